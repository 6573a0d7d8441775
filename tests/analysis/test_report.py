"""The whole report of a real run, from the command line and as a function."""

import csv
import dataclasses
import html.parser
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from loglinear_jax import tasks
from loglinear_jax.analysis.report import make_report
from loglinear_jax.analysis.section import Choices, Context, Report, Section
from loglinear_jax.analysis.style import new_figure, wrap
from loglinear_jax.analysis.table import Table
from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError
from loglinear_jax.runs import run
from tests.analysis.conftest import tiny_config
from tests.analysis.made_runs import made_run, made_variant

TASKS = Path(tasks.__file__).parent


def test_tables_of_runs_of_every_task(tmp_path, monkeypatch, blank_figures):
    """Their settings have unlike types."""
    names = [path.stem for path in TASKS.glob("*.py")]
    names = [name for name in names if name not in ("__init__", "base", "data", "draws", "lookup", "mixture")]
    assert {"mad_recall", "mad_copying", "zoology_mqar", "text"} <= set(names)
    made = [made_run(tmp_path, task=name, warmup_steps=steps) for name in names for steps in (0, 50)]
    made = {str(tmp_path / f"{i}"): dataclasses.replace(run, workdir=tmp_path / f"{i}") for i, run in enumerate(made)}
    monkeypatch.setattr("loglinear_jax.analysis.report.read_run", made.get)
    _, problems = make_report(list(made), tmp_path / "out", Choices(sections=("tables", "rates")))
    assert problems == []
    # Texts and documents have no thresholds.
    assert len(list((tmp_path / "out").glob("by-setting-*.md"))) == len(names) - 2


@pytest.mark.slow
def test_everything_is_drawn_and_shown(report):
    assert report.problems == []
    for stem in (
        "outcomes-tiny.md", "outcomes-tiny.csv", "outcomes-tiny.tex", "differences-tiny.md",
        "curves-tiny.png", "curves-tiny.svg", "lam-tokens-tiny.png", "lam-mean-tiny.png", "lam-static-tiny.svg",
        "lam-dependence-tiny.csv", "rows-mlp-softplus-tiny.png",
        "lengths-tiny.png", "lengths-table-tiny.csv",
        "answer-levels-table.csv", "looks-tiny.png", "looks-table-tiny.csv",
    ):  # fmt: skip
        assert (report.out / stem).stat().st_size > 0, stem
        assert stem.replace(".svg", ".png") in report.html or stem in report.html
    assert report.html.count('<img src="data:image/png;base64,') == len(list(report.out.glob("*.png")))
    linked = re.findall(r'(?:src|href)="([^"]*)"', report.html)
    elsewhere = [link for link in linked if not link.startswith(("data:image/png", "#"))]
    assert elsewhere and all((report.out / link).is_file() for link in elsewhere)  # it opens without a network
    assert "Left out" not in report.html and "python run.py" in report.html


def test_a_seed_without_a_finite_evaluation_is_not_averaged(tmp_path):
    run = made_run(tmp_path, accuracies={"linear": [0.1] * 4})
    text = made_run(tmp_path, task="text").task
    of_seeds = np.array([1.0, np.finfo(np.float32).max, np.inf, 2.0])  # as checkpoints have it, also earlier ones
    trained = dataclasses.replace(made_variant(run, "linear"), best_loss=of_seeds, task=text)
    context = Context([run], None, Choices())
    assert context.accuracy(run, trained) == (dict.fromkeys(range(4), 0.1), "best validation accuracy")
    assert context.averaged_seeds(trained) == [0, 3]
    assert context.describe_seed(trained, 0) == "seed 0, validation perplexity 2.7"
    assert context.describe_seed(trained, 1) == "seed 1, no validation perplexity"
    with pytest.raises(ValueError, match="no seed has a finite validation perplexity"):
        context.averaged_seeds(dataclasses.replace(trained, best_loss=np.full(4, np.inf)))


