"""Where a corpus's text comes from: a file, a folder with a file for each split, or WikiText.

WikiText-103 and WikiText-2 (Merity et al., "Pointer Sentinel Mixture Models", 2016) come raw and word-level, with rare words
as <unk>.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from loglinear_jax.files import file_sha256, local_path
from loglinear_jax.text.downloads import WIKITEXT_ARCHIVES, wikitext_archive
from loglinear_jax.text.files import SPLITS, CorpusError, check_text_file, read_blocks, share_bounds

WIKITEXT = tuple(WIKITEXT_ARCHIVES)
SPLIT_NAMES = {"train": ("train",), "validation": ("valid", "validation", "val", "dev"), "test": ("test",)}


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus's text. sha256: of its files, by file name. blocks: the text of a split, in blocks of whole lines."""

    name: str
    sha256: dict[str, str]
    blocks: Callable[[str], Iterator[str]]


def find_source(corpus: str, downloads: Path) -> Source:
    """The text that `open_corpus` is asked for. downloads: the folder for WikiText's zip. Raises CorpusError for a text that is
    missing or can't be split."""
    if corpus in WIKITEXT:
        return _wikitext(corpus, downloads)
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


def _wikitext(name: str, downloads: Path) -> Source:
    """WikiText's zip, downloaded when its text is first read, and read as a stream: nothing is unpacked."""

    def blocks(split: str) -> Iterator[str]:
        path = wikitext_archive(name, downloads)
        member = f"{name}/wiki.{SPLIT_NAMES[split][0]}.{'raw' if name.endswith('raw') else 'tokens'}"
        try:
            with zipfile.ZipFile(path) as archive, archive.open(member) as file:
                yield from read_blocks(file, f"{path}:{member}", archive.getinfo(member).file_size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise CorpusError(f"corpus: {path} is damaged ({error}): delete it, and it is downloaded again") from error

    return Source(name, {f"{name}-v1.zip": WIKITEXT_ARCHIVES[name][1]}, blocks)


def _read_file(path: Path, start: int, stop: int) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(start)
        yield from read_blocks(file, path, stop)
