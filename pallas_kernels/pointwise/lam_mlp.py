"""λ as a small MLP of the token, with its gradient, in one pass over the tokens: the hidden layer stays on the chip.

Names and shapes inside: S independent MLPs (mapped axes), R rows (tokens times heads), L levels, F hidden units.

  d, lam    [S, R, L] float32
  w1        [S, levels, hidden]   levels and hidden: L + 1 and F, each up to a power of two; row L holds the bias b1, which
                                  meets a column of ones
  w2        [S, hidden, levels]
  b2        [S, 1, levels]
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from pallas_kernels.common.launch import call, dot, vary_as, with_gradient
from pallas_kernels.common.support import dot_mode, gpu, interpreting, triton, why_not_precise
from pallas_kernels.common.tiles import Launch, tile_for
from pallas_kernels.registry import Kernel, register

MAX_LEVELS, MAX_HIDDEN = 31, 128
OUTS = ("softplus", "softmax")
ACTIVATIONS = ("gelu", "identity")
# Gradients of the weights are summed by programs, at least so many for each MLP and so many in all, and then over them.
PROGRAMS, ALL_PROGRAMS = 64, 1024
MOST_WEIGHTS = 2048  # of each matrix of an MLP on an A100 in full float32


@dataclasses.dataclass(frozen=True)
class MlpSizes:
    """Sizes and kind of an MLP as its kernels see it."""

    rows: int
    num_levels: int  # L
    levels: int
    hidden: int
    out: str
    activation: str
    precision: str  # "tf32" or "f32"
    interpret: bool
    mlps: int = 1  # S

    @property
    def block(self) -> int:
        """Rows a program, or a step of one."""
        return min(WARP_ELEMENTS * self.launch.warps // self.hidden, tile_for(self.rows))

    @property
    def launch(self) -> Launch:
        # As timed: two warps for a language model alone, four for 8 and for 32 recall models at a time.
        return Launch(heads=1, warps=2 if self.mlps == 1 else 4, stages=1)


WARP_ELEMENTS = 1024  # of the hidden layer that a warp has at a time


def lam_mlp(
    d: Float[Array, "*B L"],
    w1: Float[Array, "L F"],
    b1: Float[Array, " F"],
    w2: Float[Array, "F L"],
    b2: Float[Array, " L"],
    *,
    out: str,
    activation: str = "gelu",
    precision: PrecisionLike = None,
) -> Float[Array, "*B L"]:
    """λ = out(W2 · activation(W1 · d + b1) + b2) over the last axis, by one kernel; float32. (Amin et al. 2026,
    equation 3.)

    Args:
      d: [..., L]. w1: [L, d_h], b1: [d_h], w2: [d_h, L], b2: [L].
      out: "softplus" or "softmax". activation: "gelu" (exact) or "identity".
      precision: of the matrix products, as in jax.lax.dot: full float32, or TF32, the GPU's default.

    Returns λ [..., L]. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["lam_mlp"] says why it cannot run.
    """
    levels, hidden = w1.shape
    LAM_MLP.require(levels, hidden, out, activation, precision)
    sizes = MlpSizes(
        rows=math.prod(d.shape[:-1]),
        num_levels=levels,
        levels=tile_for(levels + 1),
        hidden=tile_for(hidden),
        out=out,
        activation=activation,
        precision=dot_mode(jnp.float32, precision),
        interpret=interpreting(),
    )
    more_levels, more_hidden = sizes.levels - levels, sizes.hidden - hidden
    w1 = jnp.pad(jnp.concatenate([w1, b1[None]]), [(0, more_levels - 1), (0, more_hidden)])
    w2 = jnp.pad(w2, [(0, more_hidden), (0, more_levels)])
    b2 = jnp.pad(b2, [(0, more_levels)])
    operands = (d.reshape(-1, levels), *(vary_as(x, d) for x in (w1, w2, b2[None])))
    return _differentiable(sizes)(*(x.astype(jnp.float32)[None] for x in operands)).reshape(d.shape)


def _limits(levels: int, hidden: int, out: str, activation: str, precision: PrecisionLike = None) -> str | None:
    for name, value, known in (("out", out, OUTS), ("activation", activation, ACTIVATIONS)):
        if value not in known:
            return f"{name} is {value!r}: the kernel of the λ MLP takes {' and '.join(known)}"
    for name, size, largest in (
        ("L, the number of levels,", levels, MAX_LEVELS),
        ("d_h, the hidden width,", hidden, MAX_HIDDEN),
    ):
        if not 1 <= size <= largest:
            return f"{name} is {size}: the kernel of the λ MLP takes 1 to {largest}"
    return why_not_precise(jnp.float32, precision)


def _no_gain(levels: int, hidden: int, out: str, activation: str, precision: PrecisionLike = None) -> str | None:
    """ptxas would leave 32 registers to each thread: see `pallas_kernels.compile_table`."""
    del out, activation
    is_large = tile_for(levels + 1) * tile_for(hidden) > MOST_WEIGHTS
    if is_large and dot_mode(jnp.float32, precision) == "f32" and gpu().capability == (8, 0):
        return f"L and d_h are {levels} and {hidden}: so large on an A100, the kernel pays in TF32 (precision='tensorfloat32')"
    return None


LAM_MLP = register("lam_mlp", Kernel("the MLP of λ", _limits, no_gain=_no_gain))


@functools.cache
def _differentiable(sizes: MlpSizes):
    return with_gradient(*(functools.partial(way, sizes=sizes) for way in (_forward, _backward)))


def _weight_specs(sizes: MlpSizes, program=None):
    """w1, w2 and b2 of one MLP; with `program`, each program's own part of their gradients, [S, programs, ...]."""
    shapes = (sizes.levels, sizes.hidden), (sizes.hidden, sizes.levels), (1, sizes.levels)
    if program is None:
        return [pl.BlockSpec((None, *shape), lambda s, p: (s, 0, 0)) for shape in shapes]
    return [pl.BlockSpec((None, None, *shape), lambda s, p: (s, p, 0, 0)) for shape in shapes]


