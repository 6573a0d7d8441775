import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from loglinear_jax.text import CorpusError, corpus, open_corpus
from loglinear_jax.text.files import share_bounds
from tests.text.conftest import make_text, without_blank


@pytest.fixture
def folder(tmp_path, texts):
    folder = tmp_path / "herons"
    folder.mkdir()
    for part, text in texts.items():
        (folder / f"{part}.txt").write_bytes(text.encode())
    return folder


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture
def count_blocks(monkeypatch):
    """A list that grows with every block that is tokenised."""
    calls = []
    kept_pieces = corpus.kept_pieces
    monkeypatch.setattr(corpus, "kept_pieces", lambda block: calls.append(block) or kept_pieces(block))
    return calls


def test_folder_of_splits_round_trip(folder, texts, bpe, cache):
    opened = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert opened.vocab_size == 300
    for part, tokens in [("train", opened.train), ("valid", opened.validation), ("test", opened.test)]:
        assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 and not tokens.flags.writeable
        assert opened.tokenizer.decode(tokens) == without_blank(texts[part])
    train = opened.manifest["splits"]["train"]
    assert train["tokens"] == len(opened.train)
    assert train["text_sha256"] == hashlib.sha256(without_blank(texts["train"]).encode()).hexdigest()
    assert opened.manifest["source_sha256"]["test.txt"] == hashlib.sha256(texts["test"].encode()).hexdigest()


def test_an_interrupt_while_tokenising_ends_it_and_leaves_nothing(folder, bpe, cache, monkeypatch):
    kept_pieces = corpus.kept_pieces

    def interrupted(block):
        os.kill(os.getpid(), signal.SIGINT)
        return kept_pieces(block)

    monkeypatch.setattr(corpus, "kept_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert not [path for path in Path(cache).iterdir() if path.is_dir()]
    monkeypatch.setattr(corpus, "kept_pieces", kept_pieces)
    assert len(open_corpus(str(folder), tokenizer=bpe, cache=cache).train)


def test_lines_are_tokenised_one_by_one(folder, texts, bpe, cache):
    opened = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    lines = without_blank(texts["valid"]).splitlines(keepends=True)
    assert [i for line in lines for i in opened.tokenizer.encode(line).ids] == opened.validation.tolist()


def test_one_file_is_split_by_its_lines(tmp_path, bpe, cache):
    path = tmp_path / "a.text.txt"
    text = make_text(300)
    path.write_text(text)
    opened = open_corpus(str(path), tokenizer=bpe, cache=cache)
    splits = [opened.tokenizer.decode(tokens) for tokens in (opened.train, opened.validation, opened.test)]
    assert "".join(splits) == without_blank(text)
    _, validation, test, end = share_bounds(path)
    assert splits[1] == without_blank(text.encode()[validation:test].decode())
    assert 0.03 < (end - test) / end <= 0.05


def test_blocks_do_not_change_the_tokens(folder, bpe, cache, tmp_path, monkeypatch):
    expected = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    monkeypatch.setattr("loglinear_jax.text.files.BLOCK_BYTES", 2000)
    blocks = open_corpus(str(folder), tokenizer=bpe, cache=str(tmp_path / "other"))
    assert blocks.manifest == expected.manifest
    np.testing.assert_array_equal(blocks.train, expected.train)


def test_cuts_of_a_long_line_do_not_change_its_tokens(folder, bpe, cache, monkeypatch):
    line = make_text(100).replace("\n", " ")
    (folder / "train.txt").write_text(line)
    monkeypatch.setattr("loglinear_jax.text.files.BLOCK_BYTES", 3000)
    monkeypatch.setattr("loglinear_jax.text.files.PIECE_CHARS", 200)
    opened = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert opened.train.tolist() == opened.tokenizer.encode(line).ids


def test_tokens_are_made_once(folder, bpe, cache, count_blocks):
    first = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    count_blocks.clear()
    again = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert not count_blocks
    assert again.train.filename == first.train.filename and again.manifest == first.manifest


def test_another_source_or_tokenizer_makes_them_anew(folder, bpe, cache, tmp_path):
    first = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    (folder / "test.txt").write_text("now another bridge \n")
    changed = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert changed.tokenizer.decode(changed.test) == "now another bridge \n"
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["a"], vocab_size=256, show_progress=False)
    (tmp_path / "bytes").mkdir()
    tokenizer.save_model(str(tmp_path / "bytes"))
    by_byte = open_corpus(str(folder), tokenizer=str(tmp_path / "bytes"), cache=cache)
    assert len(by_byte.test) == 20 and by_byte.vocab_size == 256
    assert len({first.train.filename, changed.train.filename, by_byte.train.filename}) == 3


