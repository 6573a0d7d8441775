"""A corpus: text tokenised once into files of token ids, which are then read as memory maps.

    <cache>/<name>-<hash>/
        train.bin, validation.bin, test.bin    token ids, uint16 if the vocabulary fits, else uint32
        train.starts, ...                      of documents: where each starts in the tokens, int64
        manifest.json                          what they were made from, and how many they are

The hash is that of the source files, the tokenizer and FORMAT: another source or tokenizer gets a folder of its own. A folder
is filled under another name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import numpy as np
import tokenizers
from tqdm import tqdm

from loglinear_jax.files import local_path
from loglinear_jax.progress import progress_bar
from loglinear_jax.text.sources import SPLITS, CorpusError, Source, cut_line, find_documents, find_source
from loglinear_jax.text.tokenizer import END_TOKEN, check_returned, load_tokenizer, tokenizer_sha256, tokenizer_size

FORMAT = 3  # of the files, of how text becomes tokens, and of what is checked meanwhile
GROUP_CHARS = 2**22  # of the documents that are tokenised at once


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of each split: 1-d read-only memory maps, uint16 or uint32, all below vocab_size.

    starts: of a corpus of documents, for each split int64 [documents + 1]. The tokens are the end token, and then each document
    with the end token behind it. Document i is tokens[starts[i] : starts[i + 1]] with the end token before it, and predicts
    tokens[starts[i] + 1 : starts[i + 1] + 1]. None for other texts.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    vocab_size: int
    manifest: dict[str, Any]
    tokenizer: tokenizers.Tokenizer
    starts: dict[str, np.ndarray] | None = None


def open_corpus(corpus: str, *, tokenizer: str = "gpt2", cache: str = "~/.cache/loglinear_jax") -> Corpus:
    """The tokens of a corpus; the text is tokenised if that was not done before. The lines' order is kept.

    corpus: one of WIKITEXT, which is downloaded; or a text file (UTF-8), of which the last 5 % of the bytes are the test
    split, the 5 % before them validation, all by whole lines; or a folder with a text file for each, such as train.txt,
    valid.txt, test.txt, or WikiText's unpacked files. A file that is called like a WikiText is given as ./wikitext-2.
    tokenizer: see `load_tokenizer`. cache: the folder for downloads and tokens.

    Blank lines are dropped, and each line is tokenised by itself, with its newline. Every line must come back when its
    tokens are decoded. Memory does not grow with the text, only with its longest line.
    Raises CorpusError for text that is missing, empty, too short to be split or not UTF-8, a tokenizer that loses some of
    it, a failed download, or a cache that can't be read or written; and SettingError as `local_path`.
    """
    root = _cache_folder(cache)
    with _reading(corpus):
        text = find_source(corpus, root / "downloads")
    return _open(text, load_tokenizer(tokenizer), tokenizer, root)


def open_documents(
    corpus: str,
    *,
    tokenizer: str,
    text_field: str = "text",
    end_token: str = END_TOKEN,
    cache: str = "~/.cache/loglinear_jax",
) -> Corpus:
    """The tokens of a corpus of documents, with their `starts`; they are tokenised if that was not done before.

    corpus, text_field: see `find_documents`. tokenizer: see `load_tokenizer`. end_token: the token of its vocabulary that
    stands between documents. Text that looks like a special token is tokenised as any other text.

    Every document must come back when its tokens are decoded. Memory grows with the longest document alone. Raises CorpusError
    as `open_corpus`, and for a tokenizer without the end token.
    """
    root = _cache_folder(cache)
    with _reading(corpus):
        text = find_documents(corpus, text_field)
    encoder = load_tokenizer(tokenizer)
    end = encoder.token_to_id(end_token)
    if end is None:
        special = ", ".join(token.content for token in encoder.get_added_tokens_decoder().values())
        raise CorpusError(
            f"end_token: {tokenizer} has no token {end_token!r}: expected the one that it puts between documents; its special "
            f"tokens: {special[:200] or 'none'}"
        )
    encoder.encode_special_tokens = True
    return _open(text, encoder, tokenizer, root, {"end_token": end, "text_field": text_field})


def _cache_folder(cache: str) -> Path:
    return local_path(cache, "cache").absolute()


@contextlib.contextmanager
def _reading(corpus: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(f"corpus: {error.filename or corpus} can't be read: {error.strerror or error}") from error


def _open(
    text: Source, encoder: tokenizers.Tokenizer, tokenizer: str, root: Path, documents: dict[str, Any] | None = None
) -> Corpus:
    """The tokens of a text, or of documents with {"end_token": its id}, from the cache or made there."""
    vocab_size = tokenizer_size(encoder)
    made_from = {
        "format": FORMAT,
        "name": text.name,
        "source_sha256": text.sha256,
        "tokenizer_sha256": tokenizer_sha256(encoder),
        "vocab_size": vocab_size,
        "dtype": "uint16" if vocab_size <= 2**16 else "uint32",
        **(documents or {}),
    }
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{text.name}-{digest}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock") if not folder.exists() else contextlib.nullcontext():
            if not folder.exists():  # another process may have made it meanwhile
                _make(folder, text, encoder, made_from | {"tokenizer": tokenizer})
    except OSError as error:
        raise CorpusError(f"cache: {root} can't be written ({error}): expected another folder as task.cache") from error
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        tokens = {split: np.memmap(folder / f"{split}.bin", manifest["dtype"], mode="r") for split in SPLITS}
        starts = {split: np.fromfile(folder / f"{split}.starts", np.int64) for split in SPLITS} if documents else None
        for split, of_split in manifest["splits"].items():
            if len(tokens[split]) != of_split["tokens"]:
                raise ValueError(f"{split}.bin has {len(tokens[split])} tokens, not {of_split['tokens']}")
            if starts and len(starts[split]) != of_split["documents"] + 1:
                raise ValueError(f"{split}.starts has not {of_split['documents']} documents")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"cache: {folder} is damaged ({error}): delete it, and the text is tokenised again"
        ) from error
    return Corpus(**tokens, vocab_size=vocab_size, manifest=manifest, tokenizer=encoder, starts=starts)


def _make(folder: Path, text: Source, encoder: tokenizers.Tokenizer, about: dict[str, Any]) -> None:
    """Fills the folder. Only with the lock held."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    manifest: dict[str, Any] = about | {"splits": {}}
    try:
        with progress_bar(f"tokenising {text.name}", None, unit="B", unit_scale=True) as bar:
            for split in SPLITS:
                with (partial / f"{split}.bin").open("wb") as file:
                    where = f"the {split} split of {text.name}"
                    manifest["splits"][split] = _write(file, text.texts(split), encoder, about, where, bar)
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _write(
    file: BinaryIO, texts: Iterator[str], tokenizer: tokenizers.Tokenizer, about: dict[str, Any], where: str, bar: tqdm
) -> dict[str, Any]:
    """Writes the token ids of lines, or of documents, and where these start; returns their counts and SHA-256."""
    of_documents = "end_token" in about
    end = np.array([about["end_token"]] if of_documents else [], about["dtype"])
    digest, starts = hashlib.sha256(), [0]
    file.write(end.data)
    for group in _grouped(texts):
        pieces = [cut_line(text) for text in group]
        joined = list(itertools.chain.from_iterable(pieces))
        encoded = [found.ids for found in tokenizer.encode_batch_fast(joined, add_special_tokens=False)]  # by all cores
        check_returned(tokenizer, joined, encoded, name=about["tokenizer"], where=where)
        ids = iter(encoded)
        for own in pieces if of_documents else [joined]:
            tokens = np.fromiter(itertools.chain.from_iterable(itertools.islice(ids, len(own))), about["dtype"])
            file.write(tokens.data)
            file.write(end.data)
            starts.append(starts[-1] + len(tokens) + len(end))
            digest.update("".join(own).encode() + b"\0" * of_documents)
            bar.update(sum(len(piece.encode()) for piece in own))
    if not starts[-1]:
        raise CorpusError(
            f"corpus: {where} is empty: expected {'a document' if of_documents else 'a line'} that is not blank"
        )
    counts = {"tokens": starts[-1] + len(end)}
    if of_documents:
        np.asarray(starts, np.int64).tofile(Path(file.name).with_suffix(".starts"))
        counts = {"documents": len(starts) - 1} | counts
    return counts | {"text_sha256": digest.hexdigest()}


def _grouped(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in groups of GROUP_CHARS characters or a little more, so that all cores have pieces to encode."""
    group, size = [], 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group
