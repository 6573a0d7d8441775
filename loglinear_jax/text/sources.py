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

import pyarrow
import pyarrow.parquet

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


def find_source(corpus: str, source: str, downloads: Path) -> Source:
    """The text that `open_corpus` is asked for. Raises CorpusError if it is missing or can't be split."""
    if corpus in WIKITEXT:
        return _wikitext(corpus, source, downloads)
    if source:
        raise CorpusError(f"source: {source!r} is for {', '.join(WIKITEXT)}; corpus is {corpus!r}, itself a path")
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
    return Source(name, _sha256(files.values()), lambda split: _read_file(files[split], *bounds[split]))


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


def wikitext_files(name: str, folder: Path) -> dict[str, list[Path]]:
    """The files of each split of a WikiText in a folder, or in its folder <name> or <name>-v1. The first found of

        wiki.{train,valid,test}.{raw,tokens}        as unpacked from the zip
        <name>-v1.zip                               as released
        {train,validation,test}-*.parquet           as on the Hugging Face hub

    Raises CorpusError if none are complete.
    """
    for place in (folder, folder / name, folder / f"{name}-v1"):
        for pattern in (_member(name, "{part}"), f"{name}-v1.zip", "{split}-*.parquet"):
            files = {
                split: sorted(place.glob(pattern.format(split=split, part=SPLIT_NAMES[split][0]))) for split in SPLITS
            }
            if all(files.values()):
                for path in itertools.chain(*files.values()):
                    check_text_file(path, "source")
                return files
    raise CorpusError(
        f"source: {folder} does not hold {name}: expected {_member(name, '{train,valid,test}')}, {name}-v1.zip, or "
        f"{{train,validation,test}}-*.parquet, in it or in its folder {name} or {name}-v1"
    )


def _wikitext(name: str, source: str, downloads: Path) -> Source:
    """WikiText from a folder of its files, or downloaded when its text is first read."""
    files = wikitext_files(name, local_path(source, "source")) if source else None

    def blocks(split: str) -> Iterator[str]:
        for path in files[split] if files else [wikitext_archive(name, downloads)]:
            if path.suffix == ".zip":
                yield from _read_zip(path, _member(name, SPLIT_NAMES[split][0]))
            elif path.suffix == ".parquet":
                yield from _read_parquet(path)
            else:
                yield from _read_file(path, 0, path.stat().st_size)

    sha256 = _sha256(itertools.chain(*files.values())) if files else {f"{name}-v1.zip": WIKITEXT_ARCHIVES[name][1]}
    return Source(name, sha256, blocks)


def _member(name: str, part: str) -> str:
    """The file name of a split as it was released: "wiki.valid.tokens"."""
    return f"wiki.{part}.{'raw' if name.endswith('raw') else 'tokens'}"


def _sha256(paths: Iterator[Path]) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in dict.fromkeys(paths)}


def _read_file(path: Path, start: int, stop: int) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(start)
        yield from read_blocks(file, path, stop)


def _read_zip(path: Path, member: str) -> Iterator[str]:
    """One member, as a stream: nothing is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [info for info in archive.infolist() if info.filename.split("/")[-1] == member]
            if len(found) != 1:
                raise CorpusError(f"source: {path}: expected one {member} in it, got {len(found)}")
            with archive.open(found[0]) as file:
                yield from read_blocks(file, f"{path}:{found[0].filename}", found[0].file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted
        raise CorpusError(f"source: {path} is damaged ({error}): delete it and download it again") from error


def _read_parquet(path: Path) -> Iterator[str]:
    """The hub's rows are lines with their newline, except that a blank line is an empty row."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096, columns=["text"]):
                rows = batch.column("text").cast(pyarrow.string()).to_pylist()
                yield "".join(row if row and row.endswith("\n") else f"{row or ''}\n" for row in rows)
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise CorpusError(f"source: {path} is not a parquet file with a column 'text' ({error})") from error
