"""The kernels for Hopper GPUs that carry the delta rule's states of all levels, against a state for every level in float64: in
the interpreter, which detects races, or on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import loglinear_jax
import pallas_kernels
from pallas_kernels import UnsupportedError
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.common import support
from pallas_kernels.delta import levels
from pallas_kernels.delta.tree import MapSizes
from tests.ops.inputs import relative_error
from tests.pallas_kernels.modes import assert_exact_enough, exact_results, results, value_and_gradients
from tests.pallas_kernels.test_hopper_scan import fast_alone, no_races  # noqa: F401
from tests.pallas_kernels.test_kernels import TABLE, joined, node_by_node

pytestmark = [
    pytest.mark.usefixtures("run_kernels"),
    pytest.mark.skipif(support.mosaic is None, reason="needs JAX 0.11.2, which needs Python 3.12"),
]
SHAPES = {  # B, H, N, C, K, V
    "two chunks": (1, 1, 2, 64, 64, 64),
    "three chunks, wide": (1, 1, 3, 64, 128, 128),
    "all levels in a pass, dims that are no powers of two": (2, 2, 7, 64, 40, 100),
    "four levels in a pass, wide keys": (1, 1, 16, 64, 128, 64),
    "two passes, the last segment is a part": (1, 1, 17, 64, 64, 64),
    "two passes, whole segments": (1, 1, 32, 64, 64, 64),
}


def inputs_of(shape, seed=0):
    inside, reads, lam, decay, lost, states = TABLE["read_tree"].inputs(shape, "bf16", seed)
    return [inside, reads, lam, decay, 0.5 * lost, states]  # so small that states do not grow over many chunks


def scan(inside, reads, lam, decay, lost, states):
    return pallas_kernels.read_levels(inside, reads, lam, jnp.log(decay), lost, states, hopper=True)


def exact(inside, reads, lam, decay, lost, states):
    return node_by_node(inside, reads, lam, *joined(jnp.log(decay), lost, states))


@pytest.mark.parametrize("shape", fast_alone(SHAPES, "two chunks"))
def test_outputs_and_gradients(shape):
    inputs = inputs_of(SHAPES[shape])
    found = results(scan, inputs)
    assert [x.dtype for x in found[1:]] == [x.dtype for x in inputs]
    assert_exact_enough("bf16", range(7), found, exact_results(exact, inputs), floor=1e-3)


@pytest.mark.slow
def test_more_chunks_than_programs(monkeypatch):
    from pallas_kernels.delta.hopper import level_gradients

    monkeypatch.setattr(level_gradients, "gpu", lambda: support.Gpu((9, 0), 227 * 1024, 2, "two multiprocessors"))
    inputs = inputs_of((1, 1, 5, 64, 64, 128))
    found, expected = results(scan, inputs), exact_results(exact, inputs)
    assert_exact_enough("bf16", range(7), found, expected, floor=1e-3)


@pytest.mark.slow
def test_three_passes(monkeypatch):
    """Of one level a warpgroup, as three passes of full size need 257 chunks."""
    from pallas_kernels.delta.hopper import passes

    monkeypatch.setattr(passes, "MOST_LEVELS", 2)
    monkeypatch.setattr(passes, "OF_WORKER", 1)
    levels._differentiable.cache_clear()
    jax.clear_caches()  # what was traced with the usual passes
    for num_chunks in (18, 32):
        inputs = inputs_of((1, 1, num_chunks, 64, 40, 64))
        found, expected = results(scan, inputs), exact_results(exact, inputs)
        assert_exact_enough("bf16", range(7), found, expected, floor=1e-3)
    levels._differentiable.cache_clear()
    jax.clear_caches()


@pytest.mark.parametrize("heights", range(1, 20))
def test_passes_share_the_levels_and_all_but_the_last_hand_on(heights):
    from pallas_kernels.delta.hopper.passes import MOST_LEVELS, passes_for

    sizes = dict(batch=1, heads=1, chunk=64, key_dim=64, value_dim=64, precision="bf16", interpret=True)
    passes = passes_for(MapSizes(num_chunks=2**heights, **sizes))
    assert [height for one in passes for height in range(one.first, one.first + one.num_levels)] == list(range(heights))
    assert all(one.num_levels <= MOST_LEVELS and one.is_last == (one is passes[-1]) for one in passes)
    assert all(one.workers == 2 for one in passes[:-1])


@pytest.mark.slow
def test_lam_of_levels_that_a_chunk_does_not_have_may_be_nan():
    inside, reads, lam, *nodes = inputs_of((1, 1, 4, 64, 64, 64))
    has_level = (np.arange(256)[:, None] // 64 >> np.arange(2) & 1 == 1)[None, :, None]
    found, expected = (
        results(scan, (inside, reads, jnp.where(has_level, lam, other), *nodes)) for other in (jnp.nan, 0.0)
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not jnp.where(has_level, 0.0, found[3]).any()


@pytest.mark.slow
def test_the_whole_attention(monkeypatch):
    """Log decays of -inf, which end a document, included."""
    monkeypatch.setattr(pallas_kernels, "read_levels", functools.partial(pallas_kernels.read_levels, hopper=True))
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    q, k, v = draw(1, 300, 1, 64), draw(1, 300, 1, 64), draw(1, 300, 2, 64)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, beta = (jnp.asarray(rng.uniform(*x, (1, 300, 2)), jnp.float32) for x in ((-0.1, 0), (0, 1)))
    lam = jnp.asarray(rng.uniform(0, 2, (1, 300, 2, 10)), jnp.float32)
    ids = jnp.asarray(np.searchsorted([3, 64, 150], np.arange(300), side="right")[None], jnp.int32)
    for segments in (None, ids):
        run = functools.partial(loglinear_jax.log_linear_delta_attention, segment_ids=segments)
        found = results(functools.partial(run, implementation="pallas"), (q, k, v, log_decay, beta, lam))
        expected = exact_results(functools.partial(run, implementation="recurrent"), (q, k, v, log_decay, beta, lam))
        assert_exact_enough("bf16", range(7), found, expected, floor=1e-3)


@pytest.mark.slow
def test_vmap_over_some_arguments_gives_what_a_loop_gives():
    seeds = [inputs_of((1, 2, 3, 64, 64, 64), seed) for seed in range(2)]
    inside, rest = seeds[0][0], [jnp.stack(x) for x in list(zip(*seeds, strict=True))[1:]]
    alone = functools.partial(value_and_gradients, scan)
    found = jax.tree.leaves(jax.jit(jax.vmap(alone, in_axes=((None, *[0] * 5),)))((inside, *rest)))
    for index in range(2):
        own = results(scan, (inside, *(x[index] for x in rest)))
        for a, b in zip(found, own, strict=True):
            assert relative_error(a[index], b) < 1e-3


@pytest.mark.parametrize("x64", [False, True])
def test_runs_on_hopper_where_it_can_and_pays(x64, compiling_for_a_gpu, monkeypatch):
    monkeypatch.setattr(support, "compute_capability", lambda: (9, 0))
    for heads, dim in ((64, 64), (64, 32), (63, 64)):
        q, of_head = jnp.zeros((1, 192, heads, dim), jnp.bfloat16), jnp.zeros((1, 192, heads))
        inputs = q, q, q, of_head, of_head, jnp.zeros((1, 192, heads, 9))
        run = functools.partial(loglinear_jax.log_linear_delta_attention, implementation="pallas")
        with jax.enable_x64(x64):
            traced = jax.jit(functools.partial(value_and_gradients, run)).trace(inputs)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        for name in ("levels_mosaic", "levels_back", "level_gradients"):
            assert (f"hopper_delta_{name}" in text) == ((heads, dim) == (64, 64))
        assert ("tree_reads" in text) == ((heads, dim) != (64, 64))


@pytest.mark.parametrize(
    ("shape", "message"), [((1, 1, 2, 64, 32, 64), "K, the key dim, is 32"), ((1, 1, 2, 32, 64, 64), "is 32")]
)
def test_what_the_kernels_do_not_take_is_named(shape, message):
    with pytest.raises(UnsupportedError, match=message):
        scan(*inputs_of(shape))


def test_sharded_with_checked_axes(compiling_for_a_gpu, monkeypatch):
    monkeypatch.setattr(BACKENDS["hopper"], "device", lambda: None)
    inputs = [np.asarray(x) for x in inputs_of((4, 2, 2, 64, 64, 64))]
    mesh, spec = Mesh(np.array(jax.devices("cpu")[:4]), ("batch",)), PartitionSpec("batch")
    shared = jax.shard_map(scan, mesh=mesh, in_specs=spec, out_specs=spec)
    found = jax.tree.leaves(jax.eval_shape(functools.partial(value_and_gradients, shared), inputs))
    assert [x.shape for x in found] == [inputs[0].shape, *(x.shape for x in inputs)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_chunks", [128, 300, 1025])
def test_many_chunks_are_as_by_the_tree(num_chunks):
    def by_tree(inside, reads, lam, decay, lost, states):
        return pallas_kernels.read_tree(inside, reads, lam, *pallas_kernels.join_tree(jnp.log(decay), lost, states))

    inputs = inputs_of((1, 2, num_chunks, 64, 128, 128))
    for x, y in zip(results(scan, inputs), results(by_tree, inputs), strict=True):
        assert relative_error(x, y) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_the_same_bits_each_time(dims):
    run, inputs = jax.jit(functools.partial(value_and_gradients, scan)), inputs_of((2, 8, 64, 64, *dims))
    first = run(inputs)
    for _ in range(100):
        for x, y in zip(*map(jax.tree.leaves, (first, run(inputs))), strict=True):
            assert jnp.array_equal(x, y)
