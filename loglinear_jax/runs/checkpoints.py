"""Orbax checkpoints of a run: saved asynchronously, restored onto any devices, past unreadable ones.

    <directory>/<step>/             one checkpoint, as Orbax writes it
    <directory>/<step>/data.json    of a text: where its reading stands
    <directory>/<step>/SHA256SUMS   of its files, as `sha256sum` writes and checks it

A checkpoint without SHA256SUMS, as its process was killed before they were written, is read as it is; it may lack data.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from loglinear_jax.distributed import any_process, is_main
from loglinear_jax.files import file_sha256
from loglinear_jax.runs.writing import NoReadableCheckpoint, replace_file, write_json, writing
from loglinear_jax.settings import first_line

log = logging.getLogger(__name__)

KEEP = 3
_SUMS = "SHA256SUMS"
_DATA = "data.json"
_ITEM = "default"  # Orbax's name of the one thing in a checkpoint


class Checkpoints:
    """The checkpoints in one directory, one a step; the newest KEEP stay. read_only: nothing is touched."""

    def __init__(self, directory: Path, read_only: bool = False):
        self.directory = directory.absolute()
        self._read_only = read_only
        self._manager: ocp.CheckpointManager | None = None
        self._unsummed: int | None = None
        self._data: Any = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, *exc: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # After an error or a second Ctrl-C: Orbax still waits for what it was writing, and says again what went wrong.
            with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
                if self._manager is not None:
                    self._manager.close()

    def save(self, step: int, state: Any, data: Any = None) -> None:
        """Start saving `state` (arrays are copied off the devices before this returns). data: where the reading of a text
        stands, for JSON. Raises CannotWrite, maybe for the checkpoint before, which was still being written."""
        self._finish()
        with writing(self.directory / str(step), Exception):
            if self._manager is None:  # not before: it would not open a directory with unreadable checkpoints
                options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, cleanup_tmp_directories=True)
                self._manager = ocp.CheckpointManager(self.directory, options=options)
            self._manager.save(step, args=ocp.args.StandardSave(state))
        self._unsummed, self._data = step, data

    def _finish(self) -> None:
        """Waits for the checkpoint that is being written, and writes its sums. Raises CannotWrite."""
        if self._manager is None or self._unsummed is None:
            return
        path = self.directory / str(self._unsummed)
        with writing(path, Exception):
            self._manager.wait_until_finished()
        if is_main():
            if self._data is not None:
                write_json(path / _DATA, self._data)
            files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != _SUMS)
            lines = [f"{file_sha256(file)}  {file.relative_to(path)}\n" for file in files]
            replace_file(path / _SUMS, lambda file: file.writelines(lines))
        self._unsummed = None

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, readable or not, the newest first."""
        if not self.directory.is_dir():
            return []
        names = [path.name for path in self.directory.iterdir()]
        return sorted((int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name, re.ASCII)), reverse=True)

    def restore_latest(self, abstract_state: Any) -> Any | None:
        """The newest readable state, or None if there is no checkpoint.

        One that can't be read is named in a warning, the one before it is tried, and once that is read the unreadable one is
        removed (unless read_only). Raises NoReadableCheckpoint, and removes nothing, if there are some but none can be read.
        """
        reasons: dict[int, str] = {}
        for step in self.steps():
            state, reason = self._restore(step, abstract_state)
            if not any_process(reason is not None):
                if not self._read_only:
                    self._remove(list(reasons))
                return state
            reasons[step] = reason or "another process can't read it"
            log.warning(
                "Checkpoint %s/%d can't be read (%s): trying the one before it.", self.directory, step, reasons[step]
            )
        if reasons:
            raise NoReadableCheckpoint(
                f"{self.directory}: none of its checkpoints ({', '.join(map(str, sorted(reasons)))}) can be read: they are "
                f"damaged, or of another config.json or version of this project ({next(iter(reasons.values()))}); to train "
                "anew, move the folder away"
            )
        return None

    def data_state(self, step: int) -> Any | None:
        """Where the training data stood at a step that was restored; None if its checkpoint does not say it."""
        path = self.directory / str(step) / _DATA
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _restore(self, step: int, abstract_state: Any) -> tuple[Any, str | None]:
        """(state, None) or (None, why it can't be read)."""
        path = self.directory / str(step)
        if reason := _damage(path):
            return None, reason
        reader = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        try:
            return reader.restore(path / _ITEM, args=ocp.args.StandardRestore(abstract_state)), None
        except Exception as error:  # Orbax and TensorStore raise many types for damaged files
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise
            log.debug("Checkpoint %s", path, exc_info=error)
            return None, first_line(error)[:200]
        finally:
            reader.close()

    def _remove(self, steps: list[int]) -> None:
        for path in (self.directory / str(step) for step in steps):
            if is_main():
                with writing(path):
                    path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        any_process(False)  # the others go on when it is done


def _damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint, as its sums say; None if nothing, or if it has no sums."""
    if not (path / _ITEM).is_dir():
        return f"there is no folder {_ITEM} in it"
    try:
        for line in (path / _SUMS).read_text(encoding="utf-8").splitlines() if (path / _SUMS).exists() else ():
            sha256, _, name = line.partition("  ")
            if file_sha256(path / name) != sha256:
                return f"its file {name} has changed since it was written"
    except (OSError, UnicodeError) as error:
        return str(error)
    return None


def on_this_machine(abstract_state: Any) -> Any:
    """The same shapes on this machine's first device, whatever devices the state was saved from."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract_state)
