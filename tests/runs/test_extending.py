"""A run that has ended, extended: only what is missing is trained, and the rest stays as it was."""

import jax
import numpy as np
import pytest

from loglinear_jax.config import ConfigError, variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import load_run, read_run, run
from loglinear_jax.runs.folders import read_lines
from tests.runs.tiny import TINY, assert_same_run

SHORT = "--config.variants=linear", "--config.train.num_steps=20"


def train(workdir, *changes, only=()):
    return run(read_config_arguments([*TINY, *SHORT, *changes]).config, workdir, only=only)


@pytest.mark.slow
def test_more_steps_go_on_from_the_last_checkpoint(tmp_path):
    whole, extended = tmp_path / "whole", tmp_path / "extended"
    train(whole, "--config.train.num_steps=40")
    train(extended)
    train(extended, "--config.train.num_steps=40")
    assert [process["from_step"] for process in read_lines(extended / "linear" / "processes.jsonl")] == [0, 20]
    assert_same_run(whole, extended, ["linear"])
    assert read_run(extended).outcomes["linear"].num_steps == 40


@pytest.mark.slow
def test_more_seeds_and_variants_are_trained_beside_the_others(tmp_path):
    workdir, longer = tmp_path / "run", tmp_path / "longer"
    train(workdir)
    first = (workdir / "linear" / "outcome.json").read_bytes()
    grown = "--config.train.num_seeds=3", "--config.variants=linear,fixed"
    train(workdir, *grown)
    assert (workdir / "linear" / "outcome.json").read_bytes() == first
    assert [path.name for path in (workdir / "linear").glob("seeds-*")] == ["seeds-2-2"]
    assert not list((workdir / "fixed").glob("seeds-*"))  # all of them are trained together
    outcome = read_run(workdir).outcomes["linear"]
    assert outcome.seeds == [0, 1, 2] and len(outcome.test_accuracy) == 3 and outcome.seed_steps_per_second is None
    assert list(read_run(workdir).outcomes) == ["linear", "fixed"]

    train(workdir, *grown, "--config.train.num_steps=40")
    train(longer, *grown, "--config.train.num_steps=40")
    ours, theirs = load_run(workdir, "linear"), load_run(longer, "linear")
    assert ours.seeds == theirs.seeds and ours.step == theirs.step == 40
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4), ours.last, theirs.last)
    for name, values in theirs.metrics.items():
        np.testing.assert_allclose(ours.metrics[name], values, rtol=1e-3, atol=0.02)
    assert read_run(workdir).metrics("linear")["val_loss"].shape == (8, 3)


@pytest.mark.slow
def test_more_rates_are_trained_beside_the_others(tmp_path):
    train(tmp_path, "--config.train.learning_rate=0.1,0.01")
    train(tmp_path, "--config.train.learning_rate=0.1,0.03,0.01")
    names = list(read_run(tmp_path).outcomes)
    assert names == [f"linear+train.learning_rate={rate}" for rate in (0.1, 0.03, 0.01)]
    assert all(len(read_lines(tmp_path / name / "processes.jsonl")) == 1 for name in names)


@pytest.mark.slow
def test_one_variant_is_trained_by_itself(tmp_path):
    two = "--config.variants=linear,fixed"
    assert list(train(tmp_path, two, only=["fixed"]).summary.variants) == ["fixed"]
    assert not (tmp_path / "linear").exists() and not (tmp_path / "summary.json").exists()
    assert list(train(tmp_path, two).summary.variants) == ["linear", "fixed"]
    assert (tmp_path / "summary.json").exists()
    with pytest.raises(ConfigError, match="only=rope: there is no such variant, but linear, fixed"):
        train(tmp_path, two, only=["rope"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (["num_steps=20"], ["num_steps=15"], "train.num_steps: 20 → 15"),
        (["schedule=cosine"], ["schedule=cosine", "num_steps=40"], "num_steps: 20 → 40; more .*schedule=constant"),
        (["num_steps=18"], ["num_steps=40"], "train.num_steps: 18 → 40; more .*a multiple of train.eval_every"),
        (["num_seeds=2"], ["num_seeds=1"], "train.num_seeds: 2 → 1"),
        (["first_seed=1"], ["first_seed=0", "num_seeds=3"], "train.first_seed: 1 → 0"),
        (["learning_rate=0.1"], ["learning_rate=0.2"], "train.learning_rate: 0.1 → 0.2"),
    ],
)
def test_what_is_no_extension_is_refused_by_field(tmp_path, monkeypatch, before, after, message):
    monkeypatch.setattr("loglinear_jax.runs.training._missing", lambda *_: [])
    train(tmp_path, *(f"--config.train.{change}" for change in before))
    with pytest.raises(ConfigError, match=f"holds a run with another config .*{message}"):
        train(tmp_path, *(f"--config.train.{change}" for change in after))


@pytest.mark.slow
def test_no_seeds_are_added_while_others_are_trained(tmp_path):
    train(tmp_path)
    (tmp_path / "linear" / "outcome.json").unlink()
    with pytest.raises(ConfigError, match="linear is not finished: finish it with train.num_seeds=2 before seeds are"):
        train(tmp_path, "--config.train.num_seeds=3")
    assert variant_names(read_run(tmp_path).config) == ["linear"] and read_run(tmp_path).config.train.num_seeds == 2
