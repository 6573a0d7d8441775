"""The builder, from each kind of source and from a server of this machine in place of the real one."""

import contextlib
import errno
import functools
import hashlib
import http.server
import itertools
import shutil
import socket
import stat
import subprocess
import sys
import threading
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from tensorflow_datasets.core.download.checksums import UrlInfo

from loglinear_jax.text import CorpusError, open_corpus, wikitext
from loglinear_jax.text.files import SPLITS
from loglinear_jax.text.wikitext import WIKITEXT_NAMES, Wikitext, find_files, prepare_wikitext, source_sha256
from tests.text.conftest import without_blank


def write_plain(folder, texts, name, suffix):
    for part, text in texts.items():
        (folder / f"wiki.{part}.{suffix}").write_bytes(text.encode())


def write_zip(folder, texts, name, suffix):
    with zipfile.ZipFile(folder / f"{name}-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/", "")
        for part, text in texts.items():
            archive.writestr(f"{name}/wiki.{part}.{suffix}", text)


def write_parquet(folder, texts, name, suffix):
    """As the hub has it: a row a line, blank ones without their newline; train in two files."""
    (folder / f"{name}-v1").mkdir()
    for part, text in texts.items():
        rows = [line if line.strip() else "" for line in text.splitlines(keepends=True)]
        cuts = [0, len(rows) // 2, len(rows)] if part == "train" else [0, len(rows)]
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            split = "validation" if part == "valid" else part
            path = folder / f"{name}-v1" / f"{split}-{number:05}-of-{len(cuts) - 1:05}.parquet"
            pyarrow.parquet.write_table(pyarrow.table({"text": rows[start:stop]}), path)


def texts_of(sources):
    return {split: b"".join(record["text"] for record in records).decode() for split, records in sources.items()}


@pytest.mark.parametrize("write", [write_plain, write_zip, write_parquet])
@pytest.mark.parametrize(("name", "suffix"), [("wikitext-103-raw", "raw"), ("wikitext-2", "tokens")])
def test_sources(tmp_path, texts, bpe, write, name, suffix):
    folder = tmp_path / "downloads"
    folder.mkdir()
    write(folder, texts, name, suffix)
    corpus = open_corpus(name, tokenizer=bpe, source=str(folder), cache=str(tmp_path / "cache"))
    for part, tokens in [("train", corpus.train), ("valid", corpus.validation), ("test", corpus.test)]:
        assert corpus.tokenizer.decode(tokens) == without_blank(texts[part])
    assert list(corpus.manifest["source_sha256"].values()) == [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in dict.fromkeys(path for paths in find_files(name, folder).values() for path in paths)
    ]


def test_records_that_may_not_be_read_are_not_made_again(tmp_path, texts, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write_plain(tmp_path, texts, "wikitext-2", "tokens")
    prepare_wikitext("wikitext-2", source=str(tmp_path), data_dir=tmp_path / "data")
    records = sorted((tmp_path / "data").rglob("*"))
    monkeypatch.setattr(wikitext, "file_sha256", denied)
    with pytest.raises(CorpusError, match=f"^cache: {tmp_path}/data/.* can't be read: Permission denied: expected"):
        prepare_wikitext("wikitext-2", source=str(tmp_path), data_dir=tmp_path / "data")
    assert sorted((tmp_path / "data").rglob("*")) == records


def test_records_keep_the_text_as_it_is_and_are_made_once(tmp_path, texts, monkeypatch):
    monkeypatch.setattr("loglinear_jax.text.files.BLOCK_BYTES", 500)
    write_plain(tmp_path, texts, "wikitext-2", "tokens")
    sources, sizes = prepare_wikitext("wikitext-2", source=str(tmp_path), data_dir=tmp_path / "data")
    assert texts_of(sources) == {"train": texts["train"], "validation": texts["valid"], "test": texts["test"]}
    assert len(sources["train"]) > 10 and sources["train"][3]["text"].endswith(b"\n")
    assert sizes["train"] >= len(texts["train"].encode())
    assert list((tmp_path / "data").glob("wikitext/wikitext-2/1.0.0/*.array_record*"))
    (tmp_path / "wiki.train.tokens").unlink()
    again, _ = prepare_wikitext("wikitext-2", source=str(tmp_path), data_dir=tmp_path / "data")
    assert texts_of(again) == texts_of(sources)


def test_folders_named_after_the_corpus(tmp_path, texts):
    (tmp_path / "wikitext-2-raw").mkdir()
    write_plain(tmp_path / "wikitext-2-raw", texts, "wikitext-2-raw", "raw")
    assert find_files("wikitext-2-raw", tmp_path)["train"] == [tmp_path / "wikitext-2-raw" / "wiki.train.raw"]


def test_sources_that_lack_something(tmp_path, texts):
    def message(name="wikitext-2", folder=tmp_path):
        with pytest.raises(CorpusError) as caught:
            prepare_wikitext(name, source=str(folder), data_dir=tmp_path / "data")
        return str(caught.value)

    assert f"source: there is no folder {tmp_path / 'nowhere'}" == message(folder=tmp_path / "nowhere")
    assert "holds no wikitext-2: expected wiki.{train,valid,test}.tokens, wikitext-2-v1.zip, or" in message()
    (tmp_path / "wikitext-2-v1.zip").write_bytes(b"PK, and then the connection was lost")
    assert "not a zip file, or only part of one: download it again" in message()
    write_zip(tmp_path, {"train": "a\n"}, "wikitext-2", "tokens")
    assert "expected one wiki.valid.tokens in it, got 0" in message()
    write_plain(tmp_path, {"train": "a\n", "valid": "b\n"}, "wikitext-2", "tokens")
    assert "has files for train, validation but none for test" in message()
    write_plain(tmp_path, texts | {"test": ""}, "wikitext-2", "tokens")
    assert "wiki.test.tokens is empty" in message()
    write_plain(tmp_path, texts, "wikitext-2", "tokens")
    (tmp_path / "wiki.valid.tokens").write_bytes(b"a\n\xe9\n")
    assert "wiki.valid.tokens is not UTF-8 text: byte 0xe9 at position 2" in message()
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}-0.parquet").write_bytes(b"nothing")
    assert "not a parquet file with a column 'text'" in message(name="wikitext-2-raw")


def test_damaged_zip(tmp_path, texts):
    write_zip(tmp_path, texts, "wikitext-2", "tokens")
    path = tmp_path / "wikitext-2-v1.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for part, text in texts.items():
            archive.writestr(f"wiki.{part}.tokens", text)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorpusError, match="damaged .*: download it again"):
        prepare_wikitext("wikitext-2", source=str(tmp_path), data_dir=tmp_path / "data")