def test_accuracies_are_of_the_test_only_where_every_seed_has_one(tmp_path):
    """While seeds are added, there are checkpoints of seeds without an outcome."""
    accuracies = {"linear": [0.1, 0.2], "fixed": [0.3, 0.4]}
    run = made_run(tmp_path, accuracies=accuracies, test=accuracies, num_seeds=2)
    context, trained = Context([run], None, Choices()), made_variant(run, "linear")
    assert context.accuracy(run, trained) == ({0: 0.1, 1: 0.2}, "test accuracy")
    run.config.train.num_seeds = 3
    trained = dataclasses.replace(trained, seeds=[0, 1, 2], best_accuracy=np.array([0.5, 0.6, 0.7]))
    assert context.accuracy(run, trained) == ({0: 0.5, 1: 0.6, 2: 0.7}, "best validation accuracy")


def test_no_figure_or_table_is_left_out_because_of_its_name(tmp_path):
    """The names of variants and folders are shortened to letters and digits, and then may be the same, or are long."""
    report = Report(tmp_path)
    part = report.part("Part")
    for stem in ("slope-2", "slope-2", "slope-2-2", "s" * 300, "s" * 300):
        report.add(part, Table("Table", [{"a": stem}]), stem)
    assert len(list(tmp_path.glob("*.md"))) == len(part.items) == 5
    assert [item["files"][0] for item in part.items[:3]] == ["slope-2.md", "slope-2-2.md", "slope-2-2-2.md"]


@pytest.mark.slow
def test_layers_without_lam_are_left_out(tmp_path, blank_figures):
    """Of a model whose mixers take turns."""
    config = tiny_config()
    config.variants = "mixer=(softmax,log_linear)"
    run(config, tmp_path / "hybrid", ["python", "run.py"])
    sections = ("lam", "dependence", "looks", "rows", "lengths")
    choices = Choices(sections=sections, sequences=4, evaluated=8)
    _, problems = make_report([tmp_path / "hybrid"], tmp_path / "out", choices)
    assert problems == []
    for name in ("lam-dependence-hybrid", "looks-table-hybrid"):
        with (tmp_path / "out" / f"{name}.csv").open(encoding="utf-8") as file:
            assert {row["layer"] for row in csv.DictReader(file)} == {"1"}


class Names(Section):
    """With a bug."""

    TITLE = "Names"

    def show_all(self):
        self.part.items.append({"title": "Of runs", "html": ", ".join(run.name for run in self.context.runs)})
        raise KeyError("a bug")


def test_a_section_of_ones_own_and_a_bug_in_it(workdir, tmp_path, caplog):
    """It is found by its import path. A bug is named in the report, and keeps its traceback."""
    path, problems = make_report([workdir], tmp_path, Choices(sections=(f"{__name__}:Names",)))
    assert "tiny" in path.read_text(encoding="utf-8")
    assert problems == ["all runs: Names: KeyError: 'a bug'"] and "Traceback" in caplog.text


