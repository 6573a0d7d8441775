"""Text from a trained language model, streamed to standard output.

loglinear_jax generate --workdir=runs/wikitext2 --variant=mlp_softplus --prompt=" The city of" --num_tokens=100
loglinear_jax generate --model=hanguo/log-linear-attention/gdn --prompt=" The city of"
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

from loglinear_jax.commands.arguments import BadInput, number, size, whole_number
from loglinear_jax.commands.logs import quiet_libraries
from loglinear_jax.commands.trained_models import add_trained_arguments, load_trained

HELP = "text from a trained language model"
EXTRA = "text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trained_arguments(parser)
    parser.add_argument("--prompt", required=True, help="text to go on from")
    parser.add_argument("--num_tokens", type=size, default=100, help="tokens to add (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=number, default=1.0, help="logits are divided by it; 0: the likeliest token"
    )
    parser.add_argument("--top_k", type=size, help="only that many likeliest tokens")
    parser.add_argument("--top_p", type=number, help="only the fewest tokens with this probability together")
    parser.add_argument("--seed", type=_sampling_seed, default=0, help="of the sampling")
    parser.add_argument("--stop", help="end after this token, given as its text")


def _sampling_seed(text: str) -> int:
    if (number := whole_number(text)) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**32, got {text}")
    return number


def run(args: argparse.Namespace) -> int:
    import numpy as np
    from tokenizers.decoders import DecodeStream

    from loglinear_jax.config import ConfigError
    from loglinear_jax.generate import stream
    from loglinear_jax.runs.errors import NoReadableCheckpoint
    from loglinear_jax.settings import SettingError

    for name in ("prompt", "stop"):
        _check_unicode(name, getattr(args, name))

    quiet_libraries()
    try:
        model, params, tokenizer = load_trained(args)
        stop = None if args.stop is None else tokenizer.encode(args.stop, add_special_tokens=False).ids
        if stop is not None and len(stop) != 1:
            raise ConfigError(f"stop={args.stop!r} is {len(stop)} tokens: expected a text that is one")
        prompt = tokenizer.encode(args.prompt, add_special_tokens=False).ids
        if not prompt:
            raise ConfigError("prompt is empty: expected some text to go on from")
        tokens = stream(
            model,
            params,
            np.asarray([prompt]),
            args.num_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            stop_token=None if stop is None else stop[0],
        )
        first = next(tokens)
    except (SettingError, NoReadableCheckpoint) as error:
        raise BadInput(error) from error
    print(args.prompt, end="", flush=True)
    ids, written, decoder = [], 0, DecodeStream(skip_special_tokens=True)
    try:
        for (token,) in itertools.chain([first], tokens):
            ids.append(int(token))
            if text := decoder.step(tokenizer, ids[-1]):  # a character may take several tokens
                print(text, end="", flush=True)
                written += len(text)
    except SettingError as error:
        print()
        raise BadInput(error) from error
    print(tokenizer.decode(ids)[written:])
    return 0


def _check_unicode(name: str, text: str | None) -> None:
    """Raises BadInput for bytes of the command line that are no UTF-8, which Python passes on as surrogates."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"--{name}: character {error.start} is not UTF-8, got {os.fsencode(text)[:60]!r}: expected text in UTF-8"
        ) from error


if __name__ == "__main__":
    from loglinear_jax.commands.main import main

    sys.exit(main(command="generate", called="python -m loglinear_jax.commands.generate"))
