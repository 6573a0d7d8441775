"""That the pages say what the runs hold, and that a page that does not is found."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from loglinear_jax.analysis.pages import Pages, grid
from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.loading import read_run
from tests.analysis.made_runs import made_run, swept

ROOT, RUNS = Path(__file__).parents[2], "results/copying/runs"


@pytest.fixture
def folder(tmp_path):
    """A copy of two runs with one page about them."""
    (tmp_path / RUNS).mkdir(parents=True)
    for name in ("copy-seq1024", "copy-released-seq1024"):
        shutil.copy(ROOT / RUNS / f"{name}.json", tmp_path / RUNS)
    (tmp_path / "results/tables.toml").write_text(
        '[text]\ntable = "of_variants"\nruns = "copy-seq1024"\ncolumns = ["mean", "converged"]\n', encoding="utf-8"
    )
    (tmp_path / "page.md").write_text("# Copying\n\n<!-- table: text -->\n<!-- end table -->\n", encoding="utf-8")
    assert Pages(tmp_path).write() == ([tmp_path / "page.md"], [])
    return tmp_path


def replace(file, old, new):
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def test_written_tables_are_in_agreement(folder):
    assert "| linear       | 93.7 ± 1.0 " in (folder / "page.md").read_text(encoding="utf-8")
    assert Pages(folder).check() == [] and Pages(folder).write() == ([], [])


@pytest.mark.parametrize(
    "file, old, new, found",
    [
        ("page.md", "| 93.7 ± 1.0 ", "| 93.8 ± 1.0 ", "page.md:8: '| linear"),
        ("page.md", "table: text", "table: released", "there is no table 'released'"),
        ("page.md", "<!-- end table -->", "", "1 tables begin, 0 of them end"),
        ("results/tables.toml", "runs =", "run =", "unexpected keyword argument 'run'"),
    ],
)
def test_what_disagrees_is_named_with_the_first_difference(folder, file, old, new, found):
    replace(folder / file, old, new)
    [problem] = Pages(folder).check()
    assert found in problem


def test_accuracies_are_of_one_set_in_each_table(folder):
    """Where every accuracy of one run is half as large on its test set, and the other run has no test."""
    path = folder / RUNS / "copy-seq1024.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    for outcome in summary["variants"].values():
        outcome["test_accuracy"] = [x / 2 for x in outcome["best_accuracy"]]
    path.write_text(json.dumps(summary), encoding="utf-8")
    for runs, shown in (("copy-seq1024", "| 46.9 ± 0.5 "), ("copy*1024", "| 93.7 ± 1.0 ")):
        replace(folder / "results/tables.toml", '"copy-seq1024"', f'"{runs}"')
        Pages(folder).write()
        text = (folder / "page.md").read_text(encoding="utf-8")
        where = "on each seed's test set" if runs == "copy-seq1024" else "each seed's best in validation."
        assert shown in text and f"Accuracy: {where}" in text


def test_the_command_says_by_its_exit_code_what_it_found(folder, capsys):
    check = ["results", "--check", f"--folder={folder}"]
    assert main(check) == 0
    assert capsys.readouterr().out == "1 pages, 1 tables agree with the runs\n"
    replace(folder / "page.md", "| 93.7 ", "| 93.8 ")
    assert main(check) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["results", "--write", f"--folder={folder}"]) == 0
    assert main(check) == 0
    capsys.readouterr()
    (folder / "page.md").write_bytes(b"\xff")
    assert main(check) == 2
    (folder / "page.md").unlink()
    assert main(check) == 2
    unreadable, none = capsys.readouterr().err.splitlines()
    assert "page.md can't be read: 'utf-8' codec can't decode byte 0xff" in unreadable and "has no pages" in none


def find(names):
    return [read_run(ROOT / RUNS / f"{name}.json") for name in names.split(",")]


def test_gains_are_paired_by_seed_across_runs():
    runs = "copy-released-seq1024,copy-seq1024"
    [line] = grid(find, {"MLP over linear": ["mlp_softplus", "linear"]}, {"copying": runs}, head="gain")
    ours, others = (find(runs)[0].outcomes[name].accuracy for name in ("mlp_softplus", "linear"))
    assert line["gain"] == "MLP over linear"
    assert float(line["copying"].split()[0].replace("−", "-")) == pytest.approx(100 * np.mean(ours - others), abs=0.05)
    with pytest.raises(ConfigError, match="the seeds of content and fixed are not the same"):
        grid(find, {"y": ["content", "fixed"]}, {"x": "copy-robust-seq1024-content,copy-seq256"})


def test_variants_are_compared_at_their_best_rates(tmp_path):
    seeds = np.random.default_rng(0).uniform(0.3, 0.6, 16)
    columns = {}
    for name, gain in (("A", 0.1), ("B", 0.2)):
        rates = {"linear": {0.001: seeds, 0.004: seeds + gain}, "fixed": {0.001: seeds, 0.004: seeds - 0.2}}
        columns[name] = [made_run(tmp_path / name, accuracies=swept(rates))]
    own = {"linear": {0.004: seeds + 0.2}, "fixed": {0.001: seeds}}  # at rates that other seeds chose
    chosen = {"A": columns["A"], "B": [made_run(tmp_path / "chosen", accuracies=swept(own))]}
    rows = {"`linear` over `fixed`": ["linear", "fixed"], "linear": "linear"}
    for given in (columns, chosen):
        gain, mean = grid(given.get, rows, {"A": "A", "B": "B"}, at_best_rates=True)
        assert gain["A"].startswith("+10.0 [+10.0,") and gain["B"].startswith("+20.0 [+20.0,")
        assert mean["A"].endswith("at 0.004") and mean["B"].endswith("at 0.004" if given is columns else "]")
    (row,) = grid(columns.get, ["fixed"], {"0.004": ["A", "train.learning_rate=0.004"]}, cell="least")
    assert row == {"variant": "fixed", "0.004": f"{100 * (seeds - 0.2).min():.1f}"}
    with pytest.raises(ConfigError, match="no column has what x is made from"):
        grid(columns.get, {"x": ["linear", "content"]}, {"A": "A"}, at_best_rates=True)


def test_a_full_disk_is_one_line_and_keeps_the_page(folder, full_disk, capsys):
    replace(folder / "page.md", "93.7", "93.8")
    before = (folder / "page.md").read_text(encoding="utf-8")
    assert main(["results", "--write", f"--folder={folder}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"loglinear_jax results: {folder}/page.md can't be written: No space left on device;")
    assert err.count("\n") == 1 and (folder / "page.md").read_text(encoding="utf-8") == before
