"""Text from a trained language model: the prompt in the chunkwise form, then one token at a time from O(log T) states.

python -m loglinear_jax.generate --workdir=runs/wikitext2 --variant=mlp_softplus --prompt=" The city of" --num_tokens=100
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from absl import logging as absl_logging
from jaxtyping import Array, Float, Int
from tokenizers.decoders import DecodeStream

from loglinear_jax.analysis import load_run
from loglinear_jax.config import ConfigError
from loglinear_jax.models import LanguageModel
from loglinear_jax.runs.checkpoints import NoReadableCheckpoint
from loglinear_jax.text import load_tokenizer


def generate(
    model: LanguageModel, params: Any, prompt: Int[Array, "B T"], num_tokens: int, **kwargs: Any
) -> Int[np.ndarray, "B N"]:
    """What `stream` (see there) yields, together: up to num_tokens tokens, fewer if every sequence has stopped."""
    return np.stack(list(stream(model, params, prompt, num_tokens, **kwargs)), axis=1)


def stream(
    model: LanguageModel,
    params: Any,
    prompt: Int[Array, "B T"],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_token: int | None = None,
    max_length: int | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """The tokens after a prompt, one step of all B sequences at a time.

    temperature: logits are divided by it; 0 takes the likeliest. top_k: only that many likeliest tokens. top_p: only the
    fewest tokens that together have this probability (Holtzman et al. 2020). seed: the same seed gives the same tokens.
    stop_token: a sequence that has produced it repeats it; when all have, it ends. max_length: tokens, prompt included, for
    which states are allocated; prompt and num_tokens together if None.

    Raises ValueError for a prompt without tokens or outside the vocabulary, impossible settings, or more tokens than
    max_length or the model's λ has levels for.
    """
    m = model.settings
    prompt = np.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] < 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"prompt has shape {prompt.shape} and dtype {prompt.dtype}: expected token ids [B, T], T ≥ 1")
    if prompt.min() < 0 or prompt.max() >= m.vocab_size:
        raise ValueError(f"prompt has ids {prompt.min()} to {prompt.max()}: expected 0 to {m.vocab_size - 1}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    total = prompt.shape[1] + num_tokens
    max_length = total if max_length is None else max_length
    if total > max_length:
        raise ValueError(
            f"num_tokens={num_tokens} after a prompt of {prompt.shape[1]}: expected no more than max_length={max_length} in all"
        )
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and not 1 <= top_k <= m.vocab_size:
        raise ValueError(f"top_k must be from 1 to the vocabulary's {m.vocab_size}, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    m.check_decoding(max_length)
    choose = functools.partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
    return _stream(model, params, prompt, num_tokens, max_length, choose, seed, stop_token)


def _stream(model, params, prompt, num_tokens, max_length, choose, seed, stop_token):
    @jax.jit
    def start(params, prompt, key):
        logits, caches = model.apply(params, prompt, max_length, method="prefill")
        return choose(key, logits), caches

    @functools.partial(jax.jit, donate_argnums=(2,))
    def advance(params, token, caches, key):
        logits, caches = model.apply(params, token, caches, method="step")
        return choose(key, logits), caches

    keys = jax.random.split(jax.random.key(seed), num_tokens)
    stopped = np.zeros(prompt.shape[0], bool)
    token, caches = start(params, prompt, keys[0])
    for index in range(num_tokens):
        shown = np.where(stopped, stop_token if stop_token is not None else 0, np.asarray(token))
        yield shown
        if stop_token is not None:
            stopped |= shown == stop_token
            if stopped.all():
                return
        if index + 1 < num_tokens:
            token, caches = advance(params, token, caches, keys[index + 1])


def sample(
    key: jax.Array,
    logits: Float[Array, "B vocab"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, " B"]:
    """A token for each sequence; the settings as in `stream`."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / temperature
    if top_k is not None:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        enough = jnp.cumsum(probability, axis=-1) - probability >= top_p  # those before have it already
        smallest = jnp.min(jnp.where(enough, jnp.inf, ordered), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1)


def _define_flags() -> None:
    flags.DEFINE_string("workdir", None, "a run of run.py", required=True)
    flags.DEFINE_string("variant", None, "which variant of it; needed if it has several")
    flags.DEFINE_integer("model_seed", None, "which seed's parameters; the first if not given")
    flags.DEFINE_string("prompt", None, "text to go on from", required=True)
    flags.DEFINE_integer("num_tokens", 100, "tokens to add")
    flags.DEFINE_float("temperature", 1.0, "logits are divided by it; 0: the likeliest token")
    flags.DEFINE_integer("top_k", None, "only that many likeliest tokens")
    flags.DEFINE_float("top_p", None, "only the fewest tokens with this probability together")
    flags.DEFINE_integer("seed", 0, "of the sampling", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_string("stop", None, "end after this token, given as its text")


def main(argv: list[str]) -> None:
    """Streams the text to standard output."""
    args = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax tells every step it takes
    try:
        run = load_run(args.workdir, args.variant)
        if not isinstance(run.model, LanguageModel):
            raise ConfigError(f"{run.workdir} holds no language model, but the task {run.config.task.name}")
        tokenizer = load_tokenizer(str(run.workdir))
        stop = None if args.stop is None else tokenizer.encode(args.stop, add_special_tokens=False).ids
        if stop is not None and len(stop) != 1:
            raise ValueError(f"stop={args.stop!r} is {len(stop)} tokens: expected a text that is one")
        prompt = tokenizer.encode(args.prompt, add_special_tokens=False).ids
        if not prompt:
            raise ValueError("prompt is empty: expected some text to go on from")
        model_seed = run.seeds[0] if args.model_seed is None else args.model_seed
        if model_seed not in run.seeds:
            raise ValueError(f"model_seed={model_seed} is not in this run, which has {run.seeds}")
        tokens = stream(
            run.model,
            run.params(model_seed),
            np.asarray([prompt]),
            args.num_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            stop_token=None if stop is None else stop[0],
        )
    except (ConfigError, NoReadableCheckpoint, ValueError) as error:
        print("generate:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    print(args.prompt, end="", flush=True)
    ids, written, decoder = [], 0, DecodeStream(skip_special_tokens=True)
    for (token,) in tokens:
        ids.append(int(token))
        if text := decoder.step(tokenizer, ids[-1]):  # a character may take several tokens
            print(text, end="", flush=True)
            written += len(text)
    print(tokenizer.decode(ids)[written:])


if __name__ == "__main__":
    _define_flags()
    app.run(main)
