"""Loss of language models: compared document by document, or in the windows of a text.

loglinear_jax evaluate runs/a runs/b --length=16384 --out=compared
loglinear_jax evaluate runs/a --model_seed=all --out=seeds
loglinear_jax evaluate hanguo/log-linear-attention/gdn hanguo/log-linear-attention/mamba-2 --corpus=books
loglinear_jax evaluate runs/a runs/b --needle --lengths=1024,16384 --out=needle
loglinear_jax evaluate hanguo/log-linear-attention/gdn --text=book.txt --length=16384 --out=book
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loglinear_jax.command_line import (
    BadInput,
    check_can_be_made,
    check_folder,
    comma_separated,
    number,
    path,
    path_pattern,
    quiet_libraries,
    read_text,
    size,
)
from loglinear_jax.commands.trained_models import Trained, add_trained_arguments, load_trained

if TYPE_CHECKING:
    from loglinear_jax.evaluate.documents import Measure
    from loglinear_jax.models import LanguageModel
    from loglinear_jax.text import Corpus

HELP = "loss of language models on documents or on a text"
EXTRA = "text"
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
    help_of_models = (
        "folder of a run (all variants, or --variant), or an external checkpoint: a folder, or its name on the hub. "
        "Several are compared with the first, document by document or, with several seeds, seed by seed"
    )
    parser.add_argument("models", nargs="+", type=path_pattern, metavar="MODEL", help=help_of_models)
    add_trained_arguments(parser, several_seeds=True)
    of_lengths = ",".join(map(str, NEEDLE_LENGTHS))
    flags = {
        "corpus": "documents, of which the test split is read: a folder, a .jsonl file, or a data set on the Hugging Face hub "
        "(default: those that the first run was trained on)",
        "text_field": "field of the text in a line of JSON or a row of --corpus (default: text)",
        "end_token": "token between documents of --corpus (default: the run's)",
        "documents": "number of documents, from the first of the split (default: all; with --needle the first "
        f"{NEEDLE_DOCUMENTS} that are long enough)",
        "text": "UTF-8 file to read in windows, instead of documents",
        "length": f"tokens predicted in a document or window, each from all before it (default: all, but at most "
        f"{LONGEST:,}, and no more than a model's λ has levels for)",
        "windows": "number of windows of --text, from its start (default: all)",
        "lengths": f"lengths of a document with --needle, in tokens (default: those of {of_lengths} that a document "
        "has and a model's λ has levels for)",
        "depths": "places of the sentence with --needle, in %% of the document (default: 0,25,50,75,100)",
        "out": "folder for tables, figures, every document's losses as JSON and, of runs, every seed's means as seeds.csv",
    }
    types = {"text": path, "out": path, "lengths": comma_separated(size), "depths": comma_separated(_percent)}
    types |= dict.fromkeys(("documents", "length", "windows"), size)
    for name, text in flags.items():
        parser.add_argument(f"--{name}", type=types.get(name), help=text)
    help_of_needle = (
        "test whether a model recalls a number that a sentence in the document gives: its loss and greedy accuracy"
    )
    parser.add_argument("--needle", action="store_true", help=help_of_needle)


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
    text = args.text and read_text(args.text, "--text")
    models = _load_all(args)
    if args.out is not None:
        check_can_be_made(args.out, "--out")
    if args.text is not None:
        return _text(args, models, text)
    return (_needle if args.needle else _documents)(args, models, _open_corpus(args, models))


def _documents(args: argparse.Namespace, models: Mapping[str, Trained], corpus: Corpus) -> int:
    length = _check_length(args.length, models)
    numbers = range(len(corpus.starts["test"]) - 1)[: args.documents]
    documents = [_document(corpus, number, length) for number in numbers]
    subject = f"{len(documents):,} documents of the test split of {corpus.manifest['name']}, up to {length:,} tokens"
    _show(args, models, _loss_measures(models, documents, corpus.train), subject, numbers, corpus.manifest)
    return 0


def _text(args: argparse.Namespace, models: Mapping[str, Trained], text: str) -> int:
    """The windows of a text, as if each were a document."""
    import numpy as np

    from loglinear_jax.text.tokenizer import check_returned

    name, tokenizer = next((name, trained.tokenizer) for name, trained in models.items())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    check_returned(tokenizer, [text], [ids], name=str(args.tokenizer or name), where=str(args.text))
    length = min(_check_length(args.length, models), args.length or max(len(ids) - 1, 1))
    num = args.windows or max((len(ids) - 1) // length, 1)
    if len(ids) <= num * length:
        expected = f"expected at least {num * length + 1:,}, for {num} window(s) of {length:,}"
        raise BadInput(f"--text: {args.text} has {len(ids):,} tokens: {expected}")
    # Each window predicts what follows the last; its own first token is the one that the window before predicted last.
    windows = [np.asarray(ids[i * length : (i + 1) * length + 1], np.int32) for i in range(num)]
    measures = _loss_measures(models, windows)
    subject = f"{args.text.name}, {num} window(s) of {length:,} tokens"
    _show(args, models, measures, subject, range(num), {"name": str(args.text)})
    for name in models:
        loss, low, high = measures[0].mean(name, 0)
        interval = f" [{np.exp(low):.2f}, {np.exp(high):.2f}]" if np.isfinite(low) else ""
        seeds = f", of the mean loss of {len(models[name].seeds)} seeds" if len(models[name].seeds) > 1 else ""
        print(f"Perplexity of {name}{seeds}: {np.exp(loss):.2f}{interval}")
    print(f"{num * length:,} of the text's {len(ids) - 1:,} tokens after the first were predicted")
    return 0


def _loss_measures(models: Mapping[str, Trained], documents: Sequence[Any], train: Any = None) -> list[Measure]:
    from loglinear_jax.evaluate.documents import document_losses, loss_measures, padded_lengths

    def losses(model, params, tick):
        return document_losses(model, params, documents, tick)

    return loss_measures(documents, _of_every_seed(models, losses, sum(padded_lengths(documents))), train)


def _of_every_seed(
    models: Mapping[str, Trained], score: Callable[[LanguageModel, Any, Callable], Any], tokens: int
) -> dict[str, list[Any]]:
    """score(model, parameters, tick) by model and seed. tokens: that each call counts by tick. Errors name model and seed."""
    from loglinear_jax.config import naming
    from loglinear_jax.progress import progress_bar

    found: dict[str, list[Any]] = {}
    for name, trained in models.items():
        every = {f"{name}, seed {seed}": params for seed, params in trained.seeds.items()} or {name: trained.params}
        found[name] = []
        with progress_bar(name, len(every) * tokens, unit="token", unit_scale=True) as bar:
            for of_seed, params in every.items():
                with naming(f"{of_seed}: "):
                    found[name].append(score(trained.model, params, bar.update))
    return found


def _needle(args: argparse.Namespace, models: Mapping[str, Trained], corpus: Corpus) -> int:
    import numpy as np

    from loglinear_jax.evaluate.needle import hide_needles, needle_measures, needle_scores

    sizes = np.diff(corpus.starts["test"])
    lengths = _needle_lengths(args.lengths, models, int(sizes.max()))
    depths = args.depths or [0, 25, 50, 75, 100]
    tokenizer = next(iter(models.values())).tokenizer
    numbers = [np.flatnonzero(sizes >= length)[: args.documents or NEEDLE_DOCUMENTS].tolist() for length in lengths]
    needles = [
        hide_needles(tokenizer, [_document(corpus, number, length) for number in chosen], chosen, length, depths)
        for length, chosen in zip(lengths, numbers, strict=True)
    ]

    def of_needles(model, params, tick):
        return [needle_scores(model, params, one, tick) for one in needles]

    scores = _of_every_seed(models, of_needles, sum(one.windows[..., 1:].size for one in needles))
    measures = needle_measures(lengths, depths, numbers, [one.values for one in needles], scores)
    subject = f"a number in documents of the test split of {corpus.manifest['name']}"
    _show(args, models, measures, subject, sorted(set().union(*numbers)), corpus.manifest)
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


def _load_all(args: argparse.Namespace) -> dict[str, Trained]:
    """The models by name: a variant by its own, with its run's if another run has it too. Raises BadInput unless they have one
    tokenizer."""
    from loglinear_jax.runs.loading import read_run
    from loglinear_jax.text.tokenizer import tokenizer_sha256

    variants = {
        model: [args.variant] if args.variant else read_run(model).variants
        for model in args.models
        if _is_run(Path(model))
    }
    every = [variant for of_run in variants.values() for variant in of_run]
    found: dict[str, Trained] = {}
    for model in args.models:
        if model not in variants:
            found[model] = load_trained(args, None, model)
        for variant in variants.get(model, ()):
            name = variant if every.count(variant) == 1 else f"{model}, {variant}"
            found[name] = load_trained(argparse.Namespace(**vars(args) | {"variant": variant}), Path(model), None)
    (name, first), *others = found.items()
    for other, trained in others:
        if tokenizer_sha256(trained.tokenizer) != tokenizer_sha256(first.tokenizer):
            raise BadInput(f"{other} has another tokenizer than {name}: expected the same, as tokens are compared")
        if list(trained.seeds) != list(first.seeds) and args.model_seed is not None:
            both = ",".join(str(seed) for seed in first.seeds if seed in trained.seeds)
            raise BadInput(
                f"--model_seed: {name} has seeds {list(first.seeds)} and {other} {list(trained.seeds)}: "
                + (f"expected --model_seed={both}, which both have" if both else "expected runs of the same seeds")
            )
    return found


def _is_run(folder: Path) -> bool:
    """Whether a model is a run's folder, not that of an external checkpoint, which has another config.json."""
    try:
        return "task" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return folder.is_dir() and not (folder / "config.json").exists()


