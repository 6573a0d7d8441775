"""The kernel of the tree of sums of keys against sums over its nodes in float64: in Pallas's interpreter, or on the GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.scores import key_tree
from tests.ops.inputs import relative_error
from tests.pallas_kernels.modes import but_slow, check_against_float64, flat_value_and_gradients

pytestmark = pytest.mark.usefixtures("run_kernels")

SHAPES = {  # B, H, chunks, K
    "two chunks": (1, 1, 2, 16),
    "five chunks": (2, 3, 5, 32),
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
            sums.append(jnp.sum(jnp.exp2(later)[..., None] * of_chunks[:, :, chunks], axis=2))
        size *= 2
    return jnp.stack(sums, axis=2)


@pytest.mark.parametrize("shape", but_slow(SHAPES, "two chunks", "five chunks"))
def test_value_and_gradients(shape):
    inputs = draw(shape)
    chunks = inputs[0].shape[2]
    more = [(0, 0), (0, 0), (0, (1 << (chunks - 1).bit_length()) - chunks)]

    def plain(of_chunks, decay):
        return node_by_node(jnp.pad(of_chunks, [*more, (0, 0)]), jnp.pad(decay, more))

    kernel = functools.partial(key_tree.join_keys, dtype=jnp.float32)
    check_against_float64(("sums", "of_chunks", "decay"), kernel, plain, inputs, 1e-5)


def test_bfloat16_rounds_the_result_alone():
    inputs = draw("several blocks of columns")
    exact = key_tree.join_keys(*inputs, jnp.float32)
    assert (key_tree.join_keys(*inputs, jnp.bfloat16) == exact.astype(jnp.bfloat16)).all()


def test_mapped_twice_is_a_loop():
    inputs = [
        jnp.stack(x).reshape(2, 2, *x[0].shape) for x in zip(*(draw("five chunks", i) for i in range(4)), strict=True)
    ]
    function = functools.partial(flat_value_and_gradients, functools.partial(key_tree.join_keys, dtype=jnp.float32))
    mapped = jax.jit(jax.vmap(jax.vmap(lambda *x: function(x))))(*inputs)
    for outer in range(2):
        for inner in range(2):
            for result, expected in zip(mapped, function([x[outer, inner] for x in inputs]), strict=True):
                assert relative_error(result[outer, inner], expected) < 1e-5


def test_long_sequences_are_for_xla(monkeypatch):
    inputs = draw("five chunks")

    def by(most: int):
        monkeypatch.setattr(key_tree, "MAX_CHUNKS", most)
        return flat_value_and_gradients(functools.partial(key_tree.join_keys, dtype=jnp.float32), inputs)

    for by_xla, by_kernel in zip(by(4), by(8), strict=True):
        assert relative_error(by_xla, by_kernel) < 1e-6
