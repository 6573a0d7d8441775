"""The table of every form of every operation, which the tests of tests/ops/test_forms.py go through."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax import (
    FenwickState,
    fenwick_step,
    gated_delta_attention,
    gated_linear_attention,
    log_linear_attention,
    log_linear_delta_attention,
    log_linear_delta_step,
    num_levels,
    occupied_levels,
)
from loglinear_jax.ops import bucket_scores, softmax_attention
from loglinear_jax.ops.softmax import attend_to_cache, key_value_cache

from .inputs import ARGUMENTS, bucket_definition, definition, random_inputs, softmax_definition

HAS_GPU = jax.default_backend() == "gpu"


@dataclasses.dataclass(frozen=True)
class Operation:
    """What its forms have in common.

    definition: its arguments as NumPy arrays to its output. prefill: (form, inputs, room) to (output, what `step` remembers).
    step: (what it remembers, one token's inputs) to (output, what it remembers then). oracle: the form to hold others to.
    """

    name: str
    function: Callable
    arguments: tuple[str, ...]  # of ARGUMENTS, or beta
    definition: Callable
    prefill: Callable
    step: Callable
    oracle: str = "recurrent"
    has_state: bool = True
    has_levels: bool = True  # in its state
    has_positions: bool = True  # takes a first position
    # Arguments of `function` with which a state lasts for so many tokens.
    with_room: Callable = lambda room: {}

    def inputs(self, *args, **kwargs):
        drawn = dict(zip(ARGUMENTS, random_inputs(*args, **kwargs), strict=True))
        if "beta" in self.arguments:
            k, log_decay = drawn["k"], drawn["log_decay"]
            drawn["k"] = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
            beta = np.random.default_rng(args[0]).uniform(0, 2, log_decay.shape)
            drawn["beta"] = jnp.asarray(beta, log_decay.dtype)
        return tuple(drawn[name] for name in self.arguments)

    def draw_state(self, seed, inputs, levels=None):
        """Random values for an initial state that fits the inputs."""
        named = dict(zip(self.arguments, inputs, strict=True))
        batch, _, heads = named["log_decay"].shape
        if levels is None and "lam" in named:
            levels = named["lam"].shape[-1]
        by_level = (levels or 9,) if self.has_levels else ()
        value_dim = named["v"].shape[-1] if "v" in named else 1
        stood = np.random.default_rng(seed).normal(size=(batch, heads, *by_level, named["q"].shape[-1], value_dim))
        return jnp.asarray(stood, named["log_decay"].dtype)

    def make_state(self, values, position):
        """A state of these values, at the levels that hold tokens after so many."""
        if not self.has_levels:
            return values
        position = jnp.asarray(position, jnp.int32)
        occupied = occupied_levels(jnp.maximum(position - 1, 0), values.shape[2]) & (position > 0)
        return FenwickState(jnp.where(occupied[:, None, None], values, 0), position)

    def state_values(self, state):
        return state.levels if self.has_levels else state


def _prefill(form, inputs, room):
    return form(inputs, return_state=True, **form.operation.with_room(room))


def _one_token(attention):
    def step(state, inputs):
        out, state = attention(*(x[:, None] for x in inputs), initial_state=state, return_state=True)
        return out[:, 0], state

    return step


def _attend_once(cache, inputs):
    out, cache = attend_to_cache(cache, *(x[:, None] for x in inputs))
    return out[:, 0], cache


def _score_once(state, inputs):
    inputs = (x[:, None] for x in inputs)
    scores, state = bucket_scores(*inputs, initial_state=state, return_state=True, implementation="recurrent")
    return scores[:, 0], state


LOG_LINEAR = Operation(
    "log_linear",
    log_linear_attention,
    ARGUMENTS,
    definition,
    _prefill,
    lambda state, inputs: fenwick_step(state, *inputs),
)
BUCKET_SCORES = Operation(
    "bucket_scores",
    bucket_scores,
    ("q", "k", "log_decay"),
    bucket_definition,
    _prefill,
    _score_once,
    with_room=lambda room: {"num_levels": num_levels(room)},
)
GATED_LINEAR = Operation(
    "gated_linear",
    gated_linear_attention,
    ("q", "k", "v", "log_decay"),
    lambda q, k, v, g: definition(q, k, v, g, np.ones((*g.shape, num_levels(g.shape[1])))),
    _prefill,
    _one_token(gated_linear_attention),
    has_levels=False,
    has_positions=False,
)
DELTA = Operation(
    "log_linear_delta",
    log_linear_delta_attention,
    ("q", "k", "v", "log_decay", "beta", "lam"),
    lambda q, k, v, g, beta, lam: definition(q, k, v, g, lam, beta),
    _prefill,
    lambda state, inputs: log_linear_delta_step(state, *inputs),
)
GATED_DELTA = Operation(
    "gated_delta",
    gated_delta_attention,
    ("q", "k", "v", "log_decay", "beta"),
    lambda q, k, v, g, beta: definition(q, k, v, g, np.ones((*g.shape, num_levels(g.shape[1]))), beta),
    _prefill,
    _one_token(gated_delta_attention),
    has_levels=False,
    has_positions=False,
)
SOFTMAX = Operation(
    "softmax",
    softmax_attention,
    ("q", "k", "v"),
    softmax_definition,
    lambda form, inputs, room: (form(inputs), key_value_cache(*inputs[1:], room)),
    _attend_once,
    oracle="parallel",
    has_state=False,
    has_positions=False,
)
WITH_STATES = (LOG_LINEAR, BUCKET_SCORES, GATED_LINEAR, DELTA, GATED_DELTA)


@dataclasses.dataclass(frozen=True)
class Form:
    """One form, and what it supports.

    dtype: the widest that it takes. tolerance, gradient_tolerance: relative, in that dtype; the others: in theirs.
    dims: K and V that tests take (kernels have a smallest). chunk_sizes: none where a form has no chunks. spreads: arguments
    from which NaN reaches earlier tokens of the same chunk, or of the sequence where a form has no chunks.
    """

    operation: Operation
    name: str
    dtype: type = np.float64
    tolerance: float = 1e-12
    gradient_tolerance: float = 1e-10
    float32_tolerance: float = 5e-6  # of extreme decays
    bfloat16_tolerance: float = 1e-2
    dims: tuple[int, int] = (3, 5)
    chunk_sizes: tuple[int, ...] = ()
    spreads: tuple[str, ...] = ()

    @property
    def chunk_size(self) -> int | None:
        """What tests take that do not look at chunks."""
        return self.chunk_sizes[0] if self.chunk_sizes else None

    def first_reached(self, argument, token):
        """The first token whose output NaN in this token's argument reaches."""
        if argument not in self.spreads:
            return token
        return token // self.chunk_size * self.chunk_size if self.chunk_sizes else 0

    def __call__(self, inputs, **kwargs):
        if self.chunk_sizes:
            kwargs = {"chunk_size": self.chunk_size} | kwargs
        return self.operation.function(*inputs, implementation=self.name, **kwargs)

    def inputs(self, seed, batch, length, groups, heads, **kwargs):
        return self.operation.inputs(seed, batch, length, groups, heads, *self.dims, **{"dtype": self.dtype} | kwargs)

    def __str__(self):
        return f"{self.operation.name}-{self.name}"


# Compiled on a GPU, elsewhere in Pallas's interpreter.
KERNELS = dict(dtype=np.float32, tolerance=1e-5, gradient_tolerance=1e-5, dims=(16, 24), chunk_sizes=(16, 32))
FORMS = (
    Form(LOG_LINEAR, "parallel", spreads=("k", "v")),
    Form(LOG_LINEAR, "recurrent"),
    Form(LOG_LINEAR, "xla", chunk_sizes=(4, 1, 8, 32), spreads=("k", "v")),
    Form(LOG_LINEAR, "pallas", spreads=("k", "v", "log_decay"), **KERNELS),
    Form(BUCKET_SCORES, "parallel"),
    Form(BUCKET_SCORES, "recurrent"),
    Form(BUCKET_SCORES, "xla", chunk_sizes=(4, 1, 8, 32)),
    Form(BUCKET_SCORES, "pallas", spreads=("log_decay",), **KERNELS),
    Form(GATED_LINEAR, "parallel", spreads=("k", "v")),
    Form(GATED_LINEAR, "recurrent"),
    Form(GATED_LINEAR, "xla", chunk_sizes=(4, 1, 8, 32), spreads=("k", "v")),
    Form(GATED_LINEAR, "pallas", spreads=("k", "v", "log_decay"), **KERNELS),
    *(
        form
        for operation in (DELTA, GATED_DELTA)
        for form in (
            # It solves for all tokens at once, here 130 reflections of three dimensions.
            Form(operation, "parallel", float32_tolerance=1e-5, spreads=("k", "v", "log_decay", "beta")),
            Form(operation, "recurrent"),
            Form(operation, "xla", chunk_sizes=(4, 1, 8, 32), spreads=("k", "v", "log_decay", "beta")),
            Form(operation, "pallas", spreads=("k", "v", "log_decay", "beta"), **KERNELS),
        )
    ),
    Form(SOFTMAX, "parallel", bfloat16_tolerance=2e-2, spreads=("v",)),
    Form(SOFTMAX, "recurrent", bfloat16_tolerance=2e-2),
)


def in_tiers(forms):
    """The forms as a test's parameters: the fast tier has the chunkwise forms of log-linear attention (whose tree is that of
    bucket scores) and of the gated delta rule, and softmax attention; the rest is slow."""
    return [pytest.param(form, id=str(form), marks=() if _is_fast(form) else pytest.mark.slow) for form in forms]


def _is_fast(form: Form) -> bool:
    return form.operation is SOFTMAX or (form.name == "xla" and form.operation in (LOG_LINEAR, GATED_DELTA))


def types_of(form: Form):
    """A context: 64-bit types where the form has them."""
    return jax.enable_x64(form.dtype == np.float64)


def kernels_run():
    """A context in which kernels run wherever the tests do."""
    return pallas_kernels.interpret(not HAS_GPU)


def exactly(operation, inputs):
    """The same numbers in float64; a decay of -inf as the operations take it. Within 64-bit types."""
    exact = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
    named = zip(operation.arguments, exact, strict=True)
    return [jnp.maximum(x, -1e4) if name == "log_decay" else x for name, x in named]


def exact_output(operation, inputs, **kwargs):
    """The oracle's output in float64, as NumPy."""
    with jax.enable_x64(True):
        return np.asarray(operation.function(*exactly(operation, inputs), implementation=operation.oracle, **kwargs))


@functools.cache
def _compiled(operation, name, chunk_size, room):
    def forward(inputs, values, position, segment_ids):
        kwargs = {} if chunk_size is None else dict(chunk_size=chunk_size)
        if room is not None:
            kwargs |= operation.with_room(room)
        if operation.has_state:
            kwargs["return_state"] = True
        if values is not None:
            kwargs["initial_state"] = operation.make_state(values, 0 if position is None else position)
        elif position is not None:
            kwargs["first_position"] = position
        if segment_ids is not None:
            kwargs["segment_ids"] = segment_ids
        out = operation.function(*inputs, implementation=name, **kwargs)
        return (out[0], operation.state_values(out[1])) if operation.has_state else (out,)

    def outputs_and_gradients(inputs, values, position, segment_ids, weights):
        def run(inputs, values):
            return forward(inputs, values, position, segment_ids)

        outputs, vjp = jax.vjp(run, tuple(inputs), values)
        return outputs, vjp(tuple(w.astype(x.dtype) for w, x in zip(weights, outputs, strict=True)))

    return jax.jit(forward), jax.jit(outputs_and_gradients)


def outputs_and_gradients(
    operation,
    name,
    inputs,
    values=None,
    position=None,
    chunk_size=None,
    segment_ids=None,
    room=None,
    weights=None,
    of_state=True,
):
    """NumPy arrays by name: the output "o", the last "state", and "d ..." of every input and of the initial state: gradients of
    a linear function of output and state. One compilation for each form, shape and chunk size.

    values: of the initial state, at a position; without them the position is the first token's. room: tokens that a state lasts
    for. weights: of output and state in the function; None: random ones, or with of_state False random ones and zeros.
    """
    forward, with_gradients = _compiled(operation, name, chunk_size, room)
    if weights is None:
        weights = draw_weights(jax.eval_shape(forward, inputs, values, position, segment_ids))
        weights = weights[0], *(x if of_state else 0 * x for x in weights[1:])
    outputs, (d_inputs, d_values) = with_gradients(inputs, values, position, segment_ids, weights)
    named = dict(zip(("o", "state"), outputs, strict=False))
    named |= {f"d {argument}": x for argument, x in zip(operation.arguments, d_inputs, strict=True)}
    if values is not None:
        named["d initial state"] = d_values
    return {name: np.asarray(x) for name, x in named.items()}


def draw_weights(shapes):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in shapes)


