"""WikiText as a TFDS builder that needs no TensorFlow: ArrayRecord, read through `as_data_source`.

WikiText-103 and WikiText-2 (Merity et al., "Pointer Sentinel Mixture Models", 2016), raw and word-level (rare words are
<unk>). The zips come from the author's own site, as the first address, on S3, is gone; the checksums are those published
for the files on S3. That the site serves these very bytes has not been tried: a download that differs is refused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
from tensorflow_datasets.core.utils import Size

from loglinear_jax.files import file_sha256
from loglinear_jax.text.errors import CorpusError, unreadable
from loglinear_jax.text.files import SPLITS, check_text_file, read_blocks
from loglinear_jax.text.lock import locked
from loglinear_jax.text.network import NoAnswer, check_answers

log = logging.getLogger(__name__)

MAX_BYTES = 2**30  # of an unpacked file; the training split of WikiText-103 has 540 MB
DOWNLOADS = "https://wikitext.smerity.com"
RECORDS_SHA256 = "sha256.json"  # of the records, beside them
_PUBLISHED = {  # bytes and SHA-256
    "wikitext-103-raw-v1.zip": (191984949, "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"),
    "wikitext-103-v1.zip": (190229076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "wikitext-2-raw-v1.zip": (4721645, "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
    "wikitext-2-v1.zip": (4475746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
}
_PARTS = {"train": "train", "validation": "valid", "test": "test"}  # as in wiki.valid.tokens


@dataclasses.dataclass
class WikitextConfig(tfds.core.BuilderConfig):
    """One of the four forms. zip_name and suffix as in the original release."""

    @property
    def zip_name(self) -> str:
        return f"{self.name}-v1.zip"

    @property
    def suffix(self) -> str:
        return "raw" if self.name.endswith("raw") else "tokens"


class Wikitext(tfds.core.GeneratorBasedBuilder):
    """Records are blocks of whole lines, about 1 MiB each, in their order: joined, they are the original file.

    source: a folder of already downloaded files, see `find_files`; '' downloads.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012 - as TFDS has it
        WikitextConfig(name="wikitext-103-raw", description="103 M words, as written"),
        WikitextConfig(name="wikitext-103", description="103 M words, rare ones as <unk>"),
        WikitextConfig(name="wikitext-2-raw", description="2 M words, as written"),
        WikitextConfig(name="wikitext-2", description="2 M words, rare ones as <unk>"),
    ]
    # In place of TFDS's file checksums.tsv, which it looks for with a package that it does not require.
    url_infos = {  # noqa: RUF012
        f"{DOWNLOADS}/{name}": UrlInfo(size=Size(size), checksum=sha256, filename=name)
        for name, (size, sha256) in _PUBLISHED.items()
    }

    def __init__(self, *, source: str = "", **kwargs):
        self.source = source
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://arxiv.org/abs/1609.07843",
            license="CC BY-SA 3.0",
            disable_shuffling=True,  # windows go over the ends of records
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        config = self.builder_config
        if self.source:
            files = find_files(config.name, Path(self.source))
        else:
            url = f"{DOWNLOADS}/{config.zip_name}"
            path = Path(dl_manager.download(url))
            if file_sha256(path) != self.url_infos[url].checksum:  # TFDS compares it only when it downloads
                raise CorpusError(f"corpus: {path} was damaged after its download: delete it, and start again")
            files = {split: [path] for split in SPLITS}
        return {split: self._generate_examples(files[split], split) for split in SPLITS}

    def _generate_examples(self, paths: list[Path], split: str) -> Iterator[tuple[int, dict[str, str]]]:
        member = f"wiki.{_PARTS[split]}.{self.builder_config.suffix}"
        key = 0
        for path in paths:
            for text in _read_text(path, member):
                yield key, {"text": text}
                key += 1
        if not key:
            raise CorpusError(f"source: {paths[0]} has no text for {split}")


WIKITEXT_NAMES = tuple(config.name for config in Wikitext.BUILDER_CONFIGS)


