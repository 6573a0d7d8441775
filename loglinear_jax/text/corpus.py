"""A corpus: text tokenised once into files of token ids, which are then read as memory maps.

    <cache>/<name>-<hash>/
        train.bin, validation.bin, test.bin    token ids, uint16 if the vocabulary fits, else uint32
        manifest.json                          what they were made from, and how many they are

The hash is that of the source files, the tokenizer and FORMAT: another source or tokenizer gets a folder of its own. A folder
is filled under another name and renamed when it is complete. Its files are checked by their SHA-256 whenever it is opened; a
damaged folder is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tokenizers
from tqdm import tqdm

from loglinear_jax.files import file_sha256, local_path
from loglinear_jax.progress import progress_bar
from loglinear_jax.text.files import SPLITS, CorpusError, kept_pieces
from loglinear_jax.text.sources import Source, find_source
from loglinear_jax.text.tokenizer import check_returned, load_tokenizer, tokenizer_sha256, tokenizer_size

log = logging.getLogger(__name__)

FORMAT = 2  # of the files, of how text becomes tokens, and of what is checked meanwhile


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of each split: 1-d read-only memory maps, uint16 or uint32, all below vocab_size."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    vocab_size: int
    manifest: dict[str, Any]
    tokenizer: tokenizers.Tokenizer


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
    tokens are decoded. Memory does not grow with the text, only with its longest line.
    Raises CorpusError for text that is missing, empty, too short to be split or not UTF-8, a tokenizer that loses some of
    it, a failed download, or a cache that can't be read or written; and SettingError as `local_path`.
    """
    root = local_path(cache, "cache").absolute()
    try:
        text = find_source(corpus, source, root / "downloads")
    except OSError as error:
        raise CorpusError(f"corpus: {error.filename or corpus} can't be read: {error.strerror or error}") from error
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
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{text.name}-{digest}"
    try:
        manifest = _finished(folder, made_from)
        if manifest is None:
            root.mkdir(parents=True, exist_ok=True)
            with _hold_lock(folder, text.name):  # another process may have made it meanwhile
                manifest = _finished(folder, made_from)
                manifest = manifest or _make(folder, text, encoder, made_from | {"tokenizer": tokenizer})
    except OSError as error:
        raise CorpusError(f"cache: {root} can't be written ({error}): expected another folder as task.cache") from error
    tokens = {split: np.memmap(folder / f"{split}.bin", manifest["dtype"], mode="r") for split in SPLITS}
    return Corpus(**tokens, vocab_size=vocab_size, manifest=manifest, tokenizer=encoder)


def _finished(folder: Path, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder whose files are complete, else None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        same = all(manifest[key] == value for key, value in made_from.items())
        complete = all(manifest["tokens_sha256"][split] == file_sha256(folder / f"{split}.bin") for split in SPLITS)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if same and complete else None


def _hold_lock(folder: Path, name: str) -> contextlib.AbstractContextManager:
    """Holds the lock under which a folder is filled, until the context ends or the process does."""
    lock = filelock.FileLock(f"{folder}.lock")
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info("Waiting for another process, which tokenises %s (its lock: %s)", name, lock.lock_file)
        return lock.acquire()


def _make(folder: Path, text: Source, encoder: tokenizers.Tokenizer, about: dict[str, Any]) -> dict[str, Any]:
    """Fills the folder, and returns its manifest. Only with the lock held."""
    if folder.exists():
        log.warning("%s is damaged: its tokens are made again", folder)
        shutil.rmtree(folder)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    manifest: dict[str, Any] = about | {"splits": {}, "tokens_sha256": {}}
    try:
        with progress_bar(f"tokenising {text.name}", None, unit="B", unit_scale=True) as bar:
            for split in SPLITS:
                file = partial / f"{split}.bin"
                manifest["splits"][split] = _tokenise(text, split, encoder, about, file, bar)
                manifest["tokens_sha256"][split] = file_sha256(file)
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return manifest


def _tokenise(
    text: Source, split: str, encoder: tokenizers.Tokenizer, about: dict[str, Any], path: Path, bar: tqdm
) -> dict[str, Any]:
    """Writes the token ids of a split; returns their number, with the SHA-256 of the lines that were kept."""
    digest, num_tokens = hashlib.sha256(), 0
    with path.open("wb") as file:
        for block in text.blocks(split):
            pieces = kept_pieces(block)
            ids = [encoding.ids for encoding in encoder.encode_batch_fast(pieces, add_special_tokens=False)]
            check_returned(encoder, pieces, ids, name=about["tokenizer"], where=f"the {split} split of {text.name}")
            file.write(np.fromiter(itertools.chain.from_iterable(ids), about["dtype"]).data)
            num_tokens += sum(map(len, ids))
            digest.update("".join(pieces).encode())
            bar.update(len(block.encode()))
    if not num_tokens:
        raise CorpusError(f"corpus: the {split} split of {text.name} is empty: it has only blank lines")
    return {"tokens": num_tokens, "text_sha256": digest.hexdigest()}
