"""Writing a run's files: whole or not at all, and one line when the disk does not take them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from loglinear_jax.files import to_disk
from loglinear_jax.runs.errors import RunFailed

_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CannotWrite(RunFailed):
    """The file system did not take a file; the message is one line with its path, the reason and, if that is about space, what
    is free."""

    def __init__(self, path: Path, reason: str):
        free = f" ({_free_space(path)})" if reason in map(os.strerror, _OF_SPACE) else ""
        super().__init__(f"{path} can't be written: {reason}{free}; what was saved before is kept")


@contextlib.contextmanager
def writing(path: Path, quoted: bool = False) -> Iterator[None]:
    """Raises CannotWrite for what the file system refuses inside. quoted: also for an error of a library that only quotes the
    operating system's words, as TensorStore does."""
    try:
        yield
    except Exception as error:
        reason = refusal(error, quoted)
        if reason is None:
            raise
        raise CannotWrite(path, reason) from error


_QUOTED = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "EFBIG", "ENOTDIR", "EISDIR", "ESTALE", "EMFILE")


def refusal(error: BaseException | None, quoted: bool = False) -> str | None:
    """Why the file system refused, if that is what this error, or what it was raised from, is about; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno)
        for name in _QUOTED if quoted else ():
            reason = os.strerror(getattr(errno, name))
            if reason.lower() in str(error).lower():
                return reason
        error = error.__cause__
    return None


def _free_space(path: Path) -> str:
    folder = path
    while not folder.exists():
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB free in {folder}"
    except OSError as error:
        return f"free space of {folder} not known: {error.strerror}"


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
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
