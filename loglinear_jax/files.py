"""Files: found, on disk when they are written, and known by their hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO


def expand_user(path: str | os.PathLike) -> Path:
    """With a home folder for ~ at the beginning; with ~name as it is, where there is no such user."""
    return Path(os.path.expanduser(path))


def to_disk(file: IO) -> None:
    """Returns when what was written is on disk."""
    file.flush()
    os.fsync(file.fileno())


def file_sha256(path: Path) -> str:
    """The SHA-256 of its bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
