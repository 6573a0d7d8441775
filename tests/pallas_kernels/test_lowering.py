"""Every Triton kernel is lowered for a CUDA GPU where there is none, also under jax_enable_x64."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import KERNELS, compile_table
from pallas_kernels.common.gpu import GPUS, as_if_on

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
    ("delta", "one state K=V=64"): (PALLAS, "delta_carry", "delta_carry_back", "delta_map_gradients"),  # in float32
    ("delta", "one state K=V=128"): (PALLAS, "delta_solve", "delta_scan", "delta_scan_back", "delta_read_gradients"),
    ("bucket_scores", "K=128"): (PALLAS, "bucket_scores", "bucket_score_gradients"),
    ("fenwick_step", "K=128"): (PALLAS, "output_operand_alias"),  # states are changed in place
    ("causal_conv", "W=4"): (PALLAS,),
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
                fast = mode == modes[-1 if x64 else 0]
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
