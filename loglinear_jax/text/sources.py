"""Where a corpus's text comes from: files in UTF-8, WikiText, or documents.

A text is one file, a folder with a file for each split, or WikiText-103 or WikiText-2 (Merity et al., "Pointer Sentinel Mixture
Models", 2016), raw or word-level, with rare words as <unk>. Documents are

<corpus>/train/, valid/, test/              of .txt files, each a document, and .jsonl files, with a document in each line
<corpus>/train.jsonl, valid.jsonl, test.jsonl
<corpus>                                    any other folder of such files, or one .jsonl file: each document is in
                                            validation or in test with a chance of 5 %, as the hash of its text says

or a data set of the Hugging Face hub.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import itertools
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import requests

from loglinear_jax.command_line import needs_extra
from loglinear_jax.files import file_sha256, local_path
from loglinear_jax.settings import SettingError, first_line

BLOCK_BYTES = 2**20
PIECE_CHARS = 2**16  # the longest piece given to the tokenizer: a line may be a whole file
SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train",), "validation": ("valid", "validation", "val", "dev"), "test": ("test",)}
SHARES = (0.90, 0.95)  # where validation and test begin in a single file, as a share of its bytes
SUFFIXES = (".txt", ".jsonl")
SPLIT_PERCENT = 5  # of documents without splits: what validation gets, and what test gets
ANSWER_SECONDS = 10  # that a server may take
WIKITEXT_SITE = "https://wikitext.smerity.com"  # the author's own; the first address, on S3, is gone
WIKITEXT_ARCHIVES = {  # bytes and SHA-256 of the archives as published on S3; a download that differs is refused
    "wikitext-103-raw": (191984949, "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"),
    "wikitext-103": (190229076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "wikitext-2-raw": (4721645, "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
    "wikitext-2": (4475746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
}


class CorpusError(SettingError):
    """A text, a tokenizer or windows that cannot be used; the message says what to give instead."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus's text. sha256: of its files, by file name or split. texts: a split's lines, or its documents, none blank."""

    name: str
    sha256: dict[str, str]
    texts: Callable[[str], Iterator[str]]


# --- Files ------------------------------------------------------------------------------------------------------------


def check_text_file(path: Path, argument: str) -> None:
    """Raises CorpusError, naming the argument, if the path is empty, or can't be read."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise CorpusError(f"{argument}: {path} is empty")
    except OSError as error:
        raise CorpusError(f"{argument}: {path} can't be read: {error.strerror}") from error


def read_lines(file: BinaryIO, name: str | Path, stop: int) -> Iterator[str]:
    """The lines from the file's position to byte `stop`, each with its newline, without blank ones; only "\\n" ends a line.

    A byte order mark at the beginning is left out. Raises CorpusError, naming the byte, for what is not UTF-8.
    """
    position = file.tell()
    while line := file.readline(stop - position):
        text = decode(line, "corpus", name, position)
        text = text.removeprefix("\ufeff") if position == 0 else text
        if text and not text.isspace():
            yield text
        position += len(line)


def decode(data: bytes, argument: str, name: str | Path, position: int = 0) -> str:
    """The text of UTF-8 bytes found at that position of a file. Raises CorpusError, naming the byte, for anything else."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte {data[error.start]:#04x} at position {position + error.start}"
        raise CorpusError(f"{argument}: {name} is not UTF-8 text: {at}") from error


def cut_line(text: str) -> list[str]:
    """A line, or a whole document, cut before a space into pieces of at most PIECE_CHARS characters.

    No token of GPT-2 extends from one word into the next, so these cuts do not change the tokens.
    """
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
            if first < 0:  # no line and no word ends: between two characters
                first = next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
            bounds.append(int(size * share) + first)
    bounds.append(size)
    if empty := [split for split, (a, b) in zip(SPLITS, itertools.pairwise(bounds), strict=True) if a >= b]:
        raise CorpusError(
            f"corpus: {path} has too few lines in its {size} bytes: validation and test are the last two 5 % of the bytes, "
            f"by whole lines, and nothing is left for {' and '.join(empty)}; expected more lines, or a folder of train.txt, "
            "valid.txt and test.txt"
        )
    return bounds


