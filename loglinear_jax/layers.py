"""Layers that mix tokens, [B, T, D] to [B, T, D]: projections, a short convolution, a mixer, norm and output.

    layer = loglinear_jax.LogLinearAttention(512, heads=8, lam="mlp_softplus")
    params = layer.init(key, x)
    y = layer.apply(params, x)

The models of this package are built of these modules. For decoding, max_length returns a cache beside the output, and with that
cache the layer takes the next tokens, one or several:

    y, cache = layer.apply(params, prompt, max_length=1024)
    y, cache = layer.apply(params, next_token, cache)

segment_ids, int32 [B, T], keep the documents of a packed sequence apart, as in log_linear_attention. A cache belongs to the
first of them, and the cache that is returned to the last:

    y = layer.apply(params, x, segment_ids=segment_ids)

With axis_name a layer is applied inside `jax.shard_map`, to the piece of each sequence that a device has; its parameters are
made outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import flax.linen as nn
import flax.struct
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import num_levels
from loglinear_jax.mixers import MixerCache, TokenMixer, make_mixer, takes_pieces
from loglinear_jax.modules import CausalConv, Dense, LinearMaps, RMSNorm, Scaled
from loglinear_jax.modules.positions import Positions, at_positions
from loglinear_jax.ops.checks import check_segment_ids
from pallas_kernels import with_standard_promotion

small_normal = nn.initializers.normal(0.02)


@flax.struct.dataclass
class LayerCache:
    """What one layer remembers while decoding: the convolution's window, if it has one, and its mixer's cache."""

    window: Float[Array, "B W C"] | None
    mixer: MixerCache


Output = Float[Array, "B P F"] | tuple[Float[Array, "B P F"], LayerCache]


class MixingLayer(nn.Module):
    """Base of the layers, with the arguments and methods that all layers have.

    Attributes:
      features: D of the output.
      heads: number of heads, H.
      head_dim: width V of a head's values; None: features / heads.
      key_dim: width K of queries and keys; None: head_dim.
      key_groups: number of groups of heads that share keys; None: one group per head.
      mixer: name or import path, may have keyword arguments: see loglinear_jax.mixers.
      lam: name or import path of λ, if the mixer has one: see loglinear_jax.lam.
      max_length: the longest sequence that λ has levels for.
      chunk_size: as in log_linear_attention, if the mixer takes it.
      implementation: as in log_linear_attention, if the mixer takes it.
      mixer_options: further settings of the mixer, for fields that it has and that `mixer` does not set.
      conv_width: width of a short causal convolution over queries, keys and values; 0: none.
      conv_bias: whether that convolution has a bias.
      kernel_init: initializer of the projections.
      out_init: initializer of the output projection.
      dtype: of activations and matrix products.
      param_dtype: of parameters.
      axis_name: as in log_linear_attention. Raises ValueError for a mixer that has no such field.
    """

    features: int
    heads: int = 8
    head_dim: int | None = None
    key_dim: int | None = None
    key_groups: int | None = None
    mixer: str = "log_linear"
    lam: str = "mlp_softplus"
    max_length: int = 8192
    chunk_size: int | None = None
    implementation: str | None = None
    mixer_options: Mapping[str, Any] = flax.core.FrozenDict()
    conv_width: int = 0
    conv_bias: bool = True
    kernel_init: nn.initializers.Initializer = small_normal
    out_init: nn.initializers.Initializer = small_normal
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32
    axis_name: str | None = None

    @property
    def value_size(self) -> int:
        """H · V."""
        return self.heads * self.head_size

    @property
    def head_size(self) -> int:
        """V."""
        if self.head_dim is None and self.features % self.heads:
            raise ValueError(
                f"features must be a multiple of heads where head_dim is None, got features={self.features}, "
                f"heads={self.heads}"
            )
        return self.features // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_sizes(self) -> tuple[int, int]:
        """(G, K)"""
        groups = self.heads if self.key_groups is None else self.key_groups
        return groups, self.head_size if self.key_dim is None else self.key_dim

    def _check(self, x: Any, segment_ids: Any) -> None:
        """Raises ValueError for sizes below 1, and for x and segment_ids of other shapes."""
        for name in ("features", "heads", "head_dim", "key_dim", "key_groups", "max_length"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        shape = jnp.shape(x.values if isinstance(x, Scaled) else x)
        if len(shape) != 3 or 0 in shape:
            raise ValueError(f"x has shape {shape}: expected [B, T, D] with at least one of each")
        check_segment_ids(segment_ids, *shape[:2])

    def _token_mixer(self, **more: Any) -> TokenMixer:
        """The mixer, as a submodule."""
        settings = {
            "lam": self.lam,
            "num_levels": num_levels(self.max_length),
            "chunk_size": self.chunk_size,
            "implementation": self.implementation,
            "param_dtype": self.param_dtype,
            "axis_name": self.axis_name,
        }
        if self.axis_name is not None and not takes_pieces(self.mixer):
            raise ValueError(
                f"axis_name is {self.axis_name!r}: expected None with mixer={self.mixer!r}, which has no such field"
            )
        mixer = make_mixer(self.mixer, **(settings | dict(self.mixer_options) | more), name="mixer")
        mixer.check()
        return mixer

    def _in_proj(
        self, x: Float[Array, "B T D"] | Scaled, sizes: Sequence[int], together: bool, apart: bool = False
    ) -> list[Float[Array, "B T F"]]:
        """Linear maps of x to so many features each, as one product or several."""
        if together or isinstance(x, Scaled):
            dense = self._dense(sum(sizes), "in_proj", self.kernel_init)
            return jnp.split(dense(x), np.cumsum(sizes[:-1]), axis=-1)
        maps = LinearMaps(
            tuple(sizes), self.kernel_init, self.dtype, apart=apart, param_dtype=self.param_dtype, name="in_proj"
        )
        return maps(x)

    def _conv(self, x: Float[Array, "B T C"], cache: LayerCache | None, segment_ids):
        """(the convolution of x if there is one, its window)"""
        if not self.conv_width:
            return x, None
        conv = CausalConv(
            self.conv_width, self.conv_bias, self.implementation, self.param_dtype, self.axis_name, name="conv"
        )
        return conv(x, None if cache is None else cache.window, segment_ids)

    def _mix(self, mixer: TokenMixer, q, k, v, rest, cache: LayerCache | None, max_length: int | None, segment_ids):
        """(the mixer's output [B, T, H, V], its cache or None) of projections that are not cut into heads yet."""
        (groups, key_dim), inputs = self.key_sizes, mixer.inputs
        q, k = (x.reshape(*x.shape[:2], groups, key_dim) for x in (q, k))
        v = v.reshape(*v.shape[:2], self.heads, self.head_size)
        parts = jnp.split(rest, np.cumsum([self.heads * n for n in inputs.values()][:-1], dtype=int), axis=-1)
        named = dict(zip(inputs, parts, strict=False))  # without inputs, rest is one empty part
        if segment_ids is not None:
            named["segment_ids"] = segment_ids
        if cache is None and max_length is None:
            return mixer(q, k, v, **named), None
        return mixer(q, k, v, **named, cache=None if cache is None else cache.mixer, max_length=max_length)

    def _input_size(self, mixer: TokenMixer) -> int:
        return self.heads * sum(mixer.inputs.values())

    def _dense(self, features: int, name: str, init: nn.initializers.Initializer) -> Dense:
        return Dense(
            features, use_bias=False, kernel_init=init, dtype=self.dtype, param_dtype=self.param_dtype, name=name
        )

    def _out_proj(self, y: Float[Array, "B P HV"] | Scaled, window, mixer_cache) -> Output:
        y = self._dense(self.features, "out_proj", self.out_init)(y)
        return y if mixer_cache is None else (y, LayerCache(window, mixer_cache))


class AttentionLayer(MixingLayer):
    """Projections to queries, keys and values, an optional short convolution, a mixer, and the output projection.

    order: in which the projection has queries, keys and values.
    """

    order: str = "qkv"

    @nn.compact
    @with_standard_promotion
    def __call__(
        self,
        x: Float[Array, "B T D"] | Scaled,
        cache: LayerCache | None = None,
        max_length: int | None = None,
        positions: Positions = slice(None),
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Output:
        """positions: where the output is computed, from all x."""
        self._check(x, segment_ids)
        mixer = self._token_mixer()
        groups, key_dim = self.key_sizes
        of = {"q": groups * key_dim, "k": groups * key_dim, "v": self.value_size}
        widths = [of[name] for name in self.order]
        sizes = sum(widths), self._input_size(mixer)
        # Without a convolution the gradients of q, k and v are put together anyway: one product saves doing it again.
        qkv, rest = self._in_proj(x, sizes, together=not self.conv_width or cache is not None)
        qkv, window = self._conv(qkv, cache, segment_ids)
        by_name = dict(zip(self.order, jnp.split(qkv, np.cumsum(widths[:-1]), axis=-1), strict=True))
        mixed, mixer_cache = self._mix(
            mixer, **by_name, rest=rest, cache=cache, max_length=max_length, segment_ids=segment_ids
        )
        mixed = at_positions(mixed.reshape(*mixed.shape[:2], self.value_size), positions)
        return self._out_proj(mixed, window, mixer_cache)


class LogLinearAttention(AttentionLayer):
    """Log-linear attention, or another `mixer`, with its projections: a layer from [B, T, D] to [B, T, features].

    Arguments: see `MixingLayer`.

    Examples:
      >>> import jax
      >>> from loglinear_jax import LogLinearAttention
      >>> x = jax.numpy.ones((2, 100, 64))  # [B, T, D]
      >>> layer = LogLinearAttention(64, heads=4, max_length=128)
      >>> y, params = layer.init_with_output(jax.random.key(0), x)
      >>> y.shape
      (2, 100, 64)
    """


class _GatedLayer(MixingLayer):
    """A mixer between a gate and a convolution: z, v, k, q and the mixer's inputs from one projection."""

    conv_width: int = 4
    norm_epsilon: float = 1e-5

    @nn.compact
    @with_standard_promotion
    def __call__(
        self,
        x: Float[Array, "B T D"] | Scaled,
        cache: LayerCache | None = None,
        max_length: int | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Output:
        self._check(x, segment_ids)
        mixer = self._token_mixer(scale_values=True, scale_queries=True)
        groups, key_dim = self.key_sizes
        keys = groups * key_dim
        sizes = [self.value_size, self.value_size + 2 * keys, self._input_size(mixer)]
        # Where a cache is given nothing is trained: one kernel, not three.
        gate, vkq, rest = self._in_proj(x, sizes, together=cache is not None, apart=True)
        vkq, window = self._conv(vkq, cache, segment_ids)
        v, k, q = jnp.split(vkq, [self.value_size, self.value_size + keys], axis=-1)
        mixed, mixer_cache = self._mix(mixer, q, k, v, rest, cache, max_length, segment_ids)
        return self._out_proj(self._gated(gate, v.reshape(mixed.shape), mixed), window, mixer_cache)

    def _gated(self, gate: Float[Array, "B T HV"], v: Float[Array, "B T H V"], mixed: Float[Array, "B T H V"]):
        """What the output projection reads, of the values after the convolution and of what was mixed."""
        raise NotImplementedError

    def _norm(self, **how: Any) -> RMSNorm:
        return RMSNorm(epsilon=self.norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype, name="norm", **how)


class LogLinearMamba2Block(_GatedLayer):
    """Log-linear Mamba-2 block, without residual: convolution, log-linear attention, skip D ⊙ x, gated RMSNorm.

    (Guo et al. 2025.) One projection gives the gate z, x, B, C, Δ and λ's input d. Queries are C, keys B, values Δ x.
    With `mixer="gated_linear"` it is Mamba-2's block (Dao & Gu 2024). Further arguments: see `MixingLayer`.

    norm_groups: number of feature groups that are normalised separately; None: key_groups.

    Examples:
      >>> import jax
      >>> from loglinear_jax import LogLinearMamba2Block
      >>> x = jax.numpy.ones((2, 100, 64))  # [B, T, D]
      >>> layer = LogLinearMamba2Block(64, heads=4, max_length=128)
      >>> y, params = layer.init_with_output(jax.random.key(0), x)
      >>> y.shape
      (2, 100, 64)
    """

    norm_groups: int | None = None

    def _gated(self, gate, v, mixed):
        skip = self.param("skip", nn.initializers.ones, (self.heads,), self.param_dtype)
        y = (mixed + skip.astype(v.dtype)[:, None] * v).reshape(gate.shape)
        return self._norm(groups=self.norm_groups or self.key_sizes[0], deferred=True)(y * nn.silu(gate))


class GatedDeltaNetBlock(_GatedLayer):
    """Gated DeltaNet block, without residual: convolution, the delta rule with unit queries and keys, gated RMSNorm.

    (Yang, Kautz and Hatamizadeh 2025.) `mixer="log_linear_delta"` gives it a state for each level. With a single state,
    queries are divided by √K. Arguments: see `MixingLayer`.

    Examples:
      >>> import jax
      >>> from loglinear_jax import GatedDeltaNetBlock
      >>> x = jax.numpy.ones((2, 100, 64))  # [B, T, D]
      >>> layer = GatedDeltaNetBlock(64, heads=4, max_length=128)
      >>> y, params = layer.init_with_output(jax.random.key(0), x)
      >>> y.shape
      (2, 100, 64)
    """

    mixer: str = "gated_delta"

    def _gated(self, gate, v, mixed):
        return self._norm()(mixed).reshape(gate.shape) * nn.silu(gate)  # one scale for all heads


# By what a mixer says of itself.
LAYERS: dict[str, type[MixingLayer]] = {
    "attention": AttentionLayer,
    "mamba2": LogLinearMamba2Block,
    "gated_deltanet": GatedDeltaNetBlock,
}
