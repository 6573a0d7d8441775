"""Text from a trained language model: the prompt in the chunkwise form, then one token at a time from O(log T) states.

The command line is in loglinear_jax.commands.generate.
"""

from __future__ import annotations

import functools
import itertools
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.models.params import decoding_weights, flat_params, params_of
from loglinear_jax.settings import FLOAT32_MAX, INT32_MAX, SettingError, is_of

LEAST_TEMPERATURE = 1e-30  # of a float32 that logits can be divided by
SAMPLING = ("temperature", "top_k", "top_p", "num_ids")  # what `sample` takes
PROMPT_TOKENS = 1 << 15  # of all sequences together, that are processed at a time
SCORES = 1 << 28  # of softmax attention, that are held at a time: 1 GiB
BLOCK = 16  # tokens that the device samples one after the other before the host sees them

Prompts = Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int] | Int[np.ndarray, " T"]]


def generate(
    model: LanguageModel, params: Any, prompt: Prompts, num_tokens: int, **settings: Any
) -> Int[np.ndarray, "B N"]:
    """Generate up to num_tokens tokens after each prompt; fewer if every sequence has stopped.

    Arguments, settings and errors: see `stream`."""
    return np.stack(list(stream(model, params, prompt, num_tokens, **settings)), axis=1)


def stream(
    model: LanguageModel,
    params: Any,
    prompt: Prompts,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_token: int | Sequence[int] | None = None,
    max_length: int | None = None,
    num_ids: int | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Generate tokens after prompts, and yield one step of all B sequences at a time. Prompts of different lengths are a
    list with the token ids of each; at temperature 0 every sequence continues as it would alone.

    temperature: logits are divided by it; 0 takes the likeliest token. top_k: sample only from that many of the
    likeliest tokens. top_p: only from the fewest likeliest tokens that together have this probability (Holtzman et al.
    2020). Among equally likely tokens, smaller ids come first.
    stop_token: a token id, or several. A sequence that has produced one repeats it; generation ends when all sequences
    have. max_length: how many tokens, prompt included, states are allocated for; the longest prompt plus num_tokens if
    None. num_ids: only token ids below it are sampled, as a model's vocabulary may be larger than its tokenizer's.

    Raises SettingError for a prompt without tokens or outside the vocabulary, impossible settings, or more tokens than
    max_length or the model's λ has levels for; ValueError naming the first of the params that the model does not have,
    or has with another shape; and SettingError, at the token where it happens, for logits that are not finite.
    """
    m = model.settings
    prompts = _checked_prompts(prompt, m.vocab_size)
    longest = max(map(len, prompts))
    stops = stop_token if isinstance(stop_token, Sequence) else () if stop_token is None else (stop_token,)
    most = {"num_tokens": (num_tokens, INT32_MAX - longest), "max_length": (max_length, INT32_MAX)}
    most |= {"num_ids": (num_ids, m.vocab_size), "top_k": (top_k, num_ids or m.vocab_size)}
    for name, (value, limit) in most.items():
        if value is not None or name == "num_tokens":
            _check_whole(name, value, 1, limit)
    for name, value, limit in (
        ("seed", seed, 2**32 - 1),
        *(("stop_token", token, m.vocab_size - 1) for token in stops),
    ):
        _check_whole(name, value, 0, limit)
    total = longest + num_tokens
    max_length = max_length or total
    if total > max_length:
        raise SettingError(
            f"num_tokens={num_tokens} after a prompt of {longest}: expected no more than max_length={max_length} in all"
        )
    if not (is_of(temperature, float) and (temperature == 0 or LEAST_TEMPERATURE <= temperature <= FLOAT32_MAX)):
        raise SettingError(f"temperature must be 0, or a number from {LEAST_TEMPERATURE} on, got {temperature!r}")
    if top_p is not None and not (is_of(top_p, float) and 0 < top_p <= 1):
        raise SettingError(f"top_p must be a number above 0 and at most 1, got {top_p!r}")
    m.check_decoding(max_length)
    flat_params(model, params)
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, num_ids=num_ids)
    return _stream(model, params, prompts, num_tokens, max_length, sampling, seed, stops)


def _checked_prompts(prompt: Prompts, vocab_size: int) -> list[Int[np.ndarray, " T"]]:
    """The token ids of each sequence."""
    if isinstance(prompt, Sequence) and len({_shape(row, index) for index, row in enumerate(prompt)}) > 1:
        prompts = [np.asarray(row) for row in prompt]
    else:
        whole = np.asarray(prompt)
        if whole.ndim != 2 or 0 in whole.shape:
            raise SettingError(
                f"prompt has shape {whole.shape} and dtype {whole.dtype}: expected token ids [B, T] with at least one of each"
            )
        prompts = [*whole]
    for row in prompts:
        if row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise SettingError(
                f"prompt has a sequence of shape {row.shape} and dtype {row.dtype}: expected token ids [T], at least one"
            )
    least, most = min(row.min() for row in prompts), max(row.max() for row in prompts)
    if least < 0 or most >= vocab_size:
        raise SettingError(f"prompt has ids {least} to {most}: expected 0 to {vocab_size - 1}")
    return prompts


def _shape(row: Any, index: int) -> tuple[int, ...]:
    """The shape of what a prompt has for sequence number `index`."""
    try:
        return np.shape(row)
    except ValueError as error:  # NumPy's, of lists in it that have different lengths
        raise SettingError(
            f"prompt[{index}] is not a flat list of numbers, got {reprlib.repr(row)}: expected the token ids of one sequence, "
            "such as [1, 2, 3]"
        ) from error


def tokens_at_a_time(settings: LanguageSettings, room: int) -> int:
    """How many tokens of all sequences together are processed at a time, so that memory is bounded. room: the tokens that each
    sequence has room for, to all of which mixers without states have scores."""
    if settings.has_states:
        return PROMPT_TOKENS
    return min(PROMPT_TOKENS, max(SCORES // (settings.heads * room), 1))


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if not is_of(value, int) or not least <= value <= most:
        raise SettingError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


# Compiled once for a model, the shapes and the settings, however often text is generated.
@functools.partial(jax.jit, static_argnames=("model", "max_length", *SAMPLING))
def _start(weights, prompt, key, *, model, max_length, **sampling):
    logits, caches = model.apply(params_of(weights), prompt, max_length, method="prefill")
    return sample(key, logits, **sampling), jnp.isfinite(logits).all(), caches


@functools.partial(jax.jit, static_argnames=("model", *SAMPLING), donate_argnums=(2,))
def _advance(weights, tokens, caches, key, *, model, **sampling):
    logits, caches = model.apply(params_of(weights), tokens, caches, method="extend")
    return sample(key, logits, **sampling), jnp.isfinite(logits).all(), caches


@functools.partial(jax.jit, static_argnames=("model", *SAMPLING), donate_argnums=(2,))
def _advance_by_block(weights, token, caches, key, first, *, model, **sampling):
    """(the next BLOCK tokens, of which `first` is the number of the first; whether the logits of each are finite; caches)."""

    def step(carry, index):
        token, caches = carry
        key_of_token = jax.random.fold_in(key, index)
        token, finite, caches = _advance(weights, token[:, None], caches, key_of_token, model=model, **sampling)
        return (token, caches), (token, finite)

    (_, caches), (tokens, finite) = jax.lax.scan(step, (token, caches), first + jnp.arange(BLOCK))
    return tokens, finite, caches


def _prefill(model, weights, prompt, sizes, max_length, key, sampling):
    """(the token after a prompt [B, T], whether its logits are finite, caches), by parts of these sizes."""
    how = dict(model=model, **sampling)
    token, finite, caches = _start(weights, prompt[:, : sizes[0]], key, max_length=max_length, **how)
    for first, end in itertools.pairwise(np.cumsum(sizes)):
        token, finite, caches = _advance(weights, prompt[:, first:end], caches, key, **how)
    return token, finite, caches


def _prefill_each(model, weights, prompts, part, max_length, key, sampling):
    """`_prefill` of prompts of different lengths, one after the other; then every sequence has a position of its own. What is
    less than a part is cut into powers of two, the larger ones first, so that few lengths are compiled."""
    each = []
    for prompt, key_of_one in zip(prompts, jax.random.split(key, len(prompts)), strict=True):
        whole, rest = divmod(len(prompt), part)
        sizes = [part] * whole + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
        each.append(_prefill(model, weights, prompt[None], sizes, max_length, key_of_one, sampling))
    tokens, finite, caches = zip(*each, strict=True)
    together = jax.tree.map(lambda *of_each: jnp.concatenate([x.reshape(x.shape or 1) for x in of_each]), *caches)
    return jnp.concatenate(tokens), jnp.stack(finite).all(), together


def _stream(model, params, prompts, num_tokens, max_length, sampling, seed, stops):
    weights, key = decoding_weights(model, params), jax.random.key(seed, impl="threefry2x32")
    stopped, shown = np.zeros(len(prompts), bool), np.array([prompt[-1] for prompt in prompts])
    blocks = _blocks(model, weights, prompts, num_tokens, max_length, sampling, key)
    tokens = (token for block in blocks for token in zip(*map(np.asarray, block), strict=True))
    for index, (token, finite) in zip(range(num_tokens), tokens, strict=False):
        if not finite:
            raise SettingError(
                f"params give logits that are not finite, at token {index} after the prompt: expected a model that "
                "did not diverge"
            )
        shown = np.where(stopped, shown, token)
        yield shown
        stopped |= np.isin(shown, stops)
        if stopped.all():
            return


def _blocks(model, weights, prompts, num_tokens, max_length, sampling, key):
    """(tokens [n, B], whether the logits of each are finite [n]), one after the other: the first token, then whole blocks. The
    device is given a block before the one in front of it is looked at."""
    # A power of two, as then parts begin windows, which takes less (`ops.continuation`).
    part = 1 << (max(tokens_at_a_time(model.settings, max_length) // len(prompts), 1).bit_length() - 1)
    first_key = jax.random.fold_in(key, 0)
    if len(set(map(len, prompts))) > 1:
        token, finite, caches = _prefill_each(model, weights, prompts, part, max_length, first_key, sampling)
    else:
        whole, rest = divmod(len(prompts[0]), part)
        sizes = [part] * whole + [rest] * (rest > 0)
        token, finite, caches = _prefill(model, weights, np.stack(prompts), sizes, max_length, first_key, sampling)
    block = token[None], finite[None]
    for first in range(1, num_tokens, BLOCK):
        *following, caches = _advance_by_block(weights, block[0][-1], caches, key, first, model=model, **sampling)
        yield block
        block = following
    yield block


def sample(
    key: jax.Array,
    logits: Float[Array | np.ndarray, "B vocab"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_ids: int | None = None,
) -> Int[Array, " B"]:
    """A token for each sequence; the settings as in `stream`."""
    logits = logits[:, :num_ids]
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    # From the largest, so that a small temperature makes -inf of the others.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_k is not None:
        logits = _largest(logits, jax.lax.top_k(logits, top_k)[0], top_k)
    if top_p is not None and top_p < 1:  # float32 sums of all may fall short of 1, or reach it early
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)[:, :-1]
        logits = _largest(logits, ordered, 1 + jnp.sum(before < top_p, axis=-1, keepdims=True))
    with jax.threefry_partitionable(True):  # a seed's tokens are the same whatever JAX's settings are
        return jax.random.categorical(key, logits, axis=-1)


def _largest(logits: Float[Array, "B vocab"], ordered: Float[Array, "B N"], num: int | Int[Array, "B 1"]):
    """-inf for all but the `num` largest, of equal ones the first. ordered: at least so many of them, the largest first."""
    smallest = jnp.take_along_axis(ordered, jnp.broadcast_to(num, (len(logits), 1)) - 1, axis=-1)
    larger, equal = logits > smallest, logits == smallest
    first = jnp.cumsum(equal, axis=-1) <= num - jnp.sum(larger, axis=-1, keepdims=True)
    return jnp.where(larger | (equal & first), logits, -jnp.inf)
