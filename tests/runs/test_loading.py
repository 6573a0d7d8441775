"""Reading a run back."""

import logging

import pytest

from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError
from loglinear_jax.runs import load_run
from loglinear_jax.runs.folders import read_lines
from tests.analysis.made_runs import made_run
from tests.runs.tiny import TINY


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


@pytest.mark.slow
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
    names = "changing_lam:Mine", "linear"
    first, second = (read_lines(tmp_path / "run" / name / "processes.jsonl")[0]["modules"] for name in names)
    assert first.keys() == second.keys() == {"changing_lam"} and first != second
