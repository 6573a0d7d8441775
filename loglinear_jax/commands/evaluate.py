"""Loss of language models: compared document by document, or on a text by position.

loglinear_jax evaluate runs/a runs/b --length=16384 --out=compared
loglinear_jax evaluate hanguo/log-linear-attention/gdn hanguo/log-linear-attention/mamba-2 --corpus=books
loglinear_jax evaluate runs/a runs/b --needle --lengths=1024,16384 --out=needle
loglinear_jax evaluate hanguo/log-linear-attention/gdn --text=book.txt --length=16384 --out=book
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loglinear_jax.command_line import (
    BadInput,
    check_folder,
    comma_separated,
    number,
    path,
    path_pattern,
    read_text,
    size,
)
from loglinear_jax.commands.logs import quiet_libraries
from loglinear_jax.commands.trained_models import Trained, add_trained_arguments, load_trained

if TYPE_CHECKING:
    from loglinear_jax.evaluate.documents import Measure
    from loglinear_jax.text import Corpus

HELP = "loss of language models on documents or on a text"
EXTRA = "text"
MOST_DRAWN = 1e100  # perplexity that an axis takes
LONGEST = 16_384  # of a window or of what is read of a document, if --length is not given
NEEDLE_LENGTHS = tuple(1024 << i for i in range(7))
NEEDLE_DOCUMENTS = 16
# Which of the arguments below an evaluation of documents, with --needle, or with --text takes.
TAKES = {
    "": ("corpus", "text_field", "end_token", "documents", "length"),
    "needle": ("corpus", "text_field", "end_token", "documents", "lengths", "depths"),
    "text": ("length", "windows"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        type=path_pattern,
        metavar="MODEL",
        help="folder of a run (all variants, or --variant), or an external checkpoint as in --model. Several are "
        "compared with the first, document by document",
    )
    add_trained_arguments(parser, required=False)
    parser.add_argument(
        "--corpus",
        help="documents, of which the test split is read: a folder, a .jsonl file, or a data set on the Hugging Face hub "
        "(default: those that the first run was trained on)",
    )
    parser.add_argument("--text_field", help="field of the text in a line of JSON or a row of --corpus (default: text)")
    parser.add_argument("--end_token", help="token between documents of --corpus (default: the run's)")
    parser.add_argument(
        "--documents",
        type=size,
        help="number of documents, from the first of the split (default: all; with --needle the first "
        f"{NEEDLE_DOCUMENTS} that are long enough)",
    )
    parser.add_argument("--text", type=path, help="UTF-8 file to read in windows, instead of documents")
    parser.add_argument(
        "--length",
        type=size,
        help="tokens predicted in a document or window, each from all before it (default: all, but no more than "
        f"{LONGEST:,}, or than a model's λ has levels for)",
    )
    parser.add_argument("--windows", type=size, help="number of windows of --text, from its start (default: all)")
    parser.add_argument(
        "--needle",
        action="store_true",
        help="test whether a model recalls a number that a sentence in the document says: its loss and greedy accuracy",
    )
    parser.add_argument(
        "--lengths",
        type=comma_separated(size),
        help=f"lengths of a document with --needle, in tokens (default: of {','.join(map(str, NEEDLE_LENGTHS))} "
        "the ones that a document has, and a model's λ has levels for)",
    )
    parser.add_argument(
        "--depths",
        type=comma_separated(_percent),
        help="places of the sentence with --needle, in %% of the document (default: 0,25,50,75,100)",
    )
    parser.add_argument("--out", type=path, help="folder for tables, figures and every document's losses as JSON")


def _percent(text: str) -> float:
    if not 0 <= (value := number(text)) <= 100:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    quiet_libraries()
    if args.text and args.needle:
        raise BadInput("--needle is of documents, and has no meaning with --text")
    kind = "text" if args.text else "needle" if args.needle else ""
    for name in sorted(set().union(*TAKES.values()) - set(TAKES[kind])):
        if getattr(args, name) is not None:
            raise BadInput(f"--{name} has no meaning " + (f"with --{kind}" if kind else "here: see --help"))
    each = [_as_argument(args, name) for name in args.models]
    if args.workdir or args.model:
        each.append(args)
    if not each:
        raise BadInput("expected a model: a run's folder, or an external checkpoint")
    if args.text is None:
        return _needle(args, each) if args.needle else _documents(args, each)
    if len(each) > 1:
        raise BadInput(f"--text is read by one model, got {len(each)}")
    return _text(each[0])


def _as_argument(args: argparse.Namespace, name: str) -> argparse.Namespace:
    """The arguments with a positional one as --workdir or --model."""
    folder = Path(name)
    try:
        is_run = "task" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        is_run = folder.is_dir() and not (folder / "config.json").exists()  # a folder of a model has one
    return argparse.Namespace(
        **vars(args) | {"workdir": folder, "model": None} if is_run else vars(args) | {"workdir": None, "model": name}
    )


def _documents(args: argparse.Namespace, each: Sequence[argparse.Namespace]) -> int:
    from loglinear_jax.evaluate.documents import document_losses, loss_measures, padded_lengths
    from loglinear_jax.progress import progress_bar

    models = _load_all(each)
    corpus = _open_corpus(args, models)
    length = _check_length(args.length, models)
    numbers = range(len(corpus.starts["test"]) - 1)[: args.documents]
    documents = [_document(corpus, number, length) for number in numbers]
    if args.out is not None:
        check_folder(args.out, "--out")
    losses: dict[str, Any] = {}
    for name, trained in models.items():
        with progress_bar(name, sum(padded_lengths(documents)), unit="token", unit_scale=True) as bar:
            losses[name] = document_losses(trained.model, trained.params, documents, bar.update)
    measures = loss_measures(documents, losses, corpus.train)
    subject = f"{len(documents):,} documents of the test split of {corpus.manifest['name']}, up to {length:,} tokens"
    _show(args, measures, subject, list(numbers), corpus)
    return 0


def _needle(args: argparse.Namespace, each: Sequence[argparse.Namespace]) -> int:
    import numpy as np

    from loglinear_jax.evaluate.needle import hide_needles, needle_measures, needle_scores
    from loglinear_jax.progress import progress_bar

    models = _load_all(each)
    corpus = _open_corpus(args, models)
    sizes = np.diff(corpus.starts["test"])
    lengths = _needle_lengths(args.lengths, models, int(sizes.max()))
    depths = args.depths or [0, 25, 50, 75, 100]
    tokenizer = next(iter(models.values())).tokenizer
    numbers = [np.flatnonzero(sizes >= length)[: args.documents or NEEDLE_DOCUMENTS].tolist() for length in lengths]
    needles = [
        hide_needles(tokenizer, [_document(corpus, number, length) for number in chosen], chosen, length, depths)
        for length, chosen in zip(lengths, numbers, strict=True)
    ]
    if args.out is not None:
        check_folder(args.out, "--out")
    scores: dict[str, Any] = {}
    total = sum(length * len(chosen) * len(depths) for length, chosen in zip(lengths, numbers, strict=True))
    for name, trained in models.items():
        with progress_bar(name, total, unit="token", unit_scale=True) as bar:
            scores[name] = [needle_scores(trained.model, trained.params, one, bar.update) for one in needles]
    measures = needle_measures(lengths, depths, numbers, [one.values for one in needles], scores)
    subject = f"a number in documents of the test split of {corpus.manifest['name']}"
    _show(args, measures, subject, sorted(set().union(*numbers)), corpus)
    return 0


def _needle_lengths(lengths: Sequence[int] | None, models: Mapping[str, Trained], longest: int) -> list[int]:
    """In order. longest: the tokens of the longest document."""
    for length in lengths or []:
        _check_length(length, models, "--lengths")
        if length > longest:
            raise BadInput(
                f"--lengths: no document of the test split has {length:,} tokens: the longest has {longest:,}"
            )
    limits = [trained.model.settings.longest or longest for trained in models.values()]
    found = sorted(set(lengths or [length for length in NEEDLE_LENGTHS if length <= min(longest, *limits)]))
    if not found:
        raise BadInput(
            f"--lengths: expected some of at most {min(longest, *limits):,} tokens, which the longest document has and λ has "
            "levels for"
        )
    return found


def _load_all(each: Sequence[argparse.Namespace]) -> dict[str, Trained]:
    """The models by their names: of one run, its variants; else with what the user called them."""
    from loglinear_jax.runs.loading import read_run

    found = {}
    for args in each:
        variants = [args.variant] if args.workdir is None or args.variant else read_run(args.workdir).variants
        for variant in variants:
            trained = load_trained(argparse.Namespace(**vars(args) | {"variant": variant}))
            name = args.model if variant is None else variant if len(each) == 1 else f"{args.workdir}, {variant}"
            found[name] = trained
    return found


def _open_corpus(args: argparse.Namespace, models: Mapping[str, Trained]) -> Corpus:
    """The documents, in tokens of all models. Raises BadInput where their tokenizers differ, or there are no documents."""
    from loglinear_jax.runs.folders import RunFolder
    from loglinear_jax.tasks.documents import Documents
    from loglinear_jax.text import END_TOKEN, open_documents
    from loglinear_jax.text.tokenizer import tokenizer_sha256

    (name, first), *others = models.items()
    for other, trained in others:
        if tokenizer_sha256(trained.tokenizer) != tokenizer_sha256(first.tokenizer):
            raise BadInput(f"{other} has another tokenizer than {name}: expected the same, as tokens are compared")
    if args.corpus is not None:
        given = {"text_field": args.text_field, "cache": getattr(first.task, "cache", None)}
        return open_documents(
            args.corpus,
            tokenizer=first.tokenizer_name,
            end_token=args.end_token or getattr(first.task, "end_token", END_TOKEN),
            **{key: value for key, value in given.items() if value is not None},
        )
    for option in ("text_field", "end_token"):
        if getattr(args, option) is not None:
            raise BadInput(f"--{option} is of a --corpus")
    if not isinstance(first.task, Documents):
        raise BadInput(f"--corpus is missing: {name} was not trained on documents here")
    for trained in models.values():
        if trained.task is not None:
            RunFolder(trained.tokenizer_name, writes=False).check_corpus(first.task.data)
    return first.task.data


def _check_length(length: int | None, models: Mapping[str, Trained], option: str = "--length") -> int:
    """How many tokens of a document are predicted; what every model can."""
    for name, trained in models.items():
        if length is not None:
            trained.model.settings.check_decoding(
                length, f"tokens of a document, for {name}", "give a smaller --length"
            )
    return length or min(LONGEST, *(trained.model.settings.longest or LONGEST for trained in models.values()))


def _document(corpus: Corpus, number: int, length: int):
    """A document of the test split, with the end token before it and, where `length` tokens are predicted, behind it."""
    import numpy as np

    first, end = corpus.starts["test"][number : number + 2]
    return corpus.test[first : min(first + length, end) + 1].astype(np.int32)


def _show(
    args: argparse.Namespace, measures: Sequence[Measure], subject: str, numbers: Sequence[int], corpus: Corpus
) -> None:
    """Prints the tables, and writes them with the figures and each document's sums if there is --out. numbers: of the documents
    in their split."""
    from loglinear_jax.analysis.documents import draw_measure, measure_table
    from loglinear_jax.analysis.style import save
    from loglinear_jax.provenance import origin

    tables = [measure_table(measure, subject) for measure in measures]
    for table in tables:
        print(f"{table.title}\n{table.text('simple')}\n")
    print(f"{subject}. {tables[0].note}")
    if args.out is None:
        return
    record = origin(args.called) | {"subject": subject, "corpus": corpus.manifest, "measures": []}
    for measure, table in zip(measures, tables, strict=True):
        stem = args.out / measure.name.replace(" ", "-")
        table.write(stem)
        save(draw_measure(measure, subject), stem)
        rows = [
            {
                "document": number,
                "tokens": counts.tolist(),
                "sums": {model: x[i].tolist() for model, x in measure.sums.items()},
            }
            for i, (number, counts) in enumerate(zip(numbers, measure.counts, strict=True))
        ]
        about = {"name": measure.name, "by": measure.by, "unit": measure.unit, "groups": list(measure.groups)}
        record["measures"].append(about | {"documents": rows})
    (args.out / "documents.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"Written to {args.out}")


def _text(args: argparse.Namespace) -> int:
    import numpy as np
    from tabulate import tabulate

    from loglinear_jax.evaluate import check_windows, perplexity, perplexity_by_position, window_losses
    from loglinear_jax.progress import progress_bar
    from loglinear_jax.provenance import origin
    from loglinear_jax.statistics import FEWEST_FOR_INTERVAL
    from loglinear_jax.text.tokenizer import check_returned

    text = read_text(args.text, "--text")
    model, params, tokenizer, *_ = load_trained(args)
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
