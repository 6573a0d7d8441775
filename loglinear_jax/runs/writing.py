"""Writing a run's files: whole or not at all, by one process at a time; and what ends a run, besides bad settings and bugs, in
one line each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from loglinear_jax.command_line import BadInput, Failed
from loglinear_jax.config import ConfigError
from loglinear_jax.distributed import any_process
from loglinear_jax.files import to_disk
from loglinear_jax.settings import first_line

log = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds: for so long at most a process that only asks, by `is_held`, may be in the way


class RunFailed(Failed):
    """The machine did not let a run, or its report, go on; the same command goes on once that is mended."""


class OutOfMemory(RunFailed):
    """A device has too little memory for a variant's settings."""


class NoReadableCheckpoint(BadInput):
    """Checkpoints exist, but none can be read."""


class CannotWrite(RunFailed):
    """The file system did not take a file; the message is one line with its path and the reason."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} can't be written: {reason}; what was saved before is kept")


@contextlib.contextmanager
def writing(path: Path, refusals: type[Exception] = OSError) -> Iterator[None]:
    """Raises CannotWrite for what the file system refuses inside. refusals: what a library that writes raises then."""
    try:
        yield
    except RunFailed:
        raise
    except refusals as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CannotWrite(path, reason) from error


def replace_file(path: Path, write: Callable[[IO], Any], mode: str = "w") -> None:
    """Replaces a file by what `write(file)` writes, whole or not at all. mode: "wb" for bytes. Raises CannotWrite."""
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        try:
            with partial.open(mode, encoding=None if "b" in mode else "utf-8") as file:
                write(file)
                to_disk(file)
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):  # that it could not be written is what is reported
                partial.unlink()
            raise


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Adds a line of JSON to a file, in place of one that a kill cut off, and on disk when this returns. Raises CannotWrite."""
    with writing(path), path.open("a+b") as file:
        if size := file.tell():
            file.seek(size - 1)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write((to_json(line) + "\n").encode())
        to_disk(file)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file, whole or not at all."""
    replace_file(path, lambda file: file.write(to_json(value, indent=2) + "\n"))


def to_json(value: Any, **kwargs: Any) -> str:
    """Strict JSON; numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, **kwargs)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def only_process(file: Path, tries: bool = True) -> Iterator[None]:
    """Holds the lock `file`, which says who holds it, while entered; it goes with the process, however that ends.

    tries: of several processes of one run, only one takes the lock; all of them must ask. Raises ConfigError, in all of
    them, if another run holds it, with its process and host; CannotWrite.
    """
    holder = ""
    with contextlib.ExitStack() as stack:
        if tries:
            with writing(file):
                lock = stack.enter_context(file.open("a+", encoding="utf-8"))
            holder = _hold(lock)
        if any_process(bool(holder)):
            raise ConfigError(f"{file.parent} is in use: {holder or 'another process'} trains in it")
        yield


def _hold(lock: IO) -> str:
    """Who holds the lock, if it is another process, and has been all the while; else it is taken."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            with contextlib.suppress(OSError):  # a full disk: who holds it is a courtesy
                os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
            return ""
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.seek(0)
                return lock.read().strip() or "another process"
            time.sleep(0.01)
        except OSError as error:
            log.warning("%s can't be locked (%s): start no second process in its folder", lock.name, error.strerror)
            return ""


def is_held(file: Path) -> bool:
    """Whether a process holds the lock; False where it can't be known."""
    try:
        with file.open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits for other processes that have entered it for this folder; it leaves no file there. Where the file system has no
    locks, it lets everybody in."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # with it goes the lock
