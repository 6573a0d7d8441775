"""Everything that goes wrong in practice, at random and in numbers: what may come of it is one line, and nothing lost.

    python -m tests.torture settings|workdirs|calls|kills|disk|all [--number=N] [--seed=S] [--workers=N] [--out=FILE.json]
    python -m tests.torture settings --seed=0 --case=17        (one case again, as a failure's line tells it)

settings: malformed settings, presets, variants, flags, config files and tasks. workdirs: damaged folders of runs. calls: bad
arguments of the Python API. kills: runs that are killed again and again. disk: no space left, or a file system that became
read-only. Shows a table of counts and each failure; exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from loglinear_jax.command_line import BAD_INPUT, BadInput, Parser, check_writable, one_line, path
from tests.torture.judge import Outcome
from tests.torture.pool import KINDS, find_kind, made_case, run_cases

CALLED = "python -m tests.torture"


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Raises BadInput."""
    parser = Parser(prog=CALLED, description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("--number", type=int, help="cases of each kind (default: the kind's own)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only the case with this number")
    parser.add_argument("--workers", type=int, default=2, help="processes at once")
    parser.add_argument("--out", type=path, help="file to write the counts and failures to, as JSON")
    parser.add_argument("--folder", type=path, help="where to work (default: a temporary folder)")
    args = parser.parse_args(argv)
    if args.folder is not None:
        if not os.path.isdir(args.folder):
            raise BadInput(f"--folder: {args.folder} is not a folder: expected one that exists")
        check_writable(args.folder, "--folder")
    if args.out is not None:
        check_writable(args.out.parent, "--out")  # not only once all cases have run
    return args


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = read_arguments(argv)
    except BadInput as error:
        print(f"{CALLED}:", one_line(error), file=sys.stderr)
        return BAD_INPUT
    began, found = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="torture-", dir=args.folder) as folder:
        for kind in KINDS if args.kind == "all" else (args.kind,):
            total = find_kind(kind).NUMBER if args.number is None else args.number
            numbers = range(total) if args.case is None else (args.case,)
            own = Path(folder) / kind
            own.mkdir()
            with tqdm(total=len(numbers), desc=kind, mininterval=1) as bar:
                found[kind] = run_cases(kind, numbers, args.seed, min(args.workers, len(numbers)), own, bar.update)
    failures = [describe(kind, args.seed, n, o) for kind in found for n, o in found[kind].items() if o.failure]
    for failure in failures:
        print(f"\n{failure['repeat']}\n  case: {failure['case']}\n  {failure['failure']}")
    print("\n" + table(found))
    if args.out is not None:
        command = shlex.join(["python", "-m", "tests.torture", *argv])
        args.out.write_text(
            json.dumps(counts(found, failures, command, time.monotonic() - began), indent=2) + "\n", encoding="utf-8"
        )
    return 1 if failures else 0


def describe(kind: str, seed: int, number: int, outcome: Outcome) -> dict[str, str]:
    """A failure, with what repeats it."""
    repeat = f"{CALLED} {kind} --seed={seed} --case={number}"
    return {"repeat": repeat, "case": str(made_case(kind, seed, number)), "failure": outcome.failure}


def table(found: dict[str, dict[int, Outcome]]) -> str:
    """Counts by kind and ending, and the failures by their sort."""
    rows = []
    for kind, outcomes in found.items():
        endings = collections.Counter(outcome.ended for outcome in outcomes.values())
        failed = sum(outcome.failure is not None for outcome in outcomes.values())
        ended = ", ".join(f"{ended} {count}" for ended, count in endings.most_common())
        rows.append((kind, len(outcomes), ended, failed))
    sorts = collections.Counter(
        (kind, outcome.failure.partition(":")[0])
        for kind, outcomes in found.items()
        for outcome in outcomes.values()
        if outcome.failure
    )
    shown = tabulate(rows, ("kind", "cases", "ended", "failures"), tablefmt="github")
    if sorts:
        by_sort = [(kind, sort, count) for (kind, sort), count in sorts.most_common()]
        shown += "\n\n" + tabulate(by_sort, ("kind", "failure", "cases"), tablefmt="github")
    return shown


def counts(found: dict[str, dict[int, Outcome]], failures: list, command: str, seconds: float) -> dict[str, Any]:
    """What --out holds: where the counts come from, the counts, and every failure."""
    from loglinear_jax.provenance import commit, versions

    by_kind = {
        kind: {
            "cases": len(outcomes),
            "ended": dict(collections.Counter(outcome.ended for outcome in outcomes.values()).most_common()),
            "failures": sum(outcome.failure is not None for outcome in outcomes.values()),
        }
        for kind, outcomes in found.items()
    }
    return {
        "command": command,
        "commit": commit(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}",
        "versions": versions(),
        "seconds": round(seconds, 1),
        "counts": by_kind,
        "failures": failures,
    }


if __name__ == "__main__":
    sys.exit(main())
