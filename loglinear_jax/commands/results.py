"""Make the tables of the pages about results from the runs, or check tables and numbers against them.

  loglinear_jax results --check
  loglinear_jax results --write --all

A page (README.md, docs/*.md, results/*.md) names in comments what each table is made from;
loglinear_jax/analysis/checked_pages.py says how.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loglinear_jax.command_line import FAILED, BadInput, path

HELP = "check the tables of the pages against the runs they are made from, or make them again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--check", action="store_true", help="print one line for each difference; exit code 1 if there is one"
    )
    what.add_argument("--write", action="store_true", help="make the tables of the pages again")
    parser.add_argument(
        "--all",
        action="store_true",
        help="also the tables of memory before training, which draw every seed's initial parameters again (a minute or two)",
    )
    parser.add_argument(
        "--folder",
        type=path,
        default=Path("."),
        help="where pages (*.md) and runs (<name>/summary.json) are; default: the repository, with README.md, docs, results",
    )


def run(args: argparse.Namespace) -> int:
    """0 if pages and runs agree (or now do), 1 if something does not, one line each."""
    from loglinear_jax.analysis.checked_pages import check_pages, count_pages_and_tables, write_pages
    from loglinear_jax.config import ConfigError

    try:
        if args.check:
            problems = check_pages(args.folder, slow=args.all)
        else:
            changed, problems = write_pages(args.folder, slow=args.all)
            for page in changed:
                print(f"Written: {page}")
    except ConfigError as error:
        raise BadInput(error) from error
    for problem in problems:
        print(problem)
    if args.check and not problems:
        pages, tables = count_pages_and_tables(args.folder, slow=args.all)
        print(f"{pages} pages, {tables} tables agree with the runs")
    return FAILED if problems else 0


if __name__ == "__main__":
    from loglinear_jax.commands.main import main

    sys.exit(main(command="results", called="python -m loglinear_jax.commands.results"))
