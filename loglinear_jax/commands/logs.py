"""What commands log to standard error: the project's own lines, and not those of libraries."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Silences Orbax for the rest of the process: it logs every step it takes and, with its traceback, what it then raises."""
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # its event loops log again what was raised in them


def show_log(log: logging.Logger, shown: bool) -> None:
    """Shows the lines of a logger as they are, from information on; errors alone if not `shown`."""
    log.setLevel(logging.INFO if shown else logging.ERROR)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
