"""What all the kernels share: launching, matrix products, and batching."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

from pallas_kernels.common.partition import HeadAxes, of_own_shard, refuse_derivative
from pallas_kernels.common.support import UnsupportedError, triton
from pallas_kernels.common.tiles import Launch

P = ParamSpec("P")
R = TypeVar("R")
MOST_PROGRAMS = 2**31 - 2  # of a kernel
COLUMNS = 64  # a block of them, of `for_columns` and `column_blocks`


def call(kernel, name: str, grid, in_specs, out_specs, out_shape, launch: Launch, interpret: bool, aliases=None):
    """The pallas_call, whose results vary over the same manual mesh axes (of shard_map) as its operands together. It has no
    derivative: where a kernel's gradient is differentiated, it is an UnsupportedError."""

    if math.prod(grid) > MOST_PROGRAMS:  # axes of a grid are folded into its first where they are too long for it
        raise UnsupportedError(f"{name} would have {math.prod(grid)} programs: a GPU takes up to {MOST_PROGRAMS}")

    @jax.custom_jvp
    def run(*operands):
        varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
        axes = jax.sharding.ManualAxisType(varying=varying)
        results = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes), out_shape)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=results,
            input_output_aliases=aliases or {},
            compiler_params=triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
            interpret=interpret,
            name=name,
        )(*operands)

    run.defjvp(refuse_derivative)
    return run


def dot(x, y, mode: str, interpret: bool, transpose_x=False, transpose_y=False):
    """x @ y in float32, either transposed; on the GPU's matrix units, for full float32 ("f32") too."""
    precision = None
    if mode == "f32":
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    contract = ((0 if transpose_x else 1,), (1 if transpose_y else 0,))
    return lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def for_columns(columns: int, body, carry, most: int = COLUMNS):
    """body(up to `most` columns, carry) for all columns: a program holds less at once, and more of them run side by side."""
    block = min(columns, most)
    if block == columns:
        return body(slice(None), carry)
    return lax.fori_loop(0, columns // block, lambda i, carry: body(pl.ds(i * block, block), carry), carry)


def column_blocks(columns: int) -> list[slice]:
    """The blocks of `for_columns`, for a loop that Python writes out, as `load_ahead` needs it to go beyond a step."""
    block = columns_of_block(columns)
    return [slice(start, start + block) for start in range(0, columns, block)]


def columns_of_block(columns: int) -> int:
    """How many columns a block has, of a matrix that has so many."""
    return min(columns, COLUMNS)


def load_ahead(*loads, ahead: bool = True):
    """Yields load() of each, in order; if `ahead`, each only after the next load has begun.

    A program then multiplies while it waits for memory, and holds one more value in registers.
    """
    if not ahead:
        for load in loads:
            yield load()
        return
    upcoming = loads[0]()
    for load in loads[1:]:
        current, upcoming = upcoming, load()
        yield current
    yield upcoming


def of_sequence(x, axis=0):
    """The BlockSpec of all of x that is of one sequence, by the last index of the grid. axis: that of sequences."""
    shape = (*x.shape[:axis], None, *x.shape[axis + 1 :])
    return pl.BlockSpec(shape, lambda *program: tuple(program[-1] if i == axis else 0 for i in range(len(shape))))


def vary_as(x, other):
    """x, and in shard_map varying over the manual mesh axes that `other` varies over, too."""
    axes = jax.typeof(other).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def varying(function):
    """function, whose results vary over the manual mesh axes (of shard_map) of its operands: Mosaic says nothing of these."""

    def run(*operands, **options):
        return [functools.reduce(vary_as, operands, x) for x in function(*operands, **options)]

    return run


def with_standard_promotion(function: Callable[P, R]) -> Callable[P, R]:
    """function, in which shapes and dtypes are promoted as usual, whatever jax_numpy_rank_promotion and
    jax_numpy_dtype_promotion say: these watch over the code of users."""

    @functools.wraps(function)
    def promoting(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoting


def fold_mapped_axes(function, partitioned: bool = True, heads: HeadAxes | None = None):
    """function with a batching rule: a mapped axis becomes part of axis 0 of every argument and result. Where that axis, or
    that of heads, is sharded over several devices, each computes its own part, if `partitioned`."""

    @with_standard_promotion
    def in_32_bits(*args):  # as the kernels count
        with jax.enable_x64(False):
            return function(*args)

    @custom_vmap
    def folding(*args):
        # jit keeps constants to itself. custom_vmap refuses those that lax.cond maps, which it does where its condition is.
        run = jax.jit(in_32_bits)
        return of_own_shard(run, heads, *args) if partitioned else run(*args)

    @folding.def_vmap
    def rule(axis_size, in_batched, *args):
        whole = [
            x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, batched in zip(args, in_batched, strict=True)
        ]
        results = folding(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return folding


def with_gradient(forward, backward, heads: HeadAxes | None = None):
    """forward, differentiable and with a batching rule, that of `fold_mapped_axes`; heads: as there, of all arguments.

    backward: function of its operands and of the gradient of its result, to that of each operand, None for one of integers.
    """
    of_backward = heads and dataclasses.replace(
        heads, arguments=heads.arguments + heads.results, results=heads.arguments
    )
    forward, backward = fold_mapped_axes(forward, heads=heads), fold_mapped_axes(backward, heads=of_backward)
    apply = jax.custom_vjp(forward)
    apply.defvjp(lambda *operands: (forward(*operands), operands), lambda operands, d: tuple(backward(*operands, d)))
    return apply


def changed_in_place(x):
    """x, which a kernel has changed where it was. In a loop that collects x (lax.scan), XLA would let the kernel write into the
    collection, where all that it leaves as it was would be missing (seen with JAX 0.11.2 and kernels of Mosaic GPU)."""
    return lax.optimization_barrier(x)


def pad(x, *axes_and_sizes):
    """x with zeros behind, up to the given size of each given axis."""
    widths = [(0, 0)] * x.ndim
    for axis, size in axes_and_sizes:
        widths[axis] = (0, size - x.shape[axis])
    return x if all(after == 0 for _, after in widths) else jnp.pad(x, widths)
