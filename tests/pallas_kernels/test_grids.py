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
    occupied_levels,
)
from pallas_kernels.common import support
from pallas_kernels.common.gpu import GPUS, as_if_on
from pallas_kernels.compile_table import Case, array, by_kernels, lowered
from tests.pallas_kernels.modes import results
from tests.pallas_kernels.test_fenwick_attention import ATTENTION

LIMITS = dict(x=2**31 - 1, y=2**16 - 1, z=2**16 - 1)
SIZES = {  # batch, length, groups, heads, K and V
    "many sequences": (65_536, 700, 2, 2, 64),
    "offsets of more than 32 bits": (1, 2**23 + 128, 1, 8, 128),
}
FEW_AND_MANY = [next(iter(SIZES)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(SIZES)[1:])]
needs_hopper_kernels = pytest.mark.skipif(support.mosaic is None, reason="needs JAX 0.11.2, which needs Python 3.12")


def inputs_of(batch, length, groups, heads, dim):
    """Arrays by name, as operations and kernels take them."""
    levels = num_levels(length)
    of_head, keys = array(batch, length, heads), array(batch, length, groups, dim, dtype=jnp.bfloat16)
    return dict(
        q=keys,
        k=keys,
        v=array(batch, length, heads, dim, dtype=jnp.bfloat16),
        log_decay=of_head,
        beta=of_head,
        lam=array(batch, length, heads, levels),
        scores=array(batch, length, heads, levels),
        scale=array(heads),
        x=array(batch, length, 16, dtype=jnp.bfloat16),
        filters=array(4, 16),
        bias=array(16),
        w1=array(levels, 64),
        b1=array(64),
        w2=array(64, levels),
        b2=array(levels),
        state=array(batch, heads, levels, dim, dim),
        position=array(batch, dtype=jnp.int32),
        key=array(batch, groups, dim),
        value=array(batch, heads, dim),
        gate=array(batch, heads),
        weights=array(batch, heads, levels),
    )


def content_lam(scores, scale):
    length, _, levels = scores.shape[1:]
    return pallas_kernels.content_lam(scores, scale, occupied_levels(jnp.arange(length), levels)[:, None])


def seeds(*inputs):
    """Of one sequence each, batched by vmap."""
    return jax.vmap(lambda *inputs: by_kernels(log_linear_attention)(*(x[None] for x in inputs)))(*inputs)


OPERATIONS = {
    "attention": (by_kernels(log_linear_attention), "q k v log_decay lam"),
    "attention of seeds": (seeds, "q k v log_decay lam"),
    "scores": (by_kernels(bucket_scores), "q k log_decay"),
    "delta": (by_kernels(log_linear_delta_attention), "q k v log_decay beta lam"),
    "gated_delta": (by_kernels(gated_delta_attention), "q k v log_decay beta"),
    "causal_conv": (pallas_kernels.causal_conv, "x filters bias"),
    "swiglu": (pallas_kernels.swiglu, "x x"),
    "lam_mlp": (functools.partial(pallas_kernels.lam_mlp, out="softplus"), "scores w1 b1 w2 b2"),
    "content_lam": (content_lam, "scores scale"),
    "step": (lambda *inputs: pallas_kernels.fenwick_step(*inputs), "state position key key value gate weights"),
}


def case(operation, sizes):
    function, names = OPERATIONS[operation]
    inputs = inputs_of(*SIZES[sizes])
    arguments = [inputs[name] for name in names.split()]
    return Case(operation, sizes, function, lambda _: arguments, gradient=operation != "step")


@pytest.mark.parametrize("sizes", FEW_AND_MANY)
@pytest.mark.parametrize(
    "operation", ["attention", *(pytest.param(name, marks=pytest.mark.slow) for name in list(OPERATIONS)[1:])]
)
def test_grids_by_triton(operation, sizes):
    found = re.findall(r"grid_([xyz]) = (\d+)", lowered(case(operation, sizes), "bf16", GPUS["9.0"]))
    assert found
    for axis, number in found:
        assert int(number) <= LIMITS[axis]


@needs_hopper_kernels
@pytest.mark.parametrize("sizes", FEW_AND_MANY)
@pytest.mark.parametrize(("operation", "kernels"), [("attention", 7), ("gated_delta", 3), ("delta", 3)])
def test_grids_for_hopper(operation, kernels, sizes, monkeypatch):
    from pallas_kernels.common import mosaic

    monkeypatch.setattr(pallas_kernels.delta.levels, "FEWEST_PROGRAMS", 1)
    grids, kernel = {}, mosaic.plgpu.kernel

    def recording(*args, grid, kernel_name, **kwargs):
        grids[kernel_name] = grid
        return kernel(*args, grid=grid, kernel_name=kernel_name, **kwargs)

    monkeypatch.setattr(mosaic.plgpu, "kernel", recording)
    function, operands = case(operation, sizes).function, case(operation, sizes).arguments(None)
    gradient = jax.grad(lambda *operands: jnp.sum(function(*operands).astype(jnp.float32)), range(len(operands)))
    jax.clear_caches()  # what was traced for another GPU
    with as_if_on(GPUS["9.0"]):
        jax.jit(gradient).trace(*operands).lower(lowering_platforms=("cuda",))
    assert len(grids) == kernels
    for *others, last in grids.values():
        assert last <= LIMITS["x"] and max(others, default=0) <= LIMITS["y"]


@pytest.mark.slow
@needs_hopper_kernels
@pytest.mark.usefixtures("run_kernels")
@pytest.mark.parametrize("groups", [1, 4])
def test_folded_grids_for_hopper_compute_the_same(groups, monkeypatch):
    from pallas_kernels.attention.hopper.tiles import HopperTiles
    from pallas_kernels.common import mosaic

    tiles = HopperTiles(radix=2, rows=1, outputs=2, query_gradients=2, chunk_gradients=2, chunk_states=2)
    attend, runs = functools.partial(pallas_kernels.fenwick_attention, tiles=tiles), []
    for most in (mosaic.MOST_OF_AXIS, 0):
        monkeypatch.setattr(mosaic, "MOST_OF_AXIS", most)
        runs.append(results(attend, ATTENTION.inputs((2, 130, groups, 4, 64, 64), "bf16")))
    for plain, folded in zip(*runs, strict=True):
        np.testing.assert_array_equal(np.asarray(plain), np.asarray(folded))


def test_too_many_programs_are_refused():
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2**31, 1, 1), (4, 1), (1,)))
    with as_if_on(GPUS["9.0"]), pytest.raises(pallas_kernels.UnsupportedError, match="would have 2147483648 programs"):
        jax.eval_shape(pallas_kernels.causal_conv, *shapes)
