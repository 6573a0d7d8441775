"""Sharded inputs: over explicit axes of a mesh, as `jax.make_mesh` makes them by default, and inside `jax.shard_map`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, PyTree

from pallas_kernels import interpreting
from pallas_kernels.common.launch import vary_as


def over_explicit_axes(tokens: int, axis: int) -> Callable[[Callable], Callable]:
    """Decorates a function of arrays to o or (o, state), so that it also takes arrays sharded over explicit axes.

    Under explicit axes every step has to say how its result is sharded. Here only the whole function does: o and the state have
    the batch and the heads sharded as the tokens have, and XLA shards what is between; of GPU kernels, which it would give all
    heads, every device runs its own.

    tokens: number of the argument that says how, [B, T, H, ...] or [B, H, ...]. axis: of its heads, and of those of o.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arrays: Any, **options: Any) -> Any:
            own = jax.typeof(arrays[tokens]).sharding
            meshes = [sharding.mesh for x in jax.tree.leaves(arrays) if (sharding := jax.typeof(x).sharding)]
            mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
            if mesh is None:
                return function(*arrays, **options)
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
                if options.get("implementation") == "pallas" and _are_shards_alike(arrays, own):
                    return _by_shard(run, arrays, tokens, sharded, specs)
                return jax.sharding.auto_axes(run, out_sharding=specs)(*arrays)

        return call

    return decorate


def _are_shards_alike(arrays: tuple, own: jax.sharding.NamedSharding) -> bool:
    """Whether each device can run the operation on its own sequences and heads: with one group, or whole groups. Not where an
    axis of the mesh is left, as vmap's own may be sharded over it, which shard_map takes badly."""
    batch, length, heads, *rest = *own.spec, None, None, None
    groups, parts = arrays[0].shape[2], math.prod(own.mesh.shape[axis] for axis in jax.tree.leaves(heads))
    is_explicit = all(kind is AxisType.Explicit for kind in own.mesh.axis_types)
    are_taken = all(axis in jax.tree.leaves((batch, heads)) for axis, size in own.mesh.shape.items() if size > 1)
    return is_explicit and are_taken and not any([length, *rest]) and (groups == 1 or groups % parts == 0)


def _by_shard(run: Callable, arrays: tuple, tokens: int, sharded: Callable, out_specs: Any) -> Any:
    """run(*arrays), arrays of tokens and last where they start, in `jax.shard_map`. A group that the heads of all devices share
    is whole on each of them; positions and ids of segments, which are integers, have no heads."""

    def spec(axis: int, x: Array) -> PartitionSpec:
        whole = sharded(axis, x)
        has_heads = x.ndim > axis and x.shape[axis] > 1 and not jnp.issubdtype(x.dtype, jnp.integer)
        return whole if has_heads else PartitionSpec(*whole[:axis])

    *inputs, start = arrays
    of_tokens, of_start = (functools.partial(jax.tree.map, functools.partial(spec, axis)) for axis in (2, 1))
    specs = (*of_tokens(inputs), of_start(start))

    def of_shard(*arrays: Any) -> Any:
        return run(*varying_as(arrays[tokens], arrays))

    # Pallas's interpreter mixes arrays that vary over the devices with indices that do not.
    own = jax.shard_map(of_shard, in_specs=specs, out_specs=out_specs, check_vma=not interpreting())
    return own(*jax.tree.map(jax.sharding.reshard, arrays, specs))


def varying_as(token: Array, state: PyTree[Array]) -> PyTree[Array]:
    """The state, each array of it as varying over the manual axes of `jax.shard_map` as the token is; not its position, which
    all devices have in common. A state that starts from zeros is the same everywhere, what a scan makes of it is not."""
    return jax.tree.map(lambda x: vary_as(x, token) if x.ndim else x, state)
