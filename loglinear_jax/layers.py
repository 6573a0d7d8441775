"""Flax modules between projections and outputs: the decays, and a token mixer of any kind."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.attention import gated_linear_attention, log_linear_attention
from loglinear_jax.lam import make_lam

MIXERS = ("log_linear", "linear", "softmax")
MIN_DT, MAX_DT = 1e-3, 0.1


def init_a_log(key, shape, dtype=jnp.float32):
    """A_log = log(1 .. H): heads forget at rates from slow to fast (Mamba-2)."""
    del key
    return jnp.log(jnp.arange(1, shape[0] + 1, dtype=dtype))


def init_dt_bias(key, shape, dtype=jnp.float32):
    """The inverse softplus of a log-uniform draw from [MIN_DT, MAX_DT] (Mamba-2)."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, np.log(MIN_DT), np.log(MAX_DT)))
    return dt + jnp.log(-jnp.expm1(-dt))


class TokenMixer(nn.Module):
    """Mixes tokens by log-linear, gated linear or softmax attention, after the projections.

    kind "log_linear": o = log_linear_attention with λ from d; "linear": the same with λ ≡ 1, one state, d unused; "softmax":
    causal softmax attention with rotary positions (it has no other sense of order), dt and d unused.

    λ is sown as ("intermediates", "lam_value"): apply the model with mutable=["intermediates"] to read it; otherwise free.
    """

    kind: str
    num_levels: int
    lam: str = "mlp_softplus"
    lam_hidden: int | None = 64
    lam_activation: str = "gelu"
    init_scheme: str = "paper"
    chunk_size: int | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        dt: Float[Array, "B T H"] | None,
        d: Float[Array, "B T H*L"] | None,
    ) -> Float[Array, "B T H V"]:
        heads = v.shape[2]
        if self.kind == "softmax":
            return softmax_attention(q, k, v)
        a_log = self.param("a_log", init_a_log, (heads,))
        dt_bias = self.param("dt_bias", init_dt_bias, (heads,))
        log_decay = -jnp.exp(a_log) * nn.softplus(dt.astype(jnp.float32) + dt_bias)
        if self.kind == "linear":
            return gated_linear_attention(q, k, v, log_decay, chunk_size=self.chunk_size)
        lam_shape = (*v.shape[:3], self.num_levels)
        make = dict(
            hidden=self.lam_hidden,
            activation=self.lam_activation,
            init_scheme=self.init_scheme,
            implementation=self.implementation,
        )
        lam = make_lam(self.lam, **make, name="lam")(jnp.zeros(lam_shape) if d is None else d.reshape(lam_shape))
        self.sow("intermediates", "lam_value", lam)
        return log_linear_attention(
            q, k, v, log_decay, lam, chunk_size=self.chunk_size, implementation=self.implementation
        )


def mixer_input_sizes(kind: str, lam: str, *, heads: int, num_levels: int) -> tuple[int, int]:
    """Widths of the projections dt and d that a TokenMixer of this kind and λ uses (0: none)."""
    if kind == "softmax":
        return 0, 0
    needs_d = kind == "log_linear" and make_lam(lam).needs_input
    return heads, heads * num_levels if needs_d else 0


def softmax_attention(
    q: Float[Array, "B T G K"], k: Float[Array, "B T G K"], v: Float[Array, "B T H V"]
) -> Float[Array, "B T H V"]:
    """Causal softmax attention with rotary positions, scaled by 1/√K, through jax.nn.dot_product_attention."""
    value_dim, key_dim = v.shape[-1], q.shape[-1]
    q, k = (jnp.repeat(rotate_by_position(x), v.shape[2] // q.shape[2], axis=2) for x in (q, k))
    # The library wants one size for keys and values: the smaller is padded with zeros.
    size = max(key_dim, value_dim)
    q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v.astype(q.dtype), is_causal=True, scale=key_dim**-0.5)
    return out[..., :value_dim]


def rotate_by_position(x: Float[Array, "B T G K"], base: float = 10000.0) -> Float[Array, "B T G K"]:
    """Rotary position embedding (Su et al. 2021) over the two halves of K; an odd last feature stays as it is."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angle)[:, None, :], x.dtype) for f in (np.cos, np.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
