"""The kernel of the tree of sums of keys against sums over its nodes in float64: in Pallas's interpreter, or on the GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax.ops.bucket_scores import pallas
from tests.ops.inputs import relative_error
from tests.pallas_kernels.float64 import check_against_float64, value_and_gradients

pytestmark = pytest.mark.usefixtures("run_kernels")

SHAPES = {  # B, H, chunks, K
    "two chunks": (1, 1, 2, 16),
    "no powers of two": (2, 3, 5, 24),
    "several blocks of columns": (1, 2, 256, 64),
}


def draw(shape, seed=0):
    batch, heads, chunks, key_dim = SHAPES[shape]
    rng = np.random.default_rng(seed)
    of_chunks, decay = rng.normal(size=(batch, heads, chunks, key_dim)), -rng.exponential(size=(batch, heads, chunks))
    decay[0, 0, chunks // 2] = -1e4  # forgets all before
    return [jnp.asarray(of_chunks, jnp.float32), jnp.asarray(decay, jnp.float32)]


def node_by_node(of_chunks, decay):
    """Sums of [B, H, N, K] over the chunks of each node, decayed until its end; N a power of two."""
    num_chunks, sums = decay.shape[2], []
    size = 1
    while size < num_chunks:
        for first in range(0, num_chunks, 2 * size):
            chunks = slice(first, first + size)
            later = jnp.cumsum(decay[:, :, chunks][:, :, ::-1], axis=2)[:, :, ::-1] - decay[:, :, chunks]
            sums.append(jnp.sum(jnp.exp(later)[..., None] * of_chunks[:, :, chunks], axis=2))
        size *= 2
    return jnp.stack(sums, axis=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(shape):
    inputs = draw(shape)
    chunks, key_dim = inputs[0].shape[2:]
    more_chunks, more_columns = (1 << (chunks - 1).bit_length()) - chunks, -key_dim % 16

    def plain(of_chunks, decay):
        of_chunks = jnp.pad(of_chunks, [(0, 0), (0, 0), (0, more_chunks), (0, more_columns)])
        return node_by_node(of_chunks, jnp.pad(decay, [(0, 0), (0, 0), (0, more_chunks)]))

    kernel = functools.partial(pallas_kernels.join_keys, dtype=jnp.float32)
    check_against_float64(("sums", "of_chunks", "decay"), kernel, plain, inputs, 1e-5)


def test_bfloat16_rounds_the_result_alone():
    inputs = draw("several blocks of columns")
    exact = pallas_kernels.join_keys(*inputs, jnp.float32)
    assert (pallas_kernels.join_keys(*inputs, jnp.bfloat16) == exact.astype(jnp.bfloat16)).all()


def test_mapped_twice_is_a_loop():
    inputs = [
        jnp.stack(x).reshape(2, 2, *x[0].shape)
        for x in zip(*(draw("no powers of two", i) for i in range(4)), strict=True)
    ]
    function = functools.partial(value_and_gradients, functools.partial(pallas_kernels.join_keys, dtype=jnp.float32))
    mapped = jax.jit(jax.vmap(jax.vmap(lambda *x: function(x))))(*inputs)
    for outer in range(2):
        for inner in range(2):
            for result, expected in zip(mapped, function([x[outer, inner] for x in inputs]), strict=True):
                assert relative_error(result[outer, inner], expected) < 1e-5


def test_more_chunks_than_it_takes_are_for_plain_jax(monkeypatch):
    with pytest.raises(pallas_kernels.UnsupportedError, match="there are 1025 chunks: .* takes 2 to 1024"):
        pallas_kernels.join_keys(jnp.zeros((1, 1, 1025, 16)), jnp.zeros((1, 1, 1025)), jnp.float32)
    rng = np.random.default_rng(0)
    k, log_decay = rng.normal(size=(1, 1, 5, 16, 16)), -rng.exponential(size=(1, 1, 2, 5, 16))
    tree = functools.partial(
        pallas._tree, *(jnp.asarray(x, jnp.float32) for x in (k, log_decay)), jnp.float32, "highest"
    )
    by_kernel = tree()
    monkeypatch.setattr(pallas_kernels, "why_join_keys_unsupported", lambda _: "not wanted here")
    read = np.array([0, 1, 4, 6])  # by the 5 chunks: sums of chunks 0, 2, 0 to 1 and 0 to 3
    assert relative_error(tree()[:, :, read], by_kernel[:, :, read]) < 1e-6
