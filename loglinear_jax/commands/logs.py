"""What commands log to standard error: the project's own lines, and not what libraries say on top of what they raise."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def quiet_libraries() -> None:
    """Silences Orbax for the rest of the process: it logs every step it takes and, with its traceback, what it then raises.

    When one of many reads or writes fails, Orbax raises that, and drops the others that failed; it also closes the event loop
    that they report to, and drops those that it had not begun. Python would print a traceback or a warning for each, as late
    as at its end, which say nothing more.
    """
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # its event loops say again what was raised in them
    sys.unraisablehook = functools.partial(_without_orbax, sys.unraisablehook)
    warnings.filterwarnings("ignore", r"coroutine '.*async_serialize\S*' was never awaited", RuntimeWarning)
    atexit.register(gc.collect)  # what is left of such writes is found here, as neither hook nor filter is asked later


def _without_orbax(otherwise: Callable, unraisable: Any) -> None:
    """For sys.unraisablehook: all but what Orbax's coroutines raise, and what an event loop does because it is closed."""
    of_loop = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
    code = getattr(unraisable.object, "cr_code", None)
    of_orbax = code is not None and "orbax" in Path(code.co_filename).parts
    if not (of_loop or of_orbax):
        otherwise(unraisable)


def show_log(log: logging.Logger, shown: bool) -> None:
    """The lines of a logger as they are, from information on; errors alone if not `shown`."""
    log.setLevel(logging.INFO if shown else logging.ERROR)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
