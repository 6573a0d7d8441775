"""What the kernels for Hopper GPUs share: tiles and layouts, matrix products, shared memory and its bytes, and the launch."""

from __future__ import annotations

import contextlib
import contextvars
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.chunks import Sizes
from pallas_kernels.common.launch import MOST_PROGRAMS
from pallas_kernels.common.support import UnsupportedError

BLOCK = 64  # tokens, as many as the matrix unit of a warpgroup takes rows
PAIRS = (BLOCK, BLOCK)
TILE = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = TILE.reduce(1), TILE.reduce(0)
F32 = jnp.float32
# Of the 227 KiB that a program may have; barriers, and arrays up to whole KiB, take a little.
SHARED_MEMORY = 225 * 1024


@runtime_checkable
class Problem(Protocol):
    """Sizes of a problem, of which all kernels need to know this."""

    @property
    def interpret(self) -> bool: ...


# --- Shared memory ------------------------------------------------------------------------------------------------------


def tiled(*shape: int, dtype=jnp.bfloat16):
    """Shared memory for matrices that the tensor cores or TMA read."""
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def plain(*shape: int):
    """Shared memory for float32 numbers that no tensor core reads."""
    return plgpu.SMEM(shape, F32)


def num_bytes(shared: Mapping[str, object]) -> int:
    """Bytes of all these arrays of shared memory; barriers have none."""
    arrays = [x for x in jax.tree.leaves(dict(shared)) if not isinstance(x, plgpu.Barrier)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)


