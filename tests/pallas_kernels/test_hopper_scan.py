"""The kernels for Hopper GPUs against the parallel form in float64: in the interpreter, which detects races, or on a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import pallas_kernels
from loglinear_jax import gated_linear_attention
from loglinear_jax.ops.positions import forgetting
from pallas_kernels import UnsupportedError, fenwick_attention, registry
from pallas_kernels.attention import backends
from pallas_kernels.attention.backends import BACKENDS, choose_backend
from pallas_kernels.attention.hopper.tiles import HopperTiles, choose_hopper_tiles
from pallas_kernels.common import support
from pallas_kernels.common.gpu import GPUS, as_if_on
from tests.ops.inputs import relative_error
from tests.pallas_kernels.modes import assert_exact_enough, exact_results, results, value_and_gradients
from tests.pallas_kernels.test_fenwick_attention import (
    ATTENTION,
    check_continued,
    check_extreme_decays,
    check_segments,
    inputs_of,
)

pytestmark = [
    pytest.mark.usefixtures("run_kernels"),
    pytest.mark.skipif(support.mosaic is None, reason="needs JAX 0.11.2, which needs Python 3.12"),
]


@pytest.fixture(autouse=True)
def no_races(capsys):
    """The interpreter of JAX 0.11 prints the races that it detects; that of JAX 0.12 raises."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


def fast_alone(cases, *fast):
    """The fast tier runs each kernel once: the interpreter takes seconds for a program, and minutes for all of these."""
    return [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in cases]


SHAPES = {  # batch, length, groups, heads, K, V
    "one block": ((2, 40, 1, 2, 64, 64), {}),
    "one chunk": ((1, 100, 1, 2, 64, 48), {}),
    "an odd length, a few chunks": ((1, 300, 1, 2, 40, 64), {}),
    "chunks of one block": ((1, 200, 1, 2, 64, 64), dict(rows=1)),
    "one chunk more than a power of two": ((1, 577, 1, 1, 64, 64), dict(radix=2)),
    "a group for each head, wide": ((1, 260, 2, 2, 128, 128), {}),
    "heads in a group, wide": ((1, 260, 1, 3, 128, 128), dict(state_gradients=1)),
    "groups in programs": ((2, 300, 4, 4, 64, 64), dict(outputs=2, query_gradients=2, chunk_gradients=2)),
    "groups in a program, an odd number": ((1, 200, 3, 3, 64, 48), dict(rows=1)),
    "heads in groups and programs": ((1, 257, 2, 8, 128, 64), dict(outputs=2, query_gradients=2, chunk_gradients=2)),
    "warpgroups that share keys": ((1, 300, 1, 6, 64, 64), dict(warpgroups=3)),
}


