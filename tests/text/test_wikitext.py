"""The builder, from each kind of source and from a server of this machine in place of the real one."""

import contextlib
import functools
import hashlib
import http.server
import itertools
import socket
import subprocess
import sys
import threading
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from tensorflow_datasets.core.download.checksums import UrlInfo

from loglinear_jax.text import CorpusError, open_corpus, wikitext
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


def test_no_network(tmp_path, bpe, monkeypatch):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens
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
