"""For mkdocs: makes the pages and figures in results/ part of the site, and links between the two folders work in both places.

A file of the repository keeps its path in the site; one in docs/ loses that prefix. Links are written as they work in the
repository, and changed here to where the site has them.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# What pages link to outside of docs/: pages of results, figures, tables, and files that are shown as they are.
PATTERNS = (
    "results/*.*", "results/*/*.*", "results/*/runs/*.md", "examples/*.py", "configs/*.py", "CHANGELOG.md", "CITATION.cff",
    "LICENSE",
)  # fmt: skip
LINK = re.compile(r"(?<=\]\()(?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?(?=\))")


def on_files(files: Files, config) -> Files:
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    site = page.file.src_uri
    source = site if site.startswith("results/") else f"docs/{site}"

    def relink(match: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        if not (ROOT / target).exists():  # no link, or one that mkdocs will name
            return match[0]
        if (ROOT / target).is_dir():  # the repository lists a folder, the site does not
            target += "/README.md"
        target = "docs/index.md" if target == "README.md" else target
        relative = os.path.relpath(target.removeprefix("docs/"), posixpath.dirname(site) or ".")
        return relative + (match["anchor"] or "")

    return LINK.sub(relink, markdown)


def on_page_content(html: str, page, config, files: Files) -> str:
    """Links in a notebook lead to pages of the site: mkdocs does not see them."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'(?<=href=")([^":]+)\.(?:md|ipynb)(?=["#])', r"\1.html", html)
