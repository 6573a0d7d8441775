"""How a sequence goes on from an initial state: the tokens' own part at any position, and what they read of the state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from loglinear_jax.fenwick import (
    FenwickState,
    bucket_level_after,
    capacity,
    fenwick_level,
    init_fenwick_state,
    num_levels,
    occupied_levels,
)
from loglinear_jax.ops.decays import bounded, decay_since_start
from loglinear_jax.ops.levels import dot, merge_heads, pad_to, split_heads
from loglinear_jax.ops.positions import advanced, as_int32, as_position, beginnings, have_room, segment_starts
from loglinear_jax.ops.sharding import over_explicit_axes, varying_as


class Past(NamedTuple):
    """What tokens that begin a window (see `Windows`) find at the levels beyond it, which all of them read alike.

    states: one a level. occupied: int32, with a bit for each of the levels that has a bucket.
    """

    states: Float[Array, "B H U K V"]
    occupied: Int[Array, ""]

    def read(
        self,
        q: Float[Array, "B T G K"],
        lam: Float[Array, "B T H U"],
        log_decay: Float[Array, "B T H"],
        starts: Bool[Array, "B T"] | None,
        precision=None,
    ) -> Float[Array, "B T H V"]:
        """What it adds to the outputs of tokens, for their λ of these levels alone."""
        groups, heads, levels = q.shape[2], *lam.shape[2:]
        lam = jnp.where(jnp.right_shift(self.occupied, np.arange(levels, dtype=np.int32)) & 1 == 1, lam, 0)
        since = decay_since_start(split_heads(log_decay, groups), beginnings(starts))
        states = self.states.reshape(len(q), groups, heads // groups, *self.states.shape[2:])
        weights = split_heads(lam, groups) * since[..., None]
        return merge_heads(read_levels(jnp.moveaxis(q, 1, 2), weights, states, precision))


class Start(NamedTuple):
    """Where and how a sequence starts.

    state: after earlier tokens, if there are any: a FenwickState, or one state [B, H, K, V]. position: of the first token, a
    traced scalar or [B]; None: 0. starts: which tokens start a segment, see `segments.segment_starts`; None: one segment.
    """

    state: Any = None
    position: Int[Array, "*B"] | None = None
    starts: Bool[Array, "B T"] | None = None

    @classmethod
    def of(
        cls, state: Any, first_position: int | Int[Array, "*B"] | None, segment_ids: Int[Array, "B T"] | None
    ) -> Start:
        """That of an operation's arguments, a first position of 0 as None. The state's position is -1 beyond its own levels."""
        starts = segment_starts(segment_ids)
        if isinstance(state, FenwickState):
            state = state.replace(position=as_position(state.position, capacity(state.levels.shape[2])))
            return cls(state, state.position, starts)
        return cls(state, None if first_position is None else as_position(first_position), starts)


def over_rows(form: Callable, arrays: Sequence[Array], start: Start) -> tuple[Array, Any]:
    """form(*arrays, start), (output, state) of it, also where each row of the batch is at a position of its own: then one row
    at a time, vectorised."""
    if start.position is None or start.position.ndim == 0:
        return form(*arrays, start)

    def one_row(arrays, start):
        state = None if start.state is None else start.state.replace(levels=start.state.levels[None])
        start = Start(state, start.position, None if start.starts is None else start.starts[None])
        out, state = form(*(x[None] for x in arrays), start)
        return out[0], None if state is None else state.replace(levels=state.levels[0])

    return jax.vmap(one_row)(tuple(arrays), start)


def run_from(
    start: Start,
    tokens: tuple,
    aligned: Callable,
    return_state: bool,
    precision=None,
    read: Callable | None = None,
    with_past: Callable | None = None,
) -> tuple[Float[Array, "B T H V"], FenwickState | None]:
    """Runs a form that only knows sequences from position 0 on from anywhere; returns its output and last state.

    aligned: function of tokens (q, k, v, ..., lam) at positions 0, 1, ..., of their `Start.starts`, and of an index `last` (an
      int, or traced), to the outputs and, if return_state, the levels [B, H, L, K, V] after token `last`.
    read: function of the tokens, their `Start.starts` and the initial state to what its buckets add to outputs, and a function
      that gives what they leave at the end, [B, H, L, K, V]; None: the states decay and no more.
    with_past: as `aligned`, for tokens that begin a window (see `Windows`), in place of `last` with the buckets [B, H, U, K, V]
      that all of them find beyond it, and an int32 [B] with a bit for each that there is. None: plain JAX reads them.
    """
    length, initial = tokens[0].shape[1], start.state
    if start.position is None:
        out, levels = aligned(*tokens, start.starts, length - 1)
        return out, FenwickState(levels, jnp.asarray(length, jnp.int32)) if return_state else None
    *others, lam = tokens
    windows = Windows(start.position, length, lam.shape[-1])
    old = None
    if initial is not None and read is None:
        q, _, _, log_decay, _ = tokens
        groups = q.shape[2]
        old = InitialState(initial, split_heads(log_decay, groups), lam.shape[-1], start.starts)

    def with_old(out, levels, from_old):
        """Both with what a state has that decays, and no more; from_old: what it adds to outputs."""
        if old is None:
            return out, levels
        out = out + from_old()
        out = out if with_past is None else out.astype(tokens[2].dtype)
        return out, None if levels is None else levels + old.at_end()

    def at_the_beginning():
        past = None if old is None else old.past(windows.top)
        if past is not None and with_past is not None and windows.top < lam.shape[-1]:
            return with_past(*tokens, start.starts, past.states, jnp.broadcast_to(past.occupied, q.shape[:1]))
        out, levels = aligned(*others, windows.of_local_levels(lam), start.starts, length - 1)
        levels = None if levels is None else windows.local_levels_at_end(levels)
        beyond = lam[..., windows.top :]
        return with_old(out, levels, lambda: past.read(q, beyond, log_decay, start.starts, precision))

    def anywhere():
        laid = (None if x is None else windows.lay(x) for x in (*others, windows.of_levels(lam), start.starts))
        out, levels = aligned(*laid, windows.last)
        levels = None if levels is None else windows.levels_at_end(levels)

        def from_old():
            return merge_heads(old.read(jnp.moveaxis(q, 1, 2), split_heads(lam, groups), precision))

        return with_old(windows.take(out), levels, from_old)

    # Long prompts come in parts that begin windows: half of the work, or less.
    out, levels = jax.lax.cond(windows.offset == 0, at_the_beginning, anywhere)
    if initial is not None and read is not None:
        from_initial, at_end = read(*tokens, start.starts, initial)
        out, levels = out + from_initial, levels + at_end() if return_state else None
    return out, FenwickState(levels, advanced(start.position, length)) if return_state else None


def state_at(start: Start, batch: int, heads: int, key_dim: int, value_dim: int, levels: int, dtype) -> FenwickState:
    """The state that the first token finds: an empty one of these sizes if there is none."""
    if start.state is not None:
        return start.state
    empty = init_fenwick_state(batch, heads, key_dim, value_dim, capacity(levels), dtype)
    return empty if start.position is None else empty.replace(position=start.position)


def scan_tokens(
    step: Callable,
    state: Any,
    tokens: Sequence[Float[Array, "B T ..."]],
    precision=None,
    starts: Bool[Array, "B T"] | None = None,
):
    """(outputs [B, T, ...], the state at the end) of step(state, *token, precision) -> (output, state), token by token.

    starts: the tokens that start a segment, before which the state (but for positions) is cleared.
    """

    def body(state, token_and_start):
        token, start = token_and_start
        if start is not None:
            state = jax.tree.map(lambda x: _cleared(x, start) if x.ndim > 1 else x, state)
        out, state = step(state, *token, precision=precision)
        return state, out

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (list(tokens), starts))
    state, out = jax.lax.scan(body, varying_as(tokens[0], state), by_time)
    return jnp.moveaxis(out, 0, 1), state


def _cleared(state: Float[Array, "B ..."], start: Bool[Array, " B"]) -> Float[Array, "B ..."]:
    return jnp.where(start.reshape(-1, *[1] * (state.ndim - 1)), 0, state)


@functools.partial(jax.jit, static_argnums=0)
def take_step(step: Callable, state: FenwickState, *token):
    """One more token after a state, by `step`, an operation's own, in the state's dtype.

    token: its q, k, v, log_decay, and what else it has, lam the last. Returns (o [B, H, V] in v's dtype, the next state); o is
    NaN where the state or lam has no level for the token.
    """
    return over_explicit_axes(tokens=3, axis=1)(functools.partial(_take_step, step))(state, *token)


def _take_step(step: Callable, state: FenwickState, q, k, v, log_decay, *others_and_lam):
    *others, lam = others_and_lam
    levels, dtype = state.levels.shape[2], state.levels.dtype
    position = as_int32(state.position)
    known = have_room(position, 1, capacity(min(levels, lam.shape[-1])))
    log_decay = bounded(log_decay.astype(dtype))
    lam = pad_to(lam.astype(dtype), levels, axis=2)[..., :levels]
    q, k, others = q.astype(dtype), k.astype(dtype), [x.astype(dtype) for x in others]
    out, new_state = step(state.replace(position=position), q, k, v.astype(dtype), log_decay, *others, lam)
    return jnp.where(known[..., None], out.astype(v.dtype), jnp.nan), new_state


def with_more_levels(start: Start, levels: int, dtype) -> tuple[Start, int]:
    """(the start, its state in a dtype and with at least so many levels; how many it has then)."""
    if start.state is None:
        return start, levels
    held = pad_to(start.state.levels.astype(dtype), levels, axis=2)
    return start._replace(state=start.state.replace(levels=held)), held.shape[2]


def nan_beyond(room: int, start: Start, out: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """NaN for tokens beyond the first `room` positions. Of the outputs, not of λ: so it reaches no gradient of the others."""
    if start.position is None:
        return out
    known = have_room(start.position, out.shape[1], room)
    return jnp.where(known[..., None, None], out, jnp.nan)


def read_levels(
    q: Float[Array, "B G T K"],
    weights: Float[Array, "B G R T L"],
    states: Float[Array, "B G R L K V"],
    precision=None,
) -> Float[Array, "B G R T V"]:
    """Σ_l weights_l · q states_l, one level after the other."""

    @jax.checkpoint
    def add_level(out, state_and_weight):
        state, weight = state_and_weight
        return out + weight[..., None] * dot("bgtk,bgrkv->bgrtv", q, state, precision), None

    zeros = varying_as(states, jnp.zeros((*weights.shape[:4], states.shape[-1]), states.dtype))
    return jax.lax.scan(add_level, zeros, (jnp.moveaxis(states, 3, 0), jnp.moveaxis(weights, -1, 0)))[0]


class Windows:
    """Where tokens that follow an initial state lie in a sequence of their own, at any position, which may be traced.

    The tokens are laid into a buffer of two windows of 2**w ≥ T tokens, shifted so that window boundaries in the
    buffer are window boundaries of the sequence. Any T tokens fit, and the buffer's own levels are the sequence's,
    except the topmost: pairs across the window boundary meet at the level where the boundary's position does.

    Tokens that begin a window, at offset 0, need no buffer: the levels among themselves, the local ones, are the sequence's.
    """

    def __init__(self, position: Int[Array, ""], length: int, levels: int):
        window = 1 << (num_levels(length) - 1)
        self.length, self.levels, self.buffer = length, levels, 2 * window
        self.top = num_levels(self.buffer) - 1
        self.known = min(self.top, levels)
        self.offset = position % window
        boundary = position - self.offset + window
        # Clipped where no token lies beyond the boundary, and the level is not used.
        self.boundary_level = jnp.minimum(fenwick_level(boundary, boundary - 1), levels - 1)

    @property
    def last(self) -> Int[Array, ""]:
        """The last token's place in the buffer."""
        return self.offset + self.length - 1

    def lay(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B W ..."]:
        """Tokens at their places."""
        behind = [(0, 0), (0, self.buffer - self.length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.roll(jnp.pad(x, behind), self.offset, axis=1)

    def take(self, x: Float[Array, "B W ..."]) -> Float[Array, "B T ..."]:
        """What stands at the tokens' places."""
        return jax.lax.dynamic_slice_in_dim(x, self.offset, self.length, axis=1)

    def of_local_levels(self, lam: Float[Array, "B T H L"]) -> Float[Array, "B T H M"]:
        """λ of the levels inside a window."""
        return jnp.pad(lam[..., : self.known], [(0, 0)] * 3 + [(0, self.top - self.known)])

    def of_levels(self, lam: Float[Array, "B T H L"]) -> Float[Array, "B T H M"]:
        """λ of the buffer's levels."""
        at_boundary = jax.lax.dynamic_index_in_dim(lam, self.boundary_level, axis=3)
        return jnp.concatenate([self.of_local_levels(lam), at_boundary], axis=3)

    def local_levels_at_end(self, local: Float[Array, "B H M ..."]) -> Float[Array, "B H L ..."]:
        """What the levels inside a window hold at the levels of the sequence."""
        after = [(0, 0)] * (local.ndim - 3)
        return jnp.pad(local[:, :, : self.known], [(0, 0)] * 2 + [(0, self.levels - self.known)] + after)

    def levels_at_end(self, local: Float[Array, "B H M ..."]) -> Float[Array, "B H L ..."]:
        """What the buffer's levels hold at the levels of the sequence."""
        at_boundary = jax.nn.one_hot(self.boundary_level, self.levels, dtype=local.dtype)
        at_boundary = at_boundary.reshape(-1, *[1] * (local.ndim - 3)) * local[:, :, self.top, None]
        return self.local_levels_at_end(local) + at_boundary


class InitialState:
    """An initial state as later tokens find it.

    states [B, G, R, L, K, V]: its buckets. found_at [T, L]: the level at which each token finds each of them: a bucket that
    stood at level l when the state was taken is found by token t at bucket_level_after(l, last, t). since [B, G, R, T]: the
    decay from then to each token; 0 after the first segment, to which it belongs.
    """

    def __init__(
        self,
        initial: FenwickState,
        log_decay: Float[Array, "B G R T"],
        levels: int,
        starts: Bool[Array, "B T"] | None = None,
    ):
        batch, groups, reps, length = log_decay.shape
        states = initial.levels.reshape(batch, groups, reps, levels, *initial.levels.shape[3:])
        self.position, last = initial.position, initial.position - 1
        # Position 0 has no past: whatever the levels hold there belongs to nothing.
        self.occupied = occupied_levels(jnp.maximum(last, 0), levels) & (initial.position > 0)
        self.states = jnp.where(self.occupied[:, None, None], states, 0)
        level = jnp.arange(levels, dtype=jnp.int32)
        found_at = bucket_level_after(level, last, initial.position + jnp.arange(length, dtype=jnp.int32)[:, None])
        self.found_at = jnp.minimum(found_at, levels - 1)  # only unreachable levels exceed it
        self.since = decay_since_start(log_decay, beginnings(starts))

    def found(self, lam: Float[Array, "B G R T L"]) -> Float[Array, "B G R T L"]:
        """λ with which each token reads each of the buckets; 0 for those that hold nothing, as 0 · inf is NaN."""
        found = jnp.take_along_axis(lam, jnp.broadcast_to(self.found_at, lam.shape), axis=-1)
        return jnp.where(self.occupied, found, 0)

    def read(
        self, q: Float[Array, "B G T K"], lam: Float[Array, "B G R T L"], precision=None
    ) -> Float[Array, "B G R T V"]:
        """What the buckets add to the outputs."""
        return read_levels(q, self.found(lam) * self.since[..., None], self.states, precision)

    def past(self, first: int) -> Past:
        """What tokens that begin a window find at the levels from `first` on, each bucket at the same level."""
        states = self.moved(self.states)[:, :, :, first:]
        heads = states.shape[1] * states.shape[2]
        return Past(states.reshape(len(states), heads, *states.shape[3:]), jnp.right_shift(self.position, first - 1))

    def at_end(self) -> Float[Array, "B H L K V"]:
        """What the buckets leave after the last token."""
        states = self.moved(self.states * self.since[..., -1, None, None, None])
        return states.reshape(states.shape[0], -1, *states.shape[3:])

    def moved(self, states: Float[Array, "B G R L K V"]) -> Float[Array, "B G R L K V"]:
        """These states of the buckets, each at the level where the last token finds it."""
        moved = (self.found_at[-1][:, None] == jnp.arange(states.shape[3])).astype(states.dtype)
        return jnp.einsum("bgrlkv,lm->bgrmkv", states, moved, precision="highest")