def test_large_vocabulary_takes_uint32(folder, bpe, tmp_path, cache):
    vocab = json.loads((Path(bpe) / "vocab.json").read_text())
    vocab["Ġ"] = 70_000  # the space
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    shutil.copy(Path(bpe) / "merges.txt", tmp_path)
    opened = open_corpus(str(folder), tokenizer=str(tmp_path), cache=cache)
    assert opened.train.dtype == np.uint32 and opened.train.max() == 70_000 < opened.vocab_size


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest", "no manifest"])
def test_damaged_tokens_are_made_anew(folder, bpe, cache, damage):
    first = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    expected, file = np.array(first.train), first.train.filename
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-2])
    elif damage == "gone":
        file.unlink()
    elif damage == "manifest":
        (file.parent / "manifest.json").write_text('{"format"')
    else:
        (file.parent / "manifest.json").unlink()
    np.testing.assert_array_equal(open_corpus(str(folder), tokenizer=bpe, cache=cache).train, expected)


def test_kill_leaves_nothing_that_looks_finished(folder, bpe, cache, tmp_path):
    code = f"""
import os
from loglinear_jax.text import corpus
calls = []
real = corpus.kept_pieces
corpus.kept_pieces = lambda block: os._exit(9) if len(calls) == 2 else calls.append(1) or real(block)
corpus.open_corpus({str(folder)!r}, tokenizer={bpe!r}, cache={cache!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    (partial,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert ".partial-" in partial.name and not (partial / "manifest.json").exists()
    opened = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert len(opened.test) and not partial.exists()


def test_failure_leaves_nothing(folder, bpe, cache, tmp_path):
    (folder / "test.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(CorpusError, match="test.txt is not UTF-8"):
        open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_processes_at_once_agree(folder, bpe, cache):
    code = f"""
from loglinear_jax.text import corpus
import time
real = corpus.kept_pieces
corpus.kept_pieces = lambda block: time.sleep(0.1) or print("tokenising") or real(block)
opened = corpus.open_corpus({str(folder)!r}, tokenizer={bpe!r}, cache={cache!r})
print(len(opened.train), int(opened.train.sum()))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].split("\n") for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({lines[-2] for lines in outputs}) == 1
    assert sum(lines.count("tokenising") for lines in outputs) == 3  # one process, three splits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is none of wikitext-103-raw, .* and there is no such file or folder"),
        (b"", "is empty"),
        (
            b"one line only\n",
            "x.txt has 1 line in 14 bytes: .* left for validation and test; .* or a folder of train.txt,",
        ),
        (b"one line only", "has 1 line in 13 bytes: split by whole lines"),
        (b"a\n" * 20, "has 20 lines in 40 bytes: .* nothing is left for test; expected more lines"),
        ("one line".encode("utf-16"), "is not UTF-8 text: byte 0xff at position 0 .it looks like UTF-16"),
        ("without a mark\n".encode("utf-16-le") * 99, "full of zero bytes .it looks like UTF-16"),
        (b"\xfe\xff" * 9 + b"\n" * 300, "is not UTF-8 text: byte 0xfe at position 0"),
        (b"text\n" * 10 + b" \n" * 300, "the validation split of x is empty: it has only blank lines"),
    ],
)
def test_bad_files(tmp_path, bpe, cache, content, message):
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        open_corpus(str(path), tokenizer=bpe, cache=cache)
    assert str(caught.value).startswith("corpus: ") and "\n" not in str(caught.value)


def test_bad_arguments(folder, bpe, cache, tmp_path):
    with pytest.raises(CorpusError, match="source: 'x' is for wikitext-103-raw, .*; corpus is"):
        open_corpus(str(folder), tokenizer=bpe, source="x", cache=cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match="cache: .*file.* can't be written"):
        open_corpus(str(folder), tokenizer=bpe, cache=str(tmp_path / "file" / "cache"))


def test_manifest_is_a_file_to_read(folder, bpe, cache):
    opened = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    written = json.loads((opened.train.filename.parent / "manifest.json").read_text())
    assert written == opened.manifest
    assert written["tokenizer"] == bpe and written["dtype"] == "uint16" and written["vocab_size"] == 300
