"""A corpus: text tokenised once into files of token ids, which are then read as memory maps.

    <cache>/<name>-<hash>/
        train.bin, validation.bin, test.bin    token ids, uint16 if the vocabulary fits, else uint32
        manifest.json                          what they were made from, and how many they are

The hash is that of the source files, the tokenizer and FORMAT: another source or tokenizer gets a folder of its own. A
folder is filled under another name and renamed when it is whole. Its files are checked by their SHA-256 whenever it is
opened; a damaged folder is made again.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers
from tqdm import tqdm

from loglinear_jax.files import file_sha256, local_path, to_disk
from loglinear_jax.progress import progress_bar
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.text.errors import CorpusError, unreadable
from loglinear_jax.text.files import (
    SPLITS,
    check_text_file,
    kept_pieces,
    read_blocks,
    share_bounds,
    split_files,
)
from loglinear_jax.text.lock import locked
from loglinear_jax.text.tokenizer import check_returned, load_tokenizer, tokenizer_sha256, tokenizer_size

log = logging.getLogger(__name__)

FORMAT = 2  # of the files, of how text becomes tokens, and of what is checked meanwhile
WIKITEXT = ("wikitext-103-raw", "wikitext-103", "wikitext-2-raw", "wikitext-2")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of each split: 1-d read-only memory maps, uint16 or uint32, all below vocab_size."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    vocab_size: int
    manifest: dict[str, Any]
    tokenizer: tokenizers.Tokenizer


@dataclasses.dataclass(frozen=True)
class _Split:
    num_bytes: int
    blocks: Callable[[], Iterator[str]]  # of whole lines


@dataclasses.dataclass(frozen=True)
class _Source:
    name: str
    sha256: dict[str, str]  # by file name
    splits: Callable[[], Mapping[str, _Split]]


def open_corpus(
    corpus: str, *, tokenizer: str = "gpt2", source: str = "", cache: str = "~/.cache/loglinear_jax"
) -> Corpus:
    """The tokens of a corpus; the text is tokenised if that was not done before. The lines' order is kept.

    corpus: one of WIKITEXT; or a text file (UTF-8), of which the last 5 % of the bytes are the test split, the 5 %
    before them validation, all by whole lines; or a folder with a text file for each, such as train.txt, valid.txt,
    test.txt. A file that is called like a WikiText is given as ./wikitext-2.
    tokenizer: see `load_tokenizer`. source: a folder with WikiText's files, already downloaded; '' downloads them.
    cache: the folder for downloads and tokens.

    Blank lines are dropped, and each line is tokenised by itself, with its newline. Every line must come back when its
    tokens are decoded. Memory does not grow with the text (WikiText: up to 1 GB, see `prepare_wikitext`).
    Raises CorpusError for text that is missing, empty, too short to be split or not UTF-8, a tokenizer that loses some of
    it, a failed download, or a cache that can't be read or written; and SettingError as `local_path`.
    """
    root = local_path(cache, "cache").absolute()
    try:
        text = _wikitext(corpus, source, root) if corpus in WIKITEXT else _text(corpus, source)
    except OSError as error:
        argument, where = ("source", source) if corpus in WIKITEXT else ("corpus", corpus)
        raise CorpusError(f"{argument}: {error.filename or where} can't be read: {error.strerror or error}") from error
    encoder = load_tokenizer(tokenizer)
    vocab_size = tokenizer_size(encoder)
    made_from = {
        "format": FORMAT,
        "name": text.name,
        "source_sha256": text.sha256,
        "tokenizer_sha256": tokenizer_sha256(encoder),
        "vocab_size": vocab_size,
        "dtype": "uint16" if vocab_size <= 2**16 else "uint32",
    }
    folder = root / f"{text.name}-{_digest(made_from)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        manifest = _finished(folder, made_from)
        if manifest is None:
            # A second process waits for the first, and finds its work done.
            with locked(root / f"{folder.name}.lock", f"tokenises {text.name}"):
                manifest = _finished(folder, made_from)
                if manifest is None:
                    if os.path.lexists(folder):  # renamed to that when it was whole
                        log.warning("%s is damaged: its tokens are made again", folder)
                    manifest = _make(folder, text, encoder, made_from | {"tokenizer": tokenizer})
    except OSError as error:
        of_corpus = error.filename is not None and not (
            Path(error.filename).is_relative_to(root) or root.is_relative_to(error.filename)  # a folder that root is in
        )
        not_written = f"cache: {root} can't be written ({error}): expected another folder as task.cache"
        raise CorpusError(f"corpus: {error}" if of_corpus else not_written) from error
    tokens = {split: np.memmap(folder / f"{split}.bin", manifest["dtype"], mode="r") for split in SPLITS}
    return Corpus(**tokens, vocab_size=vocab_size, manifest=manifest, tokenizer=encoder)


# --- Where text comes from ------------------------------------------------------------------------------------------


def _wikitext(name: str, source: str, root: Path) -> _Source:
    from loglinear_jax.text import wikitext  # TFDS takes long to import

    source = str(local_path(source, "source")) if source else ""
    sha256 = wikitext.source_sha256(name, source)
    data_dir = root / "tfds" / (_digest(sha256) if source else "downloaded")

    def splits() -> dict[str, _Split]:
        sources, sizes = wikitext.prepare_wikitext(name, source=source, data_dir=data_dir)
        return {
            split: _Split(sizes[split], lambda records=sources[split]: (record["text"].decode() for record in records))
            for split in SPLITS
        }

    return _Source(name, sha256, splits)


def _text(corpus: str, source: str) -> _Source:
    if source:
        raise CorpusError(f"source: {source!r} is for {', '.join(WIKITEXT)}; corpus is {corpus!r}, itself a path")
    path = local_path(corpus, "corpus")
    if not corpus or not os.path.lexists(path):
        raise CorpusError(f"corpus: {corpus!r} is none of {', '.join(WIKITEXT)}, and there is no such file or folder")
    if path.is_dir():
        files = split_files(path)
        bounds = {}
        for split, file in files.items():
            check_text_file(file, "corpus")
            bounds[split] = (0, file.stat().st_size)
    else:
        check_text_file(path, "corpus")
        files = dict.fromkeys(SPLITS, path)
        starts = share_bounds(path)
        bounds = dict(zip(SPLITS, itertools.pairwise(starts), strict=True))

    def splits() -> dict[str, _Split]:
        return {
            split: _Split(
                stop - start, lambda file=files[split], start=start, stop=stop: _file_blocks(file, start, stop)
            )
            for split, (start, stop) in bounds.items()
        }

    sha256 = {file.name: file_sha256(file) for file in dict.fromkeys(files.values())}
    return _Source(path.absolute().stem[:50] or "text", sha256, splits)


def _file_blocks(path: Path, start: int, stop: int) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(start)
        yield from read_blocks(file, path, stop - start)


# --- Tokenising -----------------------------------------------------------------------------------------------------


def _make(folder: Path, text: _Source, encoder: tokenizers.Tokenizer, about: dict[str, Any]) -> dict[str, Any]:
    """Fills the folder, and returns its manifest. Only with the lock held."""
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.partial-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)  # it may be another user's
    if folder.is_dir() and not folder.is_symlink():  # damaged, or `_finished` would have taken it
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex}")
    partial.mkdir()  # as the umask says: others may share the cache
    try:
        splits = text.splits()
        counts, sha256 = {}, {}
        num_bytes = sum(split.num_bytes for split in splits.values())
        with (
            StopOnSignal() as stop,
            progress_bar(f"tokenising {text.name}", num_bytes, unit="B", unit_scale=True) as bar,
        ):
            for name in SPLITS:
                check = functools.partial(
                    check_returned, encoder, name=about["tokenizer"], where=f"the {name} split of {text.name}"
                )
                with (partial / f"{name}.bin").open("wb") as file:
                    counts[name], sha256[name] = _tokenise(
                        splits[name].blocks(), encoder, np.dtype(about["dtype"]), file, bar, stop, check
                    )
                if not counts[name]["tokens"]:
                    raise CorpusError(f"corpus: the {name} split of {text.name} is empty: it has only blank lines")
        manifest = about | {"splits": counts, "tokens_sha256": sha256}
        manifest["digest"] = _digest(manifest)
        with (partial / "manifest.json").open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=2) + "\n")
            to_disk(file)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return manifest


def _tokenise(
    blocks: Iterator[str],
    encoder: tokenizers.Tokenizer,
    dtype: np.dtype,
    file: BinaryIO,
    bar: tqdm,
    stop: StopOnSignal,
    check: Callable[[list[str], list[list[int]]], None],
) -> tuple[dict[str, Any], str]:
    """Writes the ids of the lines that are kept; returns their number with the SHA-256 of those lines, and that of the ids.

    check: sees the lines and their ids. Raises KeyboardInterrupt once a stop is asked for: raised within the signal itself, it
    may be lost in other libraries.
    """
    digest, digest_of_ids = hashlib.sha256(), hashlib.sha256()
    num_tokens = 0
    for block in blocks:
        pieces = kept_pieces(block)
        # Threads of the tokenizers library, one a core; special tokens are none of the text.
        ids = [encoding.ids for encoding in encoder.encode_batch_fast(pieces, add_special_tokens=False)]
        check(pieces, ids)
        written = np.fromiter(itertools.chain.from_iterable(ids), dtype)
        file.write(written.data)
        digest_of_ids.update(written.data)
        num_tokens += len(written)
        digest.update("".join(pieces).encode())
        bar.set_postfix_str(f"{Path(file.name).stem} {num_tokens / 1e6:.1f} M tokens", refresh=False)
        bar.update(len(block.encode()))
        if stop.requested:
            raise KeyboardInterrupt
    to_disk(file)
    return {"tokens": num_tokens, "text_sha256": digest.hexdigest()}, digest_of_ids.hexdigest()


def _finished(folder: Path, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder whose files are whole, else None. Raises CorpusError if they may not be read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        rest = {key: value for key, value in manifest.items() if key != "digest"}
        whole = manifest["digest"] == _digest(rest) and all(
            manifest["tokens_sha256"][split] == file_sha256(folder / f"{split}.bin") for split in SPLITS
        )
    except PermissionError as error:
        raise unreadable(error) from error
    except (OSError, ValueError, AttributeError, KeyError, RecursionError):  # gone, or no JSON object of ours
        return None
    return manifest if whole and all(manifest[key] == value for key, value in made_from.items()) else None


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
