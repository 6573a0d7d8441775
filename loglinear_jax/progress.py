"""Progress bars: what a person watches while something takes long."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from tqdm import tqdm

LOG_FILE_SECONDS = 30


class LineStream:
    """Turns a progress bar's redrawing into lines, for a stream that is not a terminal. Once nobody reads them, they are not
    written: what goes on need not end for that."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            with contextlib.suppress(BrokenPipeError):
                self._stream.write(text + "\n")

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()


def progress_bar(
    description: str,
    total: int | None,
    initial: int = 0,
    shown: bool = True,
    unit: str = "step",
    unit_scale: bool = False,
) -> tqdm:
    """A bar over steps, or other units, with the rate and, where the total is known, the time left; in a log file, a line every
    LOG_FILE_SECONDS."""
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
