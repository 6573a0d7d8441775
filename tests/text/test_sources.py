"""WikiText from each kind of source, and from a server on this machine instead of the real one."""

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

from loglinear_jax.text import CorpusError, downloads, open_corpus
from loglinear_jax.text.files import SPLITS
from loglinear_jax.text.sources import wikitext_files
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


def open_wikitext(tmp_path, bpe, source="", name="wikitext-2"):
    return open_corpus(name, tokenizer=bpe, source=str(source), cache=str(tmp_path / "cache"))


def refusal(*args, **kwargs):
    with pytest.raises(CorpusError) as caught:
        open_wikitext(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("write", "name", "suffix"),
    [
        (write_plain, "wikitext-2", "tokens"),
        (write_zip, "wikitext-103-raw", "raw"),
        (write_parquet, "wikitext-2", "tokens"),
    ],
)
def test_sources(tmp_path, texts, bpe, write, name, suffix):
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder, texts, name, suffix)
    corpus = open_wikitext(tmp_path, bpe, folder, name)
    for part, tokens in [("train", corpus.train), ("valid", corpus.validation), ("test", corpus.test)]:
        assert corpus.tokenizer.decode(tokens) == without_blank(texts[part])
    assert list(corpus.manifest["source_sha256"].values()) == [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in dict.fromkeys(itertools.chain(*wikitext_files(name, folder).values()))
    ]


def test_folders_named_after_the_corpus(tmp_path, texts):
    (tmp_path / "wikitext-2-raw").mkdir()
    write_plain(tmp_path / "wikitext-2-raw", texts, "wikitext-2-raw", "raw")
    assert wikitext_files("wikitext-2-raw", tmp_path)["train"] == [tmp_path / "wikitext-2-raw" / "wiki.train.raw"]


def test_sources_that_lack_something(tmp_path, texts, bpe):
    expected = "does not hold wikitext-2: expected wiki.{train,valid,test}.tokens, wikitext-2-v1.zip, or"
    assert expected in refusal(tmp_path, bpe, tmp_path / "nowhere")
    write_plain(tmp_path, {"train": "a"}, "wikitext-2", "tokens")
    assert expected in refusal(tmp_path, bpe, tmp_path)
    write_plain(tmp_path, texts | {"test": ""}, "wikitext-2", "tokens")
    assert refusal(tmp_path, bpe, tmp_path) == f"source: {tmp_path / 'wiki.test.tokens'} is empty"


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]],
)
def test_a_damaged_zip_is_named(tmp_path, texts, bpe, damage):
    write_zip(tmp_path, texts, "wikitext-2", "tokens")
    path = tmp_path / "wikitext-2-v1.zip"
    path.write_bytes(damage(path.read_bytes()))
    assert refusal(tmp_path, bpe, tmp_path).startswith(f"source: {path} is damaged")


def test_a_zip_of_something_else_is_named(tmp_path, texts, bpe):
    write_zip(tmp_path, {"train": "a"}, "wikitext-2", "tokens")
    write_zip(tmp_path, texts, "wikitext-103", "raw")
    assert "expected one wiki.validation.tokens" not in refusal(tmp_path, bpe, tmp_path)
    assert "expected one wiki.train.tokens in it, got 0" in refusal(tmp_path, bpe, tmp_path, "wikitext-103")


@pytest.mark.parametrize("column", [{"other": ["a"]}, {"text": [b"\xff"]}], ids=str)
def test_a_parquet_file_without_strings_is_named(tmp_path, bpe, column):
    for split in SPLITS:
        pyarrow.parquet.write_table(pyarrow.table(column), tmp_path / f"{split}-0.parquet")
    assert "is not a parquet file with a column 'text'" in refusal(tmp_path, bpe, tmp_path)


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
    monkeypatch.setattr(downloads, "WIKITEXT_SITE", address)
    monkeypatch.setitem(downloads.WIKITEXT_ARCHIVES, "wikitext-2", (len(data), hashlib.sha256(data).hexdigest()))


def test_download_then_no_network_is_needed(tmp_path, texts, bpe, monkeypatch):
    write_zip(tmp_path, texts, "wikitext-2", "tokens")
    with server(tmp_path) as address:
        use_server(monkeypatch, address, (tmp_path / "wikitext-2-v1.zip").read_bytes())
        corpus = open_wikitext(tmp_path, bpe)
    assert corpus.tokenizer.decode(corpus.train) == without_blank(texts["train"])
    assert open_wikitext(tmp_path, bpe).manifest == corpus.manifest
    (corpus.train.filename.parent / "manifest.json").unlink()
    assert open_wikitext(tmp_path, bpe).manifest == corpus.manifest  # from what was downloaded


def test_download_with_another_checksum_is_refused(tmp_path, texts, bpe, monkeypatch):
    write_zip(tmp_path, texts, "wikitext-2", "tokens")
    with server(tmp_path) as address:
        use_server(monkeypatch, address, b"what it should be")
        assert "has another checksum than the published SHA-256" in refusal(tmp_path, bpe)
    assert not list((tmp_path / "cache").glob("wikitext-2-*/manifest.json"))


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
def test_no_network(tmp_path, bpe, monkeypatch, silent):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if silent:
            bound.listen()
            monkeypatch.setattr(downloads, "ANSWER_SECONDS", 0.1)
        use_server(monkeypatch, f"http://127.0.0.1:{bound.getsockname()[1]}", b"")
        assert "Without a network, fetch wikitext-2-v1.zip elsewhere" in refusal(tmp_path, bpe)


@pytest.mark.slow
def test_no_tensorflow():
    code = "import sys, loglinear_jax.text, tensorflow_datasets; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
