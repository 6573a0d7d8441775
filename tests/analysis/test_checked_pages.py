"""That the pages say what the runs hold, and that a page that does not is found."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from loglinear_jax.analysis.checked_pages import check_pages, write_pages
from loglinear_jax.analysis.pages import TABLES, Results
from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_pages_say_what_the_runs_hold():
    assert check_pages(ROOT) == []


@pytest.fixture
def folder(tmp_path):
    """A copy of two runs with one page about them."""
    for name in ("copy-seq1024", "copy-released-seq1024"):
        shutil.copytree(ROOT / "results" / name, tmp_path / name)
    (tmp_path / "page.md").write_text(
        "# Copying\n\n<!-- table: accuracies runs=copy-seq1024 columns=mean,converged -->\n<!-- end table -->\n\n"
        "`linear` is at 93.7 ±\n1.0 %, in released at 53.3 %.\n\n"
        "<!-- checked: `linear` is at {mean_and_std runs=copy-seq1024 variant=linear} %, in released at\n"
        "{mean runs=copy-released-seq1024 variant=linear} %. -->\n",
        encoding="utf-8",
    )
    assert write_pages(tmp_path) == ([tmp_path / "page.md"], [])
    return tmp_path


def test_written_tables_are_in_agreement(folder):
    assert "| linear       | 93.7 ± 1.0 " in (folder / "page.md").read_text(encoding="utf-8")
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
    page.write_text(page.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    [problem] = check_pages(folder)
    assert found in problem


def test_gains_are_paired_by_seed_across_runs(folder):
    rows = "MLP over linear = mlp_softplus,linear"
    [line] = TABLES["gains"](Results(folder), columns="copying = copy-released-seq1024,copy-seq1024", rows=rows)
    outcomes = json.loads((folder / "copy-released-seq1024" / "summary.json").read_text(encoding="utf-8"))["variants"]
    ours, others = (np.array(outcomes[name]["best_accuracy"]) for name in ("mlp_softplus", "linear"))
    assert line["gain"] == "MLP over linear"
    assert float(line["copying"].split()[0].replace("−", "-")) == pytest.approx(100 * np.mean(ours - others), abs=0.05)
    with pytest.raises(ConfigError, match="gains: linear: expected two variants"):
        TABLES["gains"](Results(folder), columns="copying = copy-seq1024", rows="y = linear")
    other_seeds = "x = copy-robust-seq1024-content,copy-seq256"
    with pytest.raises(ConfigError, match="the seeds of content,fixed are not the same"):
        TABLES["gains"](Results(ROOT / "results"), columns=other_seeds, rows="y = content,fixed")


def test_a_rate_with_several_weight_decays_has_a_column_for_each(tmp_path):
    """The weight decay of one column must not take the place of another's."""
    shutil.copytree(ROOT / "results" / "mad-memorisation-rates", tmp_path / "rates")
    outcomes = json.loads((tmp_path / "rates" / "summary.json").read_text(encoding="utf-8"))["variants"]
    variant = "mixer=log_linear_delta+lam=content"
    [line] = TABLES["at_every_rate"](Results(tmp_path), runs="rates", variants=variant)
    assert len(line) == 7
    for decay, shown in (("0.0", "0.0005 (decay 0)"), ("0.1", "0.0005 (decay 0.1)")):
        accuracy = outcomes[f"{variant}+train.learning_rate=0.0005+train.weight_decay={decay}"]["test_accuracy"]
        assert float(line[shown].split()[0]) == pytest.approx(100 * np.mean(accuracy), abs=0.05)


def test_pages_of_a_repository_are_checked_against_its_results(folder, tmp_path):
    repository = tmp_path / "repository"
    (repository / "docs").mkdir(parents=True)
    shutil.copytree(folder, repository / "results", ignore=shutil.ignore_patterns("repository"))
    for page in ("README.md", "docs/page.md"):
        shutil.copy(folder / "page.md", repository / page)
        assert check_pages(repository) == []
        wrong = (repository / page).read_text(encoding="utf-8").replace("| 93.7 ", "| 93.8 ")
        (repository / page).write_text(wrong, encoding="utf-8")
        [problem] = check_pages(repository)
        assert problem.startswith(f"{repository / page}:8: table accuracies")
        assert write_pages(repository) == ([repository / page], [])


def test_a_changed_outcome_is_found(folder):
    path = folder / "copy-seq1024" / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    summary["variants"]["fixed"]["best_accuracy"] = [0.5] * 8
    path.write_text(json.dumps(summary), encoding="utf-8")
    [problem] = check_pages(folder)
    assert "fixed" in problem and "should be" in problem and "50.0 ± 0.0" in problem


def give_test(folder, *names):
    """Every accuracy on the test set is half of that in validation."""
    for path in (folder / name / "summary.json" for name in names):
        summary = json.loads(path.read_text(encoding="utf-8"))
        for outcome in summary["variants"].values():
            outcome["test_accuracy"] = [x / 2 for x in outcome["best_accuracy"]]
        path.write_text(json.dumps(summary), encoding="utf-8")


def test_accuracies_are_of_one_set_in_each_table_and_piece_of_prose(folder):
    page = folder / "page.md"
    give_test(folder, "copy-seq1024")
    _, problems = write_pages(folder)  # the prose also names a run without a test, and still holds
    assert problems == [] and "| 46.9 ± 0.5 " in page.read_text(encoding="utf-8")
    assert "Accuracy: on each seed's test set" in page.read_text(encoding="utf-8")
    page.write_text(
        page.read_text(encoding="utf-8").replace("accuracies runs=copy-seq1024", "accuracies runs=copy*1024"),
        encoding="utf-8",
    )
    write_pages(folder)
    assert "| 93.7 ± 1.0 " in page.read_text(
        encoding="utf-8"
    ) and "Accuracy: each seed's best in validation." in page.read_text(encoding="utf-8")
    give_test(folder, "copy-released-seq1024")
    _, [problem] = write_pages(folder)
    assert "does not say '`linear` is at 46.9 ± 0.5 %, in released at 26.7 %.'" in problem


def test_the_command_says_by_its_exit_code_what_it_found(folder, capsys):
    check = ["results", "--check", f"--folder={folder}"]
    assert main(check) == 0
    assert capsys.readouterr().out == "1 pages, 1 tables agree with the runs\n"
    page = folder / "page.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| 93.7 ", "| 93.8 "), encoding="utf-8")
    capsys.readouterr()
    assert main(check) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["results", "--write", f"--folder={folder}"]) == 0
    assert main(check) == 0
    page.unlink()
    assert main(check) == 2
    assert capsys.readouterr().err.count("\n") == 1
