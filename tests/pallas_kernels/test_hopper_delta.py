"""The delta rule's kernels for Hopper GPUs against the recurrent form in float64: in the interpreter, which detects races, or
on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import loglinear_jax
import pallas_kernels
from loglinear_jax.ops.positions import forgetting
from pallas_kernels import UnsupportedError
from pallas_kernels.attention import backends
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.common import support
from pallas_kernels.common.gpu import GPUS, as_if_on
from pallas_kernels.delta import one_state
from tests.ops.inputs import relative_error
from tests.pallas_kernels.modes import assert_exact_enough, exact_results, results, value_and_gradients
from tests.pallas_kernels.test_hopper_scan import fast_alone, no_races  # noqa: F401
from tests.pallas_kernels.test_kernels import TABLE, token_by_token

pytestmark = [
    pytest.mark.usefixtures("run_kernels"),
    pytest.mark.skipif(support.mosaic is None, reason="needs JAX 0.11.2, which needs Python 3.12"),
]
SHAPES = {  # B, T, G, H, K, V
    "one chunk": (1, 64, 1, 1, 64, 64),
    "several chunks, heads in groups, dims that are no powers of two": (2, 320, 2, 4, 40, 48),
    "wide": (1, 256, 1, 2, 128, 128),
    "wide keys": (1, 128, 1, 1, 128, 64),
    "wide values": (1, 128, 1, 3, 64, 128),
}


def scan(*arguments):
    return pallas_kernels.delta_scan(*arguments, chunk_size=64, hopper=True)


def inputs_of(shape, seed=0):
    return TABLE["delta_scan"].inputs(shape, "bf16", seed)


def check(inputs, run=scan, exact=token_by_token):
    found, expected = results(run, inputs), exact_results(exact, inputs)
    assert_exact_enough("bf16", range(len(found)), found, expected, floor=1e-3)


@pytest.mark.parametrize("shape", fast_alone(SHAPES, "one chunk"))
def test_outputs_states_and_gradients(shape):
    check(inputs_of(SHAPES[shape]))


@pytest.mark.slow
def test_more_chunks_than_programs(monkeypatch):
    from pallas_kernels.delta.hopper import one_state

    monkeypatch.setattr(one_state, "gpu", lambda: support.Gpu((9, 0), 227 * 1024, 2, "two multiprocessors"))
    check(inputs_of((1, 448, 1, 1, 64, 128)))


@pytest.mark.slow
def test_no_decay_and_strong_decays():
    q, k, v, log_decay, beta, first = inputs_of((1, 192, 1, 3, 64, 64))
    log_decay = log_decay.at[:, :, 0].set(0.0).at[:, :, 1].set(-3.0).at[:, 70, 2].set(-60.0)
    check([q, k, v, log_decay, beta, first])


@pytest.mark.slow
def test_nothing_and_everything_is_overwritten():
    q, k, v, log_decay, beta, first = inputs_of((1, 128, 1, 2, 64, 64))
    check([q, k, v, log_decay, jnp.where(beta < 0.3, 0.0, jnp.where(beta > 0.8, 2.0, beta)), first])


@pytest.mark.slow
def test_segments():
    *inputs, _ = inputs_of((1, 256, 1, 2, 64, 64))
    ids = jnp.cumsum(jnp.isin(jnp.arange(256), jnp.asarray([3, 64, 100, 127, 128, 129])), axis=0)[None]
    starts = jnp.diff(ids, axis=1, prepend=0) > 0

    def run(q, k, v, log_decay, beta):
        first = jnp.zeros((1, 2, 64, 64))
        return pallas_kernels.delta_scan(
            q, k, v, forgetting(log_decay, starts), beta, first, chunk_size=64, segmented=True, hopper=True
        )[0]

    exact = functools.partial(loglinear_jax.gated_delta_attention, segment_ids=ids, implementation="recurrent")
    check(inputs, run, exact)


@pytest.mark.slow
def test_vmap_over_some_arguments_is_a_loop():
    seeds = [inputs_of((1, 128, 1, 2, 64, 64), seed) for seed in range(2)]
    q, rest = seeds[0][0], [jnp.stack(x) for x in list(zip(*seeds, strict=True))[1:]]
    alone = functools.partial(value_and_gradients, scan)
    found = jax.tree.leaves(jax.jit(jax.vmap(alone, in_axes=((None, *[0] * 5),)))((q, *rest)))
    for index in range(2):
        for a, b in zip(found, results(scan, (q, *(x[index] for x in rest))), strict=True):
            assert relative_error(a[index], b) < 1e-3


@pytest.mark.parametrize("x64", [False, True])
def test_runs_on_hopper_where_it_can(x64, compiling_for_a_gpu, monkeypatch):
    monkeypatch.setattr(support, "compute_capability", lambda: (9, 0))
    run = functools.partial(value_and_gradients, functools.partial(pallas_kernels.delta_scan, chunk_size=64))
    for dims, name in (((64, 128), "hopper_delta_scan"), ((32, 64), '"delta_scan"')):
        inputs = inputs_of((1, 128, 1, 2, *dims))
        with jax.enable_x64(x64):
            text = jax.jit(run).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
        assert name in text
        assert ("hopper_delta_gradients" in text) == ("hopper_delta_scan_back" in text) == name.startswith("hopper")


@pytest.mark.parametrize(("dims", "chunk_size"), [((32, 64), 64), ((64, 64), 32)])
def test_what_the_kernels_do_not_take_is_named(dims, chunk_size):
    inputs = inputs_of((1, 128, 1, 2, *dims))
    with pytest.raises(UnsupportedError, match="is 32: the kernels"):
        pallas_kernels.delta_scan(*inputs, chunk_size=chunk_size, hopper=True)


def test_another_mosaic_leaves_the_work_to_triton(compiling_for_a_gpu, monkeypatch):
    """With a JAX that nobody has tried the kernels with."""
    monkeypatch.setattr(support, "NEWEST_TESTED", (0, 10))
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    inputs = inputs_of((1, 128, 1, 2, 64, 64))
    for missing, message in ((None, None), ("BY_COLUMN", "has another Mosaic GPU")):
        backends._raised_by.cache_clear()
        jax.clear_caches()  # what was traced is not tried again
        if missing:
            monkeypatch.delattr(f"pallas_kernels.delta.hopper.one_state.{missing}")
        with as_if_on(GPUS["9.0"]):
            reason = one_state._why_no_hopper(64, 64, jnp.bfloat16, 64)
            assert (message in reason) if message else reason is None
            assert BACKENDS["hopper"].why_not(64, 64, jnp.bfloat16) is None
            jax.eval_shape(functools.partial(pallas_kernels.delta_scan, chunk_size=64), *inputs)
    backends._raised_by.cache_clear()


def test_sharded_with_checked_axes(compiling_for_a_gpu, monkeypatch):
    monkeypatch.setattr(BACKENDS["hopper"], "device", lambda: None)
    inputs = [np.asarray(x) for x in inputs_of((4, 128, 1, 2, 64, 64))]
    mesh, spec = Mesh(np.array(jax.devices("cpu")[:4]), ("batch",)), PartitionSpec("batch")
    shared = jax.shard_map(scan, mesh=mesh, in_specs=spec, out_specs=spec)
    found = jax.tree.leaves(jax.eval_shape(functools.partial(value_and_gradients, shared), inputs))
    assert [x.shape for x in found] == [inputs[2].shape, inputs[5].shape, *(x.shape for x in inputs)]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_the_same_bits_each_time(dims):
    run, inputs = jax.jit(functools.partial(value_and_gradients, scan)), inputs_of((2, 4096, 4, 8, *dims))
    first = run(inputs)
    for _ in range(100):
        for x, y in zip(*map(jax.tree.leaves, (first, run(inputs))), strict=True):
            assert jnp.array_equal(x, y)
