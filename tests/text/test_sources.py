"""Texts from files, and WikiText and documents from the hub, for which a data set of this machine stands."""

import hashlib
import itertools
import json

import pytest

from loglinear_jax.text import CorpusError, open_corpus, open_documents
from loglinear_jax.text.files import SPLITS
from tests.text.conftest import without_blank

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


def test_wikitext_is_read_by_its_lines(hub, texts, bpe, tmp_path):
    """A blank line is an empty row there."""
    names = dict(zip(SPLITS, texts, strict=True))
    rows = {
        split: [line if line.strip() else "" for line in texts[part].splitlines(keepends=True)]
        for split, part in names.items()
    }
    asked = hub(rows)
    corpus = open_corpus("wikitext-2", tokenizer=bpe, cache=str(tmp_path / "cache"))
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1")]
    for split, part in names.items():
        assert corpus.tokenizer.decode(getattr(corpus, split)) == without_blank(texts[part])
    (arrow,) = (tmp_path / "hub").rglob("*test*.arrow")
    digest = hashlib.sha256(arrow.read_bytes()).hexdigest()
    assert corpus.manifest["source_sha256"]["test"] == hashlib.sha256(digest.encode()).hexdigest()


@pytest.mark.parametrize("splits", [SPLITS, SPLITS[:1]])
def test_documents_of_the_hub_are_read_by_their_rows(hub, tmp_path, splits):
    rows = {split: DOCUMENTS[split] if len(splits) > 1 else [f"{n} wrens" for n in range(100)] for split in splits}
    asked = hub(rows)
    corpus = open_documents("someone/birds:small", tokenizer="bytes", cache=str(tmp_path / "cache"))
    assert asked == [("someone/birds", "small")]
    found = {}
    for split in SPLITS:
        tokens, starts = getattr(corpus, split), corpus.starts[split]
        found[split] = [corpus.tokenizer.decode(tokens[a + 1 : b]) for a, b in itertools.pairwise(starts)]
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
