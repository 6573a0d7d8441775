"""The curves of a run whose variants were trained in workdirs of their own."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError
from loglinear_jax.runs import load_run
from loglinear_jax.runs.workdir import Workdir
from tests.analysis.made_runs import made_run
from tests.runs.tiny import TINY


def record(variant, step):
    values = dict.fromkeys(("train_loss", "val_loss", "val_accuracy"), [step / 10] * 3)
    rates = dict.fromkeys(("seconds", "seed_steps_per_second", "tokens_per_second"), 1.0)
    return {"variant": variant, "step": step, "active": [True] * 3} | values | rates


def write(folder, *records):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def test_curves_come_from_where_each_variant_was_trained(tmp_path):
    run = made_run(tmp_path, eval_every=1, num_steps=2, num_seeds=3)
    folders = tuple(tmp_path / f"kv4@{variant}" for variant in run.variants)
    write(folders[0], record("linear", 1), record("linear", 2))
    run = dataclasses.replace(run, curves_in=folders)
    np.testing.assert_array_equal(run.metrics("linear")["val_loss"], [[0.1] * 3, [0.2] * 3])
    assert run.metrics("mlp_softplus")["val_loss"].shape == (0, 3)  # its workdir is gone
    assert run.problems == []

    write(folders[1], record("mlp_softplus", 2))
    run = dataclasses.replace(run)  # reads again
    np.testing.assert_array_equal(run.metrics("mlp_softplus")["step"], [2])
    (problem,) = run.problems
    assert problem.startswith(f"{folders[1]}: mlp_softplus: metrics.jsonl lacks the evaluations at step 1 ")


def test_a_variant_that_a_run_has_not_is_named(tmp_path):
    with pytest.raises(ConfigError, match="kv4 holds no variant 'fixed': there are linear, mlp_softplus"):
        made_run(tmp_path).metrics("fixed")


MY_LAM = """
import flax.linen as nn
import jax.numpy as jnp
from loglinear_jax.lam import FixedLam

class Mine(FixedLam):
    def __call__(self, d):
        return jnp.ones_like(d)
"""


def test_a_module_of_ones_own_that_has_changed_is_said(tmp_path, monkeypatch, caplog, capsys):
    """When a run goes on, and when its parameters are loaded."""
    (tmp_path / "changing_lam.py").write_text(MY_LAM, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = "train", *TINY, "--config.variants=changing_lam:Mine,fixed", "--config.train.num_steps=5"
    assert main([*arguments, f"--workdir={tmp_path / 'run'}"]) == 0
    monkeypatch.setattr(logging.getLogger("loglinear_jax"), "propagate", True)
    load_run(tmp_path / "run", "changing_lam:Mine")
    assert "changing_lam" not in caplog.text
    (tmp_path / "changing_lam.py").write_text(MY_LAM.replace("ones_like", "zeros_like"), encoding="utf-8")
    load_run(tmp_path / "run", "fixed")
    assert "has changed" not in caplog.text
    load_run(tmp_path / "run", "changing_lam:Mine")
    said = "the file of changing_lam has changed since this was trained"
    assert caplog.text.count(said) == 1
    further = [argument.replace(":Mine,fixed", ":Mine,fixed,linear") for argument in arguments]
    capsys.readouterr()
    assert main([*further, f"--workdir={tmp_path / 'run'}"]) == 0
    assert said in capsys.readouterr().err
    first, second = (process["modules"] for process in Workdir(tmp_path / "run").read_processes()[::2])
    assert first.keys() == second.keys() == {"changing_lam"} and first != second


def test_damage_is_said_of_the_file_that_has_it(tmp_path):
    run = made_run(tmp_path)
    folders = tuple(tmp_path / name for name in ("a", "b"))
    write(folders[0])
    write(folders[1], record("linear", 1), {"variant": "linear"}, record("linear", 2))
    (damaged, *_) = dataclasses.replace(run, curves_in=folders).problems
    assert damaged == f"{folders[1] / 'metrics.jsonl'}, line 2: not a record of a run"
