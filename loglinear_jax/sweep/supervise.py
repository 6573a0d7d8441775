"""The loop of a sweep: starts variants, says what becomes of them, and stops them when asked to."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

from loglinear_jax.progress import LOG_FILE_SECONDS
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.sweep.jobs import Jobs
from loglinear_jax.sweep.states import State, Tracked

POLL_SECONDS = 0.5


def supervise(variants: list[Tracked], jobs: Jobs) -> bool:
    """Runs jobs until none is left; True if it was stopped before, by Ctrl-C or SIGTERM."""
    began: dict[str, float] = {}
    counted = time.monotonic()
    with StopOnSignal() as stop:
        while jobs.running or jobs.waiting:
            if stop.requested and not jobs.stopping:
                say("Stopping: what runs saves and ends; a second Ctrl-C does not wait for it.")
                jobs.stop()
            started = jobs.start()
            for tracked in started:
                began[tracked.name], tracked.seconds = time.monotonic(), 0.0
            ended = jobs.poll()
            for tracked in ended:
                tracked.seconds = time.monotonic() - began[tracked.name]
            for tracked in started + ended:
                place = f" ({tracked.place})" if tracked.state in (State.RUNNING, State.QUEUED) else ""
                after = f" after {tracked.seconds / 60:.1f} min" if tracked.seconds else ""
                say(f"{tracked.name}: {tracked.state}{place}{after}{tracked.why and ': ' + tracked.why}")
                if tracked.state is State.FINISHED:  # maybe by another sweep, meanwhile
                    tracked.why = tracked.of.keep()
            if time.monotonic() - counted >= LOG_FILE_SECONDS:
                counted = time.monotonic()
                say(counts(variants))
            time.sleep(POLL_SECONDS)
    return jobs.stopping


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def counts(variants: Sequence[Tracked]) -> str:
    """ "112 variant(s): 3 finished, 4 running, 105 not started"."""
    found = Counter(tracked.state for tracked in variants)
    return f"{len(variants)} variant(s): " + ", ".join(f"{found[state]} {state}" for state in State if found[state])


def end_report(variants: Sequence[Tracked]) -> str:
    """The variants by their state, and of each that failed why, and where its log is."""
    failed = [tracked for tracked in variants if tracked.state is State.FAILED]
    left = [t for t in variants if t.state not in (State.FAILED, State.FINISHED)]
    lines = [f"{t.name}: {t.why}" + (f"\n    log: {t.log}" if t.log is not None else "") for t in failed]
    lines += [f"{t.name}: {t.state}" for t in left]
    lines += [f"{t.name}: {t.state}, {t.why}" for t in variants if t.state is State.FINISHED and t.why]
    return "\n".join([*lines, counts(variants)])
