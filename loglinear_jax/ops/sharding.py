"""Sharded inputs: over explicit axes of a mesh, as `jax.make_mesh` makes them by default, and inside `jax.shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, PyTree

from pallas_kernels.common.launch import vary_as


def over_explicit_axes(tokens: int, axis: int) -> Callable[[Callable], Callable]:
    """Decorates a function of arrays to o or (o, state), so that it also takes arrays sharded over explicit axes.

    Under explicit axes every step has to say how its result is sharded. Here only the whole function does: o and the state have
    the batch and the heads sharded as the tokens have, and XLA shards what is between.

    tokens: number of the argument that says how, [B, T, H, ...] or [B, H, ...]. axis: of its heads, and of those of o.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arrays: Any, **options: Any) -> Any:
            own = jax.typeof(arrays[tokens]).sharding
            meshes = [sharding.mesh for x in jax.tree.leaves(arrays) if (sharding := jax.typeof(x).sharding)]
            mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
            if mesh is None:
                # In `jax.shard_map` keys may be the same everywhere: their gradient is a sum over the devices.
                return function(*varying_as(arrays[tokens], arrays), **options)
            run = functools.partial(function, **options)
            spec = [*own.spec, *[None] * (axis + 1)]
            batch, heads = spec[0], spec[axis]

            def sharded(axis: int, x: Any) -> PartitionSpec:
                return PartitionSpec(*[batch, *[None] * (axis - 1), heads][: x.ndim])

            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
            out = jax.eval_shape(run, *shapes)
            specs: Any = sharded(axis, out[0] if isinstance(out, tuple) else out)
            if isinstance(out, tuple):
                specs = specs, jax.tree.map(functools.partial(sharded, 1), out[1])
            with jax.sharding.use_abstract_mesh(mesh):
                return jax.sharding.auto_axes(run, out_sharding=specs)(*arrays)

        return call

    return decorate


def varying_as(token: Array, state: PyTree[Array]) -> PyTree[Array]:
    """The state, each array of it as varying over the manual axes of `jax.shard_map` as the token is; not its position, which
    all devices have in common. A state that starts from zeros is the same everywhere, what a scan makes of it is not."""
    return jax.tree.map(lambda x: vary_as(x, token) if x.ndim else x, state)
