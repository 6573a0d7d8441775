"""What kernels over chunks of tokens share: sizes, decays inside chunks, tiles of pairs, and which block a program sees."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.fenwick import fenwick_level, has_left_sibling, num_levels, tree_heights
from pallas_kernels.common.launch import dot, pad
from pallas_kernels.common.tiles import Launch

LOG2_E = math.log2(math.e)
# exp2 of this is 0 in float32, and sums of it over a chunk stay small.
MIN_LOG2_DECAY = -150.0
# log2 decays are split at this many parts of one: see `log2_decays`.
COARSE = 2.0**9
# Range sums over chunks go through masks of at most this many chunks at a time.
MASK_CHUNKS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a problem as kernels over chunks see it. Hashable: one set of kernels for each."""

    batch: int
    chunk: int  # C, tokens
    num_chunks: int  # N
    groups: int  # G
    heads: int  # H
    value_blocks: int = 1  # of each head
    upper: int = 0  # heights above the tree's, at which there are states of what came before
    segmented: bool = False  # whether some tokens forget all before them, as a segment starts there
    one_state: bool = False  # whether λ ≡ 1, and a chunk reads one state, that of all chunks before it
    key_dim: int
    dtype: str  # of q, k, v and the states
    precision: str  # "bf16", "tf32" or "f32"
    interpret: bool

    @property
    def length(self) -> int:
        return self.num_chunks * self.chunk

    @property
    def all_heads(self) -> int:
        """R: heads, each as often as it has value blocks."""
        return self.heads * self.value_blocks

    @property
    def group_heads(self) -> int:
        return self.all_heads // self.groups

    def of_arrays(self, q, heads: int):
        """The same for as many sequences and groups as q [B, T, G, K] has, and so many heads: by vmap more, on one of several
        devices fewer."""
        return dataclasses.replace(self, batch=q.shape[0], groups=q.shape[2], heads=heads)

    @property
    def shared_out(self) -> int:
        """Of these devices can have a part each: heads, or groups if there are several."""
        return self.heads if self.groups == 1 else self.groups

    @property
    def heights(self) -> int:
        """Of the tree; one state ends where a chunk begins, as those at height 0."""
        heights = tree_heights(self.num_chunks)
        return min(heights, 1) if self.one_state else heights

    @property
    def read_heights(self) -> int:
        """Heights at which a chunk may read a state."""
        return self.heights + self.upper

    @property
    def levels_inside(self) -> int:
        return num_levels(self.chunk)

    @property
    def levels(self) -> int:
        return self.levels_inside + self.read_heights

    @property
    def decay_parts(self) -> int:
        return 2 if self.precision == "f32" or self.segmented else 1


# --- Around kernels -------------------------------------------------------------------------------------------------


def by_chunk(x, sizes: Sizes):
    """[..., T] to [..., N, C]."""
    return x.reshape(*x.shape[:-1], sizes.num_chunks, sizes.chunk)


