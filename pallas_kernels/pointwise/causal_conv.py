"""The short causal convolution with SiLU, and its gradient, each in one pass over the tokens: every input is read once, but for
a few at the edges of the spans of tokens that programs have.

Names and shapes inside: S independent convolutions (mapped axes), B sequences, T tokens, C channels, W their width.

  x, y      [S, B, T, C]
  weights   [S, W + 1, C] float32; row W holds the bias
  own       [S, B, T] int32, where there are segments: how many tokens before each are of its segment, up to W - 1
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.launch import call, with_gradient
from pallas_kernels.common.support import interpreting, triton
from pallas_kernels.common.tiles import Launch
from pallas_kernels.registry import Kernel, register

MAX_WIDTH = 8  # so many inputs of each channel are held
# Channels and tokens of a program, and tokens that it fetches at once.
CHANNELS, SPAN, ROWS = 64, 128, 8
LAUNCH = Launch(heads=1, warps=1, stages=1)


@dataclasses.dataclass(frozen=True)
class ConvSizes:
    """Sizes of a convolution as its kernels see them."""

    length: int  # T
    channels: int  # C
    width: int  # W
    interpret: bool

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.channels, CHANNELS)

    @property
    def spans(self) -> int:
        return pl.cdiv(self.length, SPAN)


def causal_conv(
    x: Float[Array, "B T C"],
    kernel: Float[Array, "W C"],
    bias: Float[Array, " C"],
    own: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T C"]:
    """silu(bias + Σ_j kernel[j] · x[t - W + 1 + j]) for each channel of x, computed in float32; zeros before the first token.

    Args:
      x: [B, T, C], float32 or bfloat16. kernel: [W, C]. bias: [C].
      own: [B, T] int32, of packed documents: how many tokens before each are of its document, W - 1 for more. Further ones
        are zeros to it. None for one document.

    Returns [B, T, C] in x's dtype. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["causal_conv"] says why it cannot run.
    """
    width, channels = kernel.shape
    CAUSAL_CONV.require(width, x.dtype)
    sizes = ConvSizes(length=x.shape[1], channels=channels, width=width, interpret=interpreting())
    weights = jnp.concatenate([kernel, bias[None]]).astype(jnp.float32)
    operands = (x, weights) if own is None else (x, weights, own.astype(jnp.int32))
    return _differentiable(sizes)(*(operand[None] for operand in operands))[0]


def _limits(width: int, dtype: DTypeLike) -> str | None:
    if not 1 <= width <= MAX_WIDTH:
        return f"W, the width of the convolution, is {width}: its kernel takes 1 to {MAX_WIDTH}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"x has dtype {jnp.dtype(dtype)}: the kernel of the convolution takes float32 and bfloat16"
    return None


CAUSAL_CONV = register("causal_conv", Kernel("the short convolution", _limits))


@functools.cache
def _differentiable(sizes: ConvSizes):
    return with_gradient(*(functools.partial(way, sizes=sizes) for way in (_forward, _backward)))


def _grid(x, sizes: ConvSizes):
    """A program for each convolution, sequence, span of tokens and block of channels, and the number of the first two."""
    return (x.shape[0] * x.shape[1], sizes.spans * sizes.blocks), x.shape[1]


def _sequence_spec(sequences: int, sizes: ConvSizes):
    """All tokens of one sequence, of which a program takes some."""
    shape = (None, None, sizes.length, sizes.channels)
    return pl.BlockSpec(shape, lambda i, j: (i // sequences, i % sequences, 0, 0))


def _weights_spec(sequences: int, sizes: ConvSizes):
    return pl.BlockSpec((None, sizes.width + 1, sizes.channels), lambda i, j: (i // sequences, 0, 0))


def _own_spec(sequences: int, sizes: ConvSizes):
    return pl.BlockSpec((None, None, sizes.length), lambda i, j: (i // sequences, i % sequences, 0))


def _forward(x, weights, *own, sizes: ConvSizes):
    grid, sequences = _grid(x, sizes)
    in_specs = [_sequence_spec(sequences, sizes), _weights_spec(sequences, sizes), _own_spec(sequences, sizes)]
    return call(
        functools.partial(_forward_kernel, sizes=sizes),
        "causal_conv",
        grid,
        in_specs[: 2 + len(own)],
        _sequence_spec(sequences, sizes),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        LAUNCH,
        sizes.interpret,
    )(x, weights, *own)


def _backward(x, weights, *own_and_dy, sizes: ConvSizes):
    *own, dy = own_and_dy
    grid, sequences = _grid(x, sizes)
    of_program = pl.BlockSpec(
        (None, None, None, sizes.width + 1, sizes.channels),
        lambda i, j: (i // sequences, i % sequences, j // sizes.blocks, 0, 0),
    )
    dx, parts = call(
        functools.partial(_backward_kernel, sizes=sizes),
        "causal_conv_gradients",
        grid,
        [
            _sequence_spec(sequences, sizes),
            _weights_spec(sequences, sizes),
            *[_own_spec(sequences, sizes)] * len(own),
            _sequence_spec(sequences, sizes),
        ],
        [_sequence_spec(sequences, sizes), of_program],
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((*x.shape[:2], sizes.spans, *weights.shape[1:]), jnp.float32),
        ],
        LAUNCH,
        sizes.interpret,
    )(x, weights, *own, dy)
    return dx, jnp.sum(parts, axis=(1, 2)), *[None] * len(own)


@dataclasses.dataclass(frozen=True)
class _Channels:
    """The channels and tokens of one program."""

    sizes: ConvSizes
    columns: jax.Array
    start: jax.Array

    @classmethod
    def of_program(cls, sizes: ConvSizes) -> _Channels:
        program = pl.program_id(1)
        columns = program % sizes.blocks * CHANNELS + lax.broadcasted_iota(jnp.int32, (CHANNELS,), 0)
        return cls(sizes, columns, program // sizes.blocks * SPAN)

    @property
    def exist(self):
        return self.columns < self.sizes.channels

    def weights(self, ref):
        """The rows of the kernel, and the bias."""
        rows = [triton.load(ref.at[j, self.columns], mask=self.exist, other=0.0) for j in range(self.sizes.width + 1)]
        return rows[:-1], rows[-1]

    def load(self, ref, token):
        """A token's channels in float32; zeros where there is no such token."""
        exists = self.exist & (token >= 0) & (token < self.sizes.length)
        token = jnp.clip(token, 0, self.sizes.length - 1)
        return triton.load(ref.at[token, self.columns], mask=exists, other=0.0).astype(jnp.float32)

    def store(self, ref, token, value, wanted=True):
        exists = self.exist & wanted & (token >= 0) & (token < self.sizes.length)
        token = jnp.clip(token, 0, self.sizes.length - 1)
        triton.store(ref.at[token, self.columns], value.astype(ref.dtype), mask=exists)

    def before(self, ref):
        """The inputs of the W - 1 tokens before the program's."""
        return tuple(self.load(ref, self.start - j) for j in range(self.sizes.width - 1, 0, -1))

    def own(self, refs, token):
        """How many tokens before this one it reads, W - 1 at most; any if there is no such token. refs: of `own`, or none."""
        if not refs:
            return None
        return refs[0][jnp.clip(token, 0, self.sizes.length - 1)]


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _weighted(weights, rows):
    return sum(weight * row for weight, row in zip(weights, rows, strict=True))


