"""Kernels under `jax.jit` with sharded inputs: each device runs its own sequences and heads. Of a kernel as such XLA's
partitioner knows nothing, and would give every device all of the arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.common.support import UnsupportedError


@dataclasses.dataclass(frozen=True)
class HeadAxes:
    """Which axis of each argument and result has the heads, None for what has none; axis 1 of those that are not told.

    number: of heads, or of groups if there are several: such an axis has a multiple of it, a group's heads side by side. An
    axis of 1 is of a group that all heads share: a result there is a sum over heads.
    """

    number: int
    arguments: tuple[int | None, ...] = ()
    results: tuple[int | None, ...] = ()

    def of(self, arguments: list, results: list) -> tuple[list, list]:
        """(array, its axis of heads) of all arguments and of all results."""
        told = self.arguments, self.results
        arguments, results = (
            list(zip(arrays, itertools.chain(axes, itertools.repeat(1)), strict=False))
            for arrays, axes in zip((arguments, results), told, strict=True)
        )
        return arguments, results

    def are_split(self, x, axis: int | None) -> bool:
        """Whether this axis of x can be shared out by heads."""
        return axis is not None and self.number > 1 and x.shape[axis] % self.number == 0


def of_own_shard(function: Callable, heads: HeadAxes | None, *args):
    """function(*args), in which each device computes its own part of axis 0 and of the heads, as the partitioner finds them
    sharded. The function takes its sizes from its arguments."""
    mesh = jax.sharding.get_abstract_mesh()
    has_no_device = mesh.empty and mesh.abstract_device is not None
    is_shard = any(jax.typeof(x).manual_axis_type.varying for x in args)  # in shard_map
    if jax.device_count() == 1 or has_no_device or is_shard:
        return function(*args)
    axes = heads or HeadAxes(1)

    def rule(mesh, arguments, results):
        del mesh
        return _sharding_rule(axes, list(arguments), list(results))

    def partition(mesh, arguments, results):
        leaves, structure = jax.tree.flatten(results)
        places, over = _places(axes, mesh, list(arguments), leaves)

        def of_shard(*args):
            found = jax.tree.leaves(_as_one_operation(function, *args))
            return structure.unflatten(
                lax.psum(x, over) if over and axis is not None and not axes.are_split(whole, axis) else x
                for x, (whole, axis) in zip(found, axes.of([], leaves)[1], strict=True)
            )

        return mesh, of_shard, structure.unflatten(places[1]), tuple(places[0])

    def of_all(*args):
        return jax.jit(function)(*args)  # which keeps its constants to itself: the partitioner takes none

    shared = custom_partitioning(of_all)
    shared.def_partition(partition, sharding_rule=rule)
    run = jax.custom_jvp(lambda *args: shared(*args))
    run.defjvp(refuse_derivative)
    return run(*args)


def _sharding_rule(axes: HeadAxes, arguments: list, results: list) -> tuple[str, dict[str, int]]:
    """The factors of all arrays' axes, and the sizes of those that are nowhere alone: b of axis 0, h of heads (beside another,
    where heads have several of something), one of each other axis."""
    count, factors_of_heads = itertools.count(), {}

    def factor(axis: int, x, heads_axis: int | None) -> str:
        if axis == 0:
            return "b"
        name = f"f{next(count)}"
        if axis != heads_axis or not axes.are_split(x, axis):
            return name
        if x.shape[axis] == axes.number:
            return "h"
        factors_of_heads[name] = x.shape[axis] // axes.number
        return f"(h {name})"

    sides = [
        [" ".join(factor(axis, x, heads_axis) for axis in range(len(x.shape))) for x, heads_axis in side]
        for side in axes.of(arguments, results)
    ]
    rule = " -> ".join(", ".join(side) for side in sides)
    is_alone = not factors_of_heads or any(" h" in value.replace("(h", "") for side in sides for value in side)
    return rule, factors_of_heads | ({} if is_alone else {"h": axes.number})


def _places(axes: HeadAxes, mesh: Mesh, arguments: list, results: list):
    """The shardings of arguments and of results, and over which axes of the mesh heads are: as of the first argument that has
    them sharded, if all devices get equally many."""

    def found(x, axis: int):
        return x.sharding.spec[axis] if axis < len(x.sharding.spec) else None

    def first(shardings):
        return next((axis for axis in shardings if axis is not None), None)

    both = axes.of(arguments, results)
    batch = first(found(x, 0) for x in arguments)
    over = first(found(x, axis) for x, axis in both[0] if axes.are_split(x, axis))
    if axes.number % math.prod(mesh.shape[axis] for axis in jax.tree.leaves(over)):
        over = None

    def place(x, heads_axis: int | None) -> NamedSharding:
        spec = [batch, *[None] * (len(x.shape) - 1)]
        if axes.are_split(x, heads_axis):
            spec[heads_axis] = over
        return NamedSharding(mesh, PartitionSpec(*spec))

    return [[place(*array) for array in side] for side in both], over


def refuse_derivative(primals, tangents):
    """The rule of jax.custom_jvp for what has no derivative."""
    raise UnsupportedError(
        "the Pallas kernels have first derivatives by jax.grad and jax.vjp only: implementation='xla' has all derivatives"
    )


def of_no_axes(x):
    """x, of a type that says nothing of manual mesh axes (of shard_map), as references for Mosaic GPU have to be."""
    return _as_one_operation(lambda x: x, x) if jax.typeof(x).manual_axis_type.varying else x


def _as_one_operation(function, *args):
    results = jax.tree.structure(jax.eval_shape(function, *args))
    return results.unflatten(_SELF_CONTAINED.bind(*args, function=function))


# A function as one operation: the partitioner takes none with the effects by which kernels of Mosaic GPU write their results.
_SELF_CONTAINED = Primitive("self_contained")
_SELF_CONTAINED.multiple_results = True


@_SELF_CONTAINED.def_abstract_eval
def _(*args, function):
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(function, *args))]


mlir.register_lowering(
    _SELF_CONTAINED,
    mlir.lower_fun(lambda *args, function: jax.tree.leaves(function(*args)), multiple_results=True),
)
