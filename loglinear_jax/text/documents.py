"""Corpora of documents: a folder of text files or JSON lines, or a data set of the Hugging Face hub.

<corpus>/train/, valid/, test/              of .txt files, each a document, and .jsonl files, with a document in each line
<corpus>/train.jsonl, valid.jsonl, test.jsonl
<corpus>                                    any other folder of such files, or one .jsonl file: each document is in
                                            validation or in test with a chance of 5 %, as the hash of its text says
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loglinear_jax.command_line import needs_extra
from loglinear_jax.files import file_sha256, local_path
from loglinear_jax.text.files import SPLITS, CorpusError, check_text_file, decode
from loglinear_jax.text.sources import SPLIT_NAMES, Source

SUFFIXES = (".txt", ".jsonl")
SPLIT_PERCENT = 5  # of a corpus without splits: what validation gets, and what test gets


def find_documents(corpus: str, text_field: str = "text") -> Source:
    """The documents of a corpus; `blocks` of what is returned gives the documents of a split, none of them blank.

    corpus: a folder, a .jsonl file, or the name of a data set on the hub. text_field: where a line of JSON, or a row of a data
    set, has its text. Raises CorpusError for a corpus that is missing, has no documents, or lacks a split.
    """
    path = local_path(corpus, "corpus")
    if not corpus or not path.exists():
        if "/" not in corpus or corpus.startswith((".", "/", "~")):
            raise CorpusError(
                f"corpus: there is no folder {corpus!r}: expected one with documents, a .jsonl file, or a data set on the hub, "
                "as owner/name"
            )
        return _data_set(corpus, text_field)
    if path.is_file() and path.suffix != ".jsonl":
        raise CorpusError(
            f"corpus: {path} is one file: expected a folder of documents, or a .jsonl file with one in each line"
        )
    splits = _splits(path) if path.is_dir() else {}
    if not splits:
        splits = dict.fromkeys(SPLITS, path)
    files = {split: _files(place) for split, place in splits.items()}
    pooled = len(set(splits.values())) == 1

    def documents(split: str) -> Iterator[str]:
        for file in files[split]:
            for text in _read(file, text_field):
                if text.strip() and (not pooled or _split_of(text) == split):
                    yield text

    return Source(path.absolute().stem[:50] or "documents", _sha256(files, path), documents)


def _splits(folder: Path) -> dict[str, Path]:
    """The folder or .jsonl file of each split; empty if the folder has no splits. Raises CorpusError if it has only some."""
    found = {}
    for split, names in SPLIT_NAMES.items():
        places = [folder / f"{name}{suffix}" for name in names for suffix in ("", ".jsonl")]
        if fits := [place for place in places if place.exists()]:
            found[split] = fits[0]
    if found and (missing := [SPLIT_NAMES[split][0] for split in SPLITS if split not in found]):
        raise CorpusError(
            f"corpus: {folder} has {found[next(iter(found))].name}, but no {' and no '.join(missing)}: expected train, valid "
            "and test, or a folder without splits"
        )
    return found


def _files(place: Path) -> list[Path]:
    files = sorted(path for path in place.rglob("*") if path.suffix in SUFFIXES) if place.is_dir() else [place]
    if not files:
        raise CorpusError(f"corpus: {place} has no documents: expected {' or '.join(SUFFIXES)} files")
    for file in files:
        check_text_file(file, "corpus")
    return files


def _sha256(files: Mapping[str, list[Path]], folder: Path) -> dict[str, str]:
    """One hash for each split, of its files' names and contents."""
    of_file = {file: file_sha256(file) for file in dict.fromkeys(file for own in files.values() for file in own)}
    return {
        split: hashlib.sha256(
            json.dumps([(str(file.relative_to(folder)), of_file[file]) for file in own]).encode()
        ).hexdigest()
        for split, own in files.items()
    }


def _read(path: Path, text_field: str) -> Iterator[str]:
    if path.suffix == ".txt":
        yield decode(path.read_bytes(), "corpus", path).removeprefix("\ufeff")
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                record = json.loads(decode(line, "corpus", where))
            except (json.JSONDecodeError, RecursionError) as error:
                raise CorpusError(f"corpus: {where}: not JSON ({error})") from error
            yield _text_of(record, text_field, where)


def _text_of(record: Any, text_field: str, where: str) -> str:
    text = record.get(text_field) if isinstance(record, Mapping) else None
    if not isinstance(text, str):
        has = f", got the fields {', '.join(record)}" if isinstance(record, Mapping) else ""
        raise CorpusError(f"corpus: {where}: expected an object with a text as text_field={text_field!r}{has}")
    return text


def _split_of(text: str) -> str:
    percent = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    return "test" if percent < SPLIT_PERCENT else "validation" if percent < 2 * SPLIT_PERCENT else "train"


def _data_set(name: str, text_field: str) -> Source:
    """A data set of the hub, "owner/name" or "owner/name:configuration", through the library `datasets`; one without
    validation or test is split as a folder without splits."""
    with needs_extra("datasets"):
        import datasets  # takes seconds
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # of many types, by what is missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CorpusError(
            f"corpus: the data set {name!r} can't be had from the hub ({reason}): expected its name, or a local folder"
        ) from error
    splits = {split: loaded[own] for split, names in SPLIT_NAMES.items() for own in names if own in loaded}
    if "train" not in splits:
        raise CorpusError(f"corpus: the data set {name} has the splits {', '.join(loaded)}: expected train")
    of_files = {split: [file_sha256(Path(f["filename"])) for f in own.cache_files] for split, own in splits.items()}
    sha256 = {split: hashlib.sha256("".join(of).encode()).hexdigest() for split, of in of_files.items()}
    pooled = len(splits) < len(SPLITS)

    def documents(split: str) -> Iterator[str]:
        for number, row in enumerate(splits["train" if pooled else split]):
            text = _text_of(row, text_field, f"{name}, row {number}")
            if text.strip() and (not pooled or _split_of(text) == split):
                yield text

    return Source(name.replace("/", "-").replace(":", "-")[:50], sha256, documents)
