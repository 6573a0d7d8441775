"""Perplexity of a text by position, under a trained language model, to any length.

loglinear_jax evaluate --model=hanguo/log-linear-attention/gdn --text=book.txt --length=16384 --out=book
loglinear_jax evaluate --workdir=runs/wikitext2 --variant=content --text=book.txt --length=65536
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from loglinear_jax.command_line import BadInput, check_folder, path, read_text, size
from loglinear_jax.commands.logs import quiet_libraries
from loglinear_jax.commands.trained_models import add_trained_arguments, load_trained

HELP = "perplexity of a text by position, under a trained language model"
EXTRA = "text"
MOST_DRAWN = 1e100  # perplexity that an axis takes
LONGEST = 16_384  # of a window, if --length is not given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trained_arguments(parser)
    parser.add_argument("--text", type=path, required=True, help="a file of UTF-8")
    parser.add_argument(
        "--length",
        type=size,
        help="tokens predicted in a window, each from all before it there (default: the text's, but no more than "
        f"{LONGEST:,}, or than the model's λ has levels for)",
    )
    parser.add_argument("--windows", type=size, help="how many windows of the text, from its start (default: all)")
    parser.add_argument("--out", type=path, help="a folder to write perplexity.json, .png and .svg to")


def run(args: argparse.Namespace) -> int:
    import numpy as np
    from tabulate import tabulate

    from loglinear_jax.evaluate import check_windows, perplexity, perplexity_by_position, window_losses
    from loglinear_jax.progress import progress_bar
    from loglinear_jax.provenance import origin
    from loglinear_jax.statistics import FEWEST_FOR_INTERVAL
    from loglinear_jax.text.tokenizer import check_returned

    quiet_libraries()
    text = read_text(args.text, "--text")
    model, params, tokenizer, _ = load_trained(args)
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    name = str(args.tokenizer or args.model or args.workdir)
    check_returned(tokenizer, [text], [encoded], name=name, where=str(args.text))
    ids = np.asarray(encoded, np.int32)
    length = args.length or max(min(len(ids) - 1, model.settings.longest or LONGEST, LONGEST), 1)
    num = args.windows or max((len(ids) - 1) // length, 1)
    if len(ids) <= num * length:
        expected = f"expected at least {num * length + 1:,}, for {num} window(s) of {length:,}"
        raise BadInput(f"--text: {args.text} has {len(ids):,} tokens: {expected}")
    # Each window predicts what follows the last; its own first token is the one that the window before predicted last.
    windows = np.stack([ids[i * length : (i + 1) * length + 1] for i in range(num)])
    check_windows(model, windows)
    if args.out is not None:
        check_folder(args.out, "--out")
    with progress_bar("evaluating", num * length, unit="token", unit_scale=True) as bar:
        losses = window_losses(model, params, windows, bar.update)
    spans, whole = perplexity_by_position(losses), perplexity(losses)
    subject = f"{args.model or args.workdir}, {args.text.name}, {num} window(s) of {length:,} tokens"
    rows = [(_range(span), _perplexity(span), _interval(span)) for span in spans]
    rows += [("all", _perplexity(whole), _interval(whole))]
    print(tabulate(rows, headers=("position", "perplexity", "95 % interval over windows"), disable_numparse=True))
    if num < FEWEST_FOR_INTERVAL:
        print(f"Intervals are given from {FEWEST_FOR_INTERVAL} windows on")
    print(f"{num * length:,} of the text's {len(ids) - 1:,} tokens after the first were predicted")
    if args.out is not None:
        _write(args.out, subject, spans, whole, origin(args.called))
    return 0


def _range(span) -> str:
    return f"{span.first:,}" if span.first == span.last else f"{span.first:,} – {span.last:,}"


def _perplexity(span) -> str:
    return f"{span.perplexity:.2f}" if math.isfinite(span.perplexity) else f"exp({span.loss:.1f})"


def _interval(span) -> str:
    return f"{span.low:.2f} – {span.high:.2f}" if math.isfinite(span.high) else "–"


def _numbers(span) -> dict[str, float | None]:
    """With None for what is not finite, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in span._asdict().items()}


def _write(folder: Path, subject: str, spans, whole, origin) -> None:
    from loglinear_jax.analysis.lengths import draw_perplexity_by_position
    from loglinear_jax.analysis.style import save

    record = origin | {"subject": subject, "all": _numbers(whole), "by_position": [_numbers(span) for span in spans]}
    (folder / "perplexity.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if shown := [span for span in spans if max(span.perplexity, span.high) <= MOST_DRAWN]:
        save(draw_perplexity_by_position(shown, subject), folder / "perplexity")
    print(f"Written to {folder}")
