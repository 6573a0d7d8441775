"""What W&B's library is told, by one that only remembers it."""

import sys
import types

import numpy as np
import pytest

from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import run
from loglinear_jax.runs.folders import VariantFolder, read_lines
from loglinear_jax.runs.live import open_wandb
from loglinear_jax.runs.writing import RunFailed
from tests.runs.tiny import TINY


class Refused(Exception):
    pass


class Remembered:
    """A wandb.Run."""

    def __init__(self, **given):
        self.given, self.id, self.logged, self.ended = given, given["id"] or f"id-{given['name'][-6:]}", [], None

    def log(self, scalars, step):
        self.logged.append((step, scalars))

    def finish(self, exit_code=None):
        self.ended = (exit_code,)


@pytest.fixture
def begun(monkeypatch):
    """The runs that were begun."""
    runs = []

    def init(**given):
        if given["project"] == "closed":
            raise Refused("no key\nand more")
        runs.append(Remembered(**given))
        return runs[-1]

    fake = types.SimpleNamespace(init=init, errors=types.SimpleNamespace(Error=Refused))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return runs


def test_a_variant_goes_on_in_its_own_run_and_a_refusal_is_one_line(begun, tmp_path):
    folder = VariantFolder(tmp_path / "mqar" / "linear")
    folder.make()
    for _ in range(2):
        open_wandb("herons", folder, {"a": 1})
    assert [run.given["id"] for run in begun] == [None, "id-linear"]
    given = begun[0].given
    assert [given[name] for name in ("project", "name", "group")] == ["herons", "mqar/linear", "mqar"]
    with pytest.raises(RunFailed, match="^--wandb=closed: no key$"):
        open_wandb("closed", folder, {})


@pytest.mark.slow
def test_every_evaluation_is_shown_once(begun, tmp_path):
    short = "--config.variants=linear", "--config.train.num_steps=10"
    run(read_config_arguments([*TINY, *short]).config, tmp_path / "run", wandb="herons")
    (one,) = begun
    assert (one.given["name"], one.ended) == ("run/linear", (None,)) and one.given["config"]["train"]["num_steps"] == 10
    records = read_lines(tmp_path / "run" / "linear" / "metrics.jsonl")
    assert [step for step, _ in one.logged] == [record["step"] for record in records] == [5, 10]
    for (_, scalars), record in zip(one.logged, records, strict=True):
        np.testing.assert_allclose(scalars["val_loss/mean"], np.mean(record["val_loss"]))
        assert scalars["tokens_per_second"] == record["tokens_per_second"]