def prepare_wikitext(
    name: str, *, source: str = "", data_dir: Path
) -> tuple[dict[str, Sequence[dict[str, bytes]]], dict[str, int]]:
    """Data sources of {"text": block of lines in UTF-8}, and their bytes, by split; made in data_dir if not there yet.

    name: one of WIKITEXT_NAMES. source: see `Wikitext`. Another source needs another data_dir: see `source_sha256`.
    While TFDS makes the records of a split, it holds up to 1 GB of them in memory.
    Raises CorpusError if the source lacks files or they can't be read, and if a download fails or is not the known one.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    folder = data_dir / "wikitext" / name / str(Wikitext.VERSION)
    # TFDS renames a folder when it is whole, but two processes can't both.
    with locked(data_dir / f"{name}.lock", f"prepares {name}"):
        if not _whole(folder):
            for left in folder.parent.glob("incomplete.*"):  # of a process that was killed
                shutil.rmtree(left)
            if folder.exists():
                log.warning("%s is damaged, or of an earlier version: it is made again", folder)
                shutil.rmtree(folder)
            _make_records(Wikitext(config=name, source=source, data_dir=str(data_dir)), data_dir / "downloads")
            sha256 = {path.name: file_sha256(path) for path in folder.iterdir()}
            (folder / RECORDS_SHA256).write_text(json.dumps(sha256), encoding="utf-8")
        builder = Wikitext(config=name, source=source, data_dir=str(data_dir))
    return (
        {split: builder.as_data_source(split=split) for split in SPLITS},
        {split: builder.info.splits[split].num_bytes for split in SPLITS},
    )


def _whole(folder: Path) -> bool:
    """Whether the files of the records are those that were made. Raises CorpusError if they may not be read."""
    try:
        expected = json.loads((folder / RECORDS_SHA256).read_bytes())
        return bool(expected) and all(file_sha256(folder / name) == sha256 for name, sha256 in expected.items())
    except PermissionError as error:
        raise unreadable(error) from error
    except (OSError, ValueError, AttributeError, RecursionError):  # gone, or no JSON object
        return False


def _make_records(builder: Wikitext, downloads: Path) -> None:
    name = builder.builder_config.name
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()  # in a log file it would be a line for every redrawing
    config = tfds.download.DownloadConfig(force_checksums_validation=True)
    try:
        if not builder.source and not list(downloads.rglob(f"*{name}-v1*.zip")):
            check_answers(f"{DOWNLOADS}/{builder.builder_config.zip_name}")
        builder.download_and_prepare(download_dir=str(downloads), download_config=config)
    except NonMatchingChecksumError as error:
        ((zip_name, sha256),) = source_sha256(name, "").items()
        raise CorpusError(
            f"corpus: what {DOWNLOADS}/{zip_name} sends has another checksum than the published SHA-256 {sha256}: try "
            "again, or give a folder with the files as `source`"
        ) from error
    except (NoAnswer, requests.RequestException, tfds.download.DownloadError) as error:
        raise _no_download(name, error) from error


def source_sha256(name: str, source: str) -> dict[str, str]:
    """SHA-256 by file name of what the text comes from: known beforehand for a download."""
    if not source:
        zip_name = f"{name}-v1.zip"
        return {zip_name: Wikitext.url_infos[f"{DOWNLOADS}/{zip_name}"].checksum}
    files = find_files(name, Path(source))
    return {path.name: file_sha256(path) for path in dict.fromkeys(path for paths in files.values() for path in paths)}


def find_files(name: str, folder: Path) -> dict[str, list[Path]]:
    """The files of each split in a folder of downloads, or in its folder <name> or <name>-v1. The first there are of

        wiki.{train,valid,test}.{raw,tokens}        as unpacked from the zip
        <name>-v1.zip                               as released
        {train,validation,test}-*.parquet           as on the Hugging Face hub

    Raises CorpusError if there are none, or not of every split.
    """
    if not folder.is_dir():
        raise CorpusError(f"source: there is no folder {folder}")
    suffix = "raw" if name.endswith("raw") else "tokens"
    folders = [folder, folder / name, folder / f"{name}-v1"]
    for place in folders:
        texts = {split: [place / f"wiki.{part}.{suffix}"] for split, part in _PARTS.items()}
        archive = place / f"{name}-v1.zip"
        parquets = {split: sorted(place.glob(f"{split}-*.parquet")) for split in SPLITS}
        for found in (texts, {split: [archive] for split in SPLITS}, parquets):
            there = [split for split, paths in found.items() if paths and paths[0].exists()]
            if not there:
                continue
            if missing := sorted(set(SPLITS) - set(there)):
                raise CorpusError(f"source: {place} has files for {', '.join(there)} but none for {', '.join(missing)}")
            for path in (path for paths in found.values() for path in paths):
                check_text_file(path, "source")
            return found
    raise CorpusError(
        f"source: {folder} holds no {name}: expected wiki.{{train,valid,test}}.{suffix}, {name}-v1.zip, or "
        "{train,validation,test}-*.parquet, there or in its folder " + f"{name} or {name}-v1"
    )


def _read_text(path: Path, member: str) -> Iterator[str]:
    """The text of a file in blocks of lines; `member` is the file's name inside a zip."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif zipfile.is_zipfile(path):
        yield from _read_zip(path, member)
    elif path.suffix == ".zip":
        raise CorpusError(f"source: {path} is not a zip file, or only part of one: download it again")
    else:
        with path.open("rb") as file:
            yield from read_blocks(file, path)