def prepared(tmp_path):
    return prepare_wikitext("wikitext-2", source=str(tmp_path / "source"), data_dir=tmp_path / "data")[0]


def refusal(tmp_path):
    with pytest.raises(CorpusError) as caught:
        prepared(tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def archive(tmp_path):
    """A zip to be filled, where WikiText's is looked for."""
    (tmp_path / "source").mkdir()
    with zipfile.ZipFile(tmp_path / "source" / "wikitext-2-v1.zip", "w", zipfile.ZIP_DEFLATED) as opened:
        yield opened


def test_a_zip_writes_nothing_wherever_its_members_point(tmp_path, texts, archive):
    """Up, to the root, and through a link: a member is read as a stream, and no member is unpacked."""
    link = zipfile.ZipInfo("wikitext-2/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(link, str(tmp_path))
    archive.writestr("../../escaped.txt", "x")
    archive.writestr(f"{tmp_path}/absolute.txt", "x")
    for place, (part, text) in zip(("../../", f"{tmp_path}/", "wikitext-2/link/"), texts.items(), strict=True):
        archive.writestr(f"{place}wiki.{part}.tokens", text)
    archive.close()
    before = {path for path in tmp_path.rglob("*")}
    assert texts_of(prepared(tmp_path))["test"] == texts["test"]
    written = {path for path in tmp_path.rglob("*")} - before
    assert written and all(path.is_relative_to(tmp_path / "data") for path in written)
    assert not {path.name for path in written} & {"escaped.txt", "absolute.txt", "link", "wiki.test.tokens"}


def test_a_zip_that_unpacks_to_more_than_any_wikitext_is_refused(tmp_path, texts, archive, monkeypatch):
    monkeypatch.setattr(wikitext, "MAX_BYTES", 100_000)
    for part, text in (texts | {"train": "a\n" * 10_000_000}).items():
        archive.writestr(f"wiki.{part}.tokens", text)
    archive.close()
    assert (tmp_path / "source" / "wikitext-2-v1.zip").stat().st_size < 50_000
    message = refusal(tmp_path)
    assert "wikitext-2-v1.zip unpacks to 20000000 bytes or more: expected at most 100000" in message


def test_a_zip_that_holds_more_than_it_says_is_not_read_past_that(tmp_path, texts, archive, monkeypatch):
    monkeypatch.setattr(wikitext, "MAX_BYTES", 100_000)
    for part, text in (texts | {"train": "a\n" * 10_000_000}).items():
        archive.writestr(f"wiki.{part}.tokens", text)
    archive.getinfo("wiki.train.tokens").file_size = 2_000
    archive.close()
    assert "wikitext-2-v1.zip is damaged (Bad CRC-32" in refusal(tmp_path)


def test_a_zip_with_a_password_or_cut_short_is_named(tmp_path, texts, archive):
    for part, text in texts.items():
        archive.writestr(f"wiki.{part}.tokens", text)
    archive.close()
    path = tmp_path / "source" / "wikitext-2-v1.zip"
    whole = path.read_bytes()
    encrypted = bytearray(whole)
    for at in (whole.find(b"PK\x03\x04") + 6, whole.find(b"PK\x01\x02") + 8):
        encrypted[at] |= 1
    path.write_bytes(encrypted)
    assert "is damaged" in (message := refusal(tmp_path)) and "encrypted" in message
    deflated = bytearray(whole)
    deflated[60:90] = bytes(30)
    path.write_bytes(deflated)
    assert "wikitext-2-v1.zip is damaged" in refusal(tmp_path)


def test_a_parquet_file_of_few_bytes_and_many_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(wikitext, "MAX_BYTES", 100_000_000)
    (tmp_path / "source").mkdir()
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, pyarrow.int32()), ["a" * 100_000])
    for split in SPLITS:
        path = tmp_path / "source" / f"{split}-0.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path)
    assert path.stat().st_size < 10_000
    assert "parquet unpacks to 409600000 bytes or more" in refusal(tmp_path)  # the first rows of 10 GB


