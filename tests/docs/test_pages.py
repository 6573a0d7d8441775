"""What the pages say that can be checked without running it: links, figures, the tables of settings and of modules."""

import re
from pathlib import Path

import pytest

from docs.settings_table import PAGE, with_tables

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("results/*.md"))]
FIGURES = sorted([*ROOT.glob("docs/*.png"), *ROOT.glob("results/*.png")])
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchor(heading):
    """As code hosts make it: the words of a heading, in lower case, joined by hyphens."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page):
    """As they are read in the repository; mkdocs follows them in the site."""
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, name = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name}: {link}"
        if name:
            assert name in anchors(target), f"{page.name}: {link}"


def test_the_settings_are_those_of_the_code():
    """`python -m docs.settings_table` writes them again."""
    assert PAGE.read_text(encoding="utf-8") == with_tables(PAGE.read_text(encoding="utf-8"))


def test_the_first_page_is_short():
    assert (ROOT / "README.md").stat().st_size <= 10_000
    assert (ROOT / "docs/analysis.ipynb").stat().st_size <= 200_000


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_figures_are_small_and_used(figure):
    assert figure.stat().st_size <= 300_000
    names = f"({figure.name})", f"({figure.parent.name}/{figure.name})"
    assert any(name in page.read_text(encoding="utf-8") for page in PAGES for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_no_number_is_still_to_be_measured(page):
    assert "MEASURE" not in page.read_text(encoding="utf-8")


def test_the_layout_names_every_module_and_no_other():
    """Of the package every one; beside it may be folders that git ignores."""
    _, package, beside = (ROOT / "docs/layout.md").read_text(encoding="utf-8").split("\n## ")
    named = [re.findall(r"^\| `(.*?)/?` \|", section, re.MULTILINE) for section in (package, beside)]
    modules = {path.name for path in (ROOT / "loglinear_jax").iterdir() if path.suffix == ".py" or has_files(path)}
    assert sorted(named[0]) == sorted(modules - {"__init__.py", "__main__.py"})
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert set(named[1]) <= folders and len(set(named[1])) == len(named[1])


def has_files(path):
    return path.is_dir() and any(path.glob("*.py"))
