"""The token mixer that the models share, of any kind, with what it remembers; and the settings that go with it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, get_args

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.fenwick import FenwickState, capacity, num_levels, occupied_levels
from loglinear_jax.lam import ACTIVATIONS, LAMS, MlpLam, lam_arguments, lam_traits, make_lam
from loglinear_jax.ops import (
    bucket_scores,
    check_attention_settings,
    fenwick_step,
    gated_delta_attention,
    gated_linear_attention,
    log_linear_attention,
    log_linear_delta_attention,
    log_linear_delta_step,
)
from loglinear_jax.ops.checks import Implementation
from loglinear_jax.ops.softmax import KeyValueCache, attend_to_cache, key_value_cache, softmax_attention
from loglinear_jax.settings import INT32_MAX, SettingError, check_fields, setting


@dataclasses.dataclass(frozen=True)
class MixerTraits:
    """What a mixer has: a state for each level, weighed by λ, or one alone; step sizes and decays; the delta rule, by which a
    token overwrites what the states hold under its key, as far as its β says. Softmax attention has none of them."""

    levels: bool = False
    decays: bool = False
    erases: bool = False


MIXERS = {
    "log_linear": MixerTraits(levels=True, decays=True),
    "log_linear_delta": MixerTraits(levels=True, decays=True, erases=True),
    "linear": MixerTraits(decays=True),
    "gated_delta": MixerTraits(decays=True, erases=True),
    "delta": MixerTraits(erases=True),
    "softmax": MixerTraits(),
}
MOST_LAYERS, MOST_CONV_WIDTH = 256, 256  # each is a part of the program, which takes that much longer to compile
DT_MIN, DT_MAX = 1e-3, 0.1  # step sizes start between these, as in Mamba-2
DECAY_PARAMS = ("a_log", "dt_bias")  # a mixer's parameters from which its decays follow


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


@flax.struct.dataclass
class LookingCache:
    """What log-linear attention remembers with a λ that looks into its buckets.

    states: those of the attention, [B, H, L, K, V]. key_sums: those of `bucket_scores`, [B, H, L, K, 1], at the same position.
    """

    states: FenwickState
    key_sums: FenwickState | None


# What a mixer remembers of the tokens so far: its levels, with sums of keys or without, one state [B, H, K, V], or everything.
MixerCache = FenwickState | LookingCache | Array | KeyValueCache


def unit(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / √(|x|² + 1e-6) over the last axis: of length 1, but shorter where |x| is not far above 1e-3; 0 stays 0."""
    length = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(length + 1e-6)).astype(x.dtype)


def _with_room(state: FenwickState, max_length: int) -> FenwickState:
    """The state without the levels that max_length tokens don't need, which hold nothing yet, and never will."""
    return state.replace(levels=state.levels[:, :, : num_levels(max_length)])


