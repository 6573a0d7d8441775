"""WikiText from a server on this machine, and documents of the hub from a data set on this machine."""

import functools
import hashlib
import itertools
import json
import shutil
import socket
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from loglinear_jax.text import CorpusError, open_corpus, open_documents, sources
from loglinear_jax.text.sources import SPLITS
from tests.text.conftest import documents_of, server, without_blank

DOCUMENTS = {"train": ["One wren.\n\nAnd another.", "A rook."], "validation": ["An owl."], "test": ["A heron é."]}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that makes texts by split the only data set there is; what was asked for."""
    datasets = pytest.importorskip("datasets")
    asked, load = [], datasets.load_dataset

    def offer(texts):
        for split, own in texts.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in own)
            (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        files = {split: str(tmp_path / f"{split}.jsonl") for split in texts}
        loaded = load("json", data_files=files, cache_dir=str(tmp_path / "hub"))
        monkeypatch.setattr(datasets, "load_dataset", lambda *name: asked.append(name) or loaded)
        return asked

    return offer


def write_zip(folder, texts, name="wikitext-2", suffix="tokens"):
    """WikiText's zip as released; its bytes."""
    path = folder / f"{name}-v1.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/", "")
        for part, text in texts.items():
            archive.writestr(f"{name}/wiki.{part}.{suffix}", text)
    return path.read_bytes()


def use_server(monkeypatch, address, data, name="wikitext-2"):
    """The published size and SHA-256 become those of the data; the SHA-256."""
    sha256 = hashlib.sha256(data).hexdigest()
    monkeypatch.setattr(sources, "WIKITEXT_SITE", address)
    monkeypatch.setitem(sources.WIKITEXT_ARCHIVES, name, (len(data), sha256))
    return sha256


@pytest.mark.parametrize(("name", "suffix"), [("wikitext-2", "tokens"), ("wikitext-103-raw", "raw")])
def test_wikitext_is_downloaded_once_and_read_from_its_zip(tmp_path, texts, bpe, monkeypatch, name, suffix):
    data = write_zip(tmp_path, texts, name, suffix)
    open_wikitext = functools.partial(open_corpus, name, tokenizer=bpe, cache=str(tmp_path / "cache"))
    with server(tmp_path) as (address, _):
        sha256 = use_server(monkeypatch, address, data, name)
        corpus = open_wikitext()
    assert corpus.manifest["source_sha256"] == {f"{name}-v1.zip": sha256}
    with zipfile.ZipFile(tmp_path / f"{name}-v1.zip") as archive:
        archive.extractall(tmp_path)
    unpacked = open_corpus(str(tmp_path / name), tokenizer=bpe, cache=str(tmp_path / "cache"))
    for split, text in zip(SPLITS, texts.values(), strict=True):
        assert corpus.tokenizer.decode(getattr(corpus, split)) == without_blank(text)
        np.testing.assert_array_equal(getattr(unpacked, split), getattr(corpus, split))
    shutil.rmtree(corpus.train.filename.parent)
    assert open_wikitext().manifest == corpus.manifest  # from the zip that is here, without the server
    shutil.rmtree(corpus.train.filename.parent)
    (path,) = (tmp_path / "cache" / "downloads").glob("*.zip")
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorpusError, match=f"{path.name} is damaged .*: delete it, and it is downloaded again$"):
        open_wikitext()


def test_a_download_with_another_checksum_is_refused(tmp_path, texts, bpe, monkeypatch):
    write_zip(tmp_path, texts)
    with (
        server(tmp_path) as (address, _),
        pytest.raises(CorpusError, match="another checksum than the published SHA-256"),
    ):
        use_server(monkeypatch, address, b"what it should be")
        open_corpus("wikitext-2", tokenizer=bpe, cache=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("wikitext-2-*/manifest.json"))


def test_without_a_network_the_zip_can_be_fetched_elsewhere(tmp_path, bpe, monkeypatch):
    """By a server that never answers. (One that refuses: test_tokenizer.py.)"""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.1)
        use_server(monkeypatch, f"http://127.0.0.1:{bound.getsockname()[1]}", b"")
        wanted = "fetch wikitext-2-v1.zip elsewhere, unpack it, and give the folder as task.corpus$"
        with pytest.raises(CorpusError, match=wanted):
            open_corpus("wikitext-2", tokenizer=bpe, cache=str(tmp_path / "cache"))


@pytest.mark.slow
def test_no_tensorflow():
    code = "import sys, loglinear_jax.text, tensorflow_datasets; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documents_of_the_hub_need_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"no folder .* needs datasets: pip install -e '.\[datasets\]'"):
        open_documents("someone/birds", tokenizer="bytes", cache=str(tmp_path))


@pytest.mark.parametrize("splits", [SPLITS, SPLITS[:1]])
def test_documents_of_the_hub_are_read_by_their_rows(hub, tmp_path, splits):
    rows = {split: DOCUMENTS[split] if len(splits) > 1 else [f"{n} wrens" for n in range(100)] for split in splits}
    asked = hub(rows)
    corpus = open_documents("someone/birds:small", tokenizer="bytes", cache=str(tmp_path / "cache"))
    assert asked == [("someone/birds", "small")]
    found = {split: documents_of(corpus, split) for split in SPLITS}
    assert sorted(itertools.chain(*found.values())) == sorted(itertools.chain(*rows.values()))
    assert found == rows or len(splits) == 1


def test_a_data_set_that_can_not_be_had_is_one_line(hub, monkeypatch, tmp_path):
    hub({"other": ["a"]})
    with pytest.raises(CorpusError, match="data set x/y has the splits other: expected train"):
        open_documents("x/y", tokenizer="bytes", cache=str(tmp_path))

    def fail(*name):
        raise FileNotFoundError("no such data set\nand more")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(CorpusError, match="set 'x/y' can't be had from the hub .no such data set.: expected its name"):
        open_documents("x/y", tokenizer="bytes", cache=str(tmp_path))
