"""Only one process trains a variant at a time, or adds to what a run's folder holds.

The lock of a variant is a file that says who holds it. `filelock` can't serve here, as it empties the file that it tries.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from loglinear_jax.config import ConfigError
from loglinear_jax.distributed import any_process
from loglinear_jax.runs.writing import writing

log = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds: for so long at most a process that only asks, by `is_held`, may be in the way
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def only_process(file: Path, tries: bool = True) -> Iterator[None]:
    """Holds the lock `file` while entered; it goes with the process, however that ends.

    tries: of several processes of one run, only one takes the lock; all of them must ask. Raises ConfigError, in all of
    them, if another run holds it, with its process and host; CannotWrite.
    """
    holder = None
    with contextlib.ExitStack() as stack:
        if tries:
            with writing(file):
                lock = stack.enter_context(file.open("a+", encoding="utf-8"))
            try:
                _lock_at_last(lock)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                log.warning("%s: this file system has no locks: start no second process in this folder", file.parent)
            else:
                with writing(file):
                    lock.truncate(0)
                    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
                    lock.flush()
        if any_process(holder is not None):
            raise ConfigError(f"{file.parent} is in use: {holder or 'another process'} trains in it")
        yield


def _lock_at_last(lock: TextIO) -> None:
    """Raises BlockingIOError if another process has held it all the while."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def is_held(file: Path) -> bool:
    """Whether a process holds the lock; False where it can't be known."""
    try:
        with file.open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or no locks are supported
        return False
    return False


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits for other processes that have entered it for this folder. It leaves no file there.

    Where the file system has no locks, it lets everybody in.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # with it goes the lock
