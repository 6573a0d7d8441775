"""What the pages say that can be checked without running it: links, figures, the table of settings."""

import re
from pathlib import Path

import pytest

from docs.settings_table import PAGE, with_tables

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("results/*.md"))]
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchor(heading):
    """As code hosts make it: the words of a heading, in lower case, joined by hyphens."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page):
    text = FENCED.sub("", page.read_text())
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page):
    """As they are read in the repository; mkdocs follows them in the site."""
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        path, _, name = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name}: {link}"
        if name:
            assert name in anchors(target), f"{page.name}: {link}"


def test_the_settings_are_those_of_the_code():
    """`python -m docs.settings_table` writes them again."""
    assert PAGE.read_text() == with_tables(PAGE.read_text())


def test_the_first_page_is_short():
    assert (ROOT / "README.md").stat().st_size <= 10_000
    assert (ROOT / "docs/analysis.ipynb").stat().st_size <= 200_000


@pytest.mark.parametrize("figure", sorted(ROOT.glob("docs/*.png")), ids=lambda figure: figure.name)
def test_figures_are_small_and_used(figure):
    assert figure.stat().st_size <= 300_000
    assert any(f"({figure.name})" in page.read_text() or f"(docs/{figure.name})" in page.read_text() for page in PAGES)
