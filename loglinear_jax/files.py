"""Files: their paths as users give them, on disk when they are written, and known by their hash."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import IO

from loglinear_jax.settings import SettingError

MOST_BYTES_OF_NAME = 255  # Linux's


def bytes_of_longest_name(path: str) -> int:
    """Of the names of folders and files in a path."""
    return max((len(os.fsencode(part)) for part in Path(path).parts), default=0)


def local_path(path: str | os.PathLike, argument: str) -> Path:
    """The path that a user gives as `argument`, with the home folder for a ~ at its beginning.

    Raises SettingError, naming the argument, for what `why_not_local` refuses.
    """
    if problem := why_not_local(path):
        raise SettingError(f"{argument}: {problem}")
    return Path(os.path.expanduser(path))


def why_not_local(path: str | os.PathLike) -> str | None:
    """Why a path cannot be used: it is an address such as gs://bucket, or begins with the home folder of
    nobody. None if it may name something."""
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return f"{text} is an address: expected a path on this machine, as only local folders and files are supported"
    if os.path.expanduser(text).startswith("~"):
        return f"{text}: there is no home folder for {text.partition('/')[0]}: expected a path without it"
    return None


def existing_part(path: Path) -> Path:
    """The path, or the nearest of the folders above it that exists; also a link to nothing."""
    return next(part for part in (path, *path.parents) if os.path.lexists(part))


def to_disk(file: IO) -> None:
    """Returns when what was written is on disk."""
    file.flush()
    os.fsync(file.fileno())


def file_sha256(path: Path) -> str:
    """The SHA-256 of its bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
