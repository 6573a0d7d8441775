"""One process makes what another waits for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import filelock

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path, does: str) -> Iterator[None]:
    """Holds the lock file of that path, which goes with its process, however that ends.

    does: what its holder does, for the line that tells of waiting: "tokenises birds".
    """
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info("Waiting for another process, which %s (its lock: %s)", does, path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
