"""The loop of a sweep: starts cells, shows what they do, and stops them when asked to."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tabulate import tabulate

from loglinear_jax.progress import LOG_FILE_SECONDS
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.sweep.jobs import Jobs
from loglinear_jax.sweep.states import State, Tracked

POLL_SECONDS = 0.5
REDRAW_SECONDS = 2.0
MOST_ROWS = 30  # of the live table


def supervise(cells: Sequence[Tracked], jobs: Jobs) -> bool:
    """Runs jobs until none is left; True if it was stopped before, by Ctrl-C or SIGTERM."""
    with StopOnSignal() as stop, LiveTable(cells) as table:
        began: dict[str, float] = {}
        while True:
            if stop.requested and not jobs.stopping:
                table.line("Stopping: running cells save and end; a second Ctrl-C does not wait for them.")
                jobs.stop()
            for tracked in jobs.start():
                began[tracked.cell.name] = time.monotonic()
                table.changed(tracked)
            for tracked in jobs.poll():
                tracked.seconds = time.monotonic() - began[tracked.cell.name]
                if tracked.state is State.FINISHED:
                    tracked.keep()
                table.changed(tracked)
            for name, (tracked, _) in jobs.running.items():
                tracked.seconds = time.monotonic() - began[name]
            if not jobs.running and not jobs.waiting:
                return jobs.stopping
            table.redraw()
            time.sleep(POLL_SECONDS)


class LiveTable:
    """What runs, on standard error: in a terminal a table that is drawn again and again below a line for each change; elsewhere
    the lines, and a line of counts from time to time."""

    def __init__(self, cells: Sequence[Tracked]):
        self.cells = cells
        self.stream, self.terminal = sys.stderr, sys.stderr.isatty()
        self._drawn, self._last = 0, time.monotonic()

    def __enter__(self) -> LiveTable:
        return self

    def __exit__(self, *exc) -> None:
        self._clear()

    def changed(self, tracked: Tracked) -> None:
        place = f" ({tracked.place})" if tracked.state in (State.RUNNING, State.QUEUED) else ""
        after = f" after {duration(tracked.seconds)}" if tracked.seconds else ""
        self.line(f"{tracked.cell.name}: {tracked.state}{place}{after}{tracked.why and ': ' + tracked.why}")

    def line(self, text: str) -> None:
        self._clear()
        print(text, file=self.stream, flush=True)
        self._last = min(self._last, time.monotonic() - REDRAW_SECONDS)

    def redraw(self) -> None:
        if time.monotonic() - self._last < (REDRAW_SECONDS if self.terminal else LOG_FILE_SECONDS):
            return
        self._last = time.monotonic()
        if not self.terminal:
            print(counts(self.cells), file=self.stream, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        lines = [line[:width] for line in (*self._table().splitlines(), counts(self.cells))]
        self._clear()
        print(*lines, sep="\n", file=self.stream, flush=True)
        self._drawn = len(lines)

    def _table(self) -> str:
        shown = [tracked for tracked in self.cells if tracked.state is State.RUNNING]
        rows = [(t.cell.name, t.place, t.progress(), duration(t.seconds)) for t in shown[:MOST_ROWS]]
        headers = ("cell", "where", "variant: step", "time")
        return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True) if rows else ""

    def _clear(self) -> None:
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0


def counts(cells: Sequence[Tracked]) -> str:
    """ "112 cells: 3 finished, 4 running, 105 not started"."""
    found = Counter(tracked.state for tracked in cells)
    return f"{len(cells)} cell(s): " + ", ".join(f"{found[state]} {state}" for state in State if found[state])


def end_report(cells: Sequence[Tracked]) -> str:
    """The cells by their state, and of each that failed why, and where its log is."""
    failed = [tracked for tracked in cells if tracked.state is State.FAILED]
    left = [t for t in cells if t.state not in (State.FAILED, State.FINISHED)]
    lines = [f"{tracked.cell.name}: {tracked.why}\n    log: {tracked.log}" for tracked in failed]
    lines += [f"{tracked.cell.name}: {tracked.state}" for tracked in left]
    return "\n".join([*lines, counts(cells)])


def duration(seconds: float) -> str:
    """ "35 s", "12 min", "3.4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