@pytest.mark.parametrize("column", [{"other": ["a"]}, {"text": [1]}, {"text": [b"\xff"]}], ids=str)
def test_a_parquet_file_without_strings_is_named(tmp_path, column):
    (tmp_path / "source").mkdir()
    for split in SPLITS:
        pyarrow.parquet.write_table(pyarrow.table(column), tmp_path / "source" / f"{split}-0.parquet")
    assert "column 'text'" in refusal(tmp_path)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:80], lambda data: data[:-1] + b"\xff"])
@pytest.mark.parametrize("name", ["dataset_info.json", "*train*", "sha256.json"])
def test_damaged_records_are_made_again(tmp_path, texts, name, damage, caplog):
    (tmp_path / "source").mkdir()
    write_plain(tmp_path / "source", texts, "wikitext-2", "tokens")
    prepared(tmp_path)
    (path,) = (tmp_path / "data" / "wikitext" / "wikitext-2" / "1.0.0").glob(name)
    path.write_bytes(damage(path.read_bytes()))
    assert texts_of(prepared(tmp_path)) == {
        "train": texts["train"],
        "validation": texts["valid"],
        "test": texts["test"],
    }
    assert sum("is damaged, or of an earlier version: it is made again" in line for line in caplog.messages) == 1


@contextlib.contextmanager
def server(folder):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


