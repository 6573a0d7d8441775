"""Attention on a GPU, by both backends: long sequences, transformations around it, arrays beyond 2**31 elements, and
kernels as they are built for an older GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from loglinear_jax import log_linear_attention, num_levels
from pallas_kernels import fenwick_attention
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.attention.hopper.tiles import choose_hopper_tiles
from pallas_kernels.attention.tiles import choose_tiles
from pallas_kernels.common.gpu import GPUS
from tests.ops.inputs import relative_error, worst_token
from tests.pallas_kernels.modes import TOLERANCE
from tests.pallas_kernels.test_fenwick_attention import check_continued, check_segments, inputs_of, output_and_gradients

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["hopper", "triton"])
def attend(request):
    """Attention by one backend's kernels."""
    if request.param == "hopper" and BACKENDS["hopper"].why_not(64, 64, jnp.bfloat16):
        pytest.skip("no Hopper GPU")

    def attention(q, k, v, log_decay, lam):
        length, value_dim = v.shape[1], v.shape[3]
        if request.param == "hopper":
            tiles = choose_hopper_tiles(length, value_dim)
        else:
            tiles = choose_tiles(length, q.shape[3], value_dim, q.dtype)
        return fenwick_attention(q, k, v, log_decay, lam, tiles=tiles)

    return attention


def runs(function, inputs):
    return jax.tree.leaves(jax.jit(functools.partial(output_and_gradients, function))(inputs))


def same(found, expected, tolerance=0.0):
    for x, wanted in zip(found, expected, strict=True):
        assert relative_error(x, wanted) <= tolerance


@pytest.mark.parametrize("length", [16_384, 16_381, 65_601, (1 << 20) - 77])
def test_long_sequences(attend, length):
    inputs = inputs_of("bf16", 1, length, 1, 2, 64, 64, min_decay=-0.1)
    plain = functools.partial(log_linear_attention, implementation="xla")
    with jax.default_matmul_precision("highest"):
        expected = runs(plain, [x.astype(jnp.float32) for x in inputs])
    for x, wanted in zip(runs(attend, inputs), expected, strict=True):
        assert relative_error(x, wanted) < TOLERANCE["bf16"]
        assert worst_token(x, wanted) < 5 * TOLERANCE["bf16"]


@pytest.mark.parametrize(("dims", "length"), [((33, 33), 2049), ((128, 128), 63), ((33, 128), 129), ((128, 33), 1)])
def test_dims_at_the_limits(attend, dims, length):
    inputs = inputs_of("bf16", 2, length, 2, 4, *dims)
    plain = functools.partial(log_linear_attention, implementation="xla")
    with jax.default_matmul_precision("highest"):
        expected = runs(plain, [x.astype(jnp.float32) for x in inputs])
    for x, wanted in zip(runs(attend, inputs), expected, strict=True):
        assert relative_error(x, wanted) < TOLERANCE["bf16"] or not np.any(wanted)


def test_transformations(attend):
    """Rematerialised, in a scan, in shard_map with checked axes, and mapped twice: each the plain one's bits."""
    seeds = [inputs_of("bf16", 1, 1100, 1, 4, 128, 64, seed=seed) for seed in range(4)]
    stacked = [jnp.stack(x) for x in zip(*seeds, strict=True)]
    expected = [runs(attend, inputs) for inputs in seeds]
    same(runs(jax.checkpoint(attend), seeds[0]), expected[0])

    def one_after_another(*inputs):
        return jax.lax.scan(lambda carry, x: (carry, attend(*x)), 0, inputs)[1]

    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    shared = jax.shard_map(
        jax.vmap(attend), mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec("batch")
    )

    def twice(*inputs):
        out = jax.vmap(jax.vmap(attend))(*(x.reshape(2, 2, *x.shape[1:]) for x in inputs))
        return out.reshape(4, *out.shape[2:])

    cotangent = output_and_gradients(attend, seeds[0])[0]
    for function in (one_after_another, shared, twice):
        out, pull = jax.jit(lambda *x, function=function: jax.vjp(function, *x))(*stacked)
        gradients = jax.jit(lambda pull, d: pull(d))(pull, jnp.stack([cotangent] * 4))
        for seed in range(4):
            alone, pull_alone = jax.vjp(jax.jit(attend), *seeds[seed])
            # Programs have other numbers of heads where there are more sequences, and other sums.
            same([out[seed], *(x[seed] for x in gradients)], [alone, *pull_alone(cotangent)], 4e-3)


def test_arrays_beyond_2_to_the_31_elements(attend):
    """The last heads, whose elements come last, are what they are alone."""
    heads, length = 33, 1 << 20
    inputs = inputs_of("bf16", 1, length, 1, 2, 64, 64, min_decay=-0.1)

    def with_others(x):
        return jnp.concatenate([jnp.zeros((1, length, heads - 2, *x.shape[3:]), x.dtype), x], axis=2)

    many = [*inputs[:2], *map(with_others, inputs[2:])]
    alone = jax.jit(attend)(*inputs)
    together = jax.jit(attend)(*many)
    assert together.size > 1 << 31 and not np.any(np.asarray(together[:, ::4097, : heads - 2], np.float32))
    same([together[:, :, heads - 2 :]], [alone], 4e-3)
    gradient = jax.jit(jax.grad(lambda v, x: jnp.sum(jnp.sin(attend(*x[:2], v, *x[3:]).astype(jnp.float32)))))
    same([gradient(many[2], many)[:, :, heads - 2 :]], [gradient(inputs[2], inputs)], 4e-3)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_what_came_before_and_segments(backend):
    if backend == "hopper" and BACKENDS["hopper"].why_not(128, 64, jnp.bfloat16):
        pytest.skip("no Hopper GPU")
    length = 1900
    tiles = choose_hopper_tiles(length, 64) if backend == "hopper" else choose_tiles(length, 128, 64, jnp.bfloat16)
    inside = num_levels(tiles.chunk)
    check_continued("bf16", (2, length, 1, 6, 128, 64), 5, 15, inside, tiles=tiles)
    starts = np.random.default_rng(0).random((1, length)) < 0.01
    starts[:, 0] = False
    check_segments("bf16", (1, length, 1, 6, 128, 64), starts, tiles=tiles)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")
@pytest.mark.parametrize("mode", ["bf16", "tf32", "f32"])
@pytest.mark.parametrize(
    "operation", ["log_linear_attention", "bucket_scores", "delta", "lam_mlp", "content_lam", "causal_conv"]
)
def test_kernels_as_built_for_an_a100(operation, mode):
    pytest.importorskip("triton")
    from pallas_kernels.run_table import cases, compared

    wanted = [case for case in cases() if case.operation == operation and mode in case.modes]
    if not wanted:
        pytest.skip(f"{operation} does not run in {mode}")
    # In TF32 the two kinds of matrix units round products differently.
    limit = TOLERANCE[mode] * (2 if mode == "tf32" else 1)
    assert compared(wanted[0], mode, GPUS["8.0"], batch=1, timed=False).apart < limit
