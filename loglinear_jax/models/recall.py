"""The recall model of the paper: post-norm layers, from token ids to logits."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.layers import AttentionLayer
from loglinear_jax.losses import chunked_token_losses, summed_loss, takes_kernel, token_losses
from loglinear_jax.mixers import DT_MAX, DT_MIN
from loglinear_jax.models.settings import MOST_CONV_WIDTH, MixerSettings
from loglinear_jax.modules import Embed
from loglinear_jax.modules.positions import Losses, Positions, Tokens, at_positions
from loglinear_jax.ops.decays import accumulation_dtype
from loglinear_jax.ops.positions import in_32_bits
from loglinear_jax.settings import setting

NORMS = ("post", "pre")
# Logits of one seed that exist at a time, in float32 64 MiB: many seeds are trained together.
MOST_LOGITS = 1 << 24


@dataclasses.dataclass(frozen=True)
class RecallSettings(MixerSettings):
    """Settings of a RecallModel. dtype: of matrix products; parameters, decays, λ, norms and logits are float32."""

    weight_std: float = setting(0.02, "initial size of the weights of linear maps", above=0)
    embed_std: float = setting(0.02, "initial size of the embedding", above=0)
    norm: str = setting(
        "post", "`post`: LayerNorm(x + layer(x)), as in the paper; `pre`: x + layer(LayerNorm(x))", choices=NORMS
    )
    conv_width: int = setting(
        0, "width of a causal convolution over q, k and v, as in Mamba-2; 0: none", least=0, most=MOST_CONV_WIDTH
    )
    qk_norm: bool = setting(
        False,
        "divide q and k of each head by their length, as the delta rule always does; softmax attention then learns a scale",
    )
    lam_head_slope: float = setting(
        0.0, "let λ start otherwise in each head: some with the near past, some with the far"
    )
    dt_min: float = setting(DT_MIN, "least initial step size Δ; a small one is a slow decay", above=0)
    dt_max: float = setting(DT_MAX, "largest initial step size Δ", above=0)


class RecallLayer(nn.Module):
    """x ← LayerNorm(W_o y + x), y the token mixer over linear maps of x, which an `AttentionLayer` has; or, with norm "pre",
    x ← x + W_o y with y of LayerNorm(x). index: of the layer in the model."""

    settings: RecallSettings
    index: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], positions: Positions = slice(None), segment_ids: Tokens | None = None
    ) -> Float[Array, "B P D"]:
        """x at `positions`, from all x."""
        m = self.settings
        norm = nn.LayerNorm(epsilon=1e-5, name="norm")
        attention = AttentionLayer(
            **m.layer_arguments(self.index),
            conv_width=m.conv_width,
            kernel_init=nn.initializers.normal(m.weight_std),
            # weight_std / sqrt(2 · layers): 0.02 / 2 at the paper's two layers, GPT-2's rule for residual branches elsewhere.
            out_init=nn.initializers.normal(m.weight_std / (2 * m.layers) ** 0.5),
        )
        nn.share_scope(self, attention)
        y = attention(norm(x) if m.norm == "pre" else x, positions=positions, segment_ids=segment_ids)
        x = y.astype(x.dtype) + at_positions(x, positions)
        return x if m.norm == "pre" else norm(x)


class _Weights(nn.Module):
    """Those of a linear map without a bias, in float32, where nn.Dense has them."""

    shape: tuple[int, int]
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self) -> Float[Array | np.ndarray, "D F"]:
        return self.param("kernel", self.init, self.shape)


class RecallModel(nn.Module):
    """Recall model of *Adaptive Memory Decay*: embedding, post-norm layers without positions or convolution, norm,
    untied head. Further settings may make it learn more reliably.

    segment_ids, int32 [B, T], keep the documents of a packed sequence apart, as in `log_linear_attention`.
    """

    settings: RecallSettings

    @nn.compact
    def features(
        self, tokens: Tokens, positions: Positions = slice(None), segment_ids: Tokens | None = None
    ) -> tuple[Float[Array, "B P D"], Float[Array | np.ndarray, "D vocab"]]:
        """(what the head reads at `positions` (all T), in the dtype of its products; the head). The last layer's output, and
        what follows it, is computed there only."""
        m = self.settings
        segment_ids = None if segment_ids is None else jnp.asarray(in_32_bits(segment_ids))
        x = Embed(m.vocab_size, m.hidden, embedding_init=nn.initializers.normal(m.embed_std), name="embed")(tokens)
        for index in range(m.layers):
            read = positions if index == m.layers - 1 else slice(None)
            x = RecallLayer(m, index, name=f"layer_{index}")(x, read, segment_ids)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        head = _Weights((m.hidden, m.vocab_size), nn.initializers.normal(m.weight_std), name="head")
        return x.astype(m.dtype), head()

    def __call__(
        self, tokens: Tokens, positions: Positions = slice(None), segment_ids: Tokens | None = None
    ) -> Float[Array, "B P vocab"]:
        """Logits [B, P, vocab_size] in float32 at `positions` (all T) for tokens [B, T]."""
        return _logits(*self.features(tokens, positions, segment_ids))

    def token_losses(
        self,
        tokens: Tokens,
        targets: Tokens,
        positions: Positions = slice(None),
        segment_ids: Tokens | None = None,
    ) -> Losses:
        """(cross-entropy in nats, whether argmax is right) at `positions` (all T); 0 and False where the target is < 0.

        More than MOST_LOGITS logits are computed in parts, which in bfloat16 are not rounded to it.
        """
        x, head = self.features(tokens, positions, segment_ids)
        targets = at_positions(targets, positions)
        if targets.size <= _tokens_at_once(head):
            return token_losses(_logits(x, head), targets)
        return chunked_token_losses(x, head, targets, _tokens_at_once(head))

    def summed_loss(
        self,
        tokens: Tokens,
        targets: Tokens,
        positions: Positions = slice(None),
        z_loss: float = 0.0,
        segment_ids: Tokens | None = None,
    ) -> Float[Array, ""]:
        """The sum of `token_losses`, for training, with the z_loss of each."""
        x, head = self.features(tokens, positions, segment_ids)
        targets = at_positions(targets, positions)
        pallas = self.settings.takes_pallas
        if targets.size <= _tokens_at_once(head) and not (pallas and takes_kernel(head.shape[1])):
            return jnp.sum(token_losses(_logits(x, head), targets, z_loss)[0])
        return summed_loss(x, head, targets, _tokens_at_once(head), pallas, z_loss)


def _logits(x, head):
    return jnp.dot(x, head.astype(x.dtype)).astype(accumulation_dtype(x))


def _tokens_at_once(head) -> int:
    """How many have logits at the same time."""
    return max(MOST_LOGITS // head.shape[1], 1)
