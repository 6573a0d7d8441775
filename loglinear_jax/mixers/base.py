"""What token mixers share: all of them their interface, several one state, Mamba-2's decays or its layer."""

from __future__ import annotations

import typing
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float, Int

from loglinear_jax.ops import Implementation, check_attention_settings
from loglinear_jax.settings import SettingError, of_another_kind

DT_MIN, DT_MAX = 1e-3, 0.1  # step sizes start between these, as in Mamba-2
DECAY_PARAMS = ("a_log", "dt_bias")  # a mixer's parameters from which its decays follow


# What a mixer remembers of the tokens so far, a pytree of its own kind.
MixerCache = Any


class TokenMixer(nn.Module):
    """Base of all mixers, which combine tokens after the projections; your own mixer is a subclass with a method `mix`.

    A mixer is called as

        mixer(q, k, v, *, cache=None, max_length=None, segment_ids=None, **inputs)

    with q and k [B, T, G, K], v [B, T, H, V], and a further projection of the tokens [B, T, H·n] for each entry of `inputs`.
    It returns o [B, T, H, V]. With max_length it also returns a cache after these tokens, with room for max_length
    tokens in all; with such a cache it takes the next tokens, one or several, and returns the next cache. A token for
    which the cache has no room gets NaN. segment_ids, int32 [B, T], say to which document of a pack each token belongs,
    as in `log_linear_attention`; the cache belongs to the first document, and the next cache to the last. `mix` gets
    segment_ids only if there are some.

    Its fields are its settings, all with defaults. A field that has the name of a model's setting gets its value from
    the model, unless the mixer's text sets it: "gated_delta(beta_max=2)".

    dtype: to which q, k and v are converted; None leaves them as they are. param_dtype: of the parameters.

    A mixer with a field axis_name takes the piece of a sequence that a device has inside `jax.shard_map`, as
    `log_linear_attention` does; `mix` reads it as `axis`.
    """

    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    # Whether λ weighs levels and is sown as "lam_value"; whether the mixer remembers states, and sows
    # "queries", "keys", "log_decay" and, with the delta rule, "beta".
    has_lam: ClassVar[bool] = False
    has_states: ClassVar[bool] = False
    # The layer of a language model that it belongs in, one of `loglinear_jax.layers.LAYERS`.
    layer: ClassVar[str] = "attention"

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        *,
        cache: MixerCache | None = None,
        max_length: int | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        **inputs: Float[Array, "B T _"],
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], MixerCache]:
        if max_length is not None and q.shape[1] > max_length:
            raise ValueError(
                f"q has shape {q.shape} with T = {q.shape[1]} tokens: expected no more than max_length={max_length}"
            )
        if self.axis is not None and (cache is not None or max_length is not None):
            raise ValueError(f"cache or max_length is given: expected None with axis_name = {self.axis!r}")
        if self.dtype is not None:
            q, k, v = (x.astype(self.dtype) for x in (q, k, v))
        packed = {} if segment_ids is None else {"segment_ids": segment_ids}
        mixed = self.mix(q, k, v, cache=cache, max_length=max_length, **packed, **inputs)
        out = mixed
        if cache is not None or max_length is not None:
            out = mixed[0] if isinstance(mixed, tuple) and len(mixed) == 2 else None
        if getattr(out, "shape", None) != v.shape:
            got = f"shape {out.shape}" if hasattr(out, "shape") else f"a {type(mixed).__name__}"
            and_cache = " and a cache" if out is not mixed else ""
            raise SettingError(f"{type(self).__name__}.mix returns {got}: expected [B, T, H, V] = {v.shape}{and_cache}")
        return mixed

    def mix(self, q, k, v, *, cache, max_length, segment_ids=None, **inputs):
        """What a call returns, for q, k and v in the mixer's dtype. Parameters and submodules are declared here."""
        raise NotImplementedError(f"{type(self).__name__} has no method mix(q, k, v, *, cache, max_length, ...)")

    @property
    def axis(self) -> str | None:
        """The mesh axis that sequences are cut over, if they are; parameters are made outside of `jax.shard_map`."""
        return None if self.is_initializing() else getattr(self, "axis_name", None)

    @property
    def inputs(self) -> dict[str, int]:
        """Projections of the tokens that it takes beside q, k and v: by keyword, the number of features of each head."""
        return {}

    @property
    def longest(self) -> int | None:
        """The longest sequence that it takes; None if there is none."""
        return None

    @property
    def unused(self) -> set[str]:
        """Fields that change nothing, given the others."""
        return {"chunk_size"} if getattr(self, "implementation", None) in ("parallel", "recurrent") else set()

    def numbers_kept(self, length: int, heads: int, groups: int, key_dim: int, value_dim: int) -> int | None:
        """Recurrent state size after `length` tokens; None if the mixer does not give it."""
        return None

    def check(self) -> None:
        """Raises SettingError naming the first field with an impossible value."""
        for name, hint in typing.get_type_hints(type(self)).items():
            if must := of_another_kind(value := getattr(self, name, None), hint):
                raise SettingError(f"{name} must {must}, got {value!r}")
        try:
            check_attention_settings(getattr(self, "chunk_size", None), getattr(self, "implementation", None))
        except ValueError as error:
            raise SettingError(str(error)) from error


