"""The kernels that build and read the delta rule's tree against its definition in float64: in Pallas's interpreter, or on a
GPU if there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.pallas_kernels.modes import (
    DTYPES,
    LOWER,
    PRECISIONS,
    TOLERANCE,
    assert_exact_enough,
    but_slow,
    exact_results,
    results,
    value_and_gradients,
)

pytestmark = pytest.mark.usefixtures("run_kernels")


def draw(batch, heads, num_chunks, chunk, key_dim, value_dim, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    heights, by_chunk = (num_chunks - 1).bit_length(), (batch, heads, num_chunks)
    by_token = batch, num_chunks * chunk, heads
    shapes = (*by_token, value_dim), (*by_chunk, chunk, key_dim), (*by_token, heights), by_chunk
    shapes += (*by_chunk, key_dim, key_dim), (*by_chunk, key_dim, value_dim)
    arrays = [rng.normal(size=shape) for shape in shapes]
    arrays[3] = rng.uniform(0.8, 1, by_chunk)
    arrays[4] *= 0.5 / key_dim**0.5
    dtypes = (np.float32, dtype, np.float32, np.float32, dtype, dtype)
    return [jnp.asarray(x, np.float32).astype(d) for x, d in zip(arrays, dtypes, strict=True)]


def definition(inside, reads, lam, decay, lost, states):
    """One chunk and one state after the other."""
    chunk_size, out = reads.shape[3], []
    for chunk in range(reads.shape[2]):
        tokens = slice(chunk * chunk_size, (chunk + 1) * chunk_size)
        end, read_with, found = chunk, reads[:, :, chunk], inside[:, tokens]
        while end:
            node = end - 1
            height = (end & -end).bit_length() - 1
            found += lam[:, tokens, :, height, None] * jnp.swapaxes(read_with @ states[:, :, node], 1, 2)
            read_with = decay[:, :, node, None, None] * read_with - read_with @ lost[:, :, node]
            end &= end - 1
        out.append(found)
    return jnp.concatenate(out, axis=1)


def joined(log_decay, lost, states):
    """Every node from its chunks, one after the other; what ends with the last chunk is that chunk alone."""
    results, decay = [], jnp.exp(log_decay)
    for last in range(decay.shape[-1]):
        first = last + 1 - ((last + 1) & -(last + 1)) if last + 1 < decay.shape[-1] else last
        node = decay[..., first], lost[..., first, :, :], states[..., first, :, :]
        for chunk in range(first + 1, last + 1):
            through, kept = lost[..., chunk, :, :], decay[..., chunk]
            product = through @ node[1]
            node = (
                kept * node[0],
                kept[..., None, None] * node[1] + node[0][..., None, None] * through - product,
                kept[..., None, None] * node[2] - through @ node[2] + states[..., chunk, :, :],
            )
        results.append(node)
    return tuple(jnp.stack(x, axis=2) for x in zip(*results, strict=True))


def check(mode, inputs, function=pallas_kernels.read_tree, definition=definition):
    found = results(functools.partial(function, precision=PRECISIONS[mode]), inputs)
    expected = exact_results(definition, inputs)
    assert [x.dtype for x in found[-len(inputs) :]] == [x.dtype for x in inputs]
    assert_exact_enough(mode, range(len(found)), found, expected, floor=1e-3)


SHAPES = {  # B, H, N, C, K, V
    "an odd number, and dims that are no powers of two": (2, 3, 7, 16, 24, 20),
    "one more than a power of two": (2, 1, 9, 32, 16, 32),
    "a power of two": (1, 2, 8, 16, 32, 16),
    "two": (1, 2, 2, 16, 16, 64),
}


def of_joins(inputs):
    """What `join_tree` takes of these."""
    return [jnp.log(inputs[3]), *inputs[4:]]


def check_joins(mode, inputs):
    check(mode, of_joins(inputs), pallas_kernels.join_tree, joined)


@pytest.mark.parametrize("shape", but_slow(SHAPES, "an odd number, and dims that are no powers of two"))
def test_full_float32(shape):
    inputs = draw(*SHAPES[shape])
    check("f32", inputs)
    check_joins("f32", inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", LOWER)
def test_other_precisions(mode):
    dims = (128, 128) if mode == "bf16" else (16, 16)  # 128: two blocks of columns
    inputs = draw(1, 2, 7, 16, *dims, DTYPES[mode])
    check(mode, inputs)
    check_joins(mode, inputs)


@pytest.mark.parametrize("dims", [(128, 16), (16, 128)])
@pytest.mark.slow
def test_several_blocks_of_columns_of_keys_or_values(dims):
    inputs = draw(1, 1, 7, 16, *dims, DTYPES["bf16"])
    check("bf16", inputs)
    check_joins("bf16", inputs)


def test_decays_that_leave_nothing():
    _, *maps = of_joins(draw(1, 1, 9, 16, 16, 16))
    log_decay = jnp.asarray([-60, -1, -200, 0, -1e4, -0.1, -50, -0.2, -103], jnp.float32)[None, None]
    check("f32", [log_decay, *maps], pallas_kernels.join_tree, joined)


@pytest.mark.parametrize("function", [pallas_kernels.read_tree, pallas_kernels.join_tree])
@pytest.mark.slow
def test_batched_by_vmap(function):
    inputs = draw(3, 2, 5, 16, 16, 16)
    if function is pallas_kernels.join_tree:
        inputs = of_joins(inputs)
    run = functools.partial(function, precision="highest")
    found = results(jax.vmap(run), [x[:, None] for x in inputs])
    for a, b in zip(found, results(run, inputs), strict=True):
        np.testing.assert_allclose(a[:, 0], b, rtol=1e-6, atol=1e-6)


def test_what_lies_at_the_end_and_where_nothing_is_read_does_not_matter():
    inputs = draw(1, 2, 6, 16, 16, 16)
    inside, reads, lam, *nodes = inputs
    nodes = [x.at[:, :, 5].set(np.nan) for x in nodes]
    lam = lam.at[:, 4 * 16 : 5 * 16, :, :2].set(np.nan)  # chunk 4 reads at height 2 alone
    found = value_and_gradients(pallas_kernels.read_tree, (inside, reads, lam, *nodes))
    jax.tree.map(np.testing.assert_array_equal, found, value_and_gradients(pallas_kernels.read_tree, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", TOLERANCE)
def test_on_a_gpu(mode):
    dim = 128 if mode == "bf16" else 64
    inputs = draw(2, 3, 13, 64, dim, dim, DTYPES[mode])
    check(mode, inputs)
    check_joins(mode, inputs)
