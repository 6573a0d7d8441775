"""Attention by the kernels against the parallel form in float64: an entry of the table of test_kernels.py, and what is special
to it: extreme decays, what came before, segments. In Pallas's interpreter, or on a GPU.

The interpreter fills what no program writes with nan, so these tests also see outputs that are left out.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from loglinear_jax import FenwickState, log_linear_attention, num_levels
from loglinear_jax.ops.continuation import InitialState
from loglinear_jax.ops.levels import split_heads
from loglinear_jax.ops.positions import forgetting
from pallas_kernels import fenwick_attention
from tests.ops.inputs import extreme_decays, random_inputs, relative_error
from tests.pallas_kernels.conftest import HAS_GPU
from tests.pallas_kernels.modes import DTYPES, PRECISIONS, TOLERANCE, Kernel, by_precision, exact_results, results

pytestmark = pytest.mark.usefixtures("run_kernels", "no_hopper")


def inputs_of(mode, *shape, seed=0, **kwargs):
    q, k, v, log_decay, lam = random_inputs(seed, *shape, dtype=np.float32, **kwargs)
    return *(x.astype(DTYPES[mode]) for x in (q, k, v)), log_decay, lam


def exact_attention(shape, **options):
    def attend(q, k, v, log_decay, lam):
        implementation = "xla" if q.shape[1] > 2000 else "parallel"
        return log_linear_attention(q, k, v, jnp.maximum(log_decay, -1e4), lam, implementation=implementation)

    return attend


def draw_attention(rng, *shape):
    """Decays are so slow that all of the tree counts."""
    return random_inputs(int(rng.integers(1 << 30)), *shape, dtype=np.float32, min_decay=-0.1)


CHUNK16 = dict(chunk_size=16)
ATTENTION = Kernel(  # batch, length, groups, heads, K, V
    by_precision(fenwick_attention), exact_attention, draw_attention, (0, 1, 2),
    {
        "heads in groups, an odd length": ((1, 77, 2, 6, 16, 32), CHUNK16), "one token": ((1, 1, 1, 1, 16, 16), {}),
        "a group for each head": ((1, 96, 2, 2, 32, 16), dict(chunk_size=32)),
        "sizes that are no powers of two, values in blocks": ((1, 50, 1, 2, 24, 136), CHUNK16),
        "one chunk more than a power of two": ((1, 145, 1, 1, 16, 16), CHUNK16),
        "a tree of several stages": ((1, 16 * 36, 1, 1, 16, 16), CHUNK16),
        "tiles chosen from the shapes": ((1, 300, 1, 2, 32, 32), {}),
    },
    lambda mode: ((2, 1531, 1, 8, 128, 64), {}), (None, 0, 0, 0, 0), (None, None, 0, 0, 0), fast=2,
)  # fmt: skip


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
        ATTENTION.check("f32", shape, inputs, chunk_size=16)


def check_extreme_decays(kind, length, dim, **options):
    shape = 1, length, 1, 2, dim, dim
    q, k, v, _, lam = inputs_of("bf16", *shape)
    log_decay = jnp.asarray(extreme_decays(kind, length), jnp.float32)
    found = ATTENTION.check("bf16", shape, [q, k, v, log_decay, lam], **options)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


@pytest.mark.parametrize("decay", ["none", "mixed", "reset"])
def test_extreme_decays_in_bfloat16(decay):
    """In float32: tests/ops/test_forms.py."""
    check_extreme_decays(decay, 120, 16, chunk_size=32)


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


@pytest.mark.parametrize(
    ("mode", "shape", "windows", "levels"),  # batch, length, groups, heads, K, V; windows before
    [
        ("f32", (1, 50, 1, 2, 24, 136), 3, 9),  # part of a window, values in blocks
        pytest.param("f32", (1, 64, 2, 4, 16, 24), 6, 11, marks=pytest.mark.slow),
        pytest.param("bf16", (1, 64, 2, 4, 16, 24), 6, 11, marks=pytest.mark.slow),
        pytest.param("bf16", (2, 16, 1, 2, 16, 16), 5, 8, marks=pytest.mark.slow),  # one chunk
    ],
)
def test_what_came_before_is_read_and_the_end_is_returned(mode, shape, windows, levels):
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
@pytest.mark.parametrize(("mode", "every"), [("f32", 1), ("bf16", 7), ("f32", 61)])
def test_segments_are_as_alone(mode, every):
    length = 120
    starts = (np.arange(length) % every == every // 2)[None] & (np.arange(length) > 0)
    check_segments(mode, (1, length, 1, 2, 16, 16), starts, chunk_size=16)
