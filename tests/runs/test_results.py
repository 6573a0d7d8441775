"""That what results/ holds is what results/run.sh runs, what its recorded commands say, and what its pages say."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from loglinear_jax.analysis.checked_pages import check_pages, write_pages
from loglinear_jax.commands.main import main
from loglinear_jax.config import config_differences, read_config, variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs.provenance import config_sha256

ROOT = Path(__file__).parents[2]
RESULTS = sorted(path.parent.name for path in (ROOT / "results").glob("*/summary.json"))


@functools.cache
def listed_commands() -> dict[str, list[str]]:
    """run.py's arguments by the name of the experiment, as run.sh has them."""
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


@functools.cache
def summary_of(name):
    return json.loads((ROOT / "results" / name / "summary.json").read_text())


def kept_config(name):
    return read_config(ROOT / "results" / name / "config.json")


def differences(name, arguments):
    found = config_differences(kept_config(name), read_config_arguments(arguments).config)
    # The tokenizer's folder may be another one on another machine.
    return [line for line in found if not line.startswith("task.tokenizer: ")]


def test_every_experiment_of_run_sh_has_its_results():
    assert sorted(listed_commands()) == RESULTS


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_of_the_settings_that_run_sh_gives(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not differences(name, listed_commands()[name])
    kept, summary = kept_config(name), summary_of(name)
    assert list(summary["variants"]) == variant_names(kept)
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
    config = json.loads((ROOT / "results" / name / "config.json").read_text())
    provenance = summary_of(name)["provenance"]
    assert provenance["config_sha256"] == config_sha256(config)
    assert provenance["commit"] != "not recorded" or provenance["added_by"]


# --- Pages ----------------------------------------------------------------------------------------------------------


def test_the_pages_say_what_the_runs_hold():
    assert check_pages(ROOT / "results") == []


@pytest.fixture
def folder(tmp_path):
    """A copy of two runs with one page about them."""
    for name in ("copy-seq1024", "copy-released-seq1024"):
        shutil.copytree(ROOT / "results" / name, tmp_path / name)
    (tmp_path / "page.md").write_text(
        "# Copying\n\n<!-- table: accuracies runs=copy-seq1024 columns=mean,converged -->\n<!-- end table -->\n\n"
        "`linear` is at 93.7 ±\n1.0 %, in released at 53.3 %.\n\n"
        "<!-- checked: `linear` is at {mean_and_std runs=copy-seq1024 variant=linear} %, in released at\n"
        "{mean runs=copy-released-seq1024 variant=linear} %. -->\n"
    )
    assert write_pages(tmp_path) == ([tmp_path / "page.md"], [])
    return tmp_path


def test_written_tables_are_in_agreement(folder):
    assert "| linear       | 93.7 ± 1.0 " in (folder / "page.md").read_text()
    assert check_pages(folder) == []
    assert write_pages(folder) == ([], [])


@pytest.mark.parametrize(
    "old, new, found",
    [
        (
            "| 93.7 ± 1.0 ",
            "| 93.8 ± 1.0 ",
            "page.md:8: table accuracies runs=copy-seq1024 columns=mean,converged: '| linear",
        ),
        (
            "released at 53.3",
            "released at 53.4",
            "page.md: does not say '`linear` is at 93.7 ± 1.0 %, in released at 53.3 %.'",
        ),
        ("runs=copy-seq1024 columns", "runs=copy-seq2048 columns", "no run in"),
        ("columns=mean,converged", "columns=mean,konverged", "there is no column 'konverged'"),
        ("table: accuracies", "table: accuracy", "there is no 'accuracy'"),
        ("{mean runs", "{means runs", "there is no 'means'"),
        ("{mean runs=copy-released-seq1024 variant=linear}", "{mean variant=linear}", "missing 1 required"),
        ("<!-- end table -->", "", "1 tables begin, 0 of them end"),
    ],
)
def test_a_page_that_disagrees_is_named_with_the_first_difference(folder, old, new, found):
    page = folder / "page.md"
    page.write_text(page.read_text().replace(old, new))
    [problem] = check_pages(folder)
    assert found in problem


def test_a_changed_outcome_is_found(folder):
    path = folder / "copy-seq1024" / "summary.json"
    summary = json.loads(path.read_text())
    summary["variants"]["fixed"]["best_accuracy"] = [0.5] * 8
    path.write_text(json.dumps(summary))
    [problem] = check_pages(folder)
    assert "fixed" in problem and "should be" in problem and "50.0 ± 0.0" in problem


def test_the_command_says_by_its_exit_code_what_it_found(folder, capsys):
    check = ["results", "--check", f"--folder={folder}"]
    assert main(check) == 0
    assert re.fullmatch(r"1 pages, \d+ tables agree with the runs\n", capsys.readouterr().out)
    page = folder / "page.md"
    page.write_text(page.read_text().replace("| 93.7 ", "| 93.8 "))
    capsys.readouterr()
    assert main(check) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["results", "--write", f"--folder={folder}"]) == 0
    assert main(check) == 0
    page.unlink()
    assert main(check) == 2
    assert capsys.readouterr().err.count("\n") == 1
