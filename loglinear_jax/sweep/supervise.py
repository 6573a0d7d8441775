"""The loop of a sweep: starts cells, shows what they do, and stops them when asked to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loglinear_jax.progress import LOG_FILE_SECONDS
from loglinear_jax.settings import SettingError
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.sweep.jobs import Jobs
from loglinear_jax.sweep.states import State, Tracked

POLL_SECONDS = 0.5
REDRAW_SECONDS = 2.0
MOST_ROWS = 30  # of the live table
OUTCOME_SECONDS = 60  # after which a finished cell's outcome is to be seen by all machines


def supervise(
    cells: list[Tracked], jobs: Jobs, track_again: Callable[[Tracked], list[Tracked]] = lambda waiting: [waiting]
) -> bool:
    """Runs jobs until none is left; True if it was stopped before, by Ctrl-C or SIGTERM.

    track_again: of a cell that is waiting, itself, or what stands in its place in `cells` once its rates are chosen.
    """
    with StopOnSignal() as stop, LiveTable(cells) as table:
        began: dict[str, float] = {}
        last_end = time.monotonic()
        while True:
            if stop.requested and not jobs.stopping:
                table.line("Stopping: running cells save and end; a second Ctrl-C does not wait for them.")
                jobs.stop()
            finished = []
            for tracked in jobs.start():
                began[tracked.cell.name], tracked.seconds = time.monotonic(), 0.0
                finished += _keep_if_finished(tracked)  # by another sweep, meanwhile
                table.changed(tracked)
            for tracked in jobs.poll():
                tracked.seconds = time.monotonic() - began[tracked.cell.name]
                finished += _keep_if_finished(tracked)
                table.changed(tracked)
            if finished and not jobs.stopping:
                last_end = time.monotonic()
                jobs.waiting.extend(_no_longer_waiting(cells, track_again, table))
            for name, (tracked, _) in jobs.running.items():
                tracked.seconds = time.monotonic() - began[name]
            if not jobs.running and not jobs.waiting:
                if jobs.stopping or not _is_late(cells, last_end):
                    return jobs.stopping
                jobs.waiting.extend(_no_longer_waiting(cells, track_again, table))
            table.count()
            time.sleep(POLL_SECONDS)


def _no_longer_waiting(
    cells: list[Tracked], track_again: Callable[[Tracked], list[Tracked]], table: LiveTable
) -> list[Tracked]:
    """What can be started of the cells that were waiting, now in their place in `cells`."""
    found = []
    for waiting in [tracked for tracked in cells if tracked.state is State.WAITING]:
        try:
            again = track_again(waiting)
        except SettingError as error:
            waiting.state, waiting.why = State.FAILED, str(error)
            table.changed(waiting)
            continue
        if again[0].state is not State.WAITING:
            table.line(f"{waiting.cell.name}: {waiting.cell.best_of} has chosen its rates")
            index = cells.index(waiting)
            cells[index : index + 1] = again
            found += [tracked for tracked in again if not _keep_if_finished(tracked)]
    return found


def _is_late(cells: Sequence[Tracked], last_end: float) -> bool:
    """Whether what a cell waits for has finished here so lately that its outcome may not be seen yet, in a folder of several
    machines. last_end: when a cell finished last."""

    def has_finished(name: str) -> bool:
        parts = [cell for cell in cells if cell.is_of(name)]
        return bool(parts) and all(part.state is State.FINISHED for part in parts)

    late = time.monotonic() - last_end < OUTCOME_SECONDS
    return late and any(cell.state is State.WAITING and has_finished(cell.cell.best_of) for cell in cells)


def _keep_if_finished(tracked: Tracked) -> list[Tracked]:
    """The cell, if it is."""
    if tracked.state is not State.FINISHED:
        return []
    tracked.keep()
    return [tracked]


class LiveTable:
    """What runs, on standard error: in a terminal a table that is drawn again and again below a line for each change; elsewhere
    the lines, and a line of counts from time to time."""

    def __init__(self, cells: Sequence[Tracked], console: Console | None = None):
        self.cells = cells
        self.console = Console(stderr=True) if console is None else console
        self._live = Live(
            console=self.console, get_renderable=self._shown, refresh_per_second=1 / REDRAW_SECONDS, transient=True
        )
        self._last = time.monotonic()

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        self._live.stop()

    def changed(self, tracked: Tracked) -> None:
        place = f" ({tracked.place})" if tracked.state in (State.RUNNING, State.QUEUED) else ""
        after = f" after {duration(tracked.seconds)}" if tracked.seconds else ""
        self.line(f"{tracked.cell.name}: {tracked.state}{place}{after}{tracked.why and ': ' + tracked.why}")

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def count(self) -> None:
        """Elsewhere than in a terminal, the line of counts, if it is time."""
        if not self.console.is_terminal and time.monotonic() - self._last >= LOG_FILE_SECONDS:
            self._last = time.monotonic()
            self.line(counts(self.cells))

    def _shown(self) -> Group:
        table = Table("cell", "where", "variant: step", "time", box=None, pad_edge=False)
        running = [tracked for tracked in self.cells if tracked.state is State.RUNNING]
        for tracked in running[:MOST_ROWS]:
            cells = tracked.cell.name, tracked.place, tracked.progress(), duration(tracked.seconds)
            table.add_row(*map(Text, cells))
        return Group(*([table] if running else []), Text(counts(self.cells)))


def counts(cells: Sequence[Tracked]) -> str:
    """ "112 cells: 3 finished, 4 running, 105 not started"."""
    found = Counter(tracked.state for tracked in cells)
    return f"{len(cells)} cell(s): " + ", ".join(f"{found[state]} {state}" for state in State if found[state])


def end_report(cells: Sequence[Tracked]) -> str:
    """The cells by their state, and of each that failed why, and where its log is."""
    failed = [tracked for tracked in cells if tracked.state is State.FAILED]
    left = [t for t in cells if t.state not in (State.FAILED, State.FINISHED)]
    lines = [f"{t.cell.name}: {t.why}" + (f"\n    log: {t.log}" if t.log is not None else "") for t in failed]
    for tracked in left:
        is_alone = tracked.state is State.WAITING and not any(other.is_of(tracked.cell.best_of) for other in cells)
        lines.append(f"{tracked.cell.name}: {tracked.shown_state}" + ", which is not among these cells" * is_alone)
    lines += [f"{t.cell.name}: {t.state}, {t.why}" for t in cells if t.state is State.FINISHED and t.why]
    return "\n".join([*lines, counts(cells)])


def duration(seconds: float) -> str:
    """ "35 s", "12 min", "3.4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
