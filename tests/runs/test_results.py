"""That what results/ holds is what results/run.sh runs today."""

import functools
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from loglinear_jax.config import config_differences, read_config, variant_names
from loglinear_jax.config.files import read_config_arguments

ROOT = Path(__file__).parents[2]
RESULTS = sorted(path.parent.name for path in (ROOT / "results").glob("*/summary.json"))


@functools.cache
def commands() -> dict[str, list[str]]:
    """run.py's arguments by the name of the experiment."""
    listed = subprocess.run(
        ["bash", "results/run.sh"],
        cwd=ROOT,
        env=os.environ | {"LIST": "1", "TEXT": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = [shlex.split(line) for line in listed.splitlines()]
    return {name: arguments for name, *arguments in lines}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_of_the_settings_that_their_command_gives(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = read_config_arguments(commands()[name]).config
    kept = read_config(ROOT / "results" / name / "config.json")
    differences = config_differences(kept, config)
    # The tokenizer's folder may be another one on another machine.
    assert not [line for line in differences if not line.startswith("task.tokenizer: ")]
    summary = json.loads((ROOT / "results" / name / "summary.json").read_text())
    assert list(summary["variants"]) == variant_names(kept)
    for outcome in summary["variants"].values():
        assert outcome["seeds"] == list(range(kept.train.first_seed, kept.train.first_seed + kept.train.num_seeds))
        assert len(outcome["best_accuracy"]) == kept.train.num_seeds
