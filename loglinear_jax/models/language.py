"""The language model: Mamba-2 blocks with log-linear attention, and the same skeleton with the baselines' mixers."""

from __future__ import annotations

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.layers import LAYERS, LayerCache, MixingLayer, small_normal
from loglinear_jax.losses import chunked_token_losses, summed_loss
from loglinear_jax.models.settings import MOST_CONV_WIDTH, MixerSettings
from loglinear_jax.modules import Dense, Embed, RMSNorm, is_one_token_on_gpu, swiglu
from loglinear_jax.modules.positions import Losses, Positions, Tokens, at_positions
from loglinear_jax.ops.positions import in_32_bits
from loglinear_jax.settings import SettingError, other_default, setting

# The parameters, by path, that are matrices [inputs, outputs] of a product.
MATRICES = re.compile(r"head|layer_\d+/(mixer/)?\w+_proj/kernel")
REMAT_POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable")
REMAT = ("none", "block", *REMAT_POLICIES)


@dataclasses.dataclass(frozen=True)
class LanguageSettings(MixerSettings):
    """Settings of a LanguageModel.

    The mixer "log_linear" makes it log-linear Mamba-2, "gated_linear" Mamba-2, "log_linear_delta" log-linear Gated
    DeltaNet, "gated_delta" Gated DeltaNet, "delta" the same without decays, "softmax" a Transformer with RoPE, in which
    each head has its own keys of width head_dim. dtype: of activations and matrix products; parameters, decays, λ, sums
    in norms and the loss are float32. heads: None means hidden / head_dim.
    """

    lam_hidden: int | None = other_default(MixerSettings, "lam_hidden", None)
    hidden: int = other_default(MixerSettings, "hidden", 512)
    layers: int = other_default(MixerSettings, "layers", 6)
    heads: int | None = setting(None, "number of heads; None: hidden / head_dim", least=1)
    head_dim: int = other_default(MixerSettings, "head_dim", 64)
    key_dim: int = other_default(MixerSettings, "key_dim", 128)
    key_groups: int | None = other_default(MixerSettings, "key_groups", 1)
    dtype: str = "bfloat16"
    conv_width: int = setting(4, "width of the causal convolution", least=1, most=MOST_CONV_WIDTH)
    conv_bias: bool = setting(True, "whether the convolution has a bias")
    mlp: bool = setting(True, "whether a block has a SwiGLU MLP behind its mixer")
    mlp_hidden: int | None = setting(
        None, "inner width of the MLP; None: 8/3 · hidden, up to a multiple of 256", least=1
    )
    norm_groups: int | None = setting(
        None,
        "parts of the features that Mamba-2's norm behind the attention takes by themselves; None: key_groups",
        least=1,
    )
    norm_epsilon: float = setting(1e-5, "epsilon of the RMSNorms", above=0)
    remat: str = setting(
        "none",
        "activations computed again in the backward pass, to save memory: `none`; `block`, all of each block; or all except "
        "those that a policy of jax.checkpoint_policies keeps, `dots_saveable` or `dots_with_no_batch_dims_saveable`",
        choices=REMAT,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.heads is None and self.head_dim >= 1 and self.hidden % self.head_dim == 0:
            object.__setattr__(self, "heads", self.hidden // self.head_dim)

    @property
    def inner(self) -> int:
        """Width of the mixer inside."""
        return self.heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP."""
        return -(-(8 * self.hidden // 3) // 256) * 256 if self.mlp_hidden is None else self.mlp_hidden

    @property
    def norm_parts(self) -> int:
        """Number of parts of the features that Mamba-2's norm after the attention normalises separately."""
        return self.groups if self.norm_groups is None else self.norm_groups

    @property
    def unread(self):
        of_gated = {"key_dim", "key_groups", "conv_width", "conv_bias"}
        of_mamba = set() if "mamba2" in self.layer_kinds else {"norm_groups"}
        of_mlp = set() if self.mlp else {"mlp_hidden"}
        return super().unread | of_mlp | of_mamba | (of_gated if set(self.layer_kinds) == {"attention"} else set())

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of layer for each mixer of the pattern."""
        return [mixer.layer for mixer in self.mixers]

    def check_decoding(
        self,
        max_length: int,
        what: str = "tokens, prompt included",
        instead: str = "generate fewer (a smaller num_tokens)",
    ) -> None:
        """Raises SettingError if λ has no levels for so many tokens. what, instead: for the message, what the tokens
        are, and what to do other than train another model."""
        if self.longest is not None and max_length > self.longest:
            raise SettingError(
                f"{max_length:,} {what}: the model's λ, {self.lam}, has levels for {self.longest:,}; {instead}, or extend λ "
                "(--extend_lam; settings.extended()), or train with a larger model.max_length"
            )

    def check(self) -> None:
        """Raises SettingError naming the first invalid setting."""
        if self.heads is None:
            raise SettingError(
                f"model.hidden must be a multiple of head_dim where heads is None, got hidden={self.hidden}, "
                f"head_dim={self.head_dim}"
            )
        super().check()
        if self.norm_groups is not None and self.inner % self.norm_groups:
            raise SettingError(
                f"model.norm_groups must divide heads · head_dim = {self.inner}, got {self.norm_groups} (None: key_groups)"
            )


class LanguageBlock(nn.Module):
    """x + mixer(RMSNorm(x)), then, if it has an MLP, x + SwiGLU(RMSNorm(x)). index: of the block in the model."""

    settings: LanguageSettings
    index: int

    @nn.compact
    def __call__(self, x, cache: LayerCache | None = None, max_length: int | None = None, segment_ids=None):
        m = self.settings
        mixed = self._layer()(self._norm("mixer_norm")(x), cache, max_length, segment_ids=segment_ids)
        mixed, cache = (mixed, None) if cache is None and max_length is None else mixed
        x += mixed
        if not m.mlp:
            return x, cache
        y = self._norm("mlp_norm")(x)
        y = swiglu(*(_dense(m.mlp_width, m, name)(y) for name in ("gate_proj", "up_proj")), m.implementation)
        return x + _dense(m.hidden, m, "down_proj", _residual_init(m))(y), cache

    def _layer(self) -> MixingLayer:
        m = self.settings
        arguments = m.layer_arguments(self.index) | {"out_init": _residual_init(m)}
        kind = m.layer_kinds[self.index % len(m.pattern)]
        own = {
            "attention": {"order": "vkq", "key_dim": m.head_dim, "key_groups": m.heads},
            "mamba2": {"norm_groups": m.norm_parts},
            "gated_deltanet": {},
        }[kind]
        if kind != "attention":
            own |= {"conv_width": m.conv_width, "conv_bias": m.conv_bias, "norm_epsilon": m.norm_epsilon}
        return LAYERS[kind](**(arguments | own), name="mixer")

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(epsilon=self.settings.norm_epsilon, deferred=True, dtype=self.settings.dtype, name=name)


def _dense(features: int, m: LanguageSettings, name: str, init=small_normal) -> Dense:
    return Dense(features, use_bias=False, kernel_init=init, dtype=m.dtype, name=name)


def _residual_init(m: LanguageSettings):
    """GPT-2's rule for what is added to the residual stream."""
    return nn.initializers.normal(0.02 / (2 * m.layers) ** 0.5)


class LanguageModel(nn.Module):
    """Language model, from token ids to the next token's logits: embedding, blocks, RMSNorm, untied head.

    segment_ids, int32 [B, T], keep the documents of a packed sequence apart, as in `log_linear_attention`: given caches
    belong to the first document, and returned caches to the last.

    With settings.axis_name it is applied inside `jax.shard_map` to a device's piece of each sequence, and losses are
    for the tokens of that piece.
    """

    settings: LanguageSettings

    # The parameters, by path, that are rounded to settings.dtype wherever they are read: not those of λ, norms and decays.
    ROUNDED = re.compile(MATRICES.pattern + "|embed/embedding")

    def setup(self):
        m = self.settings
        self.embed = Embed(m.vocab_size, m.hidden, embedding_init=small_normal, dtype=m.dtype)
        # max_length (argument 3, counting self) is no array.
        policy = getattr(jax.checkpoint_policies, m.remat) if m.remat in REMAT_POLICIES else None
        block = LanguageBlock if m.remat == "none" else nn.remat(LanguageBlock, static_argnums=(3,), policy=policy)
        self.blocks = [block(m, index, name=f"layer_{index}") for index in range(m.layers)]
        self.norm = RMSNorm(epsilon=m.norm_epsilon, dtype=m.dtype)
        self.head = self.param("head", small_normal, (m.hidden, m.vocab_size))

    def features(
        self,
        tokens: Tokens,
        caches: list[LayerCache] | None = None,
        max_length: int | None = None,
        segment_ids: Tokens | None = None,
    ) -> tuple[Float[Array, "B T D"], list[LayerCache | None]]:
        """What the head reads, and each block's cache: None for each without caches and max_length."""
        x = self.embed(tokens)
        segment_ids = None if segment_ids is None else jnp.asarray(in_32_bits(segment_ids))
        after = []
        for index, block in enumerate(self.blocks):
            x, cache = block(x, None if caches is None else caches[index], max_length, segment_ids)
            after.append(cache)
        return self.norm(x), after

    def _logits(self, x):
        if is_one_token_on_gpu(x):  # one token: XLA makes sums of float32 products, as fast as memory
            return jnp.dot(x.astype(jnp.float32), self.head.astype(x.dtype).astype(jnp.float32))
        return jnp.dot(x, self.head.astype(x.dtype), preferred_element_type=jnp.float32)

    def __call__(self, tokens: Tokens, segment_ids: Tokens | None = None) -> Float[Array, "B T vocab"]:
        """Logits in float32."""
        return self._logits(self.features(tokens, segment_ids=segment_ids)[0])

    def token_losses(
        self,
        tokens: Tokens,
        targets: Tokens,
        positions: Positions = slice(None),
        segment_ids: Tokens | None = None,
    ) -> Losses:
        """(cross-entropy in nats, whether argmax is right) at `positions` (all T); 0 and False where the target is < 0."""
        x, targets = self.features(tokens, segment_ids=segment_ids)[0], at_positions(targets, positions)
        return chunked_token_losses(at_positions(x, positions), self.head, targets)

    def continued_losses(
        self,
        tokens: Tokens,
        targets: Tokens,
        caches: list[LayerCache] | None = None,
        max_length: int | None = None,
        segment_ids: Tokens | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], list[LayerCache | None]]:
        """(cross-entropy in nats, whether argmax is right, as in `token_losses`; the caches after these tokens): a long text in
        parts.

        caches, max_length: as in `features`.
        """
        x, caches = self.features(tokens, caches, max_length, segment_ids)
        return *chunked_token_losses(x, self.head, targets), caches

    def summed_loss(
        self,
        tokens: Tokens,
        targets: Tokens,
        positions: Positions = slice(None),
        z_loss: float = 0.0,
        segment_ids: Tokens | None = None,
    ) -> Float[Array, ""]:
        """The sum of `token_losses`, for training, with the z_loss of each."""
        x = at_positions(self.features(tokens, segment_ids=segment_ids)[0], positions)
        targets = at_positions(targets, positions)
        return summed_loss(x, self.head, targets, pallas=self.settings.takes_pallas, z_loss=z_loss)

    def prefill(self, tokens: Tokens, max_length: int) -> tuple[Float[Array, "B vocab"], list[LayerCache]]:
        """(logits after the last of the tokens, caches with room for max_length tokens in all), in the chunkwise form.

        Raises ValueError for more tokens than max_length, or a max_length for which λ has no levels.
        """
        if tokens.shape[1] > max_length:
            raise ValueError(f"tokens has shape {tokens.shape}: expected no more than max_length={max_length} tokens")
        self.settings.check_decoding(max_length)
        x, caches = self.features(tokens, max_length=max_length)
        return self._logits(x[:, -1]), caches

    def extend(self, tokens: Tokens, caches: list[LayerCache]) -> tuple[Float[Array, "B vocab"], list[LayerCache]]:
        """(logits after the last of some more tokens, the caches after them), in the chunkwise form: a long prompt in parts.

        A traced position cannot be checked: tokens beyond max_length give NaN.
        """
        x, caches = self.features(tokens, caches)
        return self._logits(x[:, -1]), caches

    def step(
        self, token: Int[Array | np.ndarray, " B"], caches: list[LayerCache]
    ) -> tuple[Float[Array, "B vocab"], list[LayerCache]]:
        """(logits after one more token, the caches after it).

        A traced position cannot be checked: steps beyond max_length give NaN.
        """
        return self.extend(token[:, None], caches)
