"""What a run says of itself is text in the report, and nothing else."""

import html.parser
import re

import pytest

from loglinear_jax.analysis.section import Report
from loglinear_jax.analysis.style import new_figure, save, wrap
from loglinear_jax.analysis.table import Table

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


def check(page, times):
    """No tag comes from a run, and the text is shown as it is."""
    found = Tags(page)
    assert "script" not in {tag for tag, _ in found.tags}
    assert not [attrs for _, attrs in found.tags if {"onerror", "onload", "onclick"} & set(attrs)]
    assert all(attrs["src"].startswith("data:image/png;base64,") for tag, attrs in found.tags if tag == "img")
    assert all(re.fullmatch("#.*|[A-Za-z0-9._/%-]+", attrs["href"]) for tag, attrs in found.tags if tag == "a")
    assert found.text.count(HOSTILE) >= times


def test_every_text_of_a_report_is_escaped(tmp_path):
    """Titles, notes, headings, cells, commands, problems, names of files."""
    table = Table(HOSTILE, [{HOSTILE: HOSTILE, "b": HOSTILE}], note=HOSTILE)
    report = Report(tmp_path)
    report.problems.append(HOSTILE)
    part = report.part(HOSTILE, HOSTILE)
    report.add(part, table, "a")
    report.add(part, table, "b", title=HOSTILE, folded=True)
    figure, ((axis,),) = new_figure(2, 1)
    axis.plot([0, 1])
    report.add(part, figure, "c", HOSTILE, HOSTILE)
    part.items.append({"title": HOSTILE, "note": HOSTILE, "files": [HOSTILE]})
    page = report.write(HOSTILE, table, [table], [HOSTILE]).read_text(encoding="utf-8")
    check(page, 30)


def test_a_name_is_not_mathematics_in_a_figure(tmp_path):
    """Matplotlib reads TeX between two dollar signs, and ends at what is none."""
    figure, ((axis,),) = new_figure(3, 1)
    axis.set_title(wrap("costs $5 and $6^", 9, 10))
    _, svg = save(figure, tmp_path / "figure")
    assert "costs $5 and $6^" in svg.read_text(encoding="utf-8")  # the comment beside the shapes of its letters


@pytest.mark.parametrize("style", ["html", "github"])
def test_a_cell_is_one_cell_whatever_it_holds(style):
    text = Table("t", [{"a": HOSTILE, "b|c": "one\ntwo"}, {"a": "x | y", "b|c": "z"}]).text(style)
    assert "<script" not in text and "<img" not in text
    if style == "github":
        lines = text.splitlines()
        assert len(lines) == 4 and all(line.count("|") == 3 for line in lines)
        assert "&lt;script>" in lines[2] and "b&#124;c" in lines[0] and "one two" in lines[2]
