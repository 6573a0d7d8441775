"""Every Triton kernel is lowered for a CUDA GPU where there is none, also under jax_enable_x64; and fits the GPU."""

import dataclasses
import functools
import importlib.util
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels
from pallas_kernels import KERNELS, compile_table
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.tiles import Tiles, choose_tiles
from pallas_kernels.common.gpu import GPUS, as_if_on
from pallas_kernels.common.tiles import Launch

PALLAS = "__gpu$xla.gpu.triton"
# An operation and the beginning of a shape of `compile_table`, and what the module says of its kernels.
CASES = {
    ("log_linear_attention", "K=128 V=64"): (
        PALLAS,
        "chunk_states",
        "outputs",
        "state_gradients",
        "spread_gradients",
        "query_gradients",
        "chunk_gradients",
    ),
    ("gated_linear_attention", "K=128 V=64"): (PALLAS, "outputs", "chunk_gradients"),
    ("delta", "all levels K=V=128"): (PALLAS, "delta_chunks", "delta_value_gradients", "tree_joins"),  # several blocks
    ("delta", "all levels K=V=32"): (PALLAS, "delta_chunks", "delta_pair_gradients", "delta_key_gradients"),
    ("delta", "one state K=V=64"): (PALLAS, "delta_solve", "delta_scan", "delta_scan_back"),  # in float32
    ("delta", "one state K=V=128"): (PALLAS, "delta_solve", "delta_scan", "delta_scan_back", "delta_read_gradients"),
    ("bucket_scores", "K=128"): (PALLAS, "bucket_scores", "bucket_score_gradients"),
    ("fenwick_step", "K=128"): (PALLAS, "output_operand_alias"),  # states are changed in place
    ("causal_conv", "W=4"): (PALLAS,),
    ("causal_conv", "packed W=4"): (PALLAS,),
    ("swiglu", "F=256"): (PALLAS,),
    ("lam_mlp", "L=9 d_h=64 softplus"): (PALLAS,),
    ("content_lam", "L=9"): (PALLAS,),
    ("cross_entropy", "vocab=5000"): ("triton_kernel_call",),
}


def case_of(operation, shape):
    return next(x for x in compile_table.cases() if x.operation == operation and x.shape.startswith(shape))


def parameters():
    for key in CASES:
        modes = [mode for mode in case_of(*key).modes if (key[1], mode) != ("one state K=V=64", "bf16")]
        for mode in modes:
            for x64 in (False, True):
                fast = mode == modes[0] and not x64
                yield pytest.param(*key, mode, x64, marks=() if fast else pytest.mark.slow)


def test_every_kernel_is_among_the_cases():
    assert {operation for operation, _ in CASES} == set(KERNELS)


@pytest.mark.parametrize(("operation", "shape", "mode", "x64"), list(parameters()))
def test_kernels_and_their_gradients_are_lowered(operation, shape, mode, x64):
    if operation == "cross_entropy" and not can_lower_jax_triton():
        pytest.skip("jax-triton and JAX's CUDA plugin are not installed")
    with jax.enable_x64(x64):
        text = compile_table.lowered(case_of(operation, shape), mode, GPUS["8.0"])
    for name in CASES[operation, shape]:
        assert name in text, name


def can_lower_jax_triton():
    if not all(map(importlib.util.find_spec, ("jax_triton", "triton"))):
        return False
    from jax_triton import triton_lib

    return triton_lib.triton_kernel_call_lib is not None


@pytest.mark.parametrize("mapped", [False, True])
def test_cross_entropy_is_traced(mapped):
    """By the jax-triton that is installed: 0.3 passes an aliased output to the kernel, 0.4 does not."""
    pytest.importorskip("jax_triton")
    pytest.importorskip("triton")
    array = compile_table.array
    seeds = (3,) if mapped else ()
    loss = functools.partial(pallas_kernels.cross_entropy, vocab=5000)
    shapes = array(*seeds, 64, 5120, dtype=jnp.bfloat16), array(*seeds, 64, dtype=jnp.int32)
    with as_if_on(GPUS["8.0"]):
        losses, gradients = jax.eval_shape(jax.vmap(loss) if mapped else loss, *shapes)
    assert (losses.shape, gradients.shape, gradients.dtype) == (shapes[1].shape, shapes[0].shape, jnp.bfloat16)


needs_triton = pytest.mark.skipif(
    jax.__version_info__ < (0, 12) or sys.version_info < (3, 12), reason="needs JAX 0.12, which needs Python 3.12"
)


