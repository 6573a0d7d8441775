"""Where a corpus's text comes from: a file, a folder with a file for each split, or a data set of the Hugging Face hub.

WikiText-103 and WikiText-2 (Merity et al., "Pointer Sentinel Mixture Models", 2016) come raw and word-level, with rare words
as <unk>.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loglinear_jax.command_line import needs_extra
from loglinear_jax.files import file_sha256, local_path
from loglinear_jax.text.files import SPLITS, CorpusError, check_text_file, read_blocks, share_bounds

WIKITEXT = ("wikitext-103-raw", "wikitext-103", "wikitext-2-raw", "wikitext-2")
SPLIT_NAMES = {"train": ("train",), "validation": ("valid", "validation", "val", "dev"), "test": ("test",)}


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus's text. sha256: of its files, by file name. blocks: the text of a split, in blocks of whole lines."""

    name: str
    sha256: dict[str, str]
    blocks: Callable[[str], Iterator[str]]


def find_source(corpus: str) -> Source:
    """The text that `open_corpus` is asked for. Raises CorpusError if it is missing or can't be split."""
    if corpus in WIKITEXT:
        return _wikitext(corpus)
    path = local_path(corpus, "corpus")
    if not corpus or not (path.is_symlink() or path.exists()):
        raise CorpusError(f"corpus: {corpus!r} is none of {', '.join(WIKITEXT)}, and there is no such file or folder")
    if path.is_dir():
        files = split_files(path)
        for file in files.values():
            check_text_file(file, "corpus")
        bounds = {split: (0, file.stat().st_size) for split, file in files.items()}
    else:
        check_text_file(path, "corpus")
        files = dict.fromkeys(SPLITS, path)
        bounds = dict(zip(SPLITS, itertools.pairwise(share_bounds(path)), strict=True))
    name = path.absolute().stem[:50] or "text"
    sha256 = {path.name: file_sha256(path) for path in dict.fromkeys(files.values())}
    return Source(name, sha256, lambda split: _read_file(files[split], *bounds[split]))


def split_files(folder: Path) -> dict[str, Path]:
    """The text file of each split in a folder, such as train.txt, valid.txt, test.txt or wiki.train.tokens.

    Raises CorpusError unless there is exactly one for each.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    found = {}
    for split, names in SPLIT_NAMES.items():
        fits = [path for path in files if set(re.split(r"[._-]", path.name.lower())) & set(names)]
        if len(fits) != 1:
            got = ", ".join(path.name for path in fits) or "none"
            expected = f"expected one text file for {split}, such as {names[0]}.txt"
            raise CorpusError(f"corpus: folder {folder}: {expected}; got {got}")
        found[split] = fits[0]
    return found


def hub_data_set(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(A data set of the hub by split, through the library `datasets`; the SHA-256 of each split's files). Raises CorpusError
    if it can't be had.

    name: "owner/name", or "owner/name:configuration". A split that the data set has not is not there.
    """
    with needs_extra("text"):
        import datasets  # takes seconds
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # of many types, by what is missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CorpusError(
            f"corpus: the data set {name!r} can't be had from the hub ({reason}): expected its name, or a local folder"
        ) from error
    found = {split: loaded[own] for split, names in SPLIT_NAMES.items() for own in names if own in loaded}
    if "train" not in found:
        raise CorpusError(f"corpus: the data set {name} has the splits {', '.join(loaded)}: expected train")
    of_files = {split: [file_sha256(Path(f["filename"])) for f in own.cache_files] for split, own in found.items()}
    return found, {split: hashlib.sha256("".join(of).encode()).hexdigest() for split, of in of_files.items()}


def _wikitext(name: str) -> Source:
    """The hub's rows are lines with their newline, except that a blank line is an empty row."""
    splits, sha256 = hub_data_set(f"Salesforce/wikitext:{name}-v1")

    def blocks(split: str) -> Iterator[str]:
        for batch in splits[split].iter(batch_size=4096):
            yield "".join(row or "\n" for row in batch["text"])

    return Source(name, sha256, blocks)


def _read_file(path: Path, start: int, stop: int) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(start)
        yield from read_blocks(file, path, stop)
