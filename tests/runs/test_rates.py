"""Several learning rates in one program: the same as each by itself, whenever it is cut short."""

import functools
import shutil

import jax
import numpy as np
import pytest

from loglinear_jax.config import variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import load_run, loop, read_run, training
from loglinear_jax.train import ManySeeds, device_mesh
from tests.runs.tiny import TINY

RATES = [0.02, 0.001]
SETTINGS = "--config.variants=linear", "--config.train.num_steps=40", "--config.train.patience=2"


def config(rates, *more):
    text = ",".join(map(str, rates))
    return read_config_arguments([*TINY, *SETTINGS, f"--config.train.learning_rate={text}", *more]).config


VARIANTS = variant_names(config(RATES))


def train_with_an_interruption(workdir):
    """Cut short at the fourth evaluation, and gone on with. For how many seeds or replicas data was held."""
    evaluate, replicas, held = ManySeeds.evaluate_and_record, [], set()

    def dies(self, *args):
        replicas.append(len(self.numbers))
        held.update(len(x) for x in jax.tree.leaves(args[1]))
        if len(replicas) == 4:
            raise RuntimeError("killed")
        return evaluate(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ManySeeds, "evaluate_and_record", dies)
        with pytest.raises(RuntimeError, match="killed"):
            training.run(config(RATES), workdir)
        training.run(config(RATES), workdir)
    assert set(replicas) == {2 * len(RATES)}  # seeds times rates, in both processes
    return held


def assert_same(workdir, variant, expected, other):
    a, b = load_run(workdir, variant), load_run(expected, other)
    assert a.seeds == b.seeds and a.step == b.step
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4), a.best, b.best)
    np.testing.assert_allclose(a.metrics["val_loss"], b.metrics["val_loss"], rtol=1e-3)
    first, second = read_run(workdir).outcomes[variant], read_run(expected).outcomes[other]
    assert first.best_step == second.best_step and first.last_step == second.last_step
    np.testing.assert_allclose(first.test_accuracy, second.test_accuracy, atol=0.02)
    np.testing.assert_allclose(first.test_loss, second.test_loss, rtol=1e-3)


@pytest.mark.slow
def test_each_rate_ends_as_it_would_alone(tmp_path, monkeypatch):
    """On one device with the data of a seed in common. (On several: tests/train.)"""
    monkeypatch.setattr(loop, "device_mesh", functools.partial(device_mesh, devices=jax.devices()[:1]))
    assert VARIANTS == ["linear+train.learning_rate=0.02", "linear+train.learning_rate=0.001"]
    together = tmp_path / "together"
    assert train_with_an_interruption(together) == {2}
    training.run(config(RATES[1:]), tmp_path / "alone")
    assert_same(together, VARIANTS[1], tmp_path / "alone", "linear")
    steps = [outcome.last_step for outcome in read_run(together).outcomes.values()]
    assert len(set(steps)) == 2, "they were to stop at different steps"
    losses = np.array([outcome.test_loss for outcome in read_run(together).outcomes.values()])
    assert np.abs(losses[0] - losses[1]).min() > 0.01, "they were to end differently"

    # One whose newest checkpoint is gone goes on from the one before, by itself.
    shutil.copytree(together, tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    for variant in VARIANTS:
        (tmp_path / "run" / variant / "outcome.json").unlink()
    newest = max((tmp_path / "run" / VARIANTS[1] / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(newest)
    training.run(config(RATES), tmp_path / "run")
    for variant in VARIANTS:
        assert_same(tmp_path / "run", variant, together, variant)


def test_what_one_program_trains():
    def missing(config):
        return [loop.Member(*item, None) for item in training.checked_experiments(config)[0].items()]

    def together(missing):
        return [one.variant for one in training.trained_together(missing)]

    more = "--config.variants=linear,fixed", "--config.train.weight_decay=0,0.1"
    all_of_it = missing(config([0.02, 0.01, 0.001], *more))
    names = [one.variant for one in all_of_it]
    assert len(names) == 2 * 3 * 2
    linear = [name for name in names if name.startswith("linear")]
    without = [name for name in linear if name.endswith("weight_decay=0.0")]
    assert together(all_of_it) == without  # Adam; the others are AdamW's
    assert together([one for one in all_of_it if one.variant != without[1]]) == [without[0], without[2]]
    assert together(missing(config(RATES, "--config.train.rates_at_once=1"))) == VARIANTS[:1]


@pytest.mark.slow
def test_half_of_the_rates_are_trained_at_a_time_where_memory_runs_out(tmp_path, monkeypatch):
    sizes, train = [], loop.Program.run

    def run(program, process):
        sizes.append(len(program.members))
        if len(program.members) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")
        train(program, process)

    monkeypatch.setattr(loop.Program, "run", run)
    short = "--config.train.num_steps=10"
    assert training.run(config(RATES, short), tmp_path).summary.variants.keys() == set(VARIANTS)
    assert sizes == [2, 1, 1]


def test_a_members_rows_of_what_was_tested():
    found = {"test_loss": [1.0, 2.0, 3.0, 4.0], "predicts": "next", "parts": {"b": [1, 2, 3, 4], "a": [5, 6, 7, 8]}}
    rows = loop.of_rows(found, slice(2, 4))
    assert rows == {"test_loss": [3.0, 4.0], "predicts": "next", "parts": {"b": [3, 4], "a": [7, 8]}}
    assert list(rows["parts"]) == ["b", "a"]  # the order of a table's columns
