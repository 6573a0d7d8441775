"""The kernels by Triton against the parallel form in float64: in Pallas's interpreter, or on the GPU where there is one.

The interpreter fills what no program writes with nan, so these tests also see outputs that are left out.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import pallas_kernels
from loglinear_jax import FenwickState, log_linear_attention, num_levels
from loglinear_jax.ops.continuation import InitialState
from loglinear_jax.ops.levels import split_heads
from loglinear_jax.ops.positions import forgetting
from pallas_kernels import fenwick_attention
from tests.ops.inputs import ARGUMENTS, extreme_decays, random_inputs, relative_error
from tests.pallas_kernels.conftest import HAS_GPU
from tests.pallas_kernels.modes import DTYPES, LOWER, PRECISIONS, TOLERANCE, but_slow, exact_results, grids, results

pytestmark = pytest.mark.usefixtures("run_kernels", "no_hopper")


def inputs_of(mode, *shape, seed=0, **kwargs):
    q, k, v, log_decay, lam = random_inputs(seed, *shape, dtype=np.float32, **kwargs)
    return *(x.astype(DTYPES[mode]) for x in (q, k, v)), log_decay, lam


def output_and_gradients(function, inputs):
    """The output, and what a random cotangent of it gives to every input."""
    out, vjp = jax.vjp(function, *inputs)
    cotangent = np.random.default_rng(1).normal(size=out.shape)
    return out, dict(zip(ARGUMENTS, vjp(jnp.asarray(cotangent, out.dtype)), strict=True))


@functools.cache
def compiled(function, **kwargs):
    """Compiled once for each shape."""
    return jax.jit(functools.partial(output_and_gradients, functools.partial(function, **kwargs)))


def reference(inputs, implementation="parallel"):
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
        exact[3] = jnp.maximum(exact[3], -1e4)
        return jax.tree.map(np.asarray, compiled(log_linear_attention, implementation=implementation)(exact))


def check(mode, inputs, implementation="parallel", expected=None, no_gradient=(), **kwargs):
    """Output and gradients are as accurate as `mode` has to be."""
    out, gradients = compiled(fenwick_attention, precision=PRECISIONS[mode], **kwargs)(inputs)
    expected, expected_gradients = expected or reference(inputs, implementation)
    assert out.dtype == inputs[2].dtype
    assert relative_error(out, expected) < TOLERANCE[mode]
    for name, gradient in gradients.items():
        assert np.isfinite(np.asarray(gradient, np.float32)).all(), name
        if name not in no_gradient:
            assert relative_error(gradient, expected_gradients[name]) < TOLERANCE[mode], name
    return out, gradients


def check_twice(mode, inputs, expected, **kwargs):
    """`check` twice, in memory that was filled with nan before, with the same bits."""
    runs = []
    for _ in range(2):
        poison = [jnp.full((1 << 28,), jnp.nan) for _ in range(4)]
        jax.block_until_ready(poison)
        del poison
        runs.append(check(mode, inputs, expected=expected, **kwargs))
    for first, second in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


SHAPES = {  # batch, length, groups, heads, K, V
    "one token": ((1, 1, 1, 1, 16, 16), {}),
    "a group for each head": ((1, 96, 2, 2, 32, 16), dict(chunk_size=32)),
    "heads in groups, an odd length": ((1, 77, 2, 6, 16, 32), dict(chunk_size=16)),
    "sizes that are no powers of two, values in blocks": ((1, 50, 1, 2, 24, 136), dict(chunk_size=16)),
    "one chunk more than a power of two": ((1, 145, 1, 1, 16, 16), dict(chunk_size=16)),
    "a tree of several stages": ((1, 16 * 36, 1, 1, 16, 16), dict(chunk_size=16)),
    "tiles chosen from the shapes": ((1, 300, 1, 2, 32, 32), {}),
}


@pytest.mark.parametrize("shape", but_slow(SHAPES, "one token", "heads in groups, an odd length"))
def test_full_float32(shape):
    sizes, kwargs = SHAPES[shape]
    # With one token nothing decays.
    check("f32", inputs_of("f32", *sizes), no_gradient=("log_decay",) if sizes[1] == 1 else (), **kwargs)


@pytest.mark.parametrize("mode", LOWER)
@pytest.mark.parametrize("shape", ["heads in groups, an odd length", "tiles chosen from the shapes"])
def test_lower_precision(shape, mode):
    sizes, kwargs = SHAPES[shape]
    check(mode, inputs_of(mode, *sizes), **kwargs)


@pytest.mark.slow
@settings(max_examples=3)
@given(
    length=st.integers(2, 120),
    groups=st.integers(1, 2),
    group_heads=st.integers(1, 2),
    dims=st.tuples(st.integers(16, 40), st.integers(16, 40)),
    more_levels=st.integers(0, 2),
    min_decay=st.sampled_from([0.0, -0.1, -5.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(length, groups, group_heads, dims, more_levels, min_decay, seed):
    levels = (length - 1).bit_length() + 1 + more_levels
    shape = 1, length, groups, groups * group_heads, *dims
    inputs = inputs_of("f32", *shape, seed=seed, levels=levels, min_decay=min_decay)
    with pallas_kernels.interpret(not HAS_GPU):
        check("f32", inputs, chunk_size=16)


def test_decays_above_one_are_one():
    check_decays_above_one(16, chunk_size=16)


def check_decays_above_one(dim, **options):
    q, k, v, log_decay, lam = inputs_of("bf16", 1, 200, 1, 2, dim, dim)
    above = log_decay.at[:, ::7].set(0.5)
    run = compiled(fenwick_attention, **options)
    (out, gradients), (expected, wanted) = (run([q, k, v, x, lam]) for x in (above, jnp.minimum(above, 0.0)))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
    np.testing.assert_array_equal(np.asarray(gradients["log_decay"][:, ::7]), 0)
    np.testing.assert_array_equal(np.asarray(gradients["k"]), np.asarray(wanted["k"]))


@pytest.mark.parametrize("decay", ["none", "strong", "uniform", "mixed", "reset"])
def test_extreme_decays_in_bfloat16(decay):
    """In float32: tests/ops/test_forms.py."""
    check("bf16", with_extreme_decays(decay, 200, 16), chunk_size=32)


def with_extreme_decays(kind, length, dim):
    q, k, v, _, lam = inputs_of("bf16", 1, length, 1, 2, dim, dim)
    return q, k, v, jnp.asarray(extreme_decays(kind, length), jnp.float32), lam


@pytest.mark.slow
def test_nested_vmap_over_some_arguments_is_a_loop():
    attend = functools.partial(fenwick_attention, chunk_size=16, precision="highest")
    seeds = [inputs_of("f32", 1, 40, 1, 2, 16, 16, seed=seed) for seed in range(4)]
    q, k, v, log_decay, lam = (jnp.stack(x).reshape(2, 2, *x[0].shape) for x in zip(*seeds, strict=True))
    shared_q, k = q[0, 0], k[:, 0]

    def loss(q, k, v, log_decay, lam):
        return jnp.sum(jnp.sin(attend(q, k, v, log_decay, lam)))

    # q has no mapped axis, k only the outer one.
    arguments = shared_q, k, v, log_decay, lam
    outer, inner = (None, 0, 0, 0, 0), (None, None, 0, 0, 0)

    def mapped(function):
        return jax.vmap(jax.vmap(function, inner), outer)

    values_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=range(5)))
    of_sum = jax.grad(lambda *x: jnp.sum(mapped(loss)(*x)), argnums=range(5))
    values, gradients = jax.jit(lambda *x: (mapped(loss)(*x), of_sum(*x)))(*arguments)
    summed = [0.0, [0.0, 0.0]]  # over what shares q, and k
    for i in range(2):
        for j in range(2):
            value, own = values_and_gradients(shared_q, k[i], v[i, j], log_decay[i, j], lam[i, j])
            assert relative_error(values[i, j], value) < 1e-5
            for gradient, expected in zip(gradients[2:], own[2:], strict=True):
                assert relative_error(gradient[i, j], expected) < 1e-5
            summed[0] += own[0]
            summed[1][i] += own[1]
    assert relative_error(gradients[0], summed[0]) < 1e-5
    assert relative_error(gradients[1], jnp.stack(summed[1])) < 1e-5
    assert all(len(grid) <= 3 for grid in grids(mapped(jax.grad(loss, argnums=range(5))), *arguments))


@pytest.mark.slow
def test_rematerialised_gradients_are_the_same():
    inputs = inputs_of("f32", 1, 40, 1, 2, 16, 16)
    attend = functools.partial(fenwick_attention, chunk_size=16, precision="highest")
    plain, remat = (
        jax.jit(functools.partial(output_and_gradients, f))(inputs) for f in (attend, jax.checkpoint(attend))
    )
    for expected, result in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_array_equal(result, expected)


def sharded(attend):
    """attend over a mesh of 2 x 2 devices that share out batch and heads; and inputs for it."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("batch", "heads"))
    spec = PartitionSpec("batch", None, "heads")
    inputs = [np.asarray(x) for x in inputs_of("f32", 2, 40, 2, 4, 16, 16)]
    return functools.partial(jax.shard_map, attend, mesh=mesh, in_specs=spec, out_specs=spec), inputs


