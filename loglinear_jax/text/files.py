"""UTF-8 text files, read in blocks of whole lines and cut into pieces for the tokenizer."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from loglinear_jax.settings import SettingError

BLOCK_BYTES = 2**20
PIECE_CHARS = 2**16  # the longest piece given to the tokenizer: a line may be a whole file
SPLITS = ("train", "validation", "test")
SHARES = (0.90, 0.95)  # where validation and test begin in a single file, as a share of its bytes


class CorpusError(SettingError):
    """A text, a tokenizer or windows that cannot be used; the message says what to give instead."""


def check_text_file(path: Path, argument: str) -> None:
    """Raises CorpusError, naming the argument, if the path is no regular file, is empty, or can't be read."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for somebody to write
            raise CorpusError(f"{argument}: {path} is not a file")
        with path.open("rb") as file:
            if not file.read(1):
                raise CorpusError(f"{argument}: {path} is empty")
    except OSError as error:
        raise CorpusError(f"{argument}: {path} can't be read: {error.strerror}") from error


def read_blocks(file: BinaryIO, name: str | Path, stop: int) -> Iterator[str]:
    """The text from the file's position to byte `stop`, in blocks of whole lines of about BLOCK_BYTES.

    A byte order mark at the beginning is left out. Raises CorpusError, naming the byte, for what is not UTF-8.
    """
    while (position := file.tell()) < stop:
        block = file.read(min(BLOCK_BYTES, stop - position))
        block += file.readline(stop - file.tell())
        if not block:
            return
        text = decode(block, "corpus", name, position)
        yield text.removeprefix("\ufeff") if position == 0 else text


def decode(data: bytes, argument: str, name: str | Path, position: int = 0) -> str:
    """The text of UTF-8 bytes found at that position of a file. Raises CorpusError, naming the byte, for anything else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte {data[error.start]:#04x} at position {position + error.start}"
        raise CorpusError(f"{argument}: {name} is not UTF-8 text: {at}; convert it, if it is UTF-16") from error
    if data.count(0) > len(data) // 4:  # UTF-16 without a mark: every second byte of Latin letters is zero
        raise CorpusError(
            f"{argument}: {name} is not UTF-8 text: it is full of zero bytes; convert it, if it is UTF-16"
        )
    return text


def kept_pieces(block: str) -> list[str]:
    """The lines of a block, each with its newline, without blank ones; long lines are cut before a space.

    Only "\\n" ends a line. No token of GPT-2 extends from one word into the next, so these cuts do not change the tokens.
    """
    lines = io.StringIO(block, newline="\n")
    return [piece for line in lines if not line.isspace() for piece in cut_line(line)]


def cut_line(text: str) -> list[str]:
    """A line, or a whole document, cut before a space into pieces of at most PIECE_CHARS characters."""
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARS:
        space = text.rfind(" ", start + 1, start + PIECE_CHARS + 1)
        end = space if space > start else start + PIECE_CHARS
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def share_bounds(path: Path) -> list[int]:
    """The byte positions where the three splits of a single file begin, and its end; each begins a line.

    In a file whose lines are longer than BLOCK_BYTES, each begins a word. Raises CorpusError if a split would be empty.
    """
    size = path.stat().st_size
    bounds = [0]
    with path.open("rb") as file:
        for share in SHARES:
            file.seek(int(size * share))
            data = file.read(BLOCK_BYTES)
            first = data.find(b"\n") + 1 or (data.find(b" ") if len(data) == BLOCK_BYTES else len(data))
            bounds.append(int(size * share) + first)
    bounds.append(size)
    if empty := [split for split, (a, b) in zip(SPLITS, itertools.pairwise(bounds), strict=True) if a >= b]:
        raise CorpusError(
            f"corpus: {path} has too few lines in its {size} bytes: validation and test are the last two 5 % of the bytes, "
            f"by whole lines, and nothing is left for {' and '.join(empty)}; expected more lines, or a folder of train.txt, "
            "valid.txt and test.txt"
        )
    return bounds