def _open_corpus(args: argparse.Namespace, models: Mapping[str, Trained]) -> Corpus:
    """The documents, in tokens of all models. Raises BadInput where there are none."""
    from loglinear_jax.runs.folders import RunFolder
    from loglinear_jax.tasks.documents import Documents
    from loglinear_jax.text import END_TOKEN, open_documents

    name, first = next(iter(models.items()))
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
    runs = {name: trained for name, trained in models.items() if trained.task is not None}
    name, first = next(iter((runs or models).items()))
    if not isinstance(first.task, Documents):
        raise BadInput(f"--corpus is missing: {name} was not trained on documents here")
    for trained in runs.values():
        RunFolder(trained.tokenizer_name, writes=False).check_corpus(first.task.data)
    return first.task.data


def _check_length(length: int | None, models: Mapping[str, Trained], option: str = "--length") -> int:
    """How many tokens of a document are predicted; what every model can."""
    for name, trained in models.items():
        if length is not None:
            trained.model.settings.check_decoding(
                length, f"tokens of a document, for {name}", f"give a smaller {option}"
            )
    return length or min(LONGEST, *(trained.model.settings.longest or LONGEST for trained in models.values()))


def _document(corpus: Corpus, number: int, length: int):
    """A document of the test split, with the end token before it and, where `length` tokens are predicted, behind it."""
    import numpy as np

    first, end = corpus.starts["test"][number : number + 2]
    return corpus.test[first : min(first + length, end) + 1].astype(np.int32)


