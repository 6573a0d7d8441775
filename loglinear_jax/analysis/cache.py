"""Results of long evaluations, kept in files and found again by what they were computed from."""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loglinear_jax.runs.writing import CannotWrite, replace_file

log = logging.getLogger(__name__)
VERSION = 1  # of what is computed: to be raised when the same key would give something else


class Cache:
    """Dicts of arrays in <folder>/<hash of the key>.npz."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, key: Mapping[str, Any], compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """What `compute` gave for this key, now or before. key: JSON values; a run's `checkpoint` should be in it."""
        name = hashlib.sha256(json.dumps({"version": VERSION, **key}, sort_keys=True).encode()).hexdigest()[:24]
        path = self.folder / f"{name}.npz"
        if path.exists():
            if (kept := _read(path)) is not None:
                return kept
            log.warning("%s can't be read and is computed again", path)
        value = {name: np.asarray(x) for name, x in compute().items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: np.savez(file, **value), mode="wb")
        except (OSError, CannotWrite) as error:
            log.warning("an evaluation is not kept: %s", error)
        return value


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays in a file of `Cache`; None if it is damaged. Nothing in it is unpickled."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as read:
            arrays = dict(read)
    except (OSError, EOFError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile):
        return None
    return arrays if all(isinstance(x, np.ndarray) for x in arrays.values()) else None
