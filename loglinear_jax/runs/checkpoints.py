"""Orbax checkpoints of a run: saved asynchronously, restored onto any devices, past a damaged newest one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp

from loglinear_jax.distributed import any_process, is_main

log = logging.getLogger(__name__)

KEEP = 3


class NoReadableCheckpoint(Exception):
    """Checkpoints exist, but none can be read."""


class Checkpoints:
    """The checkpoints in one directory, one a step; the newest KEEP stay."""

    def __init__(self, directory: Path, read_only: bool = False):
        self.directory = directory.absolute()
        self._read_only = read_only
        policy = {"read_only": True, "create": False, "save_interval_steps": 0} if read_only else {"max_to_keep": KEEP}
        options = ocp.CheckpointManagerOptions(**policy)
        verbosity = absl.logging.get_verbosity()
        if read_only:
            absl.logging.set_verbosity(absl.logging.ERROR)  # it warns that it will only read
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        absl.logging.set_verbosity(verbosity)

    def save(self, step: int, state: Any) -> None:
        """Start saving `state` (arrays are copied off the devices before this returns)."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def close(self) -> None:
        """Wait, and free the manager's threads."""
        self._manager.close()

    def restore_latest(self, abstract_state: Any) -> Any | None:
        """The newest readable state, or None if there is no checkpoint.

        A checkpoint that can't be read is warned about, and set aside as <step>.damaged (unless read_only); the one before
        it is tried. Nothing is touched unless an older one can be read. Raises NoReadableCheckpoint if there are some, but
        none can be read.
        """
        steps, reasons = sorted(self._manager.all_steps(), reverse=True), []
        for index, step in enumerate(steps):
            try:
                state = self._manager.restore(step, args=ocp.args.StandardRestore(abstract_state))
            except Exception as error:  # Orbax and TensorStore raise many types for damaged files
                reasons.append(str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__)
                log.warning(
                    "Checkpoint %s/%d can't be read (%s): trying the one before it.", self.directory, step, reasons[-1]
                )
            else:
                if not self._read_only:
                    for damaged in steps[:index]:
                        self._set_aside(damaged)
                return state
        if steps:
            raise NoReadableCheckpoint(
                f"{self.directory}: none of its checkpoints ({', '.join(map(str, sorted(steps)))}) can be read: they are "
                f"damaged, or of another version of this project ({reasons[0]})"
            )
        return None

    def _set_aside(self, step: int) -> None:
        path = self.directory / str(step)
        target, count = path.with_name(f"{step}.damaged"), 1
        while target.exists():
            target, count = path.with_name(f"{step}.damaged{count}"), count + 1
        if is_main():
            path.rename(target)
        any_process(False)  # the others go on when it is done
        self._manager.reload()


def on_this_machine(abstract_state: Any) -> Any:
    """The same shapes on this machine's first device, whatever devices the state was saved from."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract_state)


def to_numpy(tree: Any) -> Any:
    """Every leaf as a NumPy array."""
    return jax.tree.map(np.asarray, tree)