@pytest.mark.parametrize("shape", fast_alone(SHAPES, "one block", "an odd length, a few chunks"))
def test_outputs_and_gradients(shape):
    sizes, changes = SHAPES[shape]
    tiles = HopperTiles(**{"value_block": 64 * -(-sizes[-1] // 64), "rows": 1 if sizes[1] <= 64 else 2} | changes)
    ATTENTION.check("bf16", sizes, tiles=tiles)


ONE_STATE = {  # chunks by their number; where segments start
    "1": ((1, 100, 1, 2, 64, 48), {}, [64]),
    "2, heads in groups, wide": ((1, 200, 1, 3, 128, 128), dict(state_gradients=1), []),
    "3, groups in programs": ((1, 300, 2, 2, 64, 64), dict(outputs=2, query_gradients=2, chunk_gradients=2), []),
    "5, heads in groups and programs": ((1, 300, 2, 4, 64, 64), dict(rows=1, outputs=1, chunk_gradients=1), []),
    "7, in several blocks of the scan": ((1, 800, 1, 2, 64, 64), dict(radix=4), []),
    "segments": ((1, 300, 1, 2, 64, 64), {}, [3, 64, 100, 127, 128, 129, 130]),
}


@pytest.mark.parametrize("shape", fast_alone(ONE_STATE, "segments"))
def test_one_state(shape):
    (batch, length, *sizes), changes, starts = ONE_STATE[shape]
    starts = jnp.asarray(np.isin(np.arange(length), starts)[None])
    tiles = HopperTiles(**dict(value_block=64 * -(-sizes[-1] // 64)) | changes)

    def attend(q, k, v, log_decay):
        return fenwick_attention(q, k, v, forgetting(log_decay, starts), None, tiles=tiles)

    *inputs, _ = inputs_of("bf16", batch, length, *sizes, min_decay=-0.05)  # so slow that the first chunks count
    exact = functools.partial(gated_linear_attention, segment_ids=jnp.cumsum(starts, axis=1), implementation="parallel")
    assert_exact_enough("bf16", "oqkvg", results(attend, inputs), exact_results(exact, inputs))


@pytest.mark.parametrize("decay", fast_alone(["none", "strong", "reset"]))
def test_extreme_decays(decay):
    check_extreme_decays(decay, 300, 64, tiles=choose_hopper_tiles(300, 64))


@pytest.mark.slow
def test_decays_above_one_are_one_and_levels_beyond_the_sequence_change_nothing():
    q, k, v, log_decay, lam = inputs_of("bf16", 1, 200, 1, 3, 64, 64)
    above, more = log_decay.at[:, ::7].set(0.5), jnp.pad(lam, [(0, 0)] * 3 + [(0, 3)], constant_values=np.nan)
    attend = functools.partial(fenwick_attention, tiles=choose_hopper_tiles(200, 64))
    found = results(attend, (q, k, v, above, more))
    expected = results(attend, (q, k, v, jnp.minimum(above, 0.0), lam))
    for x, y in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    np.testing.assert_array_equal(np.asarray(found[4][:, ::7]), 0)
    np.testing.assert_array_equal(np.asarray(found[5]), np.pad(expected[5], [(0, 0)] * 3 + [(0, 3)]))


@pytest.mark.parametrize(
    ("shape", "windows", "levels", "rows"),
    [
        pytest.param((1, 300, 1, 2, 64, 64), 5, 13, 2, marks=pytest.mark.slow),
        ((2, 64, 2, 2, 64, 48), 2, 9, 1),
        pytest.param((1, 512, 1, 3, 128, 64), 9, 14, 2, marks=pytest.mark.slow),
    ],
)
def test_what_came_before_is_read_and_the_end_is_returned(shape, windows, levels, rows):
    tiles = HopperTiles(value_block=64 * -(-shape[-1] // 64), rows=rows)
    check_continued("bf16", shape, windows, levels, inside=6 + rows, tiles=tiles)


@pytest.mark.slow
def test_segments_are_as_alone():
    starts = np.isin(np.arange(300), [3, 64, 127, 128, 129, 130, 250])[None]
    check_segments("bf16", (1, 300, 1, 2, 64, 64), starts, tiles=choose_hopper_tiles(300, 64))


@pytest.mark.slow
def test_vmap_over_some_arguments_is_a_loop():
    attend = functools.partial(fenwick_attention, tiles=choose_hopper_tiles(130, 64))
    seeds = [inputs_of("bf16", 1, 130, 1, 2, 64, 64, seed=seed) for seed in range(2)]
    q, rest = seeds[0][0], [jnp.stack(x) for x in list(zip(*seeds, strict=True))[1:]]
    alone = functools.partial(value_and_gradients, attend)
    found = jax.tree.leaves(jax.jit(jax.vmap(alone, in_axes=((None, 0, 0, 0, 0),)))((q, *rest)))
    for index in range(2):
        for a, b in zip(found, results(attend, (q, *(x[index] for x in rest))), strict=True):
            assert relative_error(a[index], b) < 1e-3  # on a GPU what XLA does may be rounded otherwise


@pytest.mark.parametrize(("mapped", "one_state"), [(False, False), (True, False), (True, True)])
def test_sharded_with_checked_axes(compiling_for_a_gpu, monkeypatch, mapped, one_state):
    monkeypatch.setattr(BACKENDS["hopper"], "device", lambda: None)
    inputs = [np.asarray(x) for x in inputs_of("bf16", 4, 300, 1, 2, 64, 64)][: 4 if one_state else 5]
    attend = lambda *x: fenwick_attention(*x, *[None][: 5 - len(x)], tiles=choose_hopper_tiles(300, 64))  # noqa: E731
    if mapped:
        attend = lambda *x, one=attend: jax.vmap(one)(*(y[:, None] for y in x))[:, 0]  # noqa: E731
    mesh, spec = Mesh(np.array(jax.devices("cpu")[:4]), ("batch",)), PartitionSpec("batch")
    shared = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    found = jax.tree.leaves(jax.eval_shape(functools.partial(value_and_gradients, shared), inputs))
    assert [x.shape for x in found] == [inputs[2].shape, *(x.shape for x in inputs)]


def test_a_mesh_may_have_any_axes(compiling_for_a_gpu, monkeypatch):
    """Where it has one that is called as an axis of a kernel's grid, the kernel does not ask on which device it is."""
    monkeypatch.setattr(support, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(support, "triton", None)
    attend = functools.partial(fenwick_attention, tiles=choose_hopper_tiles(700, 64))
    inputs = inputs_of("bf16", 1, 700, 1, 2, 64, 64)
    names = ("sequence", "chunk", "block", "head", "node", "program", "worker")
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape((1,) * len(names)), names)
    shared = jax.shard_map(attend, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    texts = [
        jax.jit(functools.partial(value_and_gradients, run)).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
        for run in (attend, shared)
    ]
    assert [text.count("nvshmem") for text in texts] == [0, 0]


def test_what_kernels_change_in_place_is_not_collected_as_such(compiling_for_a_gpu, monkeypatch):
    """A loop's collection of states has a barrier before it: see `changed_in_place`. `test_on_gpu.py` runs such a loop."""
    monkeypatch.setattr(BACKENDS["hopper"], "device", lambda: None)
    attend = functools.partial(fenwick_attention, tiles=choose_hopper_tiles(700, 64))
    inputs = [jnp.stack([x, x]) for x in inputs_of("bf16", 1, 700, 1, 2, 64, 64)]

    def one_after_another(*inputs):
        return jax.lax.scan(lambda carry, x: (carry, attend(*x)), 0, inputs)[1]

    traced = jax.jit(lambda *x: jax.vjp(one_after_another, *x)).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"hopper_merge_states(?s:.)*?optimization_barrier(?s:.)*?dynamic_update", text)


KERNELS = ("chunk_states", "outputs", "state_gradients", "query_gradients", "chunk_gradients")
TREE, ONE = ("merge_states", "spread_gradients"), ("prefix_states", "suffix_gradients")


# With 16 sequences a program has several heads, or groups.
@pytest.mark.parametrize(
    ("dims", "x64", "batch", "groups", "joins"),
    [
        ((64, 64), False, 16, 4, TREE),
        ((128, 64), True, 1, 1, TREE),
        ((128, 64), False, 16, 1, TREE),
        ((128, 128), False, 16, 4, TREE),
        ((128, 128), False, 16, 2, TREE),  # heads that share keys need the most shared memory
        ((64, 64), False, 16, 4, ONE),
        ((128, 128), True, 1, 1, ONE),
    ],
)
def test_compiles_for_hopper(compiling_for_a_gpu, monkeypatch, dims, x64, batch, groups, joins):
    """All of it, without a GPU; without Triton; and under jax_enable_x64."""
    monkeypatch.setattr(support, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(support, "triton", None)
    inputs = inputs_of("bf16", batch, 700, groups, 4, *dims)[: 5 if joins == TREE else 4]
    attend = lambda *x: fenwick_attention(*x, *[None][: 5 - len(x)])  # noqa: E731
    with jax.enable_x64(x64):
        text = jax.jit(functools.partial(value_and_gradients, attend)).trace(inputs)
        text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert [name for name in (*KERNELS, *TREE, *ONE) if f"hopper_{name}" in text] == [*KERNELS, *joins]


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "chunk_size", "backend"),
    [
        ((9, 0), jnp.bfloat16, (128, 64), None, "hopper"),
        ((9, 0), jnp.bfloat16, (128, 64), 64, "hopper"),
        ((9, 0), jnp.bfloat16, (128, 64), 32, "triton"),
        ((9, 0), jnp.bfloat16, (32, 64), None, "triton"),
        ((9, 0), jnp.bfloat16, (64, 256), None, "triton"),
        ((9, 0), jnp.float32, (128, 64), None, "triton"),
        ((8, 0), jnp.bfloat16, (128, 64), None, "triton"),
        ((10, 0), jnp.bfloat16, (128, 64), None, "triton"),
    ],
)
def test_whose_kernels_run_where(monkeypatch, caplog, capability, dtype, dims, chunk_size, backend):
    monkeypatch.setattr(support, "why_no_device", lambda: None)
    monkeypatch.setattr(support, "compute_capability", lambda: capability)
    with pallas_kernels.interpret(False):
        registry.tell_once.cache_clear()
        assert [choose_backend(None, *dims, dtype, chunk_size) for _ in range(2)] == [backend] * 2
        told = [message for message in caplog.messages if "twice as slow as those for Hopper" in message]
        assert len(told) == (backend == "triton" and capability == (9, 0) and min(dims) > 32)
        monkeypatch.setattr(support, "mosaic", None)
        assert choose_backend(None, *dims, dtype, chunk_size) == "triton"
        monkeypatch.setattr(support, "triton", None)
        with pytest.raises(UnsupportedError, match="has no Triton lowering of Pallas"):
            choose_backend(None, *dims, dtype, chunk_size)


@pytest.mark.parametrize("changed", ["wgmma", None])
def test_a_mosaic_that_has_changed_leaves_the_work_to_triton(changed, monkeypatch, caplog):
    """With a JAX that nobody has tried the kernels with, of which there is one warning."""
    monkeypatch.setattr(support, "NEWEST_TESTED", (0, 10))
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    backends._raised_by.cache_clear()
    jax.clear_caches()  # what was traced is not tried again
    registry.tell_once.cache_clear()
    if changed:
        monkeypatch.delattr(f"jax.experimental.pallas.mosaic_gpu.{changed}")
    with as_if_on(GPUS["9.0"]):
        assert choose_backend(None, 64, 64, jnp.bfloat16) == ("triton" if changed else "hopper")
        assert pallas_kernels.KERNELS["log_linear_attention"].is_best(64, 64, jnp.bfloat16)
        assert "is newer than 0.10, the newest that the Pallas kernels were tested with" in caplog.text
        reason = BACKENDS["hopper"].why_not(64, 64, jnp.bfloat16)
        assert ("has another Mosaic GPU" in reason) if changed else reason is None
    backends._raised_by.cache_clear()


def test_kernels_that_were_asked_for_and_cannot_run_are_refused():
    with pytest.raises(ValueError, match="span is 4: expected 1 or 2"):
        HopperTiles(span=4)
    with pytest.raises(ValueError, match="warpgroups is 4: expected 1, 2 or 3"):
        HopperTiles(warpgroups=4)
    inputs = inputs_of("f32", 1, 100, 1, 2, 64, 64)
    with pytest.raises(UnsupportedError, match="dtype float32: the kernels for Hopper take bfloat16"):
        fenwick_attention(*inputs, tiles=choose_hopper_tiles(100, 64))
    inputs = inputs_of("bf16", 1, 100, 1, 2, 32, 64)
    with pytest.raises(UnsupportedError, match="K, the key dim, is 32: the kernels for Hopper take 33 to 128"):
        fenwick_attention(*inputs, tiles=choose_hopper_tiles(100, 64))
