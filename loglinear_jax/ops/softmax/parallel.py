"""Causal softmax attention over the whole sequence, with rotary positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import runs_on_gpu


def softmax_attention(
    q: Float[Array, "B T G K"], k: Float[Array, "B T G K"], v: Float[Array, "B T H V"]
) -> Float[Array, "B T H V"]:
    """Causal softmax attention with rotary positions, scaled by 1/√K, through jax.nn.dot_product_attention."""
    # cuDNN's is FlashAttention; without it the scores take O(T²) memory.
    fast = runs_on_gpu() and v.dtype in (jnp.bfloat16, jnp.float16) and max(q.shape[-1], v.shape[-1]) <= 128
    fast = fast and max(q.shape[-1], v.shape[-1]) % 8 == 0
    return dot_product_attention(
        rotate_by_position(q), rotate_by_position(k), v, is_causal=True, implementation="cudnn" if fast else None
    )


def rotate_by_position(
    x: Float[Array, "B T G K"], first_position: Int[Array, ""] | int = 0, base: float = 10000.0
) -> Float[Array, "B T G K"]:
    """Rotary position embedding (Su et al. 2021) over the two halves of K; an odd last feature stays as it is."""
    half = x.shape[-1] // 2
    frequency = jnp.asarray(base ** (-np.arange(half) / half), jnp.float32)
    angle = (first_position + jnp.arange(x.shape[1]))[:, None] * frequency
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def dot_product_attention(q, k, v, **how):
    value_dim, key_dim, heads = v.shape[-1], q.shape[-1], v.shape[2]
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    # The library wants one size for keys and values: the smaller is padded with zeros.
    size = max(key_dim, value_dim)
    q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v.astype(q.dtype), scale=key_dim**-0.5, **how)
    return out[..., :value_dim]