def _show(
    args: argparse.Namespace,
    models: Mapping[str, Trained],
    measures: Sequence[Measure],
    subject: str,
    numbers: Sequence[int],
    corpus: Mapping[str, Any],
) -> None:
    """Prints the tables, and writes them with the figures, each document's sums and, of runs, each seed's means if there is
    --out. numbers: of the documents in their split."""
    from loglinear_jax.analysis.documents import draw_measure, measure_table, seed_rows
    from loglinear_jax.analysis.style import save
    from loglinear_jax.analysis.table import write_csv
    from loglinear_jax.provenance import origin
    from loglinear_jax.runs.writing import replace_file, writing

    tables = [measure_table(measure, subject) for measure in measures]
    for table in tables:
        print(f"{table.title}\n{table.text('simple')}\n")
    print(f"{subject}. {tables[0].note}")
    if args.out is None:
        return
    check_folder(args.out, "--out")  # made only now, so that a bad corpus leaves no empty folder behind
    seeds = {model: list(trained.seeds) for model, trained in models.items()}
    record = origin(args.called) | {"subject": subject, "corpus": corpus, "seeds": seeds, "measures": []}
    for measure, table in zip(measures, tables, strict=True):
        stem = args.out / measure.name.replace(" ", "-")
        with writing(args.out):
            table.write(stem)
            save(draw_measure(measure, subject), stem)
        rows = [
            {
                "document": number,
                "tokens": counts.tolist(),
                "sums": {model: x[:, i].tolist() for model, x in measure.sums.items()},
            }
            for i, (number, counts) in enumerate(zip(numbers, measure.counts, strict=True))
        ]
        about = {"name": measure.name, "by": measure.by, "unit": measure.unit, "groups": list(measure.groups)}
        record["measures"].append(about | {"documents": rows})
    replace_file(args.out / "documents.json", lambda file: file.write(json.dumps(record) + "\n"))
    of_first, *others = seeds.values()
    if of_first and all(of_model == of_first for of_model in others):
        replace_file(args.out / "seeds.csv", lambda file: write_csv(file, seed_rows(measures, of_first)))
    else:  # one of an earlier evaluation would be of other models
        (args.out / "seeds.csv").unlink(missing_ok=True)
    print(f"Written to {args.out}")