class OneState(TokenMixer):
    """A mixer that remembers one state, [B, H, K, V], which is its cache."""

    chunk_size: int | None = None
    implementation: Implementation | None = None
    axis_name: str | None = None

    def numbers_kept(self, length: int, heads: int, groups: int, key_dim: int, value_dim: int) -> int:
        return heads * key_dim * value_dim

    def _how(self, q: Array, cache: Array | None, max_length: int | None, segment_ids: Array | None) -> dict[str, Any]:
        """Keyword arguments of the operation: one token after others is a step of it."""
        one_token = cache is not None and q.shape[1] == 1
        return {
            "segment_ids": segment_ids,
            "axis_name": self.axis,
            "initial_state": cache,
            "return_state": cache is not None or max_length is not None,
            "chunk_size": self.chunk_size,
            "implementation": "recurrent" if one_token else self.implementation,
        }


class DecayingMixer(TokenMixer):
    """A mixer with Mamba-2's step sizes Δ = softplus(dt + bias) and log decays -exp(a_log) Δ.

    dt_min, dt_max: log decay starts near -h Δ in head h = 1 .. H, Δ drawn log-uniformly from between them, so a head remembers
    about 1 / (h Δ) tokens.
    """

    dt_min: float = DT_MIN
    dt_max: float = DT_MAX

    has_states: ClassVar[bool] = True

    @property
    def inputs(self) -> dict[str, int]:
        return {"dt": 1}

    def check(self) -> None:
        super().check()
        if not self.dt_min > 0:
            raise SettingError(f"dt_min must be positive, got {self.dt_min}")
        if self.dt_min > self.dt_max:
            raise SettingError(f"dt_min must not be above dt_max, got dt_min={self.dt_min}, dt_max={self.dt_max}")

    def _decays(self, dt: Float[Array, "B T H"]) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """(log decays, step sizes); for `mix`."""
        heads = dt.shape[2:3]
        a_log = self.param("a_log", init_a_log, heads, self.param_dtype)
        dt_bias = self.param("dt_bias", init_dt_bias(self.dt_min, self.dt_max), heads, self.param_dtype)
        step_size = nn.softplus(dt.astype(jnp.float32) + dt_bias)
        return -jnp.exp(a_log) * step_size, step_size


class Mamba2Mixer(DecayingMixer):
    """A mixer of Mamba-2's layer.

    scale_values: multiply each token's value by its step size, as in Mamba-2. qk_norm: divide q and k by their lengths.
    """

    scale_values: bool = False
    qk_norm: bool = False

    layer: ClassVar[str] = "mamba2"

    def _prepared(self, q, k, v, dt: Float[Array, "B T H"]) -> tuple[Array, Array, Array, Array]:
        """(q, k, v, log decays) as the attention takes them; for `mix`."""
        if self.qk_norm:
            q, k = unit(q), unit(k)
        log_decay, step_size = self._decays(dt)
        if self.scale_values:
            v = (v * step_size[..., None]).astype(v.dtype)
        sow(self, queries=q, keys=k, log_decay=log_decay)
        return q, k, v, log_decay


def init_a_log(key, shape, dtype=jnp.float32):
    """A_log = log(1 .. H): heads forget at rates from slow to fast (Mamba-2)."""
    del key
    return jnp.log(jnp.arange(1, shape[0] + 1, dtype=dtype))


def init_dt_bias(dt_min, dt_max):
    """An initializer: the inverse softplus of a log-uniform draw from [dt_min, dt_max] (Mamba-2)."""

    def init(key, shape, dtype=jnp.float32):
        dt = jnp.exp(jax.random.uniform(key, shape, dtype, np.log(dt_min), np.log(dt_max)))
        return dt + jnp.log(-jnp.expm1(-dt))

    return init


def unit(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / √(|x|² + 1e-6) over the last axis: of length 1, but shorter where |x| is not far above 1e-3; 0 stays 0."""
    length = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(length + 1e-6)).astype(x.dtype)


def sow(mixer: nn.Module, **values: Array) -> None:
    """Lets analyses read these: apply a model with mutable=["intermediates"]; otherwise free."""
    for name, value in values.items():
        mixer.sow("intermediates", name, value)
