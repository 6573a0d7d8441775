"""Several learning rates in one program: the same as each by itself, whenever it is cut short."""

import functools
import shutil

import jax
import numpy as np
import pytest

from loglinear_jax.config import variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import checkpoints, load_run, loop, read_run, training
from loglinear_jax.runs.folders import read_lines
from loglinear_jax.train import ManySeeds, device_mesh
from tests.runs.tiny import TINY, assert_same_run

RATES = [0.02, 0.0005]
SETTINGS = "--config.variants=linear", "--config.train.num_steps=40", "--config.train.patience=2"


def config(rates, *more):
    text = ",".join(map(str, rates))
    return read_config_arguments([*TINY, *SETTINGS, f"--config.train.learning_rate={text}", *more]).config


VARIANTS = variant_names(config(RATES))
ONE_SEED = "--config.train.num_seeds=1"  # at one rate or two, other bits come out


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
    assert VARIANTS == ["linear+train.learning_rate=0.02", "linear+train.learning_rate=0.0005"]
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


@pytest.fixture(scope="module")
def undisturbed_rates(tmp_path_factory):
    """A run on one device, with all of its checkpoints, in which the first rate ends at step 15 and the second one at 35."""
    workdir = tmp_path_factory.mktemp("rates") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "device_mesh", functools.partial(device_mesh, devices=jax.devices()[:1]))
        patch.setattr(checkpoints, "KEEP", 10)
        training.run(config(RATES, ONE_SEED), workdir)
    assert [saved(workdir, variant) for variant in VARIANTS] == [{10, 15}, {10, 20, 30, 35}]
    return workdir


def saved(workdir, variant):
    return {int(path.name) for path in (workdir / variant / "checkpoints").iterdir()}


def cut_short(workdir, left):
    """Leaves of each variant the checkpoints of these steps, and no outcome."""
    (workdir / "summary.json").unlink()
    for variant, steps in zip(VARIANTS, left, strict=True):
        (workdir / variant / "outcome.json").unlink()
        for step in saved(workdir, variant) - steps:
            shutil.rmtree(workdir / variant / "checkpoints" / str(step))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "from_steps"),
    [
        pytest.param([{10, 15}, {10, 20, 30}], [[0], [0, 30]], id="one had ended early"),
        pytest.param([{10, 15}, {20, 30, 35}], [[0], [0]], id="all had ended, none was tested"),
    ],
)
def test_rates_that_were_cut_short_end_with_the_same_bits(undisturbed_rates, tmp_path, monkeypatch, left, from_steps):
    """On one device, whose shapes say how many rates it trains."""
    monkeypatch.setattr(loop, "device_mesh", functools.partial(device_mesh, devices=jax.devices()[:1]))
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed_rates, workdir)
    cut_short(workdir, left)
    training.run(config(RATES, ONE_SEED), workdir)
    processes = [read_lines(workdir / variant / "processes.jsonl") for variant in VARIANTS]
    assert [[process["from_step"] for process in lines] for lines in processes] == from_steps
    assert_same_run(workdir, undisturbed_rates, VARIANTS)


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
    sizes, train_steps = [], ManySeeds.train_steps

    def needs_memory(self, state, data, *arguments):
        sizes.append(len(self.numbers))
        if len(self.numbers) > 2:  # seeds times rates
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")
        return train_steps(self, state, data, *arguments)

    monkeypatch.setattr(ManySeeds, "train_steps", needs_memory)
    short = "--config.train.num_steps=10"
    assert training.run(config(RATES, short), tmp_path).summary.variants.keys() == set(VARIANTS)
    assert sizes == [4, 2, 2, 2, 2]
    assert [read_run(tmp_path).metrics(variant)["val_loss"].shape for variant in VARIANTS] == [(2, 2), (2, 2)]


def test_a_members_rows_of_what_was_tested():
    found = {"test_loss": [1.0, 2.0, 3.0, 4.0], "predicts": "next", "parts": {"b": [1, 2, 3, 4], "a": [5, 6, 7, 8]}}
    rows = loop.of_rows(found, slice(2, 4))
    assert rows == {"test_loss": [3.0, 4.0], "predicts": "next", "parts": {"b": [3, 4], "a": [7, 8]}}
    assert list(rows["parts"]) == ["b", "a"]  # the order of a table's columns
