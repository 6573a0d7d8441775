"""What a person watches while a run goes on, and how they stop it."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TextIO

from tqdm import tqdm

LOG_FILE_SECONDS = 30


class LineStream:
    """Turns a progress bar's redrawing into lines, for a stream that is no terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            self._stream.write(text + "\n")

    def flush(self) -> None:
        self._stream.flush()


def progress_bar(
    description: str,
    total: int,
    initial: int = 0,
    shown: bool = True,
    unit: str = "step",
    unit_scale: bool = False,
) -> tqdm:
    """A bar over steps, or other units, with rate and time left; in a log file, a line every LOG_FILE_SECONDS."""
    stream = sys.stderr
    terminal = stream.isatty()
    return tqdm(
        desc=description,
        disable=not shown,
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=unit_scale,
        file=stream if terminal else LineStream(stream),
        mininterval=0.1 if terminal else LOG_FILE_SECONDS,
        maxinterval=10 if terminal else LOG_FILE_SECONDS,
        dynamic_ncols=terminal,
        ncols=None if terminal else 120,
        ascii=not terminal,
    )


class StopOnSignal:
    """While entered, SIGTERM and Ctrl-C set `requested` instead of ending the program; a second one ends it.

    Outside of the main thread, where Python takes no signals, it does nothing.
    """

    def __init__(self):
        self.requested = False

    def _handle(self, number, frame) -> None:
        self.requested = True
        self._restore()

    def __enter__(self) -> StopOnSignal:
        taken = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(self, *exc) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