def _read_zip(path: Path, member: str) -> Iterator[str]:
    """One member, as a stream: nothing is unpacked, whatever the members are called."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [info for info in archive.infolist() if info.filename.split("/")[-1] == member]
            if len(found) != 1:
                raise CorpusError(f"source: {path}: expected one {member} in it, got {len(found)}")
            _check_size(path, found[0].file_size)  # no more than that is read, whatever is packed
            with archive.open(found[0]) as file:
                yield from read_blocks(file, f"{path}:{found[0].filename}")
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:  # the last: encrypted
        raise CorpusError(f"source: {path} is damaged ({error}): download it again") from error


def _read_parquet(path: Path) -> Iterator[str]:
    size = 0
    try:
        with pyarrow.parquet.ParquetFile(path, read_dictionary=["text"]) as file:
            kind = file.schema_arrow.field("text").type
            if not pyarrow.types.is_dictionary(kind) or kind.value_type not in (
                pyarrow.string(),
                pyarrow.large_string(),
            ):
                raise CorpusError(f"source: {path} has a column 'text' of {kind}: expected strings")
            for batch in file.iter_batches(batch_size=4096, columns=["text"]):
                column = batch.column(
                    "text"
                )  # equal rows are still one: a file of a few bytes may stand for any number
                lengths = pyarrow.compute.binary_length(column.dictionary)
                size += pyarrow.compute.sum(lengths.take(column.indices)).as_py() or 0
                _check_size(path, size)
                rows = [row or "" for row in column.to_pylist()]
                # The hub's rows are lines with their newline, but a blank line is an empty row.
                yield "".join(row if row.endswith("\n") else row + "\n" for row in rows)
    except (pyarrow.ArrowException, KeyError, UnicodeDecodeError, OSError) as error:
        raise CorpusError(f"source: {path} is not a parquet file with a column 'text' ({error})") from error


def _check_size(path: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise CorpusError(
            f"source: {path} unpacks to {size} bytes or more: expected at most {MAX_BYTES}, twice the largest file of WikiText"
        )


def _no_download(name: str, error: Exception) -> CorpusError:
    return CorpusError(
        f"corpus: {name} can't be downloaded from {DOWNLOADS} ({error}). Without a network, "
        f"fetch {name}-v1.zip elsewhere, or the parquet files of the hub's dataset Salesforce/wikitext, put them into a "
        "folder, and give the folder as `source`"
    )
