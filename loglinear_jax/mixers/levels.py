"""What mixers with a state for each level share: λ, what it looks at, and the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import FenwickState, capacity, num_levels, occupied_levels
from loglinear_jax.lam import MlpLam, lam_arguments, lam_traits, make_lam
from loglinear_jax.mixers.base import DecayingMixer, MixerCache, sow, unit
from loglinear_jax.ops import Implementation, bucket_scores
from loglinear_jax.ops.positions import first_read
from loglinear_jax.ops.sequence_parallel import first_read_in_piece, num_pieces, place_of_piece
from loglinear_jax.settings import SettingError


@flax.struct.dataclass
class LookingCache:
    """What log-linear attention remembers with a content-aware λ.

    states: the attention's, [B, H, L, K, V]. key_sums: those of `bucket_scores`, [B, H, L, K, 1], at the same position. first:
    the position of the first token that they hold, 0 or [B].
    """

    states: FenwickState
    key_sums: FenwickState | None
    first: Int[Array, "*B"] | None


LevelCache = FenwickState | LookingCache


class LevelMixer(DecayingMixer):
    """A mixer with a state for each level of the Fenwick tree, weighed by λ.

    num_levels: that λ has, for sequences of at most 2^(num_levels - 1) tokens; None is as many as the sequence needs. With
    lam_levels a sequence may have any length, and every level from lam_levels on takes the λ of the one below. A λ of which
    nothing is indexed by level (see loglinear_jax.lam) takes any length.

    With a lam_head_slope s other than 0, λ is multiplied by exp(Σ), Σ [H, L] learned, which starts from -s · a to s · a over
    the levels with a from -1 to 1 over the heads: some heads start with the near past, some with the far.

    With a random_first_position N above 0, each sequence starts at a position drawn from 0 .. N-1 where `apply` is given an rng
    "first_position", as training does: the same in all layers. Elsewhere sequences start at 0.

    λ is sown as "lam_value", what it looks at as "bucket_scores".
    """

    num_levels: int | None = None
    lam: str = "mlp_softplus"
    lam_hidden: int | None = MlpLam.hidden
    lam_activation: str = MlpLam.activation
    init_scheme: str = MlpLam.init_scheme
    lam_head_slope: float = 0.0
    lam_levels: int | None = None
    random_first_position: int = 0
    chunk_size: int | None = None
    implementation: Implementation | None = None
    axis_name: str | None = None

    has_lam: ClassVar[bool] = True

    @property
    def inputs(self) -> dict[str, int]:
        needs_d = lam_traits(self.lam).needs_input
        return super().inputs | ({"d": self.num_levels or 0} if needs_d else {})

    @property
    def longest(self) -> int | None:
        if self.num_levels is None or self.lam_levels is not None or not lam_traits(self.lam).has_levels:
            return None
        return capacity(self.num_levels)

    @property
    def unused(self) -> set[str]:
        of_lam = {"lam_hidden": "hidden", "lam_activation": "activation", "init_scheme": "init_scheme"}
        unread = {name for name, argument in of_lam.items() if argument not in lam_arguments(self.lam)}
        return unread | super().unused

    def numbers_kept(self, length: int, heads: int, groups: int, key_dim: int, value_dim: int) -> int:
        return heads * num_levels(length) * key_dim * (value_dim + lam_traits(self.lam).needs_scores)

    def check(self) -> None:
        super().check()
        self.lam_module(parent=None)
        traits = lam_traits(self.lam)
        if self.random_first_position < 0:
            raise SettingError(f"random_first_position must not be negative, got {self.random_first_position}")
        if self.lam_levels is not None and (self.lam_levels < 1 or traits.needs_scores):
            raise SettingError(
                "lam_levels must be None or at least 1, and None for a content-aware λ, got "
                f"{self.lam_levels} with lam={self.lam}"
            )
        if self.lam_head_slope and not traits.has_levels:
            raise SettingError(
                f"lam_head_slope={self.lam_head_slope}: lam={self.lam} has no levels that could have one"
            )

    def lam_module(self, **more: Any) -> nn.Module:
        """The λ of these settings. more: other settings of `make_lam`."""
        settings = {
            "hidden": self.lam_hidden,
            "activation": self.lam_activation,
            "init_scheme": self.init_scheme,
            "implementation": self.implementation,
        }
        return make_lam(self.lam, **(settings | more))

    def _attend(
        self,
        attention: Callable,
        step: Callable,
        arrays: tuple[Array, ...],
        d: Float[Array, "B T HL"] | None,
        cache: MixerCache | None,
        max_length: int | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], LevelCache]:
        """The attention of `arrays` (q, k, v, log_decay and, with the delta rule, β), weighed by λ, and the next cache; one
        token after others is a step of it. Inside a compact method."""
        q, k, _, log_decay = arrays[:4]
        before = None if cache is None else self._checked(cache)
        drawn = self._drawn_position(q.shape[0])
        where: dict[str, Any] = {"segment_ids": segment_ids, "implementation": self.implementation}
        if drawn is not None:
            where["first_position"] = drawn
        lam, key_sums, first = self._lam(q, k, log_decay, d, before, max_length, where)
        sow(self, lam_value=lam)
        if before is not None and q.shape[1] == 1:
            out, states = step(before.states, *(x[:, 0] for x in (*arrays, lam)))
            return out[:, None], states if key_sums is None else LookingCache(states, key_sums, first)
        decoding = cache is not None or max_length is not None
        attended = attention(
            *arrays, lam, **where,
            initial_state=None if before is None else before.states, return_state=decoding, axis_name=self.axis,
            chunk_size=self.chunk_size,
        )  # fmt: skip
        if not decoding:
            return attended
        out, states = attended
        if before is None:
            states = _with_room(states, max_length)
        else:
            states = states.replace(levels=states.levels[:, :, : before.states.levels.shape[2]])
        return out, states if key_sums is None else LookingCache(states, key_sums, first)

    def _drawn_position(self, batch: int) -> Int[Array, " B"] | None:
        if not (self.random_first_position and self.has_rng("first_position")):
            return None
        assert self.scope is not None
        key = self.scope.rngs["first_position"].rng  # not make_rng's, which each layer has of its own
        return jax.random.randint(key, (batch,), 0, self.random_first_position, jnp.int32)

    def _lam(
        self, q, k, log_decay, d, before: LookingCache | None, max_length: int | None, where: dict[str, Any]
    ) -> tuple[Float[Array, "B T H L"], FenwickState | None, Int[Array, "*B"] | None]:
        """(λ; where λ looks at them and something is to be remembered, the sums of keys after these tokens and the position of
        the first of them)."""
        traits = lam_traits(self.lam)
        module = self.lam_module(name="lam")
        pieces = 1 if self.axis is None else num_pieces(self.axis)
        room = pieces * q.shape[1] if max_length is None else max_length
        room += self.random_first_position if "first_position" in where else 0
        wanted = num_levels(room) if before is None else before.states.levels.shape[2]
        levels = self.num_levels if traits.has_levels and self.num_levels is not None else wanted
        if room > capacity(levels) and self.lam_levels is None and before is None:
            raise SettingError(
                f"lam={self.lam!r} has {levels} levels, for {capacity(levels)} tokens, got {room}: train with a larger "
                "model.max_length, or a λ that is not indexed by level, such as content"
            )
        shape = (*log_decay.shape, levels)
        d = jnp.zeros(shape) if d is None else d.reshape(*log_decay.shape, -1)
        key_sums, first = None, None
        if traits.needs_scores:
            scores, occupied, key_sums, first = self._look(q, k, log_decay, levels, before, max_length, where)
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
        return lam, key_sums, first

    def _look(self, q, k, log_decay, levels: int, before: LookingCache | None, max_length: int | None, where):
        """(bucket scores of unit queries and keys; where levels are occupied; the sums of keys that are to be remembered, and
        the position of the first of them)."""
        sums = None if before is None else before.key_sums
        more: dict[str, Any] = dict(num_levels=levels, initial_state=sums, axis_name=self.axis)
        more["return_state"] = before is not None or max_length is not None
        if before is not None and q.shape[1] == 1:
            more["implementation"] = "recurrent"
        found = bucket_scores(unit(q), unit(k), log_decay, **(where | more))
        scores, key_sums = found if isinstance(found, tuple) else (found, None)
        sow(self, bucket_scores=scores)
        start = jnp.zeros((), jnp.int32) if self.axis is None else place_of_piece(q.shape[1], self.axis)
        position = where.get("first_position", start) if sums is None else sums.position
        first = jnp.zeros((), jnp.int32) if before is None or before.first is None else before.first
        first = where.get("first_position", first)
        places = position[..., None] + jnp.arange(q.shape[1])
        segment_ids = where["segment_ids"]
        if segment_ids is None:
            occupied = occupied_levels(places, levels, first[..., None])
        else:
            of_tokens = (
                first_read(segment_ids, position, first)
                if self.axis is None
                else first_read_in_piece(segment_ids, self.axis)
            )
            occupied, first = occupied_levels(places, levels, of_tokens), of_tokens[:, -1]
        occupied = occupied[..., None, :]
        if sums is not None and key_sums is not None:
            return scores, occupied, key_sums.replace(levels=key_sums.levels[:, :, : sums.levels.shape[2]]), first
        return scores, occupied, None if key_sums is None else _with_room(key_sums, max_length), first

    def _checked(self, cache: MixerCache) -> LookingCache:
        """The cache, with no sums of keys where λ does not look."""
        looks = lam_traits(self.lam).needs_scores
        expected = LookingCache if looks else FenwickState
        if not isinstance(cache, expected):
            raise ValueError(
                f"cache of lam={self.lam!r} is of type {type(cache).__name__}: expected a {expected.__name__}, as the same "
                "model returns with max_length"
            )
        return LookingCache(cache, None, None) if isinstance(cache, FenwickState) else cache

    def _init_lam_log_scale(self, key, shape):
        del key
        heads, levels = (jnp.linspace(-1.0, 1.0, size) for size in shape)
        return self.lam_head_slope * heads[:, None] * levels


def _with_room(state: FenwickState, max_length: int | None) -> FenwickState:
    """The state without the levels that max_length tokens don't need, which hold nothing yet, and never will."""
    assert max_length is not None  # where there is no cache yet
    return state.replace(levels=state.levels[:, :, : num_levels(max_length)])
