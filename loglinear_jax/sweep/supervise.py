"""The loop of a sweep: starts variants, says what becomes of them, and stops them when asked to."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from loglinear_jax.progress import LOG_FILE_SECONDS
from loglinear_jax.settings import SettingError
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.sweep.jobs import Jobs
from loglinear_jax.sweep.states import State, Tracked

POLL_SECONDS = 0.5


def supervise(
    variants: list[Tracked], jobs: Jobs, track_again: Callable[[Tracked], list[Tracked]] = lambda waiting: [waiting]
) -> bool:
    """Runs jobs until none is left; True if it was stopped before, by Ctrl-C or SIGTERM.

    track_again: of a cell that is waiting, itself, or its variants once their rates are chosen, which take its place.
    """
    began: dict[str, float] = {}
    counted = time.monotonic()
    with StopOnSignal() as stop:
        while jobs.running or jobs.waiting:
            if stop.requested and not jobs.stopping:
                say("Stopping: what runs saves and ends; a second Ctrl-C does not wait for it.")
                jobs.stop()
            changed = jobs.start()
            for tracked in changed:
                began[tracked.name], tracked.seconds = time.monotonic(), 0.0
            ended = jobs.poll()
            for tracked in ended:
                tracked.seconds = time.monotonic() - began[tracked.name]
            for tracked in changed + ended:
                say_state(tracked)
                if tracked.state is State.FINISHED:  # maybe by another sweep, meanwhile
                    tracked.why = tracked.of.keep()
                    if not jobs.stopping:
                        jobs.waiting.extend(_no_longer_waiting(variants, track_again))
            if time.monotonic() - counted >= LOG_FILE_SECONDS:
                counted = time.monotonic()
                say(counts(variants))
            time.sleep(POLL_SECONDS)
    return jobs.stopping


def _no_longer_waiting(variants: list[Tracked], track_again: Callable[[Tracked], list[Tracked]]) -> list[Tracked]:
    """What can be started of the cells that were waiting, now in their place in `variants`."""
    found = []
    for waiting in [tracked for tracked in variants if tracked.state is State.WAITING]:
        try:
            again = track_again(waiting)
        except SettingError as error:
            waiting.state, waiting.why = State.FAILED, str(error)
            say_state(waiting)
            continue
        if again[0].state is not State.WAITING:
            say(f"{waiting.name}: {waiting.of.cell.best_of} has chosen its rates")
            index = variants.index(waiting)
            variants[index : index + 1] = again
            found += [tracked for tracked in again if tracked.state is not State.FINISHED]
    return found


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def say_state(tracked: Tracked) -> None:
    place = f" ({tracked.place})" if tracked.state in (State.RUNNING, State.QUEUED) else ""
    after = f" after {duration(tracked.seconds)}" if tracked.seconds else ""
    say(f"{tracked.name}: {tracked.state}{place}{after}{tracked.why and ': ' + tracked.why}")


def counts(variants: Sequence[Tracked]) -> str:
    """ "112 variant(s): 3 finished, 4 running, 105 not started"; a cell that is waiting counts as one."""
    found = Counter(tracked.state for tracked in variants)
    return f"{len(variants)} variant(s): " + ", ".join(f"{found[state]} {state}" for state in State if found[state])


def end_report(variants: Sequence[Tracked]) -> str:
    """The variants by their state, and of each that failed why, and where its log is."""
    failed = [tracked for tracked in variants if tracked.state is State.FAILED]
    left = [t for t in variants if t.state not in (State.FAILED, State.FINISHED)]
    lines = [f"{t.name}: {t.why}" + (f"\n    log: {t.log}" if t.log is not None else "") for t in failed]
    names = {tracked.of.cell.name for tracked in variants}
    for tracked in left:
        is_alone = tracked.state is State.WAITING and tracked.of.cell.best_of not in names
        lines.append(f"{tracked.name}: {tracked.shown_state}" + ", which is not among these cells" * is_alone)
    lines += [f"{t.name}: {t.state}, {t.why}" for t in variants if t.state is State.FINISHED and t.why]
    return "\n".join([*lines, counts(variants)])


def duration(seconds: float) -> str:
    """ "35 s", "12 min", "3.4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
