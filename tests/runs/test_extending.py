"""A run that has ended, extended: only what is missing is trained, and the rest stays as it was."""

import pytest

from loglinear_jax.config import ConfigError
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import read_run, run
from loglinear_jax.runs.folders import RunFolder, read_lines
from tests.runs.tiny import TINY, assert_same_run

SHORT = "--config.variants=linear", "--config.train.num_steps=20"


def train(workdir, *changes, only=()):
    return run(read_config_arguments([*TINY, *SHORT, *changes]).config, workdir, only=only)


def test_more_steps_go_on_from_the_last_checkpoint(tmp_path):
    whole, extended = tmp_path / "whole", tmp_path / "extended"
    train(whole, "--config.train.num_steps=40")
    train(extended)
    train(extended, "--config.train.num_steps=40")
    assert [process["from_step"] for process in read_lines(extended / "linear" / "processes.jsonl")] == [0, 20]
    assert_same_run(whole, extended, ["linear"])
    assert read_run(extended).outcomes["linear"].num_steps == 40


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
        (["schedule=cosine"], ["schedule=cosine", "num_steps=40"], "train.num_steps: 20 → 40"),
        (["num_steps=18"], ["num_steps=40"], "train.num_steps: 18 → 40"),  # which was evaluated last at 18
        (["num_seeds=2"], ["num_seeds=3"], "train.num_seeds: 2 → 3"),
        (["first_seed=1"], ["first_seed=0"], "train.first_seed: 1 → 0"),
        (["learning_rate=0.1"], ["learning_rate=0.2"], "train.learning_rate: 0.1 → 0.2"),
    ],
)
def test_what_is_no_extension_is_refused_by_field(tmp_path, before, after, message):
    first, second = (
        read_config_arguments([*TINY, *SHORT, *(f"--config.train.{change}" for change in changes)]).config
        for changes in (before, after)
    )
    RunFolder(tmp_path).prepare(first)
    with pytest.raises(ConfigError, match=f"holds a run with another config .*{message}"):
        RunFolder(tmp_path).prepare(second)
