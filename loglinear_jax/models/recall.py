"""The recall model of the paper: post-norm layers, from token ids to logits."""

from __future__ import annotations

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.losses import token_losses
from loglinear_jax.mixers import MixerSettings
from loglinear_jax.modules import CausalConv, Embed

NORMS = ("post", "pre")


@dataclasses.dataclass(frozen=True)
class RecallSettings(MixerSettings):
    """Settings of a RecallModel.

    vocab_size, max_length: ids 0 .. vocab_size-1; the longest sequence, which sets the number of levels of λ.
    mixer: "log_linear", "linear" (gated linear attention, one state) or "softmax".
    lam, lam_hidden, lam_activation: see loglinear_jax.lam; lam_hidden None means twice the number of levels.
    hidden, layers, heads, head_dim, key_dim, key_groups: sizes; key_groups None means one per head.
    init_scheme: "paper", or "released" for the initial values that the released code ends up with.
    weight_std, embed_std: of the initial weights of linear maps, and of the embedding.
    norm: "post", LayerNorm(x + layer(x)) as in the paper; or "pre", x + layer(LayerNorm(x)).
    conv_width: of a causal convolution with SiLU over q, k and v, as in Mamba-2; 0, as in the paper, for none.
    qk_norm: whether each head's q and k are divided by their length.
    lam_head_slope, dt_min, dt_max: see TokenMixer.
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
    weight_std: float = 0.02
    embed_std: float = 0.02
    norm: str = "post"
    conv_width: int = 0
    qk_norm: bool = False
    lam_head_slope: float = 0.0
    dt_min: float = 1e-3
    dt_max: float = 0.1
    chunk_size: int | None = None
    implementation: str | None = None
    dtype: str = "float32"

    def check(self) -> None:
        """Raises ValueError naming the first setting that cannot be."""
        self.check_sizes_and_mixer()
        if self.norm not in NORMS:
            raise ValueError(f"model.norm must be one of {', '.join(NORMS)}, got {self.norm!r}")
        if self.conv_width < 0:
            raise ValueError(f"model.conv_width must be 0, for none, or more, got {self.conv_width}")
        for name in ("weight_std", "embed_std", "dt_min", "dt_max"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model.{name} must be finite and positive, got {getattr(self, name)}")
        if not math.isfinite(self.lam_head_slope):
            raise ValueError(f"model.lam_head_slope must be finite, got {self.lam_head_slope}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"model.dt_min must not be above dt_max, got dt_min={self.dt_min}, dt_max={self.dt_max}")


class RecallLayer(nn.Module):
    """x ← LayerNorm(W_o y + x), y the token mixer over bias-free linear maps q, k, v, dt, d of x (one fused matrix); or, with
    norm "pre", x ← x + W_o y with y of LayerNorm(x)."""

    settings: RecallSettings

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], positions: slice = slice(None)) -> Float[Array, "B P D"]:
        """x at `positions`, from all x."""
        m = self.settings
        norm = nn.LayerNorm(epsilon=1e-5, name="norm")
        y = _linear_maps_and_mixing(m, norm(x) if m.norm == "pre" else x)[:, positions]
        # weight_std / sqrt(2 · layers): 0.02 / 2 at the paper's two layers, GPT-2's rule for residual branches elsewhere.
        out_init = nn.initializers.normal(m.weight_std / (2 * m.layers) ** 0.5)
        y = nn.Dense(m.hidden, use_bias=False, kernel_init=out_init, dtype=m.dtype, name="out_proj")(y)
        x = y.astype(jnp.float32) + x[:, positions]
        return x if m.norm == "pre" else norm(x)


def _linear_maps_and_mixing(m: RecallSettings, x: Float[Array, "B T D"]) -> Float[Array, "B T H*V"]:
    """Inside RecallLayer."""
    keys, values = m.groups * m.key_dim, m.heads * m.head_dim
    dt_size, d_size = m.dt_and_d_sizes
    qkv_size = 2 * keys + values
    init = nn.initializers.normal(m.weight_std)
    dense = nn.Dense(qkv_size + dt_size + d_size, use_bias=False, kernel_init=init, dtype=m.dtype, name="in_proj")
    qkv, dt, d = jnp.split(dense(x), [qkv_size, qkv_size + dt_size], axis=-1)
    if m.conv_width:
        qkv, _ = CausalConv(m.conv_width, name="conv")(qkv)
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    q, k = (y.reshape(*y.shape[:2], m.groups, m.key_dim) for y in (q, k))
    if m.qk_norm:
        q, k = (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    v = v.reshape(*v.shape[:2], m.heads, m.head_dim)
    mixer = m.token_mixer(lam_head_slope=m.lam_head_slope, dt_min=m.dt_min, dt_max=m.dt_max, learned_scale=m.qk_norm)
    mixed = mixer(q, k, v, dt if dt_size else None, d if d_size else None)
    return mixed.reshape(*mixed.shape[:2], values)


class RecallModel(nn.Module):
    """The paper's recall model: embedding, post-norm layers with no positions and no convolution, norm, untied head; and with
    other settings, what may make it learn more reliably."""

    settings: RecallSettings

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"], positions: slice = slice(None)) -> Float[Array, "B P vocab"]:
        """Logits [B, P, vocab_size] in float32 at `positions` (all T) for tokens [B, T]. The last layer's output, and what
        follows it, is computed there only."""
        m = self.settings
        x = Embed(m.vocab_size, m.hidden, embedding_init=nn.initializers.normal(m.embed_std), name="embed")(tokens)
        for index in range(m.layers):
            x = RecallLayer(m, name=f"layer_{index}")(x, positions if index == m.layers - 1 else slice(None))
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        init = nn.initializers.normal(m.weight_std)
        logits = nn.Dense(m.vocab_size, use_bias=False, kernel_init=init, dtype=m.dtype, name="head")(x)
        return logits.astype(jnp.float32)

    def token_losses(
        self, tokens: Int[Array, "B T"], targets: Int[Array, "B T"], positions: slice = slice(None)
    ) -> tuple[Float[Array, "B P"], Bool[Array, "B P"]]:
        """(cross-entropy in nats, whether argmax is right) at `positions` (all T); 0 and False where the target is < 0."""
        return token_losses(self(tokens, positions), targets[:, positions])

    def summed_loss(
        self, tokens: Int[Array, "B T"], targets: Int[Array, "B T"], positions: slice = slice(None)
    ) -> Float[Array, ""]:
        """The sum of `token_losses`, for training."""
        return jnp.sum(self.token_losses(tokens, targets, positions)[0])
