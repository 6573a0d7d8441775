"""The kernel of the short convolution against plain float64 arithmetic: in Pallas's interpreter, or on a GPU."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from loglinear_jax.modules import CausalConv
from tests.ops.inputs import relative_error
from tests.pallas_kernels.conftest import HAS_GPU
from tests.pallas_kernels.modes import check_against_float64, flat_value_and_gradients

pytestmark = pytest.mark.usefixtures("run_kernels", "small_programs")
NAMES = "y", "x", "kernel", "bias"


@pytest.fixture(scope="module")
def small_programs():
    """In the interpreter programs have few tokens, which are traced one by one."""
    module = sys.modules["pallas_kernels.pointwise.causal_conv"]
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(module, "SPAN", 16)
            patch.setattr(module, "ROWS", 4)
        yield


def draw(seed, batch, length, channels, width):
    rng = np.random.default_rng(seed)
    shapes = (batch, length, channels), (width, channels), (channels,)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def plain(x, kernel, bias):
    """The definition: a product for each token and tap that there is."""
    width = kernel.shape[0]
    z = bias + jnp.zeros(x.shape, x.dtype)
    for tap in range(width):
        back = width - 1 - tap
        moved = kernel[tap] * x[:, : x.shape[1] - back]
        z = z.at[:, back:].add(moved) if back < x.shape[1] else z
    return z / (1 + jnp.exp(-z))


def check(inputs, tolerance=1e-5):
    return check_against_float64(NAMES, pallas_kernels.causal_conv, plain, inputs, tolerance)


@settings(max_examples=3)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    channels=st.integers(1, 70),
    width=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_value_and_gradients(batch, length, channels, width, seed):
    with pallas_kernels.interpret(not HAS_GPU):
        check(draw(seed, batch, length, channels, width))


@pytest.mark.parametrize("length", [128, 131, 300] if HAS_GPU else [16, 19, 40])
def test_across_the_spans_of_programs(length):
    check(draw(0, 2, length, 8, 4))


def test_bfloat16_is_summed_in_float32():
    inputs = draw(0, 2, 40, 64, 4)
    results = check([inputs[0].astype(jnp.bfloat16), *inputs[1:]], tolerance=1e-2)
    assert [x.dtype for x in results] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_at_a_size_that_fills_a_gpu(dtype):
    inputs = draw(0, 64, 512, 1200, 4)
    results = check([inputs[0].astype(dtype), *inputs[1:]], tolerance=1e-2 if dtype == jnp.bfloat16 else 1e-5)
    again = check([inputs[0].astype(dtype), *inputs[1:]], tolerance=1)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(results, again, strict=True))


def test_mapped_twice_is_a_loop():
    inputs = [jnp.stack(x) for x in zip(*(draw(seed, 2, 9, 4, 4) for seed in range(3)), strict=True)]
    inputs = [jnp.stack([x, 2 * x]) for x in inputs]
    inputs[1] = inputs[1][0]  # the kernel has no outer axis
    function = functools.partial(flat_value_and_gradients, pallas_kernels.causal_conv)
    mapped = jax.jit(jax.vmap(jax.vmap(lambda *x: function(x)), (0, None, 0)))(*inputs)
    for outer in range(2):
        for inner in range(3):
            own = [x[inner] if i == 1 else x[outer, inner] for i, x in enumerate(inputs)]
            for result, expected in zip(mapped, jax.jit(function)(own), strict=True):
                assert relative_error(result[outer, inner], expected) < 1e-5


@pytest.mark.parametrize("length", [2, 9])
def test_the_module_takes_the_kernel_but_after_other_tokens(length):
    x, *_ = draw(0, 2, length, 6, 4)
    kernel, plainly = (CausalConv(implementation=i) for i in ("pallas", "xla"))
    params = plainly.init(jax.random.key(0), x)
    applied = [functools.partial(conv.apply, params) for conv in (kernel, plainly)]
    assert ["pallas_call" in str(jax.make_jaxpr(conv)(x)) for conv in applied] == [True, False]
    for result, expected in zip(applied[0](x), applied[1](x), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    window = applied[1](x)[1]
    assert "pallas_call" not in str(jax.make_jaxpr(applied[0])(x, window))