@pytest.mark.slow
def test_sharded_over_batch_and_heads():
    attend = functools.partial(fenwick_attention, chunk_size=16, precision="highest")
    shard, inputs = sharded(attend)
    with pallas_kernels.interpret(), jax.default_device(jax.devices("cpu")[0]):
        # The interpreter's own loops do not know manual axes, hence check_vma=False: see the next test.
        result = jax.jit(functools.partial(output_and_gradients, shard(check_vma=False)))(inputs)
        expected = jax.jit(functools.partial(output_and_gradients, attend))(inputs)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-6


def test_sharded_with_checked_axes(compiling_for_a_gpu):
    shard, inputs = sharded(fenwick_attention)
    _, gradients = jax.eval_shape(functools.partial(output_and_gradients, shard(check_vma=True)), inputs)
    assert [gradients[name].shape for name in ARGUMENTS] == [x.shape for x in inputs]


# --- On a GPU only: sizes that the interpreter takes too long for ----------------------------------------------------

LARGE = {
    "odd length": (2, 1531, 1, 8, 128, 64),
    "a group for each head": (2, 1024, 16, 16, 64, 64),
    "one head of many": (1, 4099, 1, 1, 64, 64),
    "recall model": (64, 256, 2, 2, 32, 32),
    "largest dims": (1, 700, 2, 4, 256, 256),
    "wide keys": (1, 700, 1, 4, 256, 16),
    "wide values": (1, 700, 1, 4, 16, 256),
    "no powers of two": (3, 515, 2, 6, 80, 96),
    "many groups": (1, 300, 12, 24, 48, 48),
}


