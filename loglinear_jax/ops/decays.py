"""Products of decays, formed so that neither overflow nor cancellation can touch them.

begin: where the segment of each token begins, if there are several (see `ops.positions`); then what one segment would have of
another is 0. Products are in the inputs' dtype, decays and sums in float32 or wider.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# exp of this is 0 in float64 too, while sums over a chunk stay finite: log_decay = -inf (forget everything) becomes usable.
MIN_LOG_DECAY = -1e4
SLOW = -0.5  # log decays above are those of `decayed` that lose less than they keep
SUMMED = 256  # tokens of a block of `cumulative_sum`


def accumulation_dtype(*arrays) -> jnp.dtype:
    """Dtype of decays, λ, states and sums: float32, or float64 if an input is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def to_common_dtypes(log_decay: Float[Array, "B T H"], *arrays: Array, bound: bool = True) -> tuple[Array, ...]:
    """(log_decay in the dtype of sums, `bounded` if `bound`; the others in the widest of their dtypes)."""
    log_decay, widest = log_decay.astype(accumulation_dtype(*arrays)), jnp.result_type(*arrays)
    return bounded(log_decay) if bound else log_decay, *(x.astype(widest) for x in arrays)


def bounded(log_decay: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """The log decays from MIN_LOG_DECAY to 0. One above 0 counts as 0 and has no gradient, one of 0 has its own."""
    log_decay = jnp.maximum(log_decay, MIN_LOG_DECAY)
    return jnp.where(log_decay > 0, 0.0, log_decay)


def compensated_cumsum(x: Float[Array, "... T"]) -> tuple[Float[Array, "... T"], Float[Array, "... T"]]:
    """Inclusive cumulative sum over the last axis as a pair (sum, correction).

    Differences of a plain float32 cumulative sum lose the small decays that follow large ones. `correction` is what
    rounding took from `sum` (found exactly by Knuth's TwoSum), so a difference of both keeps full precision. The
    gradient flows through `sum` alone, which is the gradient of the exact sum.
    """
    total = jnp.cumsum(x, axis=-1)
    rounded, term = jax.lax.stop_gradient((total, x))
    before = jnp.concatenate([jnp.zeros_like(rounded[..., :1]), rounded[..., :-1]], axis=-1)
    step = before + term
    term_in_step = step - before
    rounding = (before - (step - term_in_step)) + (term - term_in_step)
    return total, jnp.cumsum((step - rounded) + rounding, axis=-1)


def cumulative_sum(x: Float[Array, "... T"], reverse: bool = False) -> Float[Array, "... T"]:
    """Inclusive cumulative sum over the last axis; reverse: from the last token on. Of many tokens by blocks: on a GPU reversed
    sums, which are also the gradients of others, take JAX a time that grows with T²."""
    axis, length = x.ndim - 1, x.shape[-1]
    if length <= SUMMED:
        return jax.lax.cumsum(x, axis=axis, reverse=reverse)
    whole = jnp.pad(x, [(0, 0)] * axis + [(0, -length % SUMMED)])
    inside = jax.lax.cumsum(whole.reshape(*x.shape[:-1], -1, SUMMED), axis=axis + 1, reverse=reverse)
    end, none = (0, -1) if reverse else (-1, 0)  # a block's sum, and the block that has no other before it
    beside = jnp.roll(inside[..., end], -1 if reverse else 1, axis).at[..., none].set(0)
    return (inside + cumulative_sum(beside, reverse)[..., None]).reshape(whole.shape)[..., :length]


def decayed(states: Float[Array, "*N K V"], log_decay: Float[Array, "*#N"]) -> Float[Array, "*N K V"]:
    """states · exp(log_decay). Of slow decays what is lost is taken away: near 1, exp would be rounded alike at each of many
    steps."""
    log_decay = log_decay[..., None, None]
    return jnp.where(log_decay > SLOW, states + states * jnp.expm1(log_decay), states * jnp.exp(log_decay))


def decay_matrix(log_decay: Float[Array, "... T"], begin: Int[Array, "... T"] | None = None) -> Float[Array, "... T T"]:
    """exp(sum of log_decay over s < r ≤ t) for every t ≥ s, and 0 above the diagonal.

    The diagonal is a constant 1: left to exp(x - x), its gradient would be added and taken away again, and rounding would drown
    that of strong decays.
    """
    total, correction = compensated_cumsum(log_decay)
    between = (total[..., :, None] - total[..., None, :]) + (correction[..., :, None] - correction[..., None, :])
    length = log_decay.shape[-1]
    below = jnp.tril(jnp.ones((length, length), bool), -1)
    if begin is not None:
        place = jnp.arange(length, dtype=jnp.int32)
        # begin ≤ s < t in one comparison: a place before the beginning becomes a large number.
        since_begin, own = (x.astype(jnp.uint32) for x in (place - begin[..., None], place - begin))
        below = since_begin < own[..., None]
    return jnp.exp(jnp.where(below, between, -jnp.inf)) + jnp.eye(length, dtype=log_decay.dtype)


def decay_to_end(log_decay: Float[Array, "... T"], begin: Int[Array, "... T"] | None = None) -> Float[Array, "... T"]:
    """exp(sum of log_decay over r > s) for every s: what is left of token s at the end."""
    later = jnp.concatenate([log_decay[..., 1:], jnp.zeros_like(log_decay[..., :1])], axis=-1)
    kept = jnp.exp(cumulative_sum(later, reverse=True))
    if begin is None:
        return kept
    return jnp.where(begin[..., -1:] <= jnp.arange(begin.shape[-1], dtype=jnp.int32), kept, 0)


def decay_since_start(
    log_decay: Float[Array, "... T"], begin: Int[Array, "... T"] | None = None
) -> Float[Array, "... T"]:
    """exp(sum of log_decay over r ≤ t) for every t: what is left at token t of a state before the first."""
    since = jnp.exp(cumulative_sum(log_decay))
    return since if begin is None else jnp.where(begin < 0, since, 0)