def rows(operation, mode, gpus, part_of_shape="", **more):
    """Of kernels as tests change them by arguments."""
    pytest.importorskip("jax_triton")
    cases = [case for case in compile_table.cases() if case.operation == operation and part_of_shape in case.shape]
    cases = [dataclasses.replace(case, function=functools.partial(case.function, **more)) for case in cases]
    return list(compile_table.table(cases, [GPUS[gpu] for gpu in gpus], [mode]))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("operation", "mode", "gpus", "shape"),
    [
        ("log_linear_attention", "bf16", ("8.0", "10.0", "12.0"), "K=128 V=64"),
        ("log_linear_attention", "f32", ("8.0",), "K=128 V=64"),
        ("log_linear_attention", "bf16", ("8.0", "8.6"), "K=256"),
        ("log_linear_attention", "f32", ("8.6",), "K=256"),
        ("delta", "tf32", ("8.0",), "all levels K=V=64"),
        ("bucket_scores", "f32", ("8.0",), "K=128"),
        ("lam_mlp", "tf32", ("8.0",), "L=14"),
        ("cross_entropy", "bf16", ("8.0", "12.0"), ""),
    ],
)
def test_kernels_fit_and_keep_their_numbers_in_registers(operation, mode, gpus, shape):
    for row in rows(operation, mode, gpus, shape):
        assert row.fits, (row.kernel.name, row.gpu, row.needs)
        assert row.needs.spilled <= compile_table.MOST_SPILLED, (row.kernel.name, row.gpu, row.needs)


@pytest.mark.slow
@needs_triton
def test_chunks_that_are_asked_for_and_too_large_for_a_gpu_are_cut():
    for row in rows("log_linear_attention", "bf16", ("8.6",), "K=256", chunk_size=128):
        assert row.fits, (row.kernel.name, row.needs)


@pytest.mark.parametrize(
    ("gpu", "key_dim", "dtype", "chunk", "expected"),
    [
        ("8.6", 256, "bfloat16", 128, 64),
        ("8.6", 128, "bfloat16", 128, 128),
        ("8.6", 256, "float32", 64, 32),
        ("8.0", 256, "bfloat16", 128, 128),
        ("9.0", 256, "float32", 64, 64),
    ],
)
def test_chunks_fit_shared_memory(gpu, key_dim, dtype, chunk, expected):
    with as_if_on(GPUS[gpu]):
        assert Tiles().with_chunk(chunk).in_shared_memory(key_dim, dtype).chunk == expected


@given(
    length=st.integers(1, 1 << 20),
    key_dim=st.sampled_from([16, 32, 64, 128, 256]),
    value_dim=st.integers(16, 256),
    reps=st.integers(1, 50),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_programs_take_whole_heads_or_whole_fractions(length, key_dim, value_dim, reps, dtype):
    tiles = choose_tiles(length, key_dim, value_dim, dtype)
    assert 16 <= tiles.chunk <= max(2 * length - 1, 16)
    value_blocks = -(-value_dim // tiles.value_block)
    assert tiles.value_block < 2 * value_dim
    fitted = tiles.fitted(reps * value_blocks, value_blocks, groups=1)
    launches = [launch for launch in vars(fitted).values() if isinstance(launch, Launch)]
    assert len(launches) == 7
    for launch in launches:
        assert (reps * value_blocks) % launch.heads == 0
        assert launch.heads % value_blocks == 0 or value_blocks % launch.heads == 0


def test_programs_for_hopper_fill_its_multiprocessors():
    few, many = (HopperTiles().filling(48, 2, length) for length in (2048, 8192))
    assert (few.chunk_states, few.outputs, few.query_gradients, few.chunk_gradients) == (6, 6, 6, 12)
    assert (many.chunk_states, many.outputs, many.query_gradients, many.chunk_gradients) == (24, 24, 24, 48)
    assert many.fitted(48, 1, groups=2) == many
    assert HopperTiles().filling(48, 2, 2048, one_state=True).outputs == 12  # as chunks that read less take less time
    alone = HopperTiles().filling(1, 1, 8192).fitted(1, 1, groups=1)
    assert (alone.outputs, alone.chunk_gradients, alone.state_gradients) == (1, 1, 1)
    assert HopperTiles().filling(6, 1000, 100_000).outputs == 6  # too many programs to follow
    tiles = HopperTiles().filling(1, 16, 8192, sequences=2)  # several groups of one head
    assert tiles.chunk_states == 1
    for groups in (tiles.outputs, tiles.query_gradients, tiles.chunk_gradients):
        assert groups > 1 and 16 % groups == 0
    assert tiles.fitted(1, 1, groups=16) == dataclasses.replace(tiles, state_gradients=1)
