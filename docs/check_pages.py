"""Checks what the pages say, as far as nothing must be run: links, figures, sizes, wording, and what is made from code.

    python -m docs.check_pages

prints a line for each problem, and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from docs import reference_tables

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("results/**/*.md"))]
FIGURES = sorted([*ROOT.glob("docs/**/*.png"), *ROOT.glob("results/**/*.png")])
MOST_BYTES = {"README.md": 7_000, "docs/tutorials/look-inside-lam.ipynb": 200_000}
MOST_BYTES_OF_FIGURE = 300_000
GENERATED = re.compile(r"<!-- generated -->.*?<!-- /generated -->", re.DOTALL)
# Words and turns of phrase that read as coined or translated, and what to write in their place.
WORDS = {
    r"λ that looks|looks into (its|the) buckets|the look\b": "content-aware λ",
    r"models of others|models? that others trained": "external checkpoints",
    r"numbers that a layer keeps": "recurrent state size",
    r"(the )?setting (text|released)\b": "paper-text or released-code configuration",
    r"\bseeds? collapse": "fails to train",
    r"\bharms?\b": "hurts",
    r"\bstands? (in|at) (a |the )?(level|bucket)": "is in",
    r"\bin place of\b": "instead of",
    r"\bbut for\b": "except",
    r"\btells? [^.]{0,40} from (another|each other)": "are indistinguishable",
    r"\bwithout a word\b": "silently",
    r"\b(interval|difference)s? holds? 0\b": "includes 0",
    r"\b(seeds|runs) (choose|chose|tell)\b": "say who does what: we chose on tuning seeds",
    r"\bas there[.,;:]": "name what is the same",
}
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """The anchor that code hosts make of a heading: its words in lower case, joined by hyphens."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def broken_links() -> Iterator[str]:
    """Links within the repository that lead nowhere; mkdocs follows them in the site."""
    for page in PAGES:
        for link in LINK.findall(prose(page)):
            if link.startswith(("https://", "http://")):
                continue
            path, _, name = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                yield f"{page}: the link {link} leads nowhere"
            elif name and name not in map(anchor, re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)):
                yield f"{page}: {link}: {target.name} has no such heading"


def sizes() -> Iterator[str]:
    """Files that are larger than they may be."""
    limits = {ROOT / name: most for name, most in MOST_BYTES.items()} | dict.fromkeys(FIGURES, MOST_BYTES_OF_FIGURE)
    for path, most in limits.items():
        if (size := path.stat().st_size) > most:
            yield f"{path} has {size:,} bytes: expected at most {most:,}"


def unused_figures() -> Iterator[str]:
    """Figures that no page shows."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return (f"{figure}: no page shows it" for figure in FIGURES if f"{figure.name})" not in text)


def old_tables() -> Iterator[str]:
    """Whether the tables of settings and of the command line are those of the code."""
    for page in reference_tables.PAGES:
        if page.read_text(encoding="utf-8") != reference_tables.with_tables(page):
            yield f"{page}: its tables are not those of the code: python -m docs.reference_tables writes them"


def wording() -> Iterator[str]:
    """Coined words and turns of phrase in pages for readers; code, tables that are made and the log of kernels are left out."""
    logs = {ROOT / "docs/development/kernel-log.md", ROOT / "docs/reference/performance.md"}
    for page in (page for page in PAGES if page not in logs and page.parent.name != "runs"):
        text = re.sub(r"`[^`\n]*`", "", GENERATED.sub("", prose(page)))
        for pattern, better in WORDS.items():
            for found in re.finditer(pattern, text, re.IGNORECASE):
                yield f"{page}: {found[0]!r}: write {better!r}"


def layout() -> Iterator[str]:
    """Modules that docs/development/layout.md does not name, and names of none."""
    page = ROOT / "docs/development/layout.md"
    _, package, beside = page.read_text(encoding="utf-8").split("\n## ")
    named, folders = (set(re.findall(r"^\| `(.*?)/?` \|", part, re.MULTILINE)) for part in (package, beside))
    paths = [path for path in (ROOT / "loglinear_jax").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
    modules = {path.name for path in paths} - {"__init__.py", "__main__.py"}
    for name in sorted(named ^ modules):
        yield f"{page}: {name} " + ("is no module" if name in named else "is not named")
    for name in sorted(name for name in folders if not (ROOT / name).is_dir()):
        yield f"{page}: {name} is no folder"


def main() -> int:
    problems = [
        problem for check in (broken_links, sizes, unused_figures, old_tables, wording, layout) for problem in check()
    ]
    print("\n".join(problems) or f"{len(PAGES)} pages and {len(FIGURES)} figures: no problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
