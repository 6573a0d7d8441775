"""silu(gate) · up, whose two gradients one kernel computes: XLA takes a kernel for each, and both read gate and up."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.launch import call, fold_mapped_axes
from pallas_kernels.common.support import interpreting, triton
from pallas_kernels.common.tiles import Launch
from pallas_kernels.registry import Kernel, register

BLOCK = 2048  # numbers a program
MOST_NUMBERS = 2**31 - BLOCK  # which an int32 counts
LAUNCH = Launch(heads=1, warps=4, stages=1)


def swiglu(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """silu(gate) · up, both float32 or both bfloat16.

    Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["swiglu"] says why it cannot run.
    """
    SWIGLU.require(gate.size, gate.dtype)
    return _differentiable(interpreting())(gate, up)


def _limits(size: int, dtype: DTypeLike) -> str | None:
    if not 1 <= size < MOST_NUMBERS:
        return f"gate has {size} numbers: the kernel of SwiGLU takes 1 to {MOST_NUMBERS - 1}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"gate has dtype {jnp.dtype(dtype)}: the kernel of SwiGLU takes float32 and bfloat16"
    return None


SWIGLU = register("swiglu", Kernel("SwiGLU", _limits))


@functools.cache
def _differentiable(interpret: bool):
    backward = fold_mapped_axes(functools.partial(_backward, interpret=interpret))

    @jax.custom_vjp
    def apply(gate, up):
        return jax.nn.silu(gate) * up

    apply.defvjp(lambda gate, up: (apply(gate, up), (gate, up)), lambda operands, dy: backward(*operands, dy))
    return apply


def _backward(gate, up, dy, *, interpret: bool):
    operands = [x.reshape(-1) for x in (gate, up, dy)]
    shape = jax.ShapeDtypeStruct(operands[0].shape, gate.dtype)
    whole = pl.BlockSpec(shape.shape, lambda i: (0,))
    results = call(
        functools.partial(_gradients_kernel, size=gate.size),
        "swiglu_gradients",
        (pl.cdiv(gate.size, BLOCK),),
        [whole] * 3,
        [whole] * 2,
        [shape] * 2,
        LAUNCH,
        interpret,
    )(*operands)
    return tuple(x.reshape(gate.shape) for x in results)


def _gradients_kernel(gate_ref, up_ref, dy_ref, d_gate_ref, d_up_ref, *, size: int):
    index = pl.program_id(0) * BLOCK + lax.broadcasted_iota(jnp.int32, (BLOCK,), 0)
    exists = index < size

    def load(ref):
        return triton.load(ref.at[index], mask=exists, other=0.0).astype(jnp.float32)

    def store(ref, value):
        triton.store(ref.at[index], value.astype(ref.dtype), mask=exists)

    gate, up, dy = load(gate_ref), load(up_ref), load(dy_ref)
    sigmoid = 1.0 / (1.0 + jnp.exp(-gate))
    store(d_up_ref, dy * gate * sigmoid)
    store(d_gate_ref, dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)))
