"""One table of kernels, each held to its definition in float64 with gradients, in every precision, mapped and on a GPU; then
what is special to each. They run in Pallas's interpreter, or on a GPU."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from scipy import stats

import loglinear_jax
import pallas_kernels
from loglinear_jax import FenwickState, bucket_scores
from loglinear_jax.fenwick import num_levels, occupied_levels
from loglinear_jax.lam import make_lam
from loglinear_jax.modules import CausalConv
from loglinear_jax.ops.delta.transitions import transitions
from loglinear_jax.ops.levels import level_of_pairs, select_level
from loglinear_jax.ops.log_linear import pallas, recurrent
from pallas_kernels.common import support
from pallas_kernels.pointwise.lam_mlp import normal_distribution
from pallas_kernels.scores import key_tree
from tests.ops.inputs import random_inputs, relative_error
from tests.pallas_kernels.conftest import HAS_GPU
from tests.pallas_kernels.modes import (
    LOWER,
    PRECISIONS,
    TOLERANCE,
    Kernel,
    always,
    assert_exact_enough,
    by_precision,
    exact_results,
    grids,
    results,
    value_and_gradients,
)
from tests.pallas_kernels.test_fenwick_attention import ATTENTION, CHUNK16

pytestmark = pytest.mark.usefixtures("run_kernels", "no_hopper", "small_programs")
F32 = np.float32


@pytest.fixture(scope="module")
def small_programs():
    """In the interpreter programs of the convolution have few tokens, which are traced one by one."""
    module = sys.modules["pallas_kernels.pointwise.causal_conv"]
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(module, "SPAN", 16)
            patch.setattr(module, "ROWS", 4)
        yield


# --- Definitions ----------------------------------------------------------------------------------------------------


def convolution(x, kernel, bias, own=None):
    """A product for each token and tap that there is."""
    width, length = kernel.shape[0], x.shape[1]
    z = bias + jnp.zeros(x.shape, x.dtype)
    for back in range(min(width, length)):
        moved = kernel[width - 1 - back] * x[:, : length - back]
        moved = moved if own is None else jnp.where(own[:, back:, None] >= back, moved, 0)
        z = z.at[:, back:].add(moved)
    return z / (1 + jnp.exp(-z))


def draw_convolution(rng, batch, length, channels, width):
    return [rng.normal(size=shape) for shape in ((batch, length, channels), (width, channels), (channels,))]


def own_tokens(shape):
    """How many tokens before each are of its document; documents have 1, 2, 3 ... tokens, and each row begins elsewhere."""
    batch, length, _, width = shape
    place = np.concatenate([np.arange(size) for size in range(1, length + batch + 1)])
    return np.stack([np.minimum(place[row : row + length], width - 1) for row in range(batch)]).astype(np.int32)


def occupied_at(shape):
    _, length, _, first = shape
    return np.asarray(occupied_levels(first + np.arange(length), num_levels(first + length)))[:, None]


def draw_content(rng, batch, length, heads, first):
    """NaN where no level is occupied."""
    occupied = occupied_at((batch, length, heads, first))
    scores = rng.normal(size=(batch, length, heads, occupied.shape[-1]))
    return np.where(occupied, scores, np.nan), rng.uniform(0.5, 30, heads)


def softmax_of(shape):
    occupied = occupied_at(shape)

    def softmax(scores, scale):
        logits = scale[:, None] * jnp.where(occupied, scores, 0.0)
        return jax.nn.softmax(jnp.where(occupied, logits, -jnp.inf), axis=-1)

    return softmax


def draw_mlp(rng, shape, levels, hidden):
    shapes = (*shape, levels), (levels, hidden), (hidden,), (hidden, levels), (levels,)
    return [0.5 * rng.normal(size=shape) for shape in shapes]


def mlp(shape, out="softplus", activation="gelu"):
    def plain(d, w1, b1, w2, b2):
        hidden = d @ w1 + b1
        hidden = jax.nn.gelu(hidden, approximate=False) if activation == "gelu" else hidden
        return {"softplus": jax.nn.softplus, "softmax": jax.nn.softmax}[out](hidden @ w2 + b2)

    return plain


def draw_scores(rng, batch, length, groups, heads, key_dim, min_decay=-2.0):
    seed = int(rng.integers(1 << 30))
    drawn = random_inputs(seed, batch, length, groups, heads, key_dim, 1, dtype=F32, min_decay=min_decay)
    return drawn[0], drawn[1], drawn[3]


def score(shape, mode, **options):
    return functools.partial(bucket_scores, implementation="pallas", precision=PRECISIONS[mode], **options)


def draw_keys(rng, batch, heads, chunks, key_dim):
    of_chunks, decay = rng.normal(size=(batch, heads, chunks, key_dim)), -rng.exponential(size=(batch, heads, chunks))
    decay[0, 0, chunks // 2] = -1e4  # forgets all before
    return of_chunks, decay


def joined_keys(of_chunks, decay):
    """Sums [B, H, N, K] over the chunks of each node of the tree, decayed until its end."""
    num_chunks, sums = 1 << (decay.shape[2] - 1).bit_length(), []
    more = [(0, 0), (0, 0), (0, num_chunks - decay.shape[2])]
    of_chunks, decay = jnp.pad(of_chunks, [*more, (0, 0)]), jnp.pad(decay, more)
    for size in (1 << height for height in range((num_chunks - 1).bit_length())):
        for first in range(0, num_chunks, 2 * size):
            chunks = slice(first, first + size)
            later = jnp.cumsum(decay[:, :, chunks][:, :, ::-1], axis=2)[:, :, ::-1] - decay[:, :, chunks]
            sums.append(jnp.sum(jnp.exp2(later)[..., None] * of_chunks[:, :, chunks], axis=2))
    return jnp.stack(sums, axis=2)


def draw_chunks(rng, batch, num_chunks, groups, heads, key_dim, value_dim, chunk):
    length = num_chunks * chunk
    q, k = rng.normal(size=(2, batch, length, groups, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(batch, length, heads, value_dim))
    log_decay, beta = -0.3 * rng.uniform(size=v.shape[:3]) ** 2, rng.uniform(0, 2, v.shape[:3])
    return q / key_dim**0.5, k, v, log_decay, beta, rng.uniform(size=(*v.shape[:3], num_levels(chunk)))


def by_matrices(shape):
    """The same of `transitions`."""
    chunk = shape[-1]

    def parts(x):  # [B, G or H, N, C, ...]
        return jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 3, 1)

    def run(q, k, v, log_decay, beta, lam):
        q, k = (jnp.repeat(parts(x), v.shape[2] // x.shape[2], axis=1) for x in (q, k))
        run = transitions(q, k, *(parts(x)[:, :, None] for x in (log_decay, beta)), "highest")
        of_pairs = select_level(parts(lam)[:, :, None], level_of_pairs(np.arange(chunk)))
        v = parts(v)[:, :, None]
        out = jnp.moveaxis(((run.weights * of_pairs) @ v)[:, :, 0], 1, 3).reshape(len(v), -1, v.shape[1], v.shape[-1])
        states = run.own(v[..., None, :, :], "highest")[..., 0, :, :]
        return out, *(x[:, :, 0] for x in (run.reads, run.maps("highest").lost, states))

    return run


def chunks_by_kernel(shape, mode):
    settings = dict(chunk_size=shape[-1], precision=PRECISIONS[mode])

    def run(q, k, v, log_decay, beta, lam):
        return pallas_kernels.delta_chunks(q, k, v, log_decay, beta, lam, **settings)

    return run


def draw_scan(rng, batch, length, groups, heads, key_dim, value_dim):
    q, k = rng.normal(size=(2, batch, length, groups, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(batch, length, heads, value_dim))
    log_decay, beta = -rng.uniform(0, 0.1, v.shape[:3]), rng.uniform(size=v.shape[:3])
    return q, k, v, log_decay, beta, rng.normal(size=(batch, heads, key_dim, value_dim))


def token_by_token(*arguments):
    *inputs, state = arguments
    options = dict(initial_state=state, return_state=True, implementation="recurrent")
    return loglinear_jax.gated_delta_attention(*inputs, **options)


def draw_maps(rng, batch, heads, num_chunks, chunk, key_dim, value_dim):
    """inside, reads, decay, lost, states of chunks of the delta rule."""
    by_chunk = batch, heads, num_chunks
    inside = rng.normal(size=(batch, num_chunks * chunk, heads, value_dim))
    reads = rng.normal(size=(*by_chunk, chunk, key_dim))
    lost = 0.5 * rng.normal(size=(*by_chunk, key_dim, key_dim)) / key_dim**0.5
    return inside, reads, rng.uniform(0.8, 1, by_chunk), lost, rng.normal(size=(*by_chunk, key_dim, value_dim))


def draw_tree(rng, *shape):
    inside, reads, *nodes = draw_maps(rng, *shape)
    return inside, reads, rng.normal(size=(*inside.shape[:3], (shape[2] - 1).bit_length())), *nodes


def node_by_node(inside, reads, lam, decay, lost, states):
    chunk_size, out = reads.shape[3], []
    for chunk in range(reads.shape[2]):
        tokens = slice(chunk * chunk_size, (chunk + 1) * chunk_size)
        end, read_with, found = chunk, reads[:, :, chunk], inside[:, tokens]
        while end:
            node, height = end - 1, (end & -end).bit_length() - 1
            found += lam[:, tokens, :, height, None] * jnp.swapaxes(read_with @ states[:, :, node], 1, 2)
            read_with = decay[:, :, node, None, None] * read_with - read_with @ lost[:, :, node]
            end &= end - 1
        out.append(found)
    return jnp.concatenate(out, axis=1)


def draw_joins(rng, *shape):
    *_, decay, lost, states = draw_maps(rng, *shape)
    return np.log(decay), lost, states


def joined(log_decay, lost, states):
    """Every node from its chunks, one after the other; what ends with the last chunk is that chunk alone."""
    nodes, decay = [], jnp.exp(log_decay)
    for last in range(decay.shape[-1]):
        first = last + 1 - ((last + 1) & -(last + 1)) if last + 1 < decay.shape[-1] else last
        node = decay[..., first], lost[..., first, :, :], states[..., first, :, :]
        for chunk in range(first + 1, last + 1):
            through, kept = lost[..., chunk, :, :], decay[..., chunk]
            node = (
                kept * node[0],
                kept[..., None, None] * node[1] + node[0][..., None, None] * through - through @ node[1],
                kept[..., None, None] * node[2] - through @ node[2] + states[..., chunk, :, :],
            )
        nodes.append(node)
    return tuple(jnp.stack(x, axis=2) for x in zip(*nodes, strict=True))


def draw_step(rng, batch, groups, heads, levels, key_dim, value_dim, position):
    shapes = (batch, heads, levels, key_dim, value_dim), *[(batch, groups, key_dim)] * 2, (batch, heads, value_dim)
    arrays = [rng.normal(size=shape) for shape in shapes]
    return *arrays, -rng.uniform(0, 1, (batch, heads)), rng.uniform(0, 2, (batch, heads, levels))


def one_step(step):
    def of_shape(shape, *mode):
        def run(levels, *inputs):
            out, state = step(FenwickState(levels, jnp.int32(shape[-1])), *inputs)
            return out, state.levels

        return run

    return of_shape


# --- The table ------------------------------------------------------------------------------------------------------


def of_dims(*shape):
    """Of the delta rule: the widest keys and values of a mode."""
    return lambda mode: ((*shape, *[128 if mode == "bf16" else 64] * 2), {})


TREES = {  # B, H, N, C, K, V
    "an odd number, and dims that are no powers of two": ((2, 3, 7, 16, 24, 20), {}),
    "one more than a power of two": ((2, 1, 9, 32, 16, 32), {}),
    "a power of two": ((1, 2, 8, 16, 32, 16), {}),
    "two": ((1, 2, 2, 16, 16, 64), {}),
}
STEPS = [
    (1, 1, 2, 5, 32, 16), (2, 2, 4, 7, 16, 64), (1, 1, 1, 1, 16, 16), (1, 1, 1, 3, 256, 16), (1, 1, 1, 3, 16, 256),
    (1, 1, 1, 7, 16, 16),
]  # fmt: skip
TABLE = {
    "attention": ATTENTION,
    "causal_conv": Kernel(  # batch, length, channels, width
        always(pallas_kernels.causal_conv), always(convolution), draw_convolution, (0,),
        {
            "a span and more": ((2, 19, 8, 4), {}), "one token": ((1, 1, 1, 1), {}), "whole spans": ((2, 32, 8, 4), {}),
            "wide": ((3, 40, 70, 8), {}), "fewer tokens than taps": ((1, 3, 5, 7), {}),
        },
        lambda mode: ((64, 512, 1200, 4), {}), (0, None, 0), modes=("f32", "bf16"), fast=2,
    ),
    "causal_conv, packed": Kernel(
        lambda shape, mode: lambda *x: pallas_kernels.causal_conv(*x, jnp.asarray(own_tokens(shape))),
        lambda shape: lambda *x: convolution(*x, own_tokens(shape)), draw_convolution, (0,),
        {"spans and more": ((2, 35, 8, 4), {}), "fewer tokens than taps": ((1, 3, 5, 7), {})},
        lambda mode: ((64, 512, 1200, 4), {}), (0, None, 0), modes=("f32", "bf16"), fast=1,
    ),
    "swiglu": Kernel(
        always(pallas_kernels.swiglu), always(lambda gate, up: jax.nn.silu(gate) * up),
        lambda rng, *shape: 3 * rng.normal(size=(2, *shape)), (0, 1),
        {"small": ((3, 5), {}), "a block": ((2048,), {}), "blocks": ((2, 3, 700), {})},
        lambda mode: ((64, 5000), {}), (0, 0), modes=("f32", "bf16"),
    ),
    "content_lam": Kernel(  # batch, length, heads, tokens before the first
        lambda shape, mode: lambda *x: pallas_kernels.content_lam(*x, occupied_at(shape)),
        softmax_of, draw_content, (),
        {
            "parts of blocks": ((3, 45, 5, 0), {}), "one token": ((1, 1, 1, 0), {}), "whole blocks": ((2, 64, 4, 0), {}),
            "later tokens": ((2, 40, 3, 1000), {}),
        },
        lambda mode: ((64, 256, 2, 0), {}), (0, None), modes=("f32",), fast=2,
    ),
    "lam_mlp": Kernel(  # shape of tokens, levels, hidden
        lambda shape, mode, out="softplus", activation="gelu": functools.partial(
            pallas_kernels.lam_mlp, out=out, activation=activation, precision=PRECISIONS[mode]
        ),
        mlp, draw_mlp, (),
        {
            "tokens": (((2, 9), 6, 16), {}), "one": (((1,), 1, 1), dict(out="softmax")),
            "more axes": (((5, 2, 3), 20, 22), dict(out="softmax", activation="identity")),
            "wide": (((4,), 8, 64), dict(activation="identity")), "several passes": (((3, 1111), 7, 128), {}),
        },
        lambda mode: (((64, 256, 2), 31, 128), {}), (0, None, 0, 0, 0), modes=("f32", "tf32"), fast=2,
    ),
    "bucket_scores": Kernel(  # batch, length, groups, heads, K
        score, always(functools.partial(bucket_scores, implementation="parallel")), draw_scores, (0, 1),
        {
            "heads in groups, an odd length": ((1, 77, 2, 6, 16), CHUNK16), "one token": ((1, 1, 1, 1, 16), {}),
            "heads of a group in several programs": ((1, 40, 1, 34, 24), CHUNK16),
            "one chunk more than a power of two": ((1, 145, 1, 1, 16), CHUNK16),
            "tiles chosen from the shapes": ((1, 300, 1, 2, 32), {}),
            "strong decays": ((1, 300, 1, 2, 32, -50.0), {}),
        },
        lambda mode: ((2, 1000, 2, 6, 64), {}), (None, 0, 0), inner=(None, None, 0),
    ),
    "join_keys": Kernel(  # B, H, chunks, K
        lambda shape, mode: functools.partial(key_tree.join_keys, dtype=jnp.float32), always(joined_keys), draw_keys, (),
        {
            "five chunks": ((2, 3, 5, 32), {}), "two chunks": ((1, 1, 2, 16), {}),
            "several blocks of columns": ((1, 2, 256, 64), {}),
        },
        lambda mode: ((2, 3, 64, 64), {}), (0, None), modes=("f32",),
    ),
    "delta_chunks": Kernel(  # B, N, G, H, K, V, C
        chunks_by_kernel, by_matrices, draw_chunks, (0, 1, 2),
        {
            "groups, and dims that are no powers of two": ((2, 2, 2, 4, 24, 20, 32), {}),
            "one chunk": ((1, 1, 1, 1, 16, 16, 32), {}), "short chunks": ((1, 2, 1, 1, 16, 16, 16), {}),
            "long chunks": ((1, 1, 1, 1, 16, 16, 64), {}),
        },
        lambda mode: ((2, 5, 3, 6, *of_dims()(mode)[0], 64), {}), (0, 0, 0, None, 0, 0),
    ),
    "delta_scan": Kernel(  # B, T, G, H, K, V
        lambda shape, mode, chunk_size=16: by_precision(pallas_kernels.delta_scan)(shape, mode, chunk_size=chunk_size),
        always(token_by_token), draw_scan, (0, 1, 2),
        {
            "two heads a group": ((1, 32, 1, 2, 16, 32), {}),
            "dims that are no powers of two": ((2, 48, 3, 3, 24, 20), {}), "one chunk": ((1, 16, 2, 2, 32, 16), {}),
        },
        lambda mode: (of_dims(2, 13 * 64, 3, 3)(mode)[0], dict(chunk_size=64)), (0, 0, 0, None, 0, 0),
    ),
    "read_tree": Kernel(
        by_precision(pallas_kernels.read_tree), always(node_by_node), draw_tree, (1, 4, 5), TREES, of_dims(2, 3, 13, 64),
        (0, 0, None, 0, 0, 0),
    ),
    "join_tree": Kernel(
        by_precision(pallas_kernels.join_tree), always(joined), draw_joins, (1, 2), TREES, of_dims(2, 3, 13, 64),
        (0, None, 0),
    ),
    "fenwick_step": Kernel(  # batch, groups, heads, levels, K, V, position
        one_step(pallas.step), one_step(functools.partial(recurrent.step, precision="highest")), draw_step, (),
        {f"{shape} at {p}": ((*shape, p), {}) for shape, p in zip(STEPS, (12, 15, 0, 1, 2, 32), strict=True)},
        lambda mode: ((4, 2, 8, 12, 64, 64, 1000), {}), (0, None, 0, 0, 0, 0), modes=("f32",), fast=3,
    ),
}  # fmt: skip


def slow(*values, unless=False):
    return pytest.param(*values, id="-".join(map(str, values)), marks=() if unless else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "shape"),
    [slow(name, shape, unless=i < k.fast) for name, k in TABLE.items() for i, shape in enumerate(k.shapes)],
)
def test_values_and_gradients(name, shape):
    sizes, options = TABLE[name].shapes[shape]
    TABLE[name].check("f32", sizes, **options)


@pytest.mark.parametrize("mode", LOWER)
@pytest.mark.parametrize("name", [slow(name, unless=name == "attention") for name in TABLE])
def test_lower_precision(name, mode):
    if mode not in TABLE[name].modes:
        pytest.skip("not one of its precisions")
    sizes, options = next(iter(TABLE[name].shapes.values()))
    TABLE[name].check(mode, sizes, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("delta_chunks", (1, 2, 1, 2, 100, 70, 32)),
        ("delta_chunks", (1, 1, 1, 1, 16, 128, 128)),
        ("delta_scan", (1, 32, 1, 1, 128, 128)),
        *((tree, (1, 1, 7, 16, *dims)) for tree in ("read_tree", "join_tree") for dims in ((128, 16), (16, 128))),
    ],
)
def test_several_blocks_of_columns(name, shape):
    """Of keys and of values, or of one of them: a block has 64. And the longest chunks."""
    TABLE[name].check("bf16", shape)


@pytest.mark.parametrize("name", [slow(name, unless=name in ("fenwick_step", "content_lam")) for name in TABLE])
def test_mapped_twice_is_a_loop(name):
    """With arguments that have no mapped axis, or one."""
    kernel = TABLE[name]
    shape, options = next(iter(kernel.shapes.values()))
    function = functools.partial(value_and_gradients, kernel.run(shape, "f32", **options))
    inner = kernel.inner if isinstance(kernel.inner, tuple) else (0,) * len(kernel.outer)
    seeds = [[kernel.inputs(shape, seed=2 * i + j) for j in range(2)] for i in range(2)]
    arguments = [
        jnp.stack([jnp.stack([of_seed[n] for of_seed in row]) for row in seeds]) for n in range(len(kernel.outer))
    ]
    arguments = [x if axis == 0 else x[0] for x, axis in zip(arguments, kernel.outer, strict=True)]
    arguments = [
        x if axis == 0 else x[..., 0, *[slice(None)] * seeds[0][0][n].ndim]
        for n, (x, axis) in enumerate(zip(arguments, inner, strict=True))
    ]
    mapped = jax.vmap(jax.vmap(lambda *x: jax.tree.leaves(function(x)), inner), kernel.outer)
    found = jax.jit(mapped)(*arguments)
    for i in range(2):
        for j in range(2):
            own = [x if a is None else x[i] for x, a in zip(arguments, kernel.outer, strict=True)]
            own = [x if a is None else x[j] for x, a in zip(own, inner, strict=True)]
            for x, expected in zip(found, jax.tree.leaves(jax.jit(function)(own)), strict=True):
                assert relative_error(jnp.nan_to_num(x[i, j]), jnp.nan_to_num(expected)) < 1e-5
    assert all(len(grid) <= 3 for grid in grids(mapped, *arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", TOLERANCE)
@pytest.mark.parametrize("name", TABLE)
def test_accuracy_and_races_on_a_gpu(name, mode):
    if mode not in TABLE[name].modes:
        pytest.skip("not one of its precisions")
    sizes, options = TABLE[name].wide(mode)
    for first, second in zip(*(TABLE[name].check(mode, sizes, **options) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


# --- Bucket scores --------------------------------------------------------------------------------------------------

READS = {  # chunks of a sequence, its heads, and K: how many heads' sums are read at once depends on all three
    "fewer rows than a tile has, height 1": (2, 1, 16),
    "several programs, 3 heights of 4": (7, 48, 128),
    "half of the last heads are not there, 5 heights of 8": (17, 6, 128),
    "a head at a time, 9 heights of 16": (257, 3, 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("reads", READS)
def test_heads_whose_sums_are_read_at_once(reads):
    chunks, heads, key_dim = READS[reads]
    by_chunks = always(functools.partial(bucket_scores, implementation="xla"))
    kernel = dataclasses.replace(TABLE["bucket_scores"], exact=by_chunks)
    kernel.check("f32", (1, 16 * chunks - 3, 1, heads, key_dim, -0.02), **CHUNK16)


def test_sums_of_keys_in_bfloat16_round_the_result_alone_and_long_sequences_are_for_xla(monkeypatch):
    inputs = TABLE["join_keys"].inputs((2, 3, 5, 32))
    exact = key_tree.join_keys(*inputs, jnp.float32)
    assert (key_tree.join_keys(*inputs, jnp.bfloat16) == exact.astype(jnp.bfloat16)).all()
    found = results(functools.partial(key_tree.join_keys, dtype=jnp.float32), inputs)
    monkeypatch.setattr(key_tree, "MAX_CHUNKS", 4)
    by_xla = results(functools.partial(key_tree.join_keys, dtype=jnp.float32), inputs)
    assert all(relative_error(x, y) < 1e-6 for x, y in zip(by_xla, found, strict=True))


# --- The delta rule -------------------------------------------------------------------------------------------------


def test_equal_keys_that_are_reflected_again_and_again():
    """β = 2 and one key: each token undoes what the one before has done, and powers of A reach 10¹⁸."""
    kernel, shape = TABLE["delta_chunks"], (1, 1, 1, 1, 16, 16, 32)
    q, k, v, log_decay, beta, lam = kernel.inputs(shape)
    beta = (0 * beta + 2).at[:, 0].set(1)
    kernel.check("f32", shape, [q, jnp.broadcast_to(k[:, :1], k.shape), v, 0 * log_decay, beta, lam])


def test_few_sequences_have_smaller_programs():
    scan = functools.partial(pallas_kernels.delta_scan, chunk_size=16)
    assert (2, 1) in grids(scan, *TABLE["delta_scan"].inputs((1, 32, 1, 1, 16, 64)))


def test_states_that_are_forgotten():
    kernel, shape = TABLE["join_tree"], (1, 1, 9, 16, 16, 16)
    decay = jnp.asarray([-60, -1, -200, 0, -1e4, -0.1, -50, -0.2, -103], F32)[None, None]
    kernel.check("f32", shape, [decay, *kernel.inputs(shape)[1:]])


def test_a_token_that_forgets():
    inputs = TABLE["delta_scan"].inputs((1, 48, 2, 2, 16, 16))
    inputs[3] = inputs[3].at[:, 21].set(-1e4).at[:, 32, 0].set(-60.0)
    run = functools.partial(pallas_kernels.delta_scan, chunk_size=16, precision="highest", segmented=True)
    found, expected = ([*x[:5], *x[6:]] for x in (results(run, inputs), exact_results(token_by_token, inputs)))
    assert_exact_enough("f32", range(7), found, expected)


def test_what_lies_at_the_end_and_where_nothing_is_read_does_not_matter():
    inputs = TABLE["read_tree"].inputs((1, 2, 6, 16, 16, 16))
    inside, reads, lam, *nodes = inputs
    nodes = [x.at[:, :, 5].set(np.nan) for x in nodes]
    lam = lam.at[:, 4 * 16 : 5 * 16, :, :2].set(np.nan)  # chunk 4 reads at height 2 alone
    found = value_and_gradients(pallas_kernels.read_tree, (inside, reads, lam, *nodes))
    jax.tree.map(np.testing.assert_array_equal, found, value_and_gradients(pallas_kernels.read_tree, inputs))


# --- λ --------------------------------------------------------------------------------------------------------------


def test_levels_that_are_empty_have_no_lambda_and_no_gradient_and_nan_stays_in_its_head_and_token():
    kernel, shape = TABLE["content_lam"], (3, 45, 5, 0)
    scores, scale = kernel.inputs(shape)
    lam, d_scores, _ = kernel.check("f32", shape)
    empty = ~np.broadcast_to(occupied_at(shape), lam.shape)
    assert (np.asarray(lam)[empty] == 0).all() and (np.asarray(d_scores)[empty] == 0).all()
    np.testing.assert_allclose(np.sum(lam, axis=-1), 1.0, rtol=1e-5)
    lam = np.asarray(kernel.run(shape, "f32")(scores.at[1, 7, 2, 0].set(np.nan), scale))
    assert np.isnan(lam[1, 7, 2]).any() and np.isnan(lam).any(axis=-1).sum() == 1


def test_a_scale_of_another_dtype_is_used_in_float32():
    kernel, shape = TABLE["content_lam"], (3, 45, 5, 0)
    scores, scale = kernel.inputs(shape)
    low = scale.astype(jnp.bfloat16)
    found, expected = (results(kernel.run(shape, "f32"), [scores, x]) for x in (low, low.astype(jnp.float32)))
    assert [x.dtype for x in found] == [jnp.float32, jnp.float32, jnp.bfloat16]
    for x, wanted in zip(found, expected, strict=True):
        assert relative_error(x, wanted) < (1e-2 if x.dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize(("name", "shape"), [("content_lam", (2, 64, 4, 0)), ("lam_mlp", ((2, 9), 6, 16))])
def test_parameters_that_all_devices_share_in_shard_map(compiling_for_a_gpu, name, shape):
    inputs = [np.asarray(x) for x in TABLE[name].inputs(shape)]
    mesh, by_batch = Mesh(np.array(jax.devices("cpu")[:2]), "devices"), PartitionSpec("devices")
    specs = by_batch, *[PartitionSpec()] * (len(inputs) - 1)
    sharded = jax.shard_map(TABLE[name].run(shape, "f32"), mesh=mesh, in_specs=specs, out_specs=by_batch)
    found = jax.eval_shape(lambda *x: jax.tree.leaves(value_and_gradients(sharded, x)), *inputs)
    assert [x.shape for x in found] == [inputs[0].shape, *(x.shape for x in inputs)]


def test_normal_distribution():
    x = np.linspace(-8, 8, 10_001)
    below, density = normal_distribution(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(below, stats.norm.cdf(x), atol=1e-6)
    np.testing.assert_allclose(density, stats.norm.pdf(x), atol=1e-6)


# --- Modules and steps that take a kernel ---------------------------------------------------------------------------


def takes_kernel(function, *arguments):
    return "pallas_call" in str(jax.make_jaxpr(function)(*arguments))


def assert_modules_agree(kernel, plainly, params, *inputs, by_kernel=True):
    """The first takes the kernel, if by_kernel; the second does not."""
    assert takes_kernel(kernel.apply, params, *inputs) == by_kernel and not takes_kernel(plainly.apply, params, *inputs)
    outs = (jax.tree.leaves(module.apply(params, *inputs)) for module in (kernel, plainly))
    for result, expected in zip(*outs, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [2, 9])
def test_the_convolution_takes_the_kernel_but_after_other_tokens(length):
    x = TABLE["causal_conv"].inputs((2, length, 6, 4))[0]
    kernel, plainly = (CausalConv(implementation=i) for i in ("pallas", "xla"))
    params = plainly.init(jax.random.key(0), x)
    assert_modules_agree(kernel, plainly, params, x)
    assert_modules_agree(
        kernel, plainly, params, x, None, jnp.arange(length)[None] // 3 % 2 + jnp.zeros((2, 1), jnp.int32)
    )
    assert not takes_kernel(kernel.apply, params, x, plainly.apply(params, x)[1])


@pytest.mark.parametrize(
    ("name", "length", "by_kernel"),
    [("mlp_softplus", 5, True), ("mlp_softmax", 5, True), ("content", 128, True), ("content", 8, False)],
)
def test_lambdas_take_the_kernel_where_there_are_many_tokens(name, length, by_kernel):
    levels = num_levels(length)
    occupied = occupied_levels(jnp.arange(length), levels)[:, None]
    scores = jnp.where(occupied, jax.random.normal(jax.random.key(0), (2, length, 3, levels)), 0.0)
    inputs = (scores, scores, occupied) if name == "content" else (scores,)
    kernel, plainly = (make_lam(name, implementation=i) for i in ("pallas", "xla"))
    params = jax.tree.map(lambda x: x + 0.5, plainly.init(jax.random.key(0), *inputs))
    assert_modules_agree(kernel, plainly, params, *inputs, by_kernel=by_kernel)


def test_the_mlp_raises_where_the_kernel_that_it_is_asked_for_cannot_run():
    message = "jax_default_matmul_precision is 'bfloat16'"
    with jax.default_matmul_precision("bfloat16"), pytest.raises(pallas_kernels.UnsupportedError, match=message):
        make_lam("mlp_softplus", implementation="pallas").init(jax.random.key(0), jnp.ones((5, 2, 6)))


def test_steps_of_rows_at_positions_of_their_own():
    kernel, shape = TABLE["fenwick_step"], (3, 1, 2, 4, 16, 16, 0)
    levels, *inputs = kernel.inputs(shape)
    position = jnp.arange(3)
    found = jax.jit(pallas_kernels.fenwick_step)(levels, position, *inputs)
    of_row = lambda *x: pallas_kernels.fenwick_step(*(y[None] for y in x))  # noqa: E731
    mapped = jax.jit(jax.vmap(of_row))(levels, position, *inputs)
    step = jax.jit(functools.partial(recurrent.step, precision="highest"))
    out, state = step(FenwickState(levels, position), *inputs)
    for result, of_row, expected in zip(found, mapped, (out, state.levels), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(of_row[:, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "dtype", "levels", "key_dim", "by_kernel"),
    [
        (None, jnp.float32, 32, 64, True),
        ("pallas", jnp.float32, 4, 16, True),
        ("recurrent", jnp.float32, 4, 16, False),
        (None, jnp.bfloat16, 4, 16, False),
        (None, jnp.float32, 4, 48, False),
        (None, jnp.float32, 33, 16, False),
    ],
)
def test_decoding_on_a_gpu_takes_the_kernel_where_it_can(
    implementation, dtype, levels, key_dim, by_kernel, compiling_for_a_gpu, monkeypatch
):
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    states, *inputs = TABLE["fenwick_step"].inputs((1, 1, 1, levels, key_dim, 16, 1))
    step = functools.partial(loglinear_jax.fenwick_step, implementation=implementation)
    assert takes_kernel(step, FenwickState(states.astype(dtype), jnp.int32(1)), *inputs) == by_kernel
