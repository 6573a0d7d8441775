"""How a person stops a run: Ctrl-C and SIGTERM are heard, not obeyed at once."""

from __future__ import annotations

import signal
import threading


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