def sum_tokens(x, counts, sizes: Sizes):
    """For each token, the sum of x [B, H, T] over those of its chunk for which counts(their number, its number); [B, H, N, C].

    counts: a comparison, such as np.less. Blocks of tokens are summed first, so that each sum is of few numbers.
    """
    block = 1 << (sizes.chunk.bit_length() // 2)
    blocks = by_chunk(x, sizes).reshape(*x.shape[:-1], sizes.num_chunks, -1, block)
    inside, number = np.arange(block), np.arange(blocks.shape[-2])
    same = counts(inside[:, None], inside)
    others = counts(number[:, None], number) & (number[:, None] != number)
    own = jnp.sum(jnp.where(same, blocks[..., None], 0.0), axis=-2)
    other = jnp.sum(jnp.where(others, jnp.sum(blocks, axis=-1)[..., None], 0.0), axis=-2)
    return (own + other[..., None]).reshape(*x.shape[:-1], sizes.num_chunks, sizes.chunk)


def decay_in_chunk(log_decay: Float[Array, "B T H"], sizes: Sizes) -> Float[Array, "P B H T"]:
    """The kernels' `decay`, from [B, T, H] natural logs."""
    return since_chunk_start(log2_decays(log_decay, sizes), sizes)


def log2_decays(log_decay: Float[Array, "B T H"], sizes: Sizes) -> Float[Array, "P B H T"]:
    """[P, B, H, T], of each token, in parts whose sums over a chunk are exact; from [B, T, H] natural logs."""
    return jnp.stack(log2_decay_parts(jnp.swapaxes(log_decay, 1, 2), sizes))


def log2_decay_parts(log_decay, sizes: Sizes) -> list:
    """The parts of `log2_decays`, each of log_decay's shape."""
    log2_decay = at_most_zero(log_decay * LOG2_E)  # decays above 1 are 1, in every kernel
    # NaN stays, in a kernel on a GPU too.
    log2_decay = jnp.where(log2_decay < MIN_LOG2_DECAY, MIN_LOG2_DECAY, log2_decay)
    if sizes.decay_parts == 1:
        return [log2_decay]
    # Multiples of 1 / COARSE add up over a chunk without rounding, and what is left of each is small.
    coarse = jnp.floor(log2_decay * COARSE) / COARSE
    return [coarse, log2_decay - coarse]


def since_chunk_start(parts: Float[Array, "P B H T"], sizes: Sizes) -> Float[Array, "P B H T"]:
    """The kernels' `decay` from `log2_decays`."""
    return jnp.stack([sum_tokens(part, np.less_equal, sizes).reshape(part.shape) for part in parts])


def chunk_decay_of(decay: Float[Array, "P B H T"], sizes: Sizes) -> Float[Array, "B H N"]:
    """log2 decay over each chunk, [B, H, N]."""
    return jnp.sum(by_chunk(decay, sizes)[..., -1], axis=0)


def since_block_start(chunk_decay: Float[Array, "*axes N"]) -> Float[Array, "*axes N heights"]:
    """[..., N, heights]: the sum of chunks' log decays [..., N] from the start of the chunk's block of 2**height chunks
    up to the chunk. Linear in what is finite, and never a difference."""
    num_chunks = chunk_decay.shape[-1]
    heights = tree_heights(num_chunks)
    size = min(1 << heights, MASK_CHUNKS)
    local = tree_heights(size)
    blocks = -(-num_chunks // size)
    # A decay that is not finite is in the states of its chunk already; times the masks' zeros it would reach earlier chunks.
    finite = jnp.where(jnp.isfinite(chunk_decay), chunk_decay, 0.0)
    padded = pad(finite, (chunk_decay.ndim - 1, blocks * size))
    padded = padded.reshape(*chunk_decay.shape[:-1], blocks, size)

    # One height more than the block has: the sum over all of the block before each chunk.
    height, chunk, other = np.arange(local + 1), np.arange(size)[:, None, None], np.arange(size)[:, None]
    mask = (chunk >> height == other >> height) & (other < chunk)
    sums = jnp.einsum("...bo,coh->...bch", padded, mask.astype(np.float32), precision="highest")
    since = sums[..., :local]
    if blocks > 1:
        whole = since_block_start(jnp.sum(padded, axis=-1))
        since = jnp.concatenate([since, sums[..., local:] + whole[..., None, :]], axis=-1)
    return since.reshape(*chunk_decay.shape[:-1], blocks * size, heights)[..., :num_chunks, :]


def since_start(chunk_decay: Float[Array, "*axes N"], sizes: Sizes) -> Float[Array, "*axes N heights"]:
    """`since_block_start`, and at each height above the tree's the sum of all chunks before; [..., N, read_heights]."""
    if sizes.one_state:
        return jnp.zeros_like(chunk_decay)[..., None]
    since = since_block_start(chunk_decay)
    if sizes.upper == 0:
        return since
    finite = jnp.where(jnp.isfinite(chunk_decay), chunk_decay, 0.0)
    before = jnp.cumsum(jnp.concatenate([jnp.zeros_like(finite[..., :1]), finite[..., :-1]], axis=-1), axis=-1)
    upper = jnp.broadcast_to(before[..., None], (*before.shape, sizes.upper))
    return jnp.concatenate([since, upper], axis=-1)


def upper_reads(above: Int[Array, " B"], sizes: Sizes) -> Bool[Array, "B U"]:
    """Whether there is a state at each height above the tree's, bool [B, upper]; above [B]: a bit for each."""
    return (above[:, None] >> np.arange(sizes.upper, dtype=np.int32) & 1) != 0


def where_read(
    x: Float[Array, "B H heights T"], above: Int[Array, " B"] | None, sizes: Sizes
) -> Float[Array, "B H heights T"]:
    """x [B, heads, read_heights, T] where a token's chunk reads a state at a height, else 0. above: as in `upper_reads`."""
    reads = has_left_sibling(np.arange(sizes.num_chunks), np.arange(sizes.heights)[:, None])
    reads = np.repeat(reads, sizes.chunk, axis=1)[None, None]
    if sizes.upper:
        upper = upper_reads(above, sizes)[:, None, :, None]
        upper = jnp.broadcast_to(upper, (*upper.shape[:3], sizes.length))
        reads = jnp.concatenate([jnp.broadcast_to(reads, (len(upper), *reads.shape[1:])), upper], axis=2)
    return jnp.where(reads, x, 0.0)


def read_decay(
    decay: Float[Array, "P B H T"],
    since: Float[Array, "B H N heights"],
    above: Int[Array, " B"] | None,
    sizes: Sizes,
) -> Float[Array, "B H heights T"]:
    """Decay from the end of the state that a token's chunk reads at each height to the token; 0 if it reads none.

    Returns [B, H, read_heights, T]. since: `since_start` of the chunks' decays. above: as in `upper_reads`, or None.
    """
    since_start = jnp.sum(by_chunk(decay, sizes), axis=0)[:, :, None]
    decays = jnp.exp2(jnp.swapaxes(since, 2, 3)[..., None] + since_start)
    return where_read(decays.reshape(*decays.shape[:3], sizes.length), above, sizes)


# --- Inside a kernel ------------------------------------------------------------------------------------------------


def multiply(x, y, sizes: Sizes, transpose_x=False, transpose_y=False):
    return dot(x, y, sizes.precision, sizes.interpret, transpose_x, transpose_y)


def decay_parts(decay_ref, head, tokens, sizes: Sizes):
    """The parts of the log2 decay since the chunk's start, at some tokens or at one."""
    return [decay_ref[part, head, tokens] for part in range(sizes.decay_parts)]


def at_most_zero(x):
    """min(x, 0), and NaN of NaN: the minimum of a kernel on a GPU would make 0 of it, a decay of 1."""
    return jnp.where(x > 0.0, 0.0, x)


def decay_tile(parts):
    """Decay from key (column) to query (row) for each pair of a chunk; 1 where the key comes later."""
    between = sum(part[:, None] - part[None, :] for part in parts)
    return jnp.exp2(at_most_zero(between))


def decay_until_end(parts, last):
    """Decay from each token to the end of the chunk; `last` are the parts at its last token."""
    after = sum(end - part for part, end in zip(parts, last, strict=True))
    return jnp.exp2(at_most_zero(after))


def level_tile(size: int):
    """Fenwick level of each pair of query (row) and key (column) of a chunk; -1 where the key comes later."""
    query = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    key = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.where(query >= key, fenwick_level(query, key), -1)


# --- Launching ------------------------------------------------------------------------------------------------------


class Specs:
    """BlockSpecs of a grid (chunk or node, block of a group's heads, batch x group), with `launch.heads` heads a program.

    A program sees `chunks` chunks of tokens from the first grid axis on, or all of them if that is None.
    """

    def __init__(self, sizes: Sizes, launch: Launch):
        self.sizes, self.launch = sizes, launch
        self.head_blocks = sizes.group_heads // launch.heads
        self.decay_heads = max(launch.heads // sizes.value_blocks, 1)

    def grid(self, first: int) -> tuple[int, int, int]:
        return first, self.head_blocks, self.sizes.batch * self.sizes.groups

    def _batch(self, z):
        return z // self.sizes.groups

    def _head_block(self, y, z):
        return (z % self.sizes.groups) * self.head_blocks + y

    def _decay_block(self, y, z):
        first = self._head_block(y, z) * self.launch.heads // self.sizes.value_blocks
        return first // self.decay_heads

    def batch_and_heads(self, y, z):
        """Which sequence, and which block of heads."""
        return self._batch(z), self._head_block(y, z)

    def keys(self, chunks=1):
        """[tokens, K] of q or k; all tokens if `chunks` is None."""
        tokens = self._tokens(chunks)
        return pl.BlockSpec(
            (None, tokens, None, self.sizes.key_dim),
            lambda x, y, z: (self._batch(z), self._block(chunks, x), z % self.sizes.groups, 0),
        )

    def partial_keys(self, chunks=1):
        """[tokens, K] of one block of heads' part of dq or dk, [head blocks, B, T, G, K]."""
        return pl.BlockSpec(
            (None, None, self._tokens(chunks), None, self.sizes.key_dim),
            lambda x, y, z: (y, self._batch(z), x, z % self.sizes.groups, 0),
        )

    def decay(self, chunks=1):
        """[parts, decay heads, tokens]."""
        return pl.BlockSpec(
            (self.sizes.decay_parts, None, self.decay_heads, self._tokens(chunks)),
            lambda x, y, z: (0, self._batch(z), self._decay_block(y, z), self._block(chunks, x)),
        )

    def lam(self, levels: int, chunks=1):
        """[decay heads, levels, tokens] of lam or weight."""
        return pl.BlockSpec(
            (None, self.decay_heads, levels, self._tokens(chunks)),
            lambda x, y, z: (self._batch(z), self._decay_block(y, z), 0, self._block(chunks, x)),
        )

    def by_token(self, chunks=1):
        """[heads, tokens] of what is summed by head."""
        return pl.BlockSpec(
            (None, self.launch.heads, self._tokens(chunks)),
            lambda x, y, z: (*self.batch_and_heads(y, z), x),
        )

    def by_level(self, levels: int, chunks=1):
        """[heads, levels, tokens] of what is summed by head and level."""
        return pl.BlockSpec(
            (None, self.launch.heads, levels, self._tokens(chunks)),
            lambda x, y, z: (*self.batch_and_heads(y, z), 0, x),
        )

    def _tokens(self, chunks):
        return self.sizes.length if chunks is None else chunks * self.sizes.chunk

    def _block(self, chunks, x):
        """Which such block of tokens the program with this first index sees."""
        return 0 if chunks is None else x
