"""Generate text with a trained language model, to standard output; with several prompts, once all are done.

loglinear_jax generate --workdir=runs/wikitext2 --variant=mlp_softplus --prompt=" The city of" --num_tokens=100
loglinear_jax generate --model=hanguo/log-linear-attention/gdn --prompt=" The city of" --prompt=" The river"
"""

from __future__ import annotations

import argparse
import itertools

from loglinear_jax.command_line import BadInput, number, path, quiet_libraries, read_text, size, whole_number
from loglinear_jax.commands.trained_models import add_trained_arguments, load_trained

HELP = "text from a trained language model"
EXTRA = "text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained = parser.add_mutually_exclusive_group(required=True)
    trained.add_argument("--workdir", type=path, help="folder of a run")
    help_of_model = "external checkpoint: a folder with config.json, safetensors and tokenizer, or its name on the hub"
    trained.add_argument("--model", help=help_of_model)
    add_trained_arguments(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    help_of_file = "UTF-8 file whose whole text is the prompt; may be given several times"
    prompts.add_argument("--prompt_file", action="append", type=path, help=help_of_file)
    help_of_top_p = "sample from the fewest tokens whose probabilities sum to this (default: all)"
    help_of_temperature = "divisor of the logits; 0 takes the likeliest token (default: 1)"
    add = parser.add_argument
    add("--num_tokens", type=size, default=100, help="number of tokens to generate (default: %(default)s)")
    add("--temperature", type=number, default=1.0, help=help_of_temperature)
    add("--top_k", type=size, help="sample from this many of the likeliest tokens (default: all)")
    add("--top_p", type=number, help=help_of_top_p)
    add("--seed", type=_sampling_seed, default=0, help="seed of the sampling (default: 0)")
    add("--stop", help="text of the token that ends a text")
    add("--go_on", action="store_true", help="do not end at a run's task.end_token, or a model's eos_token_id")


def _sampling_seed(text: str) -> int:
    if (number := whole_number(text)) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**32, got {text}")
    return number


def run(args: argparse.Namespace) -> int:
    from loglinear_jax.generate import stream
    from loglinear_jax.text.tokenizer import text_after, tokenizer_size

    stop = None if args.stop is None else _unicode("stop", args.stop)
    texts = [_unicode("prompt", text) for text in args.prompt or []]
    texts = texts or [read_text(file, "--prompt_file") for file in args.prompt_file]

    quiet_libraries()
    model, params, tokenizer, _, ends, *_ = load_trained(args, args.workdir, args.model, stops=not args.go_on)
    stops = [*ends]
    if stop is not None:
        stops += (of_stop := tokenizer.encode(stop, add_special_tokens=False).ids)
        if len(of_stop) != 1:
            raise BadInput(f"--stop: {stop!r} is {len(of_stop)} tokens: expected a text that is one")
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    if not all(prompts):
        raise BadInput(f"--prompt{'' if args.prompt else '_file'} is empty: expected some text to go on from")
    settings = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed, stop_token=stops)
    num_ids = min(tokenizer_size(tokenizer), model.settings.vocab_size)
    tokens = stream(model, params, prompts, args.num_tokens, num_ids=num_ids, **settings)
    if len(prompts) == 1:
        first = next(tokens)  # what is wrong shows before anything is printed
        print(texts[0], end="", flush=True)
        try:
            for piece in text_after(tokenizer, prompts[0], (one for (one,) in itertools.chain([first], tokens))):
                print(piece, end="", flush=True)
        finally:
            print()
    else:
        after: list[list[int]] = [[] for _ in prompts]
        for of_all in tokens:
            for found, token in zip(after, of_all, strict=True):
                if not found or found[-1] not in stops:
                    found.append(int(token))
        every = zip(texts, prompts, after, strict=True)
        print("\n\n".join(text + "".join(text_after(tokenizer, prompt, ids)) for text, prompt, ids in every))
    return 0


def _unicode(name: str, text: str) -> str:
    """An argument's text: Python passes on bytes as surrogates where the locale, such as C, does not have them. Raises BadInput
    for what is not UTF-8."""
    given = text.encode(errors="surrogateescape")
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise BadInput(
            f"--{name}: byte {error.start} is not UTF-8, got {given[:60]!r}: expected text in UTF-8"
        ) from error
