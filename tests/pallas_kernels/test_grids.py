"""No grid is larger than a GPU's, however many sequences, heads and tokens there are: kernels are lowered, not run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax import (
    bucket_scores,
    gated_delta_attention,
    log_linear_attention,
    log_linear_delta_attention,
    num_levels,
)
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.common import support
from pallas_kernels.common.gpu import GPUS, as_if_on

LIMITS = dict(x=2**31 - 1, y=2**16 - 1, z=2**16 - 1)
SIZES = {  # batch, length, groups, heads, K and V
    "many sequences": (65_536, 700, 1, 1, 64),
    "many sequences and heads": (32_768, 700, 4, 4, 64),
    "many tokens": (1, 2**23 + 128, 1, 1, 64),
    "offsets of more than 32 bits": (1, 2**23 + 128, 1, 8, 128),
}
FEW_AND_MANY = [next(iter(SIZES)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(SIZES)[1:])]
OPERATIONS = {
    "attention": (log_linear_attention, "lam"),
    "scores": (bucket_scores,),
    "delta": (log_linear_delta_attention, "beta", "lam"),
    "gated_delta": (gated_delta_attention, "beta"),
}
needs_hopper_kernels = pytest.mark.skipif(support.mosaic is None, reason="needs JAX 0.11.2, which needs Python 3.12")


def arguments(operation, batch, length, groups, heads, dim):
    array = jax.ShapeDtypeStruct
    of_head = array((batch, length, heads), jnp.float32)
    more = dict(beta=of_head, lam=array((batch, length, heads, num_levels(length)), jnp.float32))
    keys = array((batch, length, groups, dim), jnp.bfloat16)
    values = [] if operation == "scores" else [array((batch, length, heads, dim), jnp.bfloat16)]
    return [keys, keys, *values, of_head, *(more[name] for name in OPERATIONS[operation][1:])]


def lowered(function, operands):
    jax.clear_caches()  # what was traced for another GPU

    def both(*operands):
        out, pull = jax.vjp(function, *operands)
        return out, pull(out)

    return jax.jit(both).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("sizes", FEW_AND_MANY)
@pytest.mark.parametrize(
    "operation", ["attention", *(pytest.param(name, marks=pytest.mark.slow) for name in list(OPERATIONS)[1:])]
)
def test_grids_by_triton(operation, sizes, monkeypatch):
    monkeypatch.setattr(BACKENDS["hopper"], "device", lambda: "Triton's are wanted")
    function = functools.partial(OPERATIONS[operation][0], implementation="pallas")
    with as_if_on(GPUS["9.0"]):
        text = lowered(function, arguments(operation, *SIZES[sizes]))
    found = re.findall(r"grid_([xyz]) = (\d+)", text)
    assert len(found) >= 6
    for axis, number in found:
        assert int(number) <= LIMITS[axis]


@needs_hopper_kernels
@pytest.mark.parametrize("sizes", FEW_AND_MANY)
def test_grids_for_hopper(sizes, monkeypatch):
    from pallas_kernels.attention.hopper import parts

    grids, kernel = {}, parts.plgpu.kernel

    def recording(*args, grid, kernel_name, **kwargs):
        grids[kernel_name] = grid
        return kernel(*args, grid=grid, kernel_name=kernel_name, **kwargs)

    monkeypatch.setattr(parts.plgpu, "kernel", recording)
    with as_if_on(GPUS["9.0"]):
        lowered(functools.partial(log_linear_attention, implementation="pallas"), arguments("attention", *SIZES[sizes]))
    assert len(grids) == 7
    for *others, last in grids.values():
        assert last <= LIMITS["x"] and max(others, default=0) <= LIMITS["y"]


@pytest.mark.slow
@needs_hopper_kernels
@pytest.mark.usefixtures("run_kernels")
@pytest.mark.parametrize("groups", [1, 4])
def test_folded_grids_for_hopper_compute_the_same(groups, monkeypatch):
    from pallas_kernels.attention.hopper import parts
    from pallas_kernels.attention.hopper.tiles import HopperTiles
    from tests.pallas_kernels.test_fenwick_attention import inputs_of, output_and_gradients

    tiles = HopperTiles(radix=2, rows=1, outputs=2, query_gradients=2, chunk_gradients=2, chunk_states=2)
    attend, runs = functools.partial(pallas_kernels.fenwick_attention, tiles=tiles), []
    for most in (parts.MOST_OF_AXIS, 0):
        monkeypatch.setattr(parts, "MOST_OF_AXIS", most)
        run = jax.jit(functools.partial(output_and_gradients, attend))
        runs.append(run(inputs_of("bf16", 2, 200, groups, 4, 64, 64)))
    for plain, folded in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(np.asarray(plain), np.asarray(folded))


def test_too_many_programs_are_refused():
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2**31, 1, 1), (4, 1), (1,)))
    with as_if_on(GPUS["9.0"]), pytest.raises(pallas_kernels.UnsupportedError, match="would have 2147483648 programs"):
        jax.eval_shape(pallas_kernels.causal_conv, *shapes)