class TokenMixer(nn.Module):
    """Mixes tokens by attention of one of the MIXERS, after the projections.

    mixer "log_linear": o = log_linear_attention with λ from d; "linear": the same with λ ≡ 1, one state; "log_linear_delta" and
    "gated_delta": log_linear_delta_attention and gated_delta_attention, the same two with the delta rule, β = beta_max ·
    sigmoid(b); "delta": the latter without decays (DeltaNet); "softmax": causal softmax attention with rotary positions (it has
    no other sense of order). dt, d and b are None where the mixer or its λ has no use for them. For the delta rule q and k are
    divided by their lengths, and q is then multiplied by query_scale.

    With a lam_head_slope s other than 0, λ is multiplied by exp(Σ), Σ [H, L] learned, which starts from -s · a to s · a
    over the levels with a from -1 to 1 over the heads: some heads start with the near past, some with the far.

    dt_min, dt_max: log decay starts near -h Δ in head h = 1 .. H, Δ drawn log-uniformly from between them, so a head
    remembers about 1 / (h Δ) tokens.

    With learned_scale, for q and k of unit length, softmax attention's logits are g (q · k), g > 0 learned for each group, from
    10 (Henry et al. 2020; cosine attention of Swin V2): within ±1/√K it could not choose. The other mixers need none.

    With scale_values, values are multiplied by their token's step size Δ = softplus(dt + bias), as in Mamba-2.

    Decoding: with max_length, it also returns a cache after these tokens, with room for max_length in all; with such a
    cache, it takes the next tokens, one or several, and returns the next cache. A token for which the cache has no room
    (softmax: from max_length on, and those that come together with it; with levels: from the next power of two on; one state:
    never) gets NaN.

    A λ that has levels takes sequences of at most 2^(num_levels - 1) tokens, but of any length with lam_levels: then every
    level from lam_levels on takes the λ of the one below. A λ of which nothing is indexed by level (see loglinear_jax.lam)
    takes any length.

    λ is sown as ("intermediates", "lam_value"), what it looks at as "bucket_scores", and q, k, log decays and β as "queries",
    "keys", "log_decay" and "beta": apply the model with mutable=["intermediates"] to read them; otherwise free.
    """

    mixer: str
    num_levels: int
    lam: str
    lam_hidden: int | None
    lam_activation: str
    init_scheme: str
    chunk_size: int | None
    implementation: str | None
    scale_values: bool = False
    lam_head_slope: float = 0.0
    dt_min: float = DT_MIN
    dt_max: float = DT_MAX
    learned_scale: bool = False
    lam_levels: int | None = None
    beta_max: float = 1.0
    query_scale: float = 1.0

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        dt: Float[Array, "B T H"] | None,
        d: Float[Array, "B T HL"] | None,
        b: Float[Array, "B T H"] | None = None,
        *,
        cache: MixerCache | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], MixerCache]:
        if max_length is not None and q.shape[1] > max_length:
            raise ValueError(
                f"q has shape {q.shape} with T = {q.shape[1]} tokens: expected no more than max_length={max_length}"
            )
        if self.mixer == "softmax":
            if self.learned_scale:
                log_scale = self.param("log_scale", nn.initializers.constant(np.log(10)), q.shape[2:3])
                q = (q * (jnp.exp(log_scale) * q.shape[-1] ** 0.5)[:, None]).astype(q.dtype)
            if cache is not None:
                return attend_to_cache(cache, q, k, v)
            out = softmax_attention(q, k, v)
            return out if max_length is None else (out, key_value_cache(k, v, max_length))

        traits = MIXERS[self.mixer]
        log_decay, v = self._decays(v, dt)
        betas = ()
        if traits.erases:
            q, k = (unit(q) * self.query_scale).astype(q.dtype), unit(k)
            betas = (self.beta_max * nn.sigmoid(b.astype(jnp.float32)),)
            self.sow("intermediates", "beta", *betas)
        for name, value in (("queries", q), ("keys", k), ("log_decay", log_decay)):
            self.sow("intermediates", name, value)
        decoding = cache is not None or max_length is not None
        if not traits.levels:
            attend = gated_linear_attention
            if traits.erases:
                attend = functools.partial(gated_delta_attention, implementation=self._form(q, cache))
            return attend(
                q, k, v, log_decay, *betas, initial_state=cache, return_state=decoding, chunk_size=self.chunk_size
            )

        before = None if cache is None else self._checked(cache)
        lam, key_sums = self._lam(q, k, log_decay, d, before, max_length)
        self.sow("intermediates", "lam_value", lam)
        if before is not None and q.shape[1] == 1:
            fenwick = functools.partial(fenwick_step, implementation=self.implementation)
            step = log_linear_delta_step if traits.erases else fenwick
            out, states = step(before.states, *(x[:, 0] for x in (q, k, v, log_decay, *betas, lam)))
            return out[:, None], states if key_sums is None else LookingCache(states, key_sums)
        attend = log_linear_delta_attention if traits.erases else log_linear_attention
        attended = attend(
            q, k, v, log_decay, *betas, lam,
            initial_state=None if before is None else before.states, return_state=decoding,
            chunk_size=self.chunk_size, implementation=self.implementation,
        )  # fmt: skip
        if not decoding:
            return attended
        out, states = attended
        if before is None:
            states = _with_room(states, max_length)
        else:
            states = states.replace(levels=states.levels[:, :, : before.states.levels.shape[2]])
        return out, states if key_sums is None else LookingCache(states, key_sums)

    def _form(self, q, before: MixerCache | None) -> str | None:
        """The implementation for these tokens: a step for one token after others."""
        return "recurrent" if before is not None and q.shape[1] == 1 else self.implementation

    def _decays(self, v, dt) -> tuple[Float[Array, "B T H"], Float[Array, "B T H V"]]:
        """(log decays, 0 where the mixer has none; the values, multiplied by their step sizes where they are to be)."""
        if not MIXERS[self.mixer].decays:
            return jnp.zeros(v.shape[:3]), v
        heads = v.shape[2:3]
        a_log = self.param("a_log", init_a_log, heads)
        dt_bias = self.param("dt_bias", init_dt_bias(self.dt_min, self.dt_max), heads)
        step_size = nn.softplus(dt.astype(jnp.float32) + dt_bias)
        if self.scale_values:
            v = (v * step_size[..., None]).astype(v.dtype)
        return -jnp.exp(a_log) * step_size, v

    def _lam(
        self, q, k, log_decay, d, before: LookingCache | None, max_length: int | None
    ) -> tuple[Float[Array, "B T H L"], FenwickState | None]:
        """(λ, the sums of keys after these tokens where λ looks at them and something is to be remembered)."""
        traits = lam_traits(self.lam)
        module = make_lam(
            self.lam,
            hidden=self.lam_hidden,
            activation=self.lam_activation,
            init_scheme=self.init_scheme,
            implementation=self.implementation,
            name="lam",
        )
        room = q.shape[1] if max_length is None else max_length
        wanted = num_levels(room) if before is None else before.states.levels.shape[2]
        levels = self.num_levels if traits.has_levels else wanted
        if room > capacity(levels) and self.lam_levels is None and before is None:
            raise SettingError(
                f"lam={self.lam!r} has {levels} levels, for {capacity(levels)} tokens, got {room}: train with a larger "
                "model.max_length, or a λ that is not indexed by level, such as content"
            )
        shape = (*log_decay.shape, levels)
        d = jnp.zeros(shape) if d is None else d.reshape(*log_decay.shape, -1)
        key_sums = None
        if traits.needs_scores:
            scores, occupied, key_sums = self._look(q, k, log_decay, levels, before, max_length)
            lam = module(d, scores, occupied)
        else:
            lam = module(d)
        if getattr(lam, "shape", None) != shape:
            of_sequence = "" if traits.has_levels else ", as with has_levels = False L follows from the sequence"
            got = f"shape {lam.shape}" if hasattr(lam, "shape") else f"a {type(lam).__name__}"
            raise SettingError(f"lam={self.lam!r} returns {got}: expected an array [B, T, H, L] = {shape}{of_sequence}")
        if self.lam_head_slope:
            lam *= jnp.exp(self.param("lam_log_scale", self._init_lam_log_scale, shape[2:]))
        if self.lam_levels is not None:
            lam = lam[..., : self.lam_levels]
            lam = jnp.pad(lam, [(0, 0)] * 3 + [(0, max(wanted - lam.shape[3], 0))], mode="edge")
        return lam, key_sums

    def _look(self, q, k, log_decay, levels: int, before: LookingCache | None, max_length: int | None):
        """(bucket scores of unit queries and keys, where levels are occupied, the sums of keys that are to be remembered)."""
        sums = None if before is None else before.key_sums
        remember = before is not None or max_length is not None
        found = bucket_scores(
            unit(q), unit(k), log_decay,
            num_levels=levels, initial_state=sums, return_state=remember,
            implementation=self._form(q, before),
        )  # fmt: skip
        scores, key_sums = found if remember else (found, None)
        self.sow("intermediates", "bucket_scores", scores)
        first = 0 if sums is None else sums.position
        occupied = occupied_levels(first + jnp.arange(q.shape[1]), levels)[:, None]
        if sums is not None:
            return scores, occupied, key_sums.replace(levels=key_sums.levels[:, :, : sums.levels.shape[2]])
        return scores, occupied, None if key_sums is None else _with_room(key_sums, max_length)

    def _checked(self, cache: MixerCache) -> LookingCache:
        """The cache, with no sums of keys where λ does not look. Raises ValueError for that of another mixer or λ."""
        looks = lam_traits(self.lam).needs_scores
        parts = (cache.states, cache.key_sums) if isinstance(cache, LookingCache) else (cache,)
        if len(parts) != 1 + looks or not all(isinstance(part, FenwickState) for part in parts):
            without = ", without the sums of keys that it looks at" if looks and len(parts) == 1 else ""
            expected = "LookingCache of two FenwickStates" if looks else "FenwickState"
            raise ValueError(
                f"cache of lam={self.lam!r} is of type {type(cache).__name__}{without}: expected a {expected}, as the same "
                "model returns with max_length"
            )
        return cache if looks else LookingCache(cache, None)

    def _init_lam_log_scale(self, key, shape):
        del key
        heads, levels = (jnp.linspace(-1.0, 1.0, size) for size in shape)
        return self.lam_head_slope * heads[:, None] * levels


