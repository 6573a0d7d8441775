"""The devices as one mesh, and how states and data lie on it.

The mesh has four axes. The devices along

    "seed"      train seeds of their own, and never talk to each other;
    "data"      share out each batch, and have the same parameters (data parallelism);
    "fsdp"      share out each batch too, and have a part of each large parameter and of what the optimiser keeps of it. Each
                layer puts its parameters together when it reads them (fully sharded data parallelism; Rajbhandari et al.,
                "ZeRO", 2020, stage 3);
    "sequence"  have a piece of each sequence (see `ops.sequence_parallel`).

All is computed inside `jax.shard_map`, so a program has the collectives that are written in the package, and no other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import numpy as np
from flax.core.meta import AxisMetadata
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from loglinear_jax.mixers import takes_pieces
from loglinear_jax.settings import SettingError
from loglinear_jax.train.settings import TrainSettings

AXES = ("seed", "data", "fsdp", "sequence")
OF_BATCH = ("data", "fsdp")
OF_TOKENS = (*OF_BATCH, "sequence")
SMALLEST_CUT = 1 << 12  # elements of a parameter that is shared out: putting smaller ones together does not pay

SEED = PartitionSpec("seed")
# How data is laid out over the mesh: every leaf has a leading seed axis.
DATA_SPECS = {
    "train": SEED,
    "validation": PartitionSpec("seed", OF_BATCH, "sequence"),
    "batches": PartitionSpec("seed", None, OF_BATCH, "sequence"),
}


def device_mesh(
    num_seeds: int,
    batch_size: int = 1,
    devices: Sequence[jax.Device] | None = None,
    fsdp: int = 1,
    sequence: int = 1,
) -> Mesh:
    """A mesh of `AXES` over as many devices as can share out seeds and batch evenly, the seeds first; fsdp and sequence are the
    sizes of these axes. Raises SettingError if there are too few devices, or sequences in a batch, for that."""
    devices = jax.devices() if devices is None else devices
    count = len(devices) // (fsdp * sequence)
    if count == 0:
        raise SettingError(
            f"train.fsdp_devices={fsdp} times train.sequence_devices={sequence} must be at most the number of devices, "
            f"{len(devices)}"
        )
    if batch_size % fsdp:
        raise SettingError(f"train.fsdp_devices={fsdp} must divide the sequences of a batch, {batch_size}")
    per_device = batch_size // fsdp
    ways = [
        (s, b) for s in range(1, count + 1) for b in range(1, count // s + 1) if num_seeds % s == per_device % b == 0
    ]
    over_seeds, over_batch = max(ways, key=lambda way: (way[0] * way[1], way[0]))
    shape = over_seeds, over_batch, fsdp, sequence
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), AXES)


def check_pieces(settings: TrainSettings, task: Any, model: Any) -> None:
    """Raises SettingError unless the task and the model of these settings can be trained so.

    Sequences that the devices draw themselves are only shared out by seed.
    """
    for name in ("fsdp_devices", "sequence_devices"):
        if (given := getattr(settings, name)) > 1 and not task.STREAMED:
            raise SettingError(f"train.{name}={given} is for texts: expected 1 with a task whose sequences are drawn")
    pieces = settings.sequence_devices
    if pieces == 1:
        return
    if not hasattr(model, "axis_name") or not all(map(takes_pieces, model.pattern)):
        what = "a model of your own" if not hasattr(model, "axis_name") else f"model.mixer={model.mixer}"
        raise SettingError(
            f"train.sequence_devices={pieces} must be 1 with {what}, which takes no pieces of a sequence"
        )
    if model.random_first_position:
        raise SettingError(f"train.sequence_devices={pieces} must be 1 with a model.random_first_position")
    if not can_be_cut(task.seq_len, pieces, model.conv_width):
        raise SettingError(
            f"train.sequence_devices={pieces} must cut task.seq_len={task.seq_len} into pieces of a power of two, of at least "
            f"model.conv_width={model.conv_width} tokens"
        )


def can_be_cut(length: int, pieces: int, least: int = 1) -> bool:
    """Whether a sequence is whole, or can be cut into equal pieces of a power of two, and at least `least`, tokens."""
    piece, rest = divmod(length, pieces)
    return pieces == 1 or not (rest or piece & (piece - 1) or piece < least)


def in_pieces(model: nn.Module) -> nn.Module:
    """The same model for the pieces of sequences that are cut over the axis "sequence"."""
    return model.clone(settings=dataclasses.replace(model.settings, axis_name="sequence"))


# --- Parts of parameters --------------------------------------------------------------------------------------------------


def specs_of(tree: PyTree[jax.ShapeDtypeStruct], mesh: Mesh) -> PyTree[PartitionSpec]:
    """How a tree of arrays with a leading seed axis lies on the mesh, parameters and what the optimiser keeps of them alike.

    Over "fsdp" it is cut along its longest axis that can be cut evenly, unless it is small.
    """

    def spec(x) -> PartitionSpec:
        lengths = [length if length % mesh.shape["fsdp"] == 0 else 0 for length in x.shape[1:]]
        if mesh.shape["fsdp"] == 1 or math.prod(x.shape[1:]) < SMALLEST_CUT or not any(lengths):
            return SEED
        return PartitionSpec("seed", *[None] * int(np.argmax(lengths)), "fsdp")

    return jax.tree.map(spec, tree)


def own_parts(tree: PyTree[Array], specs: PyTree[PartitionSpec]) -> PyTree[Array]:
    """Inside `jax.shard_map`: of whole arrays, with a leading axis for the device's own seeds, the parts that it has."""
    specs = jax.tree.broadcast(specs, tree)

    def part(x, spec):
        if "fsdp" not in spec:
            return x
        axis = spec.index("fsdp")
        length = x.shape[axis] // jax.lax.axis_size("fsdp")
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("fsdp") * length, length, axis)

    return jax.tree.map(part, tree, specs)


class Part(flax.struct.PyTreeNode, AxisMetadata):
    """A device's part of a parameter that is cut along an axis. Flax puts the whole together where a module reads it: with
    `model.remat` once more in the backward pass, so that no device holds the parameters of more than a few layers. The
    gradient is the part's own, summed over the devices of "fsdp", by one reduce-scatter.

    sent_as: the dtype to which all that read it round it, so that no more is sent; None: its own. The gradient is summed in
    its own.
    """

    value: Any
    axis: int = flax.struct.field(pytree_node=False)
    sent_as: str | None = flax.struct.field(pytree_node=False, default=None)

    def unbox(self) -> Array:
        return _put_together(self.value, self.axis, self.sent_as)

    def replace_boxed(self, val: Any) -> Part:
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Part:
        return self.replace(axis=self.axis + (index <= self.axis))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Part:
        return self.replace(axis=self.axis - (index < self.axis))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _put_together(part: Array, axis: int, sent_as: str | None) -> Array:
    sent = part if sent_as is None else part.astype(sent_as)
    return jax.lax.all_gather(sent, "fsdp", axis=axis, tiled=True).astype(part.dtype)


_put_together.defvjp(
    lambda part, axis, sent_as: (_put_together(part, axis, sent_as), None),
    lambda axis, sent_as, _, grad: (jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=axis, tiled=True),),
)


def cut_axes(specs: PyTree[PartitionSpec]) -> PyTree[int]:
    """Along which axis each array of one seed is cut; -1 for none."""
    return jax.tree.map(lambda spec: spec.index("fsdp") - 1 if "fsdp" in spec else -1, specs)
