"""That what results/ holds is what its grids run, and what its recorded commands say."""

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

ROOT = Path(__file__).parents[2]
RECORDS = {path.stem: path for path in sorted(ROOT.glob("results/*/runs/*.json"))}


@functools.cache
def listed_commands() -> dict[str, list[str]]:
    """run.py's arguments by the name of the run, of the grids of all studies."""
    found = {}
    with contextlib.chdir(ROOT):
        for path in sorted(Path("results").glob("*/grid.toml")):
            found |= {cell.name: list(cell.arguments) for cell in read_grid(path).cells}
    return found


def differences(kept, arguments):
    found = config_differences(kept, read_config_arguments(arguments).config)
    # The tokenizer's folder may be another one on another machine.
    return [line for line in found if not line.startswith("task.tokenizer: ")]


def test_every_run_is_of_a_grid_and_what_is_not_run_yet_can_be_built(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(RECORDS) == len(list(ROOT.glob("results/*/runs/*.json"))) and RECORDS.keys() <= listed_commands().keys()
    for name in listed_commands().keys() - RECORDS.keys():
        config = read_config_arguments(listed_commands()[name]).config
        of_texts = config.task.name in ("text", "documents")  # which are not in the repository
        for variant in () if of_texts else variant_names(config):
            build(config, variant)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_what_its_grid_and_its_command_give(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    record, kept = json.loads(RECORDS[name].read_text(encoding="utf-8")), read_config(RECORDS[name])
    assert not differences(kept, listed_commands()[name])
    assert list(record["variants"]) == variant_names(kept)
    for outcome in record["variants"].values():
        assert outcome["seeds"] == list(range(kept.train.first_seed, kept.train.first_seed + kept.train.num_seeds))
        assert len(outcome["best_accuracy"]) == kept.train.num_seeds
    program, script, *arguments = shlex.split(record.get("command_today", record["command"]))
    assert (program, script) == ("python", "run.py")
    assert not differences(kept, arguments)
    provenance = record["provenance"]
    assert provenance["config_sha256"] == config_sha256(record["config"])
    assert provenance["commit"] != "not recorded" or provenance["added_by"]