@dataclasses.dataclass(frozen=True)
class MixerSettings:
    """Settings that every model with TokenMixers has; each model's own class adds to them. `vocab_size` and `max_length` come
    from the task, `dtype` from train.precision, if they are not given."""

    vocab_size: int
    max_length: int
    mixer: str = setting(
        "log_linear",
        "token mixer: `log_linear`, `linear` (gated linear attention, one state), the two with the delta rule, "
        "`log_linear_delta` and `gated_delta`, `delta` (the delta rule without decays) or `softmax` (with rotary positions)",
        choices=tuple(MIXERS),
    )
    lam: str = setting(
        "mlp_softplus",
        f"λ of `log_linear` and `log_linear_delta`: {', '.join(f'`{name}`' for name in LAMS)}, or a "
        "class of your own as `my_module:MyLam`",
    )
    lam_hidden: int | None = setting(MlpLam.hidden, "width d_h of the λ MLP; None: twice the number of levels")
    lam_activation: str = setting(
        MlpLam.activation, f"activation of the λ MLP: {', '.join(f'`{name}`' for name in ACTIVATIONS)} (equation 3)"
    )
    hidden: int = setting(64, "width of the model", least=1)
    layers: int = setting(2, "number of layers", least=1, most=MOST_LAYERS)
    heads: int = setting(2, "number of heads", least=1)
    head_dim: int = setting(32, "width V of a head's values", least=1)
    key_dim: int = setting(32, "width K of queries and keys", least=1)
    key_groups: int | None = setting(None, "groups of heads that share keys; None: one group a head")
    init_scheme: str = setting(
        MlpLam.init_scheme, "initial values of λ: `text`, as in the paper, or `released`, as in its released code"
    )
    beta_max: float = setting(
        1.0, "of the delta rule: β is this times a sigmoid; 2 lets a state's eigenvalues be negative", above=0
    )
    chunk_size: int | None = setting(None, "tokens a chunk of the chunkwise forms, a power of two; None: by the shapes")
    implementation: str | None = setting(
        None,
        "form of the attention, and of what λ looks at (`linear` and `softmax` have one form): "
        f"{', '.join(f'`{name}`' for name in get_args(Implementation))}; None: the best that works",
    )
    dtype: str = "float32"
    # Not in configs, as training never needs it: so many levels have a λ of their own, and higher ones that of the highest of
    # them. None: all that max_length needs.
    lam_levels: int | None = None

    @property
    def groups(self) -> int:
        return self.heads if self.key_groups is None else self.key_groups

    @property
    def traits(self) -> MixerTraits:
        """Those of the mixer; none where there is no such mixer, which `check` refuses."""
        return MIXERS.get(self.mixer, MixerTraits())

    @property
    def has_lam(self) -> bool:
        """Whether the mixer weighs levels by λ, which it sows."""
        return self.traits.levels

    @property
    def longest(self) -> int | None:
        """The longest sequence that λ has levels for; None if there is none, as where nothing is indexed by level."""
        if not self.has_lam:
            return None
        return self.max_length if lam_traits(self.lam).has_levels and self.lam_levels is None else None

    def numbers_kept(self, length: int) -> int:
        """How many numbers one layer's mixer keeps of a sequence of `length` tokens when it decodes: its states and, if λ
        looks into its buckets, sums of keys; or all keys and values. What a short convolution keeps is not in it."""
        if self.mixer == "softmax":
            return length * (self.groups * self.key_dim + self.heads * self.head_dim)
        if not self.has_lam:
            return self.heads * self.key_dim * self.head_dim
        looks = lam_traits(self.lam).needs_scores
        return self.heads * num_levels(length) * self.key_dim * (self.head_dim + looks)

    def extended(self):
        """The same for sequences of any length: levels that λ was not trained for take the λ of the last that it was. As they
        are if there is no longest sequence. `check` refuses it for a λ that has levels and looks into its buckets."""
        return self if self.longest is None else dataclasses.replace(self, lam_levels=num_levels(self.max_length))

    @property
    def has_decays(self) -> bool:
        """Whether the mixer has step sizes and decays."""
        return self.traits.decays

    @property
    def has_states(self) -> bool:
        """Whether the mixer remembers states, and sows queries, keys, log decays and, with the delta rule, β."""
        return self.traits.decays or self.traits.erases

    @property
    def takes_pallas(self) -> bool:
        """Whether GPU kernels may compute it."""
        return self.implementation in (None, "pallas")

    @property
    def lam_settings(self) -> dict[str, Any]:
        """The arguments of `make_lam`."""
        return {
            "lam": self.lam,
            "hidden": self.lam_hidden,
            "activation": self.lam_activation,
            "init_scheme": self.init_scheme,
            "implementation": self.implementation,
        }

    @property
    def input_sizes(self) -> tuple[int, int, int]:
        """Widths of the projections dt, d and b that the mixer and its λ use beside q, k and v (0: none)."""
        needs_d = self.has_lam and lam_traits(self.lam).needs_input
        return (
            self.heads if self.has_decays else 0,
            self.heads * num_levels(self.max_length) if needs_d else 0,
            self.heads if self.traits.erases else 0,
        )

    @property
    def unread(self) -> set[str]:
        """The settings that change nothing, given the others."""
        of_delta = set() if self.traits.erases else {"beta_max"}
        has_forms = self.has_lam or self.traits.erases
        has_chunks = self.has_states and not (has_forms and self.implementation in ("parallel", "recurrent"))
        of_forms = (set() if has_forms else {"implementation"}) | (set() if has_chunks else {"chunk_size"})
        if not self.has_lam:
            return {"lam", "lam_hidden", "lam_activation", "init_scheme"} | of_delta | of_forms
        own = {"hidden": "lam_hidden", "activation": "lam_activation", "init_scheme": "init_scheme"}
        unread = {name for argument, name in own.items() if argument not in lam_arguments(self.lam)}
        return unread | of_delta | of_forms

    def token_mixer(self, **more: Any) -> TokenMixer:
        """The TokenMixer of these settings, called "mixer"."""
        return TokenMixer(
            mixer=self.mixer,
            num_levels=num_levels(self.max_length),
            lam=self.lam,
            lam_hidden=self.lam_hidden,
            lam_activation=self.lam_activation,
            init_scheme=self.init_scheme,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
            lam_levels=self.lam_levels,
            beta_max=self.beta_max,
            name="mixer",
            **more,
        )

    def check(self) -> None:
        """Raises SettingError naming the first invalid setting."""
        check_fields(self, "model")
        try:
            _check_attention(self.chunk_size, self.implementation)
            make_lam(**self.lam_settings)
        except SettingError as error:
            raise SettingError(f"model.{error}") from error
        if self.traits.erases and self.beta_max > 2:
            raise SettingError(
                f"model.beta_max must be at most 2, got {self.beta_max}: above that states can grow without bound"
            )
        if self.lam_levels is not None and (self.lam_levels < 1 or lam_traits(self.lam).needs_scores):
            raise SettingError(
                "model.lam_levels must be None or at least 1, and None for a λ that looks into its buckets, got "
                f"{self.lam_levels} with lam={self.lam}"
            )
        for name in ("vocab_size", "max_length", "groups"):
            shown, value = "key_groups" if name == "groups" else name, getattr(self, name)
            if value < 1:
                raise SettingError(f"model.{shown} must be at least 1, got {value}")
            if value > INT32_MAX:
                raise SettingError(f"model.{shown} must be at most {INT32_MAX:,}, got {value:,}")
        if self.heads % self.groups:
            raise SettingError(
                f"model.heads must be a multiple of key_groups, got heads={self.heads}, key_groups={self.groups}"
            )
        self._check_matrices()

    def _check_matrices(self) -> None:
        """Raises SettingError naming the sizes of a matrix that has more elements than can be indexed."""
        levels = f"num_levels({self.max_length})"
        matrices = [
            {"task.vocab_size": self.vocab_size, "model.hidden": self.hidden},
            {"model.hidden": self.hidden, "model.heads": self.heads, "model.head_dim": self.head_dim},
            {"model.hidden": self.hidden, "model.key_groups": self.groups, "model.key_dim": self.key_dim},
            {"model.hidden": self.hidden, "model.heads": self.heads, levels: num_levels(self.max_length)},
            {"model.lam_hidden": self.lam_hidden or 1, levels: num_levels(self.max_length)},
        ]
        for sizes in matrices:
            if (elements := math.prod(sizes.values())) > INT32_MAX:
                shown = " × ".join(f"{name}={size}" for name, size in sizes.items())
                raise SettingError(f"{shown} is a matrix of {elements:,} elements: expected at most {INT32_MAX:,}")


def _check_attention(chunk_size: int | None, implementation: str | None) -> None:
    try:
        check_attention_settings(chunk_size, implementation)
    except ValueError as error:
        raise SettingError(str(error)) from error
