"""Write the tables of the results pages from the records of runs, or check them.

  loglinear_jax results --check
  loglinear_jax results --write

A page (README.md, in docs and results) names its tables in comments, and results/tables.toml says what each is made from;
loglinear_jax/analysis/pages.py says how.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from loglinear_jax.command_line import FAILED, path

HELP = "check the tables of the pages against the records of runs, or write them again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    help_of_check = "print one line for each difference; exit code 1 if there is one"
    what.add_argument("--check", action="store_true", help=help_of_check)
    what.add_argument("--write", action="store_true", help="rewrite the tables of the pages")
    help_of_folder = "folder with README.md, docs/ and results/ (default: this one)"
    parser.add_argument("--folder", type=path, default=Path("."), help=help_of_folder)


def run(args: argparse.Namespace) -> int:
    """0 if pages and runs agree (or now do), 1 if something does not, one line each."""
    from loglinear_jax.analysis.pages import Pages

    pages = Pages(args.folder)
    changed, problems = ([], pages.check()) if args.check else pages.write()
    for page in changed:
        print(f"Written: {page}")
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(pages.pages)} pages, {pages.num_tables} tables agree with the runs")
    return FAILED if problems else 0
