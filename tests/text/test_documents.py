import itertools
import json

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from loglinear_jax.text import CorpusError, load_tokenizer, open_documents, sources
from loglinear_jax.text.sources import SPLIT_PERCENT, SPLITS, find_documents
from tests.text.conftest import documents_of

DOCUMENTS = {
    "train": ["A heron.\n\nIt stands.\n", " é 東京 <|endoftext|> ", "To be or\n\nnot  to be, " * 20],
    "valid": ["One more.\n"],
    "test": ["The last\r\nof them"],
}


def write_jsonl(path, texts, field="text", mark=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    path.write_text(mark + "".join(lines), encoding="utf-8")


@pytest.fixture(params=["txt", "jsonl", "jsonl files"])
def folder(request, tmp_path):
    """The same documents in each of the forms; a blank one is none."""
    folder = tmp_path / "birds"
    for split, texts in DOCUMENTS.items():
        texts = [*texts, " \n"]
        if request.param == "jsonl files":
            write_jsonl(folder / f"{split}.jsonl", texts, mark="\ufeff")
        elif request.param == "jsonl":
            write_jsonl(folder / split / "a.jsonl", texts[:1])
            write_jsonl(folder / split / "deeper" / "b.jsonl", texts[1:])
        else:
            (folder / split).mkdir(parents=True)
            for index, text in enumerate(texts):
                mark = b"\xef\xbb\xbf" if index == 0 else b""
                (folder / split / f"{index}.txt").write_bytes(mark + text.encode())
    return folder


def opened(folder, tmp_path, **given):
    return open_documents(str(folder), cache=str(tmp_path / "cache"), **{"tokenizer": "bytes"} | given)


def test_documents_come_back_whatever_they_are_stored_as(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARS", 100)  # a long document is encoded in pieces
    corpus = opened(folder, tmp_path)
    for split, texts in zip(SPLITS, DOCUMENTS.values(), strict=True):
        assert documents_of(corpus, split) == texts
        assert corpus.manifest["splits"][split]["documents"] == len(texts)
    assert isinstance(corpus.train, np.memmap) and corpus.train.dtype == np.uint16


def test_tokens_are_those_of_the_whole_document(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARS", 50)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        DOCUMENTS["train"], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save(str(tmp_path / "own.json"))
    corpus = opened(folder, tmp_path, tokenizer=str(tmp_path / "own.json"))
    last = DOCUMENTS["train"][-1]
    assert corpus.train[corpus.starts["train"][2] + 1 : -1].tolist() == tokenizer.encode(last).ids


def test_documents_without_splits_are_split_by_their_text(tmp_path):
    texts = [f"document {i}" for i in range(400)]
    write_jsonl(tmp_path / "all.jsonl", texts, field="body")
    write_jsonl(tmp_path / "folder" / "b.jsonl", texts[:200:-1], field="body")
    write_jsonl(tmp_path / "folder" / "a.jsonl", texts[200::-1], field="body")
    found = {split: list(find_documents(str(tmp_path / "all.jsonl"), "body").texts(split)) for split in SPLITS}
    assert sorted(itertools.chain(*found.values())) == sorted(texts)
    for split in ("validation", "test"):
        assert 400 * SPLIT_PERCENT / 100 / 2 < len(found[split]) < 400 * SPLIT_PERCENT / 100 * 2
    for split, own in found.items():  # in whichever order and file they are
        assert sorted(find_documents(str(tmp_path / "folder"), "body").texts(split)) == sorted(own)


@pytest.mark.parametrize(
    ("content", "message", "given"),
    [
        (None, "there is no folder '.*': expected one with documents, a .jsonl file, or a data set on the hub, as", {}),
        ('{"text": "a"}\n', "split of few is empty: expected a document", {}),
        ('{"text": "a"}\n', "an object with a text as text_field='body', got the fields text", {"text_field": "body"}),
        ('{"text": "a"}\n', "end_token: bytes has no token '</s>'.*its special tokens: <.endoftext.>", {"end_token": "</s>"}),
        ('{"text": "a"}\n{"text": \n', "few.jsonl, line 2: not JSON", {}),
        ('["a"]\n', "line 1: expected an object with a text as text_field='text'$", {}),
        ('{"text": "é"}\n', "line 1 is not UTF-8 text: byte 0xe9 at position 10", {}),
        ('{"text": "a \\ud83d"}\n', r"line 1: '\\ud83d' is half of a character", {}),
        (f'{{"id": {"1" * 5000}, "text": "a"}}\n', "line 1: not JSON", {}),
    ],
)  # fmt: skip
def test_unusable_documents_are_refused_with_a_reason(content, message, given, tmp_path):
    if content:
        (tmp_path / "few.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(CorpusError, match=message):
        opened(tmp_path / "few.jsonl", tmp_path, **given)


@pytest.mark.parametrize(
    ("name", "corpus", "message"),
    [
        ("birds/train.jsonl", "birds", "has train.jsonl, but no valid and no test"),
        ("birds/README.md", "birds", "has no documents: expected .txt or .jsonl files"),
        ("one.txt", "one.txt", "is one file: expected a folder of documents, or a .jsonl file"),
    ],
)
def test_folders_without_documents_are_refused(name, corpus, message, tmp_path):
    write_jsonl(tmp_path / name, ["a"])
    with pytest.raises(CorpusError, match=message):
        opened(tmp_path / corpus, tmp_path)


def test_each_field_has_tokens_of_its_own(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text('{"text": "heron", "body": "stork"}\n', encoding="utf-8")
    for field, text in (("text", "heron"), ("body", "stork")):
        assert documents_of(opened(tmp_path, tmp_path, text_field=field), "train") == [text]


def test_linked_folders_are_read_once(tmp_path):
    for split in SPLITS:
        write_jsonl(tmp_path / "birds" / split / "a.jsonl", ["heron"])
    write_jsonl(tmp_path / "shelf" / "b.jsonl", ["stork"])
    (tmp_path / "birds/train/shelf").symlink_to(tmp_path / "shelf")
    (tmp_path / "birds/train/again").symlink_to(tmp_path / "birds/train")
    assert documents_of(opened(tmp_path / "birds", tmp_path), "train") == ["heron", "stork"]


def test_bytes_are_a_tokenizer_without_a_file():
    tokenizer = load_tokenizer("bytes")
    text = "é 東京\n\0\x7f"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 257 and tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.to_str() == load_tokenizer("bytes").to_str()