def _read(rows, owns):
    """rows, each so many tokens back as rows follow it, or 0 where that is more than its reader's `own`."""
    back = reversed(range(len(rows)))
    return [row if own is None else jnp.where(own >= j, row, 0.0) for row, own, j in zip(rows, owns, back, strict=True)]


def _forward_kernel(x_ref, weights_ref, *refs, sizes: ConvSizes):
    *own_refs, y_ref = refs
    program, width = _Channels.of_program(sizes), sizes.width
    weights, bias = program.weights(weights_ref)

    def step(index, before):
        first = program.start + index * ROWS
        rows = [*before, *(program.load(x_ref, first + i) for i in range(ROWS))]
        for i in range(ROWS):
            own = program.own(own_refs, first + i)
            z = bias + _weighted(weights, _read(rows[i : i + width], [own] * width))
            program.store(y_ref, first + i, z * _sigmoid(z))
        return tuple(rows[ROWS:])

    lax.fori_loop(0, min(SPAN, pl.cdiv(sizes.length, ROWS) * ROWS) // ROWS, step, program.before(x_ref))


def _backward_kernel(x_ref, weights_ref, *refs, sizes: ConvSizes):
    """Token by token: the gradient of its sum z, of the weights by it, and of the input W - 1 tokens before, of which z is the
    last to read. The W - 1 tokens behind the program's are there for the last inputs alone."""
    *own_refs, dy_ref, dx_ref, parts_ref = refs
    program, width = _Channels.of_program(sizes), sizes.width
    weights, bias = program.weights(weights_ref)
    end = program.start + SPAN

    def rows_of(first, count, x_before, dz_before):
        """(inputs from W - 1 tokens before on, gradients of z likewise) up to `count` tokens from `first` on; writes dx."""
        xs = [*x_before, *(program.load(x_ref, first + i) for i in range(count))]
        dys = [program.load(dy_ref, first + i) for i in range(count)]
        owns = [program.own(own_refs, first + i) for i in range(1 - width, count)]
        dzs = list(dz_before)
        for i in range(count):
            z = bias + _weighted(weights, _read(xs[i : i + width], [owns[i + width - 1]] * width))
            share = _sigmoid(z)
            dzs.append(dys[i] * share * (1.0 + z * (1.0 - share)))
            token = first + i - width + 1
            dx = _weighted(weights, _read(dzs[i : i + width][::-1], owns[i : i + width][::-1]))
            program.store(dx_ref, token, dx, wanted=(token >= program.start) & (token < end))
        return xs, dzs, owns[width - 1 :]

    def step(index, carry):
        x_before, dz_before, sums = carry
        xs, dzs, owns = rows_of(program.start + index * ROWS, ROWS, x_before, dz_before)
        of_rows = dzs[width - 1 :]
        read = [_read(xs[i : i + width], [owns[i]] * width) for i in range(ROWS)]  # of each row, what it reads
        sums = [
            *(sums[j] + _weighted(of_rows, [inputs[j] for inputs in read]) for j in range(width)),
            sums[width] + sum(of_rows),
        ]
        return tuple(xs[ROWS:]), tuple(dzs[ROWS:]), tuple(sums)

    zeros = jnp.zeros((CHANNELS,), jnp.float32)
    start = program.before(x_ref), (zeros,) * (width - 1), (zeros,) * (width + 1)
    steps = min(SPAN, pl.cdiv(sizes.length, ROWS) * ROWS) // ROWS
    x_before, dz_before, sums = lax.fori_loop(0, steps, step, start)
    for j, value in enumerate(sums):
        triton.store(parts_ref.at[j, program.columns], value, mask=program.exist)
    rows_of(program.start + steps * ROWS, width - 1, x_before, dz_before)