def _row_spec(sizes: MlpSizes):
    """[R, L]: all rows of one MLP, of which a program takes some."""
    return pl.BlockSpec((None, sizes.rows, sizes.num_levels), lambda s, p: (s, 0, 0))


def _forward(d, w1, w2, b2, *, sizes: MlpSizes):
    sizes = dataclasses.replace(sizes, mlps=d.shape[0])
    return call(
        functools.partial(_forward_kernel, sizes=sizes),
        "lam_mlp",
        (d.shape[0], pl.cdiv(sizes.rows, sizes.block)),
        [_row_spec(sizes), *_weight_specs(sizes)],
        _row_spec(sizes),
        jax.ShapeDtypeStruct(d.shape, jnp.float32),
        sizes.launch,
        sizes.interpret,
    )(d, w1, w2, b2)


def _backward(d, w1, w2, b2, dlam, *, sizes: MlpSizes):
    sizes = dataclasses.replace(sizes, mlps=d.shape[0])
    programs = min(max(PROGRAMS, ALL_PROGRAMS // d.shape[0]), pl.cdiv(sizes.rows, sizes.block))
    dd, *weights = call(
        functools.partial(_backward_kernel, sizes=sizes, programs=programs),
        "lam_mlp_gradients",
        (d.shape[0], programs),
        [_row_spec(sizes), *_weight_specs(sizes), _row_spec(sizes)],
        [_row_spec(sizes), *_weight_specs(sizes, programs)],
        [
            jax.ShapeDtypeStruct(d.shape, jnp.float32),
            *(jax.ShapeDtypeStruct((d.shape[0], programs, *x.shape[1:]), jnp.float32) for x in (w1, w2, b2)),
        ],
        sizes.launch,
        sizes.interpret,
    )(d, w1, w2, b2, dlam)
    return dd, *(jnp.sum(x, axis=1) for x in weights)


def _window(ref, first, sizes: MlpSizes):
    """(the part of ref [R, L] from row `first` on as [block, levels], and which of that there is)."""
    row = first + lax.broadcasted_iota(jnp.int32, (sizes.block, sizes.levels), 0)
    level = lax.broadcasted_iota(jnp.int32, (sizes.block, sizes.levels), 1)
    exists = (row < sizes.rows) & (level < sizes.num_levels)
    return ref.at[row, level], exists


def _load(ref, first, sizes: MlpSizes):
    window, exists = _window(ref, first, sizes)
    return triton.load(window, mask=exists, other=0.0)


def _store(ref, first, value, sizes: MlpSizes):
    window, exists = _window(ref, first, sizes)
    triton.store(window, value, mask=exists)


def _with_ones(d, sizes: MlpSizes):
    """d with 1 at level L, which meets b1."""
    level = lax.broadcasted_iota(jnp.int32, d.shape, 1)
    return jnp.where(level == sizes.num_levels, 1.0, d)


def _hidden(d, w1, sizes: MlpSizes):
    """(activation(W1 · d + b1), its derivative), [block, hidden]."""
    x = dot(d, w1, sizes.precision, sizes.interpret)
    if sizes.activation == "identity":
        return x, jnp.ones_like(x)
    below, density = normal_distribution(x)
    return x * below, below + x * density


def _lam(logits, sizes: MlpSizes):
    if sizes.out == "softplus":
        return jnp.maximum(logits, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    level = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logits = jnp.where(level < sizes.num_levels, logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return weights / jnp.sum(weights, axis=1, keepdims=True)


def _forward_kernel(d_ref, w1_ref, w2_ref, b2_ref, lam_ref, *, sizes: MlpSizes):
    first = pl.program_id(1) * sizes.block
    d = _with_ones(_load(d_ref, first, sizes), sizes)
    hidden, _ = _hidden(d, w1_ref[:, :], sizes)
    logits = dot(hidden, w2_ref[:, :], sizes.precision, sizes.interpret) + b2_ref[0, :][None, :]
    _store(lam_ref, first, _lam(logits, sizes), sizes)


def _backward_kernel(
    d_ref,
    w1_ref,
    w2_ref,
    b2_ref,
    dlam_ref,
    dd_ref,
    dw1_ref,
    dw2_ref,
    db2_ref,
    *,
    sizes: MlpSizes,
    programs: int,
):
    program = pl.program_id(1)
    w1, w2, b2 = w1_ref[:, :], w2_ref[:, :], b2_ref[0, :]
    multiply = functools.partial(dot, mode=sizes.precision, interpret=sizes.interpret)

    def step(index, carry):
        dw1, dw2, db2 = carry
        first = (program + index * programs) * sizes.block
        d = _with_ones(_load(d_ref, first, sizes), sizes)
        dlam = _load(dlam_ref, first, sizes)
        hidden, slope = _hidden(d, w1, sizes)
        logits = multiply(hidden, w2) + b2[None, :]
        if sizes.out == "softplus":
            dlogits = dlam / (1.0 + jnp.exp(-logits))
        else:
            lam = _lam(logits, sizes)
            dlogits = lam * (dlam - jnp.sum(lam * dlam, axis=1, keepdims=True))
        dhidden = slope * multiply(dlogits, w2, transpose_y=True)
        _store(dd_ref, first, multiply(dhidden, w1, transpose_y=True), sizes)
        return (
            dw1 + multiply(d, dhidden, transpose_x=True),
            dw2 + multiply(hidden, dlogits, transpose_x=True),
            db2 + jnp.sum(dlogits, axis=0),
        )

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (w1, w2, b2))
    steps = pl.cdiv(sizes.rows, sizes.block * programs)
    dw1_ref[:, :], dw2_ref[:, :], db2_ref[0, :] = lax.fori_loop(0, steps, step, tuple(zeros))


def normal_distribution(x):
    """(distribution function, density) of the standard normal, to 1e-6 in float32 (Abramowitz and Stegun 7.1.26): the
    lowering of kernels for GPUs knows no erf."""
    distance = jnp.abs(x) * math.sqrt(0.5)
    exponential = jnp.exp(-distance * distance)
    t = 1.0 / (1.0 + 0.3275911 * distance)
    polynomial = 0.0
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + coefficient) * t
    tail = 0.5 * polynomial * exponential
    return jnp.where(x < 0, tail, 1.0 - tail), exponential / math.sqrt(2 * math.pi)
