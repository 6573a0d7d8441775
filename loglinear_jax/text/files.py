"""Text files, read in blocks of whole lines."""

from __future__ import annotations

import codecs
import itertools
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from loglinear_jax.text.errors import CorpusError

BLOCK_BYTES = 2**20
PIECE_CHARS = 2**16  # longest piece given to the tokenizer: a line may be a whole file
SPLITS = ("train", "validation", "test")
SHARES = (0.90, 0.95)  # of a single file's bytes: where validation begins, and test
UTF16 = " (it looks like UTF-16: convert it)"
_SPLIT_NAMES = {"train": ("train",), "validation": ("valid", "validation", "val", "dev"), "test": ("test",)}


def read_blocks(file: BinaryIO, name: str | Path, num_bytes: int | None = None) -> Iterator[str]:
    """The UTF-8 text from the file's position on, `num_bytes` of it or all, in blocks of whole lines.

    A block is about BLOCK_BYTES; a line longer than that is cut before a space. A byte order mark is left out.
    Raises CorpusError, naming the byte, for what is not UTF-8.
    """
    rest, first = b"", True
    position = file.tell()
    while True:
        size = BLOCK_BYTES if num_bytes is None else min(BLOCK_BYTES, num_bytes)
        data = file.read(size)
        if num_bytes is not None:
            num_bytes -= len(data)
        block = rest + data
        cut = _last_cut(block) if data else len(block)
        if block[:cut]:
            text = decode(block[:cut], "corpus", name, position)
            yield text.removeprefix("\ufeff") if first and position == 0 else text
            first = False
        position += cut
        rest = block[cut:]
        if not data:
            return


def kept_pieces(block: str) -> list[str]:
    """The lines of a block, each with its newline, without blank ones; long ones in pieces, cut before a space.

    Only "\\n" ends a line. No token of GPT-2 reaches from one word into the next, so that cuts leave the tokens alone.
    """
    lines = block.split("\n")
    last = lines.pop()
    kept = [line + "\n" for line in lines if line and not line.isspace()]
    if last and not last.isspace():
        kept.append(last)
    return [piece for line in kept for piece in _cut_line(line)]


def _cut_line(line: str) -> Iterator[str]:
    start = 0
    while len(line) - start > PIECE_CHARS:
        space = line.rfind(" ", start + 1, start + PIECE_CHARS + 1)
        end = space if space > start else start + PIECE_CHARS
        yield line[start:end]
        start = end
    yield line[start:]


def share_bounds(path: Path) -> list[int]:
    """The byte positions 0, where validation begins, where test begins, and the end; each begins a line.

    In a file whose lines are longer than BLOCK_BYTES, they begin a word instead.
    Raises CorpusError if a share would be empty.
    """
    size = path.stat().st_size
    bounds = [0]
    with path.open("rb") as file:
        for share in SHARES:
            position = int(size * share)
            file.seek(position)
            bounds.append(position + _first_cut(file.read(BLOCK_BYTES)))
    bounds.append(size)
    if empty := [split for split, (a, b) in zip(SPLITS, itertools.pairwise(bounds), strict=True) if a >= b]:
        text = decode(
            path.read_bytes(), "corpus", path
        )  # of less than 20 · BLOCK_BYTES, or the last share were a block
        lines = text.count("\n") + (not text.endswith("\n"))
        raise CorpusError(
            f"corpus: {path} has {lines} line{'s' * (lines != 1)} in {size} bytes: split by whole lines, the last two 5 % "
            f"of the bytes each, nothing is left for {' and '.join(empty)}; expected more lines, or a folder of train.txt, "
            "valid.txt and test.txt"
        )
    return bounds


def split_files(folder: Path) -> dict[str, Path]:
    """The text files of the splits in a folder, such as train.txt, valid.txt, test.txt or wiki.train.tokens.

    Raises CorpusError unless there is exactly one for each.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    found = {}
    for split, names in _SPLIT_NAMES.items():
        fits = [path for path in files if set(re.split(r"[._-]", path.name.lower())) & set(names)]
        if len(fits) != 1:
            got = ", ".join(path.name for path in fits) or "none"
            raise CorpusError(
                f"corpus: folder {folder}: expected one text file for {split}, such as {names[0]}.txt; got {got}"
            )
        found[split] = fits[0]
    return found


def check_text_file(path: Path, argument: str) -> None:
    """Raises CorpusError, naming the argument, if the file is missing, no file, empty, or can't be read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for somebody to write
            kind = "folder" if stat.S_ISDIR(status.st_mode) else "pipe, a socket or a device"
            raise CorpusError(f"{argument}: {path} is not a file, but a {kind}")
        if not status.st_size:
            raise CorpusError(f"{argument}: {path} is empty")
        path.open("rb").close()
    except FileNotFoundError as error:
        raise CorpusError(f"{argument}: there is no file {path}") from error
    except OSError as error:
        raise CorpusError(f"{argument}: {path} can't be read: {error.strerror}") from error


def decode(data: bytes, argument: str, name: str | Path, position: int = 0) -> str:
    """UTF-8 bytes, found at that position of a file, as text. Raises CorpusError, naming the byte, for anything else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = position == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise CorpusError(
            f"{argument}: {name} is not UTF-8 text: byte {data[error.start]:#04x} at position {position + error.start}"
            + (UTF16 if utf16 else "")
        ) from error
    if data.count(0) > len(data) // 4:  # Latin letters of two bytes, without a mark in front
        raise CorpusError(f"{argument}: {name} is not UTF-8 text: it is full of zero bytes{UTF16}")
    return text


def _last_cut(data: bytes) -> int:
    """Where to end a block: after the last newline, else before the last space, else between two characters."""
    if newline := data.rfind(b"\n") + 1:
        return newline
    if len(data) < BLOCK_BYTES:
        return 0  # a line still to be read on
    if (space := data.rfind(b" ")) > 0:
        return space
    cut = len(data)
    while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1


def _first_cut(data: bytes) -> int:
    """Where to begin a share: after the first newline, else at the first space, else between two characters."""
    if newline := data.find(b"\n") + 1:
        return newline
    if len(data) < BLOCK_BYTES:
        return len(data)  # the last line
    if (space := data.find(b" ")) >= 0:
        return space
    return next((at for at, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
