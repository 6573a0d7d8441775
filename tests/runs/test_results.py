"""That what results/ holds is what results/experiments.toml runs, and what its recorded commands say."""

import contextlib
import functools
import json
import shlex
from pathlib import Path

import pytest

from loglinear_jax.config import build, config_differences, read_config, variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.provenance import config_sha256
from loglinear_jax.sweep.grid import read_grid
from loglinear_jax.sweep.states import track

ROOT = Path(__file__).parents[2]
RESULTS = sorted(path.parent.name for path in (ROOT / "results").glob("*/summary.json"))


@functools.cache
def listed_commands(file: str = "experiments.toml") -> dict[str, list[str]]:
    """run.py's arguments by the name of the experiment."""
    with contextlib.chdir(ROOT):
        grid = read_grid(Path("results") / file)
        cells = [cell for cell in grid.cells if cell.best_of]
        chosen = {tracked.of.cell.name: tracked.of.cell for tracked in track(grid, cells, ROOT / "runs-of-nobody")}
    return {cell.name: list(chosen.get(cell.name, cell).arguments) for cell in grid.cells}


def planned_commands() -> dict[str, list[str]]:
    """The same of what is not run yet, or not to its end; without rates where they are not chosen yet."""
    return listed_commands("planned.toml")


@functools.cache
def summary_of(name):
    return json.loads((ROOT / "results" / name / "summary.json").read_text(encoding="utf-8"))


def kept_config(name):
    return read_config(ROOT / "results" / name / "config.json")


def differences(name, arguments):
    found = config_differences(kept_config(name), read_config_arguments(arguments).config)
    # The tokenizer's folder may be another one on another machine.
    return [line for line in found if not line.startswith("task.tokenizer: ")]


def test_every_experiment_has_its_results():
    assert sorted(listed_commands()) == [name for name in RESULTS if name not in planned_commands()]


def test_planned_experiments_can_be_built_and_lack_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, arguments in planned_commands().items():
        config = read_config_arguments(arguments).config
        assert name not in RESULTS or len(summary_of(name)["variants"]) < len(variant_names(config))
        if config.task.name != "text":  # which may have to be downloaded
            for name in variant_names(config):
                build(config, name)


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_of_the_settings_that_the_grids_give(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not differences(name, (planned_commands() | listed_commands())[name])
    kept, summary = kept_config(name), summary_of(name)
    variants = variant_names(kept)
    if name in planned_commands():  # some are there, in their order
        variants = [variant for variant in variants if variant in summary["variants"]]
    assert list(summary["variants"]) == variants
    for outcome in summary["variants"].values():
        assert outcome["seeds"] == list(range(kept.train.first_seed, kept.train.first_seed + kept.train.num_seeds))
        assert len(outcome["best_accuracy"]) == kept.train.num_seeds


@pytest.mark.parametrize("name", RESULTS)
def test_the_recorded_command_gives_the_recorded_config(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    summary = summary_of(name)
    program, script, *arguments = shlex.split(summary.get("command_today", summary["command"]))
    assert (program, script) == ("python", "run.py")
    assert not differences(name, arguments)


@pytest.mark.parametrize("name", RESULTS)
def test_the_recorded_hash_is_that_of_the_config(name):
    config = json.loads((ROOT / "results" / name / "config.json").read_text(encoding="utf-8"))
    provenance = summary_of(name)["provenance"]
    assert provenance["config_sha256"] == config_sha256(config)
    assert provenance["commit"] != "not recorded" or provenance["added_by"]