@pytest.mark.gpu
@pytest.mark.parametrize("min_decay", [0.0, -0.1, -50.0])
@pytest.mark.parametrize("mode", ["bf16", "tf32", "f32"])
@pytest.mark.parametrize("shape", LARGE)
def test_accuracy_and_races_on_a_gpu(shape, mode, min_decay):
    """Twice the same, in memory that was filled with nan before."""
    inputs = inputs_of(mode, *LARGE[shape], min_decay=min_decay)
    expected = reference(inputs, "xla" if LARGE[shape][1] > 2000 else "parallel")
    check_twice(mode, inputs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "chunk_size"), [*(("bf16", 1 << i) for i in range(4, 8)), *(("f32", 1 << i) for i in (4, 5, 6))]
)
def test_every_chunk_size_on_a_gpu(mode, chunk_size):
    check(mode, inputs_of(mode, 1, 1000, 1, 4, 64, 32), chunk_size=chunk_size)


# --- What came before, and the states at the end ---------------------------------------------------------------------


def check_continued(mode, shape, windows, levels, inside, **kwargs):
    """Outputs, states at the end above the `inside` levels of a chunk, and all gradients, after so many windows."""
    inputs = inputs_of(mode, *shape, levels=levels, min_decay=-0.05)  # so that much of what came before is left
    batch, length, groups, heads, *dims = shape
    first = num_levels(length)
    position = windows << first - 1
    initial = np.random.default_rng(5).normal(size=(batch, heads, levels, *dims)).astype(np.float32)

    def plain(*arguments):
        *inputs, levels = arguments
        state = FenwickState(levels, jnp.asarray(position, jnp.int32))
        out, state = log_linear_attention(*inputs, initial_state=state, return_state=True, implementation="xla")
        return out, state.levels[:, :, inside:]

    def by_kernels(*arguments):
        *inputs, states = arguments
        state = FenwickState(states, jnp.asarray(position, jnp.int32))
        old = InitialState(state, split_heads(inputs[3], groups), levels)
        found = old.moved(old.states).reshape(states.shape)[:, :, first:]
        occupied = jnp.full((batch,), windows, jnp.int32)
        options = dict(initial=found, occupied=occupied, return_end=True, precision=PRECISIONS[mode], **kwargs)
        return fenwick_attention(*inputs, **options)

    arguments = [*inputs, jnp.asarray(initial)]
    found, expected = results(by_kernels, arguments), exact_results(plain, arguments)
    for x, wanted in zip(found, expected, strict=True):
        assert x.shape == wanted.shape and relative_error(x, wanted) < TOLERANCE[mode]