def most_slots(fixed: int, slot: int, most: int) -> int:
    """How many slots of so many bytes, up to `most`, shared memory has beside what takes `fixed` bytes."""
    return max(min((SHARED_MEMORY - fixed) // slot, most), 1)  # one has room in every shape that the kernels take


# --- Products -----------------------------------------------------------------------------------------------------------


def product(x, y, shape: tuple[int, int]):
    """x y in float32; y in shared memory, x too."""

    def multiply(sum_ref):
        plgpu.wgmma(sum_ref, x, y)
        return sum_ref[...]

    # Reading the sum waits for it; the barrier keeps what uses it behind that wait.
    return lax.optimization_barrier(pl.run_scoped(multiply, plgpu.ACC(shape, F32)))


def products(*operands):
    """Several `product`s (x, y, shape), in flight together."""

    def multiply(*sum_refs):
        for sum_ref, (x, y, _) in zip(sum_refs, operands, strict=True):
            plgpu.wgmma(sum_ref, x, y)
        return tuple(sum_ref[...] for sum_ref in sum_refs)

    return lax.optimization_barrier(pl.run_scoped(multiply, *(plgpu.ACC(shape, F32) for *_, shape in operands)))


def add_products(start, factors: Sequence[tuple], shape: tuple[int, int], sizes: Problem):
    """start + Σ x y over (x, y) of factors; start may be None."""
    return add_to_tiles([start], [factors], sizes, shape)[0]


def add_to_tiles(tiles, factors, sizes: Problem, shape: tuple[int, int] = PAIRS):
    """tile + Σ x y over (x, y) of its own factors, for each tile, which may be None; all products in flight together. The
    interpreter's sums have no start: there the tile is added."""

    def multiply(*sum_refs):
        for sum_ref, tile, own in zip(sum_refs, tiles, factors, strict=True):
            if tile is not None and not sizes.interpret:
                sum_ref[...] = tile
            for x, y in own:
                plgpu.wgmma(sum_ref, x, y)
        return tuple(sum_ref[...] for sum_ref in sum_refs)

    sums = lax.optimization_barrier(pl.run_scoped(multiply, *[plgpu.ACC(shape, F32)] * len(tiles)))
    if not sizes.interpret:
        return sums
    return tuple(x if tile is None else tile + x for tile, x in zip(tiles, sums, strict=True))


def add_product(sum_ref, x, y, staged) -> None:
    """sum += x y, x in registers; not waited for. The interpreter has no such operand: there x goes through `staged`."""
    if staged is None:
        plgpu.wgmma(sum_ref, x, y)
    else:
        staged[...] = x
        plgpu.commit_smem()
        plgpu.wgmma(sum_ref, staged, y)
        plgpu.wgmma_wait(0)


# --- Tiles --------------------------------------------------------------------------------------------------------------


def rowwise(vector, shape: tuple[int, int]):
    """vector[i] for all of row i."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def columnwise(vector, shape: tuple[int, int]):
    """vector[j] for all of column j."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def columns_of(tile, number: int, width: int):
    """The part of a tile with this number, of so many columns."""
    return tile[:, number * width : (number + 1) * width]


def zeros(width: int):
    """[tokens of a block, width], as products have it."""
    return plgpu.layout_cast(jnp.zeros((BLOCK, width), F32), TILE)


def zeros_by_row():
    """[tokens of a block]."""
    return plgpu.layout_cast(jnp.zeros((BLOCK,), F32), BY_ROW)


def rounded(x, dtype):
    """x in a 16-bit type. The barriers let the compiler round two numbers at once, also where they are used in float32 again or
    masked before."""
    return lax.optimization_barrier(lax.optimization_barrier(x).astype(dtype))


def exp2_of_decay(x):
    """exp2(min(x, 0)), NaN of NaN."""
    return jnp.exp2(jnp.where(x > 0.0, 0.0, x))


def write(ref, x, sizes: Problem) -> None:
    """x into global memory. JAX 0.12 wants to be told that rows in bfloat16 may fill parts of its sectors."""
    if hasattr(plgpu, "store") and not sizes.interpret:
        plgpu.store(ref, x.astype(ref.dtype), optimized=False)
    else:
        ref[...] = x.astype(ref.dtype)


# --- Launching ----------------------------------------------------------------------------------------------------------

MOST_OF_AXIS = 2**16 - 1  # programs that a GPU has on any but the last axis of a grid
GRID = "axis of the grid: "  # before the names of a kernel's own axes: one that a mesh has, too, would be taken for the mesh's
_folded: contextvars.ContextVar[Mapping[str, int] | None] = contextvars.ContextVar("folded", default=None)


@contextlib.contextmanager
def _fold(grid: Mapping[str, int] | None) -> Iterator[None]:
    token = _folded.set(grid)
    try:
        yield
    finally:
        _folded.reset(token)


def program_index(axis: str):
    """Where on this axis of the grid a program is."""
    grid = _folded.get()
    if grid is None:
        return lax.axis_index(GRID + axis)
    sizes = list(grid.values())
    behind = math.prod(sizes[list(grid).index(axis) + 1 :])
    return lax.rem(lax.div(lax.axis_index(GRID + "program"), behind), grid[axis])


def worker_index():
    """Which warpgroup of its program this is."""
    return lax.axis_index(GRID + "worker")


def launch(
    body: Callable,
    name: str,
    grid: Mapping[str, int],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    shared: Mapping[str, object],
    sizes: Problem,
    *,
    warpgroups: int = 1,
    column_sums: int = 0,
) -> types.SimpleNamespace:
    """Runs body(refs, shared) as a kernel, and returns its outputs by name.

    inputs: arrays, or references to arrays that are changed in place.
    refs: global memory of the inputs and outputs, by name; None for what is None here. shared: shared memory, by name.
    grid: sizes by name, the last changes fastest; `program_index` tells where a program is.
    warpgroups: of a program, which `worker_index` numbers; with several the body itself has to put a barrier, `commit_smem`,
    wherever threads use shared memory after others of their warpgroup.
    column_sums: bytes of shared memory for sums over rows.
    """
    operands, results = ({key: x for key, x in named.items() if x is not None} for named in (inputs, outputs))
    missing, folded = dict.fromkeys([*inputs, *outputs]), None
    if max(list(grid.values())[:-1], default=0) > MOST_OF_AXIS:
        folded, grid = grid, dict(program=math.prod(grid.values()))
    if max(grid.values()) > MOST_PROGRAMS:
        raise UnsupportedError(f"{name} would have {max(grid.values())} programs: a GPU takes up to {MOST_PROGRAMS}")

    def run(*refs, **shared_refs):
        found = dict(zip([*operands, *results], refs, strict=True))
        with _fold(folded):
            body(types.SimpleNamespace(**missing | found), types.SimpleNamespace(**shared_refs))

    found = plgpu.kernel(
        run,
        out_type=tuple(results.values()),
        scratch_types=dict(shared),
        grid=tuple(grid.values()),
        grid_names=tuple(GRID + axis for axis in grid),
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name=GRID + "worker" if warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=column_sums,
            unsafe_no_auto_barriers=warpgroups > 1,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if sizes.interpret else None,
        kernel_name=f"hopper_{name}",
    )(*operands.values())
    return types.SimpleNamespace(**dict.fromkeys(outputs) | dict(zip(results, found, strict=True)))


def limit_registers(number: int, action: str, sizes: Problem) -> None:
    """Sets how many registers each thread of this warpgroup has: those that only fetch need few. The interpreter has none."""
    if not sizes.interpret:
        plgpu.set_max_registers(number, action=action)


def by_token_type(sizes: Sizes, *levels: int) -> jax.ShapeDtypeStruct:
    """A float32 number for each token of a head, [B, H, levels, T]."""
    return jax.ShapeDtypeStruct((sizes.batch, sizes.heads, *levels, sizes.length), F32)
