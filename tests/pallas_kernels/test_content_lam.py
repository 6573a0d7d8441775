"""The kernel of λ `content` against plain float64 arithmetic: in Pallas's interpreter, or on the GPU where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import pallas_kernels
from loglinear_jax.fenwick import num_levels, occupied_levels
from loglinear_jax.lam import make_lam
from tests.ops.inputs import relative_error
from tests.pallas_kernels.modes import check_against_float64, flat_value_and_gradients

pytestmark = pytest.mark.usefixtures("run_kernels")

SHAPES = {  # B, T, H, tokens before the first
    "one token": (1, 1, 1, 0),
    "whole blocks": (2, 64, 4, 0),
    "parts of blocks": (3, 45, 5, 0),
    "later tokens": (2, 40, 3, 1000),
}


def draw(shape, seed=0):
    """(scores, scale), NaN where no level is occupied; and where one is."""
    batch, length, heads, first = SHAPES[shape]
    levels = num_levels(first + length)
    occupied = np.asarray(occupied_levels(first + np.arange(length), levels))[:, None]
    rng = np.random.default_rng(seed)
    scores = np.where(occupied, rng.normal(size=(batch, length, heads, levels)), np.nan)
    return [jnp.asarray(scores, jnp.float32), jnp.asarray(rng.uniform(0.5, 30, heads), jnp.float32)], jnp.asarray(
        occupied
    )


def softmax(scores, scale, occupied):
    return jax.nn.softmax(jnp.where(occupied, scale[:, None] * jnp.where(occupied, scores, 0.0), -jnp.inf), axis=-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(shape):
    inputs, occupied = draw(shape)
    lam, d_scores, _ = check_against_float64(
        ("lam", "scores", "scale"),
        lambda *x: pallas_kernels.content_lam(*x, occupied),
        lambda *x: softmax(*x, occupied),
        inputs,
        1e-5,
    )
    empty = ~np.broadcast_to(occupied, lam.shape)
    assert (np.asarray(lam)[empty] == 0).all()
    assert (np.asarray(d_scores)[empty] == 0).all()
    np.testing.assert_allclose(np.sum(lam, axis=-1), 1.0, rtol=1e-5)


def test_a_score_that_is_not_a_number_stays_in_its_head_and_token():
    (scores, scale), occupied = draw("parts of blocks")
    lam = np.asarray(pallas_kernels.content_lam(scores.at[1, 7, 2, 0].set(np.nan), scale, occupied))
    assert np.isnan(lam[1, 7, 2]).any()
    assert np.isnan(lam).any(axis=-1).sum() == 1


def test_mapped_twice_is_a_loop():
    inputs, occupied = zip(*(draw("parts of blocks", seed) for seed in range(4)), strict=True)
    scores, scale = (jnp.stack(x).reshape(2, 2, *x[0].shape) for x in zip(*inputs, strict=True))
    scale = scale[0]  # has no outer axis

    def function(*x):
        return flat_value_and_gradients(lambda *x: pallas_kernels.content_lam(*x, occupied[0]), x)

    mapped = jax.jit(jax.vmap(jax.vmap(function), (0, None)))(scores, scale)
    for outer in range(2):
        for inner in range(2):
            own = function(scores[outer, inner], scale[inner])
            for result, expected in zip(mapped, own, strict=True):
                assert relative_error(result[outer, inner], expected) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_a_scale_of_another_dtype_is_used_in_float32(dtype):
    (scores, scale), occupied = draw("parts of blocks")
    with jax.enable_x64(True):
        of_dtype = scale.astype(dtype)
        found = flat_value_and_gradients(lambda *x: pallas_kernels.content_lam(*x, occupied), [scores, of_dtype])
        expected = flat_value_and_gradients(
            lambda *x: pallas_kernels.content_lam(*x, occupied), [scores, of_dtype.astype(jnp.float32)]
        )
    assert [x.dtype for x in found] == [jnp.float32, jnp.float32, dtype]
    for x, wanted in zip(found, expected, strict=True):
        assert relative_error(x, wanted) < (1e-2 if x.dtype == jnp.bfloat16 else 1e-6)


def test_a_scale_that_all_devices_share_in_shard_map(compiling_for_a_gpu):
    inputs, occupied = draw("whole blocks")
    mesh, by_batch = Mesh(np.array(jax.devices("cpu")[:2]), "devices"), PartitionSpec("devices")
    sharded = jax.shard_map(
        lambda *x: pallas_kernels.content_lam(*x, occupied),
        mesh=mesh, in_specs=(by_batch, PartitionSpec()), out_specs=by_batch,
    )  # fmt: skip
    results = jax.eval_shape(lambda *x: flat_value_and_gradients(sharded, x), *map(np.asarray, inputs))
    assert [x.shape for x in results] == [inputs[0].shape, *(x.shape for x in inputs)]


def test_the_module_takes_the_kernel_where_there_are_many_tokens():
    module, plainly = (make_lam("content", implementation=i) for i in ("pallas", "xla"))
    for length, kernels in ((128, True), (8, False)):
        levels = num_levels(length)
        occupied = occupied_levels(jnp.arange(length), levels)[:, None]
        scores = jnp.where(occupied, jax.random.normal(jax.random.key(0), (2, length, 3, levels)), 0.0)
        params = {"params": {"log_scale": jnp.asarray([0.1, 1.0, 2.0])}}
        jaxpr = jax.make_jaxpr(module.apply)(params, scores, scores, occupied)
        assert ("pallas_call" in str(jaxpr)) == kernels
        expected = plainly.apply(params, scores, scores, occupied)
        np.testing.assert_allclose(module.apply(params, scores, scores, occupied), expected, rtol=1e-5, atol=1e-6)