def test_a_full_disk_is_one_line(workdir, tmp_path, full_disk, capsys):
    assert main(["analyze", f"--workdir={workdir}", f"--out={tmp_path}", "--sections=tables"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"loglinear_jax analyze: {tmp_path}/report.html can't be written: No space left on device;")
    assert err.count("\n") == 1


def test_several_runs_and_broken_ones(workdir, tmp_path, capsys, blank_figures):
    """What can't be read is named in a line of its own, and the rest is reported."""

    def copy(name, file=None, change=None):
        path = shutil.copytree(workdir, tmp_path / name)
        if file is not None:
            text = (path / file).read_text(encoding="utf-8")
            (path / file).write_text(change(text), encoding="utf-8")
        return path

    for variant in ("mlp_softplus", "mixer=softmax"):
        shutil.rmtree(copy(f"tables-{variant}") / variant / "checkpoints")
    for file in copy("damaged").glob("*/checkpoints/**/*"):
        if file.is_file() and file.stat().st_size > 200:
            file.write_bytes(file.read_bytes()[:100])
    copy("half", "config.json", lambda text: text[:50])
    copy("types", "config.json", lambda text: text.replace('"heads": 2', '"heads": "two"'))
    copy("metrics", "mlp_softplus/metrics.jsonl", lambda text: text[1:])
    copy("summary", "summary.json", lambda text: "{}")
    names = ("tables-mixer=soft*", "tables-mlp_softplus", "half", "damaged", "metrics", "summary", "types", "none")
    command = [f"--workdir={path}" for path in (workdir, *(tmp_path / name for name in names))]
    command += [f"--out={tmp_path / 'out'}", "--sections=tables,curves,lam", "--sequences=4", "--seeds=0"]
    code = main(["analyze", *command])
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("analysis:")]
    assert code == 1 and "Traceback" not in err, err
    for part in (
        "half/config.json can't be read", "none holds no run", "types/config.json is not a config",
        "metrics.jsonl can't be read", "summary.json can't be read: not a summary",
    ):  # fmt: skip
        assert any(part in line for line in lines), (part, lines)
    assert sum("'mlp_softplus' has no checkpoint" in line for line in lines) == 1
    assert sum("none of its checkpoints" in line and "damaged" in line for line in lines) == 2  # one a variant
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "outcomes-tables-mlp-softplus.md" in html and "lam-mean-tiny.png" in html and "Left out" in html


def test_nothing_to_report(tmp_path, capsys):
    with pytest.raises(ValueError, match="holds no run"):
        make_report([tmp_path], tmp_path / "out")
    assert main(["analyze", f"--workdir={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    assert "holds no run" in capsys.readouterr().err and not (tmp_path / "out").exists()
    for sections, message in (
        ((), "is empty: expected some of tables"),
        (("all",), ": there is no 'all', but tables"),
        (("os:path",), ": expected a subclass of Section, got <module 'posixpath'"),
    ):
        with pytest.raises(ConfigError, match=f"sections ?{message}"):
            make_report([tmp_path], tmp_path / "out", Choices(sections=sections))


HOSTILE = """<script>alert(1)</script><img src=x onerror="alert(2)">'">&lt;|`${x}"""


class Tags(html.parser.HTMLParser):
    """Every tag of a page with its attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_every_text_of_a_report_is_escaped(tmp_path):
    """Titles, notes, headings, cells, commands, problems, names of files: no tag comes from a run."""
    table = Table(HOSTILE, [{HOSTILE: HOSTILE, "b": HOSTILE}], note=HOSTILE)
    report = Report(tmp_path)
    report.problems.append(HOSTILE)
    part = report.part(HOSTILE, HOSTILE)
    report.add(part, table, "a")
    report.add(part, table, "b", title=HOSTILE)
    figure, ((axis,),) = new_figure(2, 1)
    axis.set_title(wrap("costs $5 and $6^", 9, 10))  # Matplotlib reads TeX between two dollar signs
    report.add(part, figure, "c", HOSTILE, HOSTILE)
    part.items.append({"title": HOSTILE, "note": HOSTILE, "files": [HOSTILE]})
    found = Tags(report.write(HOSTILE, table, [table], [HOSTILE]).read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in found.tags} and found.text.count(HOSTILE) >= 30
    assert not [attrs for _, attrs in found.tags if {"onerror", "onload", "onclick"} & set(attrs)]
    assert all(attrs["src"].startswith("data:image/png;base64,") for tag, attrs in found.tags if tag == "img")
    assert all(re.fullmatch("#.*|[A-Za-z0-9._/%-]+", attrs["href"]) for tag, attrs in found.tags if tag == "a")
    assert "costs $5 and $6^" in (tmp_path / "c.svg").read_text(encoding="utf-8")  # beside the shapes of its letters
    lines = Table("t", [{"a": HOSTILE, "b|c": "one\ntwo"}]).text("github").splitlines()
    assert len(lines) == 3 and all(line.count("|") == 3 for line in lines)
    assert "&lt;script>" in lines[2] and "b&#124;c" in lines[0] and "one two" in lines[2]