def find_source(corpus: str, downloads: Path) -> Source:
    """The text that `open_corpus` is asked for. downloads: the folder for WikiText's zip. Raises CorpusError for a text that is
    missing or can't be split."""
    if corpus in WIKITEXT_ARCHIVES:
        return _wikitext(corpus, downloads)
    path = local_path(corpus, "corpus")
    if not corpus or not (path.is_symlink() or path.exists()):
        known = ", ".join(WIKITEXT_ARCHIVES)
        raise CorpusError(f"corpus: {corpus!r} is none of {known}, and there is no such file or folder")
    files = split_files(path) if path.is_dir() else dict.fromkeys(SPLITS, path)
    for file in files.values():
        check_text_file(file, "corpus")
    if path.is_dir():
        bounds = {split: (0, file.stat().st_size) for split, file in files.items()}
    else:
        bounds = dict(zip(SPLITS, itertools.pairwise(share_bounds(path)), strict=True))

    def lines(split: str) -> Iterator[str]:
        with files[split].open("rb") as file:
            file.seek(bounds[split][0])
            yield from read_lines(file, files[split], bounds[split][1])

    sha256 = {file.name: file_sha256(file) for file in dict.fromkeys(files.values())}
    return Source(path.absolute().stem[:50] or "text", sha256, lines)


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


# --- WikiText ---------------------------------------------------------------------------------------------------------


def _wikitext(name: str, downloads: Path) -> Source:
    """WikiText's zip, downloaded when its text is first read, and read as a stream: nothing is unpacked."""

    def lines(split: str) -> Iterator[str]:
        path = _wikitext_archive(name, downloads)
        member = f"{name}/wiki.{SPLIT_NAMES[split][0]}.{'raw' if name.endswith('raw') else 'tokens'}"
        try:
            with zipfile.ZipFile(path) as archive, archive.open(member) as file:
                yield from read_lines(file, f"{path}:{member}", archive.getinfo(member).file_size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise CorpusError(f"corpus: {path} is damaged ({error}): delete it, and it is downloaded again") from error

    return Source(name, {f"{name}-v1.zip": WIKITEXT_ARCHIVES[name][1]}, lines)


def _wikitext_archive(name: str, folder: Path) -> Path:
    """WikiText's zip file, downloaded into the folder unless it is there. Raises CorpusError if it can't be had."""
    with needs_extra("text"):
        import tensorflow_datasets as tfds  # takes seconds
        from tensorflow_datasets.core.download.checksums import UrlInfo
        from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
        from tensorflow_datasets.core.utils import Size

    url = f"{WIKITEXT_SITE}/{name}-v1.zip"
    size, sha256 = WIKITEXT_ARCHIVES[name]
    manager = tfds.download.DownloadManager(
        download_dir=folder,
        url_infos={url: UrlInfo(size=Size(size), checksum=sha256, filename=f"{name}-v1.zip")},
        force_checksums_validation=True,
    )
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()  # in a log file it would write a line each time it is redrawn
    try:
        if not list(folder.glob(f"*{name}-v1*.zip")):
            check_answers(url)
        return Path(manager.download(url))
    except (requests.RequestException, tfds.download.DownloadError, NonMatchingChecksumError) as error:
        is_other = isinstance(error, NonMatchingChecksumError)
        reason = f"what is sent has another checksum than the published SHA-256 {sha256}" if is_other else error
        raise CorpusError(
            f"corpus: {name} can't be downloaded from {WIKITEXT_SITE} ({reason}). Without a network, fetch {name}-v1.zip "
            "elsewhere, unpack it, and give the folder as task.corpus"
        ) from error


def check_answers(url: str) -> None:
    """Raises requests.RequestException if no server answers there; the libraries that download would try for minutes."""
    try:
        requests.head(url, timeout=ANSWER_SECONDS).close()
    except requests.exceptions.SSLError:
        pass  # a server is there, and the download will say what is wrong with it
    except requests.RequestException as error:
        raise requests.RequestException(f"no answer from {url}") from error


# --- Documents --------------------------------------------------------------------------------------------------------


def find_documents(corpus: str, text_field: str = "text") -> Source:
    """The documents of a corpus.

    corpus: a folder, a .jsonl file, or the name of a data set on the hub, "owner/name" or "owner/name:configuration".
    text_field: where a line of JSON, or a row of a data set, has its text. Raises CorpusError for a corpus that is missing, has
    no documents, or lacks a split.
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
    splits = (_splits(path) if path.is_dir() else {}) or dict.fromkeys(SPLITS, path)
    files = {split: _files(place) for split, place in splits.items()}
    of_file = {file: file_sha256(file) for file in dict.fromkeys(itertools.chain.from_iterable(files.values()))}
    sha256 = {  # one for each split, of its files' names and contents
        split: _sha256(json.dumps([(str(file.relative_to(path)), of_file[file]) for file in own]))
        for split, own in files.items()
    }

    def texts(split: str) -> Iterator[str]:
        return itertools.chain.from_iterable(_read(file, text_field) for file in files[split])

    return Source(path.absolute().stem[:50] or "documents", sha256, _documents(texts, len(set(splits.values())) == 1))


def _documents(texts: Callable[[str], Iterable[str]], pooled: bool) -> Callable[[str], Iterator[str]]:
    """The texts of each split that are not blank; pooled: there are no splits but those of the texts' hashes."""

    def split_of(text: str) -> str:
        percent = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
        return "test" if percent < SPLIT_PERCENT else "validation" if percent < 2 * SPLIT_PERCENT else "train"

    def documents(split: str) -> Iterator[str]:
        return (text for text in texts(split) if text.strip() and (not pooled or split_of(text) == split))

    return documents


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
    files = [place]
    if place.is_dir():  # Path.rglob would pass over links to folders; one that leads back shows its files several times
        below = (place / path for path in glob.iglob("**/*", root_dir=place, recursive=True, include_hidden=True))
        files = sorted({path.resolve(): path for path in below if path.suffix in SUFFIXES}.values())
    if not files:
        raise CorpusError(f"corpus: {place} has no documents: expected {' or '.join(SUFFIXES)} files")
    for file in files:
        check_text_file(file, "corpus")
    return files


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, text_field: str) -> Iterator[str]:
    if path.suffix == ".txt":
        yield decode(path.read_bytes(), "corpus", path).removeprefix("\ufeff")
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            text = decode(line, "corpus", where).removeprefix("\ufeff" if number == 1 else "")
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:  # also of a number of too many digits
                raise CorpusError(f"corpus: {where}: not JSON ({error})") from error
            yield _text_of(record, text_field, where)