def exact_outputs_and_gradients(operation, inputs, values=None, position=None, **options):
    """The same of the oracle in float64."""
    with jax.enable_x64(True):
        values = None if values is None else jnp.asarray(np.asarray(values, np.float64))
        exact = exactly(operation, inputs)
        return outputs_and_gradients(operation, operation.oracle, exact, values, position, **options)


def of_documents_alone(operation, inputs, cuts, values=None, position=None, room=None):
    """`outputs_and_gradients` of a pack, by the oracle over each of its documents alone, started at its position.

    cuts: where documents after the first begin. values: of an initial state before the first document.
    """
    forward, _ = _compiled(operation, operation.oracle, None, room)
    out_weights, *state_weights = draw_weights(jax.eval_shape(forward, inputs, values, position, None))
    parts, length = [], inputs[0].shape[1]
    for first, end in zip((0, *cuts), (*cuts, length), strict=True):
        where = dict(values=values, position=position)
        if first:
            where = dict(position=(position or 0) + first if operation.has_positions else None)
        weights = out_weights[:, first:end], *(x if end == length else 0 * x for x in state_weights)
        tokens = [x[:, first:end] for x in inputs]
        parts.append(outputs_and_gradients(operation, operation.oracle, tokens, **where, room=room, weights=weights))
    by_token = ["o", *(f"d {argument}" for argument in operation.arguments)]
    return parts[0] | parts[-1] | {name: np.concatenate([part[name] for part in parts], axis=1) for name in by_token}