CONTINUED = {  # batch, length, groups, heads, K, V; windows before; levels
    "one chunk": ((2, 16, 1, 2, 16, 16), 5, 8),
    "a whole window": ((1, 64, 2, 4, 16, 24), 6, 11),
    "part of a window, values in blocks": ((1, 50, 1, 2, 24, 136), 3, 9),
}


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("case", but_slow(CONTINUED, "part of a window, values in blocks"))
def test_what_came_before_is_read_and_the_end_is_returned(case, mode):
    shape, windows, levels = CONTINUED[case]
    check_continued(mode, shape, windows, levels, inside=5, chunk_size=16)


def segments_alone(*inputs, starts):
    """Attention of each segment of one sequence alone, by plain JAX, at its levels of the sequence."""
    q, _, v, _, lam = inputs
    nothing = jnp.zeros((1, v.shape[2], lam.shape[3], q.shape[3], v.shape[3]), lam.dtype)
    parts = []
    for begin, end in itertools.pairwise([0, *np.flatnonzero(starts[0]), v.shape[1]]):
        state = FenwickState(nothing, jnp.asarray(begin, jnp.int32))
        own = [x[:, begin:end] for x in inputs]
        parts.append(log_linear_attention(*own, initial_state=state, implementation="recurrent"))
    return jnp.concatenate(parts, axis=1)


def check_segments(mode, shape, starts, **kwargs):
    inputs = inputs_of(mode, *shape, min_decay=-0.05)

    def kernel(q, k, v, log_decay, lam):
        log_decay = forgetting(log_decay, jnp.asarray(starts))
        return fenwick_attention(q, k, v, log_decay, lam, precision=PRECISIONS[mode], segmented=True, **kwargs)

    found, expected = results(kernel, inputs), exact_results(functools.partial(segments_alone, starts=starts), inputs)
    for x, wanted in zip(found, expected, strict=True):
        assert relative_error(x, wanted) < TOLERANCE[mode]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("every", [1, 7, 32, 61])
def test_segments_are_as_alone(mode, every):
    length = 120
    starts = (np.arange(length) % every == every // 2)[None] & (np.arange(length) > 0)
    check_segments(mode, (1, length, 1, 2, 16, 16), starts, chunk_size=16)
