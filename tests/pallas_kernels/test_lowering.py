"""Every Triton kernel is lowered for a CUDA GPU where there is none, also under jax_enable_x64."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from loglinear_jax import (
    bucket_scores,
    gated_delta_attention,
    log_linear_attention,
    log_linear_delta_attention,
    num_levels,
    occupied_levels,
)
from pallas_kernels.common.gpu import GPUS, as_if_on
from tests.pallas_kernels.modes import DTYPES, PRECISIONS

B, T, G, H, K, V = 1, 256, 1, 4, 64, 64
L = num_levels(T)


def arrays(*shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def qkv(dtype, dim=64):
    return arrays((B, T, G, dim), (B, T, G, dim), (B, T, H, dim), dtype=dtype)


def by_kernels(operation):
    return functools.partial(operation, implementation="pallas")


DECAY, LAM = arrays((B, T, H)), arrays((B, T, H, L))
CALLS = {
    "log_linear": (
        by_kernels(log_linear_attention),
        lambda dtype: [*qkv(dtype), *DECAY, *LAM],
        "chunk_states",
        "outputs",
        "state_gradients",
        "spread_gradients",
        "query_gradients",
        "chunk_gradients",
    ),
    "delta": (
        by_kernels(log_linear_delta_attention),
        lambda dtype: [*qkv(dtype, 128 if dtype == jnp.bfloat16 else 24), *DECAY, *DECAY, *LAM],  # 128: several blocks
        "delta_chunks",
        "delta_value_gradients",
        "delta_pair_gradients",
        "delta_key_gradients",
        "tree_joins",
    ),
    "gated_delta": (
        by_kernels(gated_delta_attention),
        lambda dtype: [*qkv(dtype), *DECAY, *DECAY],
        "delta_chunks",
        "delta_carry",
        "delta_carry_back",
        "delta_map_gradients",
    ),
    "bucket_scores": (
        by_kernels(bucket_scores),
        lambda dtype: [*qkv(dtype)[:2], *DECAY],
        "bucket_scores",
        "bucket_score_gradients",
    ),
    "causal_conv": (
        pallas_kernels.causal_conv,
        lambda dtype: arrays((2, T, 96), dtype=dtype) + arrays((4, 96), (96,)),
    ),
    "swiglu": (pallas_kernels.swiglu, lambda dtype: arrays((2, T, 96), (2, T, 96), dtype=dtype)),
    "lam_mlp": (
        functools.partial(pallas_kernels.lam_mlp, out="softplus", activation="gelu"),
        lambda dtype: arrays((B, T, H, L), (L, 64), (64,), (64, L), (L,)),
    ),
    "content_lam": (
        lambda scores, scale: pallas_kernels.content_lam(scores, scale, occupied_levels(jnp.arange(T), L)[:, None]),
        lambda dtype: arrays((B, T, H, L), (H,)),
    ),
}


def step(*arguments):
    return pallas_kernels.fenwick_step(*arguments)


STEP = [
    *arrays((B, H, L, K, V)),
    *arrays((B,), dtype=jnp.int32),
    *arrays((B, G, K), (B, G, K), (B, H, V), (B, H), (B, H, L)),
]


@pytest.fixture(autouse=True)
def as_if_there_were_a_gpu(no_hopper):
    with as_if_on(GPUS["8.0"]):
        yield


MODES = [
    ("bf16", False),
    pytest.param("tf32", False, marks=pytest.mark.slow),
    pytest.param("f32", False, marks=pytest.mark.slow),
    ("f32", True),
]


@pytest.mark.parametrize(("mode", "x64"), MODES)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_and_their_gradients_are_lowered(name, mode, x64):
    function, arguments, *kernels = CALLS[name]

    def both(*arguments):
        out, pull = jax.vjp(function, *arguments)
        return out, pull(out)

    with jax.enable_x64(x64), jax.default_matmul_precision(PRECISIONS[mode] or "highest"):
        text = jax.jit(both).trace(*arguments(DTYPES[mode])).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
    for kernel in kernels:
        assert kernel in text, kernel


@pytest.mark.parametrize("x64", [False, True])
def test_a_step_is_lowered(x64):
    with jax.enable_x64(x64):
        text = jax.jit(step).trace(*STEP).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text and "output_operand_alias" in text  # states are changed in place


@pytest.mark.parametrize("mapped", [False, True])
def test_cross_entropy_is_traced(mapped, monkeypatch):
    """By the jax-triton that is installed: 0.3 passes an aliased output to the kernel, 0.4 does not."""
    pytest.importorskip("jax_triton")
    pytest.importorskip("triton")
    seeds = (3,) if mapped else ()
    loss = functools.partial(pallas_kernels.cross_entropy, vocab=5000)
    shapes = arrays((*seeds, 64, 5120), dtype=jnp.bfloat16) + arrays((*seeds, 64), dtype=jnp.int32)
    losses, gradients = jax.eval_shape(jax.vmap(loss) if mapped else loss, *shapes)
    assert (losses.shape, gradients.shape, gradients.dtype) == (shapes[1].shape, shapes[0].shape, jnp.bfloat16)
