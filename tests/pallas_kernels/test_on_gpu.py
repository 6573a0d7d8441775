"""Attention on a GPU, by both backends: accuracy and races, long sequences, transformations around it, arrays beyond 2**31
elements, and kernels as they are built for an older GPU."""

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
from tests.pallas_kernels.modes import DTYPES, TOLERANCE, results
from tests.pallas_kernels.test_fenwick_attention import ATTENTION, check_continued, check_segments, inputs_of

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["hopper", "triton"])
def tiles_of(request):
    """Of a shape, whose kernels are those of one backend; None: as chosen, of what Triton compiles."""

    def hopper(length, key_dim, value_dim, dtype=jnp.bfloat16):
        if BACKENDS["hopper"].why_not(key_dim, value_dim, dtype):
            pytest.skip("no Hopper GPU, or not for its kernels")
        return choose_hopper_tiles(length, value_dim)

    if request.param == "hopper":
        return hopper
    request.getfixturevalue("no_hopper")
    return lambda *shape: None


@pytest.fixture
def attend(tiles_of):
    def attention(q, k, v, log_decay, lam):
        tiles = tiles_of(v.shape[1], q.shape[3], v.shape[3], q.dtype)
        return fenwick_attention(q, k, v, log_decay, lam, tiles=tiles)

    return attention


def same(found, expected, tolerance=0.0):
    for x, wanted in zip(found, expected, strict=True):
        assert relative_error(x, wanted) <= tolerance


SHAPES = {  # batch, length, groups, heads, K, V
    "odd length": (2, 1531, 1, 8, 128, 64),
    "a group for each head": (2, 1024, 16, 16, 64, 64),
    "one head of many": (1, 4099, 1, 1, 64, 64),
    "recall model": (64, 256, 2, 2, 32, 32),
    "language model": (1, 2048, 1, 48, 128, 64),
    "wide": (1, 1100, 8, 8, 128, 128),
    "largest dims": (1, 700, 2, 4, 256, 256),
    "wide keys": (1, 700, 1, 4, 256, 16),
    "wide values": (1, 700, 1, 4, 16, 256),
    "no powers of two": (3, 515, 2, 6, 80, 96),
    "many groups": (1, 300, 12, 24, 48, 48),
}


@pytest.mark.parametrize("min_decay", [0.0, -0.1, -50.0])
@pytest.mark.parametrize("mode", ["bf16", "tf32", "f32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy_and_races(shape, mode, min_decay, tiles_of):
    """Twice the same, in memory that was filled with nan before."""
    _, length, _, _, *dims = SHAPES[shape]
    tiles, inputs = tiles_of(length, *dims, DTYPES[mode]), inputs_of(mode, *SHAPES[shape], min_decay=min_decay)
    runs = []
    for _ in range(2):
        poison = [jnp.full((1 << 28,), jnp.nan) for _ in range(4)]
        jax.block_until_ready(poison)
        del poison
        runs.append(ATTENTION.check(mode, SHAPES[shape], inputs, tiles=tiles))
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.parametrize(
    ("mode", "chunk_size"), [*(("bf16", 1 << i) for i in range(4, 8)), *(("f32", 1 << i) for i in (4, 5, 6))]
)
def test_every_chunk_size(mode, chunk_size):
    ATTENTION.check(mode, (1, 1000, 1, 4, 64, 32), chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("dims", "length"),
    [
        *(((64, 64), length) for length in (16_384, 16_381, 65_601, (1 << 20) - 77)),
        *(((33, 33), 2049), ((128, 128), 63), ((33, 128), 129), ((128, 33), 1)),
    ],
)
def test_long_sequences_and_dims_at_the_limits(attend, dims, length):
    many = length > 10_000
    inputs = inputs_of("bf16", *((1, length, 1, 2) if many else (2, length, 2, 4)), *dims, min_decay=-0.1)
    plain = functools.partial(log_linear_attention, implementation="xla")
    with jax.default_matmul_precision("highest"):
        expected = results(plain, [x.astype(jnp.float32) for x in inputs])
    for x, wanted in zip(results(attend, inputs), expected, strict=True):
        assert relative_error(x, wanted) < TOLERANCE["bf16"] or not np.any(wanted)
        assert not many or worst_token(x, wanted) < 5 * TOLERANCE["bf16"]


def test_transformations(attend):
    """Rematerialised, in a scan, in shard_map with checked axes, and mapped twice: each the plain one's bits."""
    seeds = [inputs_of("bf16", 1, 1100, 1, 4, 128, 64, seed=seed) for seed in range(4)]
    stacked = [jnp.stack(x) for x in zip(*seeds, strict=True)]
    expected = [results(attend, inputs) for inputs in seeds]
    same(results(jax.checkpoint(attend), seeds[0]), expected[0])

    def one_after_another(*inputs):
        return jax.lax.scan(lambda carry, x: (carry, attend(*x)), 0, inputs)[1]

    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    shared = jax.shard_map(
        jax.vmap(attend), mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec("batch")
    )

    def twice(*inputs):
        out = jax.vmap(jax.vmap(attend))(*(x.reshape(2, 2, *x.shape[1:]) for x in inputs))
        return out.reshape(4, *out.shape[2:])

    cotangent = attend(*seeds[0])
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


def test_what_came_before_and_segments(tiles_of):
    length = 1900
    tiles = tiles_of(length, 128, 64) or choose_tiles(length, 128, 64, jnp.bfloat16)
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
