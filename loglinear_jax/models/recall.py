"""The recall model of the paper: post-norm layers, from token ids to logits."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import num_levels
from loglinear_jax.layers import MixerSettings, mixer_input_sizes

small_normal = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class RecallSettings(MixerSettings):
    """Settings of a RecallModel.

    vocab_size, max_length: ids 0 .. vocab_size-1; the longest sequence, which sets the number of levels of λ.
    mixer: "log_linear", "linear" (gated linear attention, one state) or "softmax".
    lam, lam_hidden, lam_activation: see loglinear_jax.lam; lam_hidden None means twice the number of levels.
    hidden, layers, heads, head_dim, key_dim, key_groups: sizes; key_groups None means one per head.
    init_scheme: "paper", or "released" for the initial values that the released code ends up with.
    chunk_size, implementation: see log_linear_attention.
    dtype: of matrix products; parameters, decays, λ, norms and logits are float32.
    """

    vocab_size: int
    max_length: int
    mixer: str = "log_linear"
    lam: str = "mlp_softplus"
    lam_hidden: int | None = 64
    lam_activation: str = "gelu"
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    key_dim: int = 32
    key_groups: int | None = None
    init_scheme: str = "paper"
    chunk_size: int | None = None
    implementation: str | None = None
    dtype: str = "float32"

    def check(self) -> None:
        """Raises ValueError naming the first setting that cannot be."""
        self.check_sizes_and_mixer()


class RecallLayer(nn.Module):
    """x ← LayerNorm(W_o y + x), y the token mixer over bias-free linear maps q, k, v, dt, d of x (one fused matrix)."""

    settings: RecallSettings

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        m = self.settings
        keys, values = m.groups * m.key_dim, m.heads * m.head_dim
        levels = num_levels(m.max_length)
        dt_size, d_size = mixer_input_sizes(m.mixer, m.lam, heads=m.heads, num_levels=levels)
        sizes = [keys, keys, values, dt_size, d_size]
        projected = nn.Dense(sum(sizes), use_bias=False, kernel_init=small_normal, dtype=m.dtype, name="in_proj")(x)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        q, k, v, dt, d = jnp.split(projected, ends, axis=-1)
        q, k = (y.reshape(*y.shape[:2], m.groups, m.key_dim) for y in (q, k))
        v = v.reshape(*v.shape[:2], m.heads, m.head_dim)
        mixed = m.token_mixer()(q, k, v, dt if dt_size else None, d if d_size else None)
        # 0.02 / sqrt(2 · layers): 0.02 / 2 at the paper's two layers, GPT-2's rule for residual branches elsewhere.
        out_init = nn.initializers.normal(0.02 / (2 * m.layers) ** 0.5)
        y = nn.Dense(m.hidden, use_bias=False, kernel_init=out_init, dtype=m.dtype, name="out_proj")(
            mixed.reshape(*mixed.shape[:2], values)
        )
        return nn.LayerNorm(epsilon=1e-5, name="norm")(y.astype(jnp.float32) + x)


class RecallModel(nn.Module):
    """The paper's recall model: embedding, post-norm layers with no positions and no convolution, norm, untied head."""

    settings: RecallSettings

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        """Logits [B, T, vocab_size] in float32 for tokens [B, T]."""
        m = self.settings
        x = nn.Embed(m.vocab_size, m.hidden, embedding_init=small_normal, name="embed")(tokens)
        for index in range(m.layers):
            x = RecallLayer(m, name=f"layer_{index}")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        logits = nn.Dense(m.vocab_size, use_bias=False, kernel_init=small_normal, dtype=m.dtype, name="head")(x)
        return logits.astype(jnp.float32)