def use_server(monkeypatch, address, data):
    info = UrlInfo(size=len(data), checksum=hashlib.sha256(data).hexdigest(), filename="wikitext-2-v1.zip")
    monkeypatch.setattr(wikitext, "DOWNLOADS", address)
    monkeypatch.setattr(Wikitext, "url_infos", {f"{address}/wikitext-2-v1.zip": info})


def test_download_then_no_network_is_needed(tmp_path, texts, bpe, monkeypatch):
    write_zip(tmp_path, texts, "wikitext-2", "tokens")
    cache = str(tmp_path / "cache")
    with server(tmp_path) as address:
        use_server(monkeypatch, address, (tmp_path / "wikitext-2-v1.zip").read_bytes())
        corpus = open_corpus("wikitext-2", tokenizer=bpe, cache=cache)
    assert corpus.tokenizer.decode(corpus.train) == without_blank(texts["train"])
    assert open_corpus("wikitext-2", tokenizer=bpe, cache=cache).manifest == corpus.manifest
    for made in (*(tmp_path / "cache").glob("wikitext-2-*/"), tmp_path / "cache" / "tfds" / "downloaded" / "wikitext"):
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    assert open_corpus("wikitext-2", tokenizer=bpe, cache=cache).manifest == corpus.manifest  # from what was downloaded
    shutil.rmtree(tmp_path / "cache" / "tfds" / "downloaded" / "wikitext")
    shutil.rmtree(corpus.train.filename.parent)
    (downloaded,) = (tmp_path / "cache").rglob("*.zip")
    downloaded.write_bytes(downloaded.read_bytes() + b"\0")
    with pytest.raises(CorpusError, match=f"{downloaded.name} was damaged after its download: delete it"):
        open_corpus("wikitext-2", tokenizer=bpe, cache=cache)


def test_download_with_another_checksum_is_refused(tmp_path, texts, bpe, monkeypatch):
    write_zip(tmp_path, texts, "wikitext-2", "tokens")
    with server(tmp_path) as address:
        use_server(monkeypatch, address, b"what it should be")
        with pytest.raises(CorpusError, match="has another checksum than the published SHA-256") as caught:
            open_corpus("wikitext-2", tokenizer=bpe, cache=str(tmp_path / "cache"))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("wikitext-2-*/manifest.json"))


def test_download_that_is_not_there(tmp_path, bpe, monkeypatch):
    with server(tmp_path) as address:
        use_server(monkeypatch, address, b"")
        with pytest.raises(CorpusError, match="can't be downloaded .*404.*give the folder as `source`"):
            open_corpus("wikitext-2", tokenizer=bpe, cache=str(tmp_path / "cache"))


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
def test_no_network(tmp_path, bpe, monkeypatch, silent):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if silent:
            bound.listen()
            monkeypatch.setattr("loglinear_jax.text.network.STEP_SECONDS", 0.1)
        use_server(monkeypatch, f"http://127.0.0.1:{bound.getsockname()[1]}", b"")
        with pytest.raises(CorpusError, match="Without a network, fetch wikitext-2-v1.zip elsewhere") as caught:
            open_corpus("wikitext-2", tokenizer=bpe, cache=str(tmp_path / "cache"))
    assert "\n" not in str(caught.value)


def test_published_checksums():
    for name in WIKITEXT_NAMES:
        ((zip_name, sha256),) = source_sha256(name, "").items()
        assert zip_name == f"{name}-v1.zip" and len(sha256) == 64
    assert len({info.checksum for info in Wikitext.url_infos.values()}) == 4


def test_no_tensorflow():
    code = "import sys, loglinear_jax.text, loglinear_jax.text.wikitext; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