def _text_of(record: Any, text_field: str, where: str) -> str:
    text = record.get(text_field) if isinstance(record, Mapping) else None
    if not isinstance(text, str):
        has = f", got the fields {', '.join(record)}" if isinstance(record, Mapping) else ""
        raise CorpusError(f"corpus: {where}: expected an object with a text as text_field={text_field!r}{has}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise CorpusError(f"corpus: {where}: {half!a} is half of a character: expected valid Unicode") from error
    return text


def _data_set(name: str, text_field: str) -> Source:
    """A data set of the hub, through the library `datasets`; one that lacks a split is split by the hash of its texts."""
    try:
        with needs_extra("datasets"):
            import datasets  # takes seconds
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise CorpusError(f"corpus: there is no folder {name!r}; if it is a data set on the hub, {error}") from error
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # of many types, by what is missing
        raise CorpusError(
            f"corpus: the data set {name!r} can't be had from the hub ({first_line(error)}): expected its name, or a "
            "local folder"
        ) from error
    splits = {split: loaded[own] for split, names in SPLIT_NAMES.items() for own in names if own in loaded}
    if "train" not in splits:
        raise CorpusError(f"corpus: the data set {name} has the splits {', '.join(loaded)}: expected train")
    sha256 = {
        split: _sha256("".join(file_sha256(Path(file["filename"])) for file in own.cache_files))
        for split, own in splits.items()
    }
    pooled = len(splits) < len(SPLITS)

    def texts(split: str) -> Iterator[str]:
        rows = enumerate(splits["train" if pooled else split])
        return (_text_of(row, text_field, f"{name}, row {number}") for number, row in rows)

    return Source(name.replace("/", "-").replace(":", "-")[:50], sha256, _documents(texts, pooled))
