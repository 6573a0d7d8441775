import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from loglinear_jax.settings import SettingError
from loglinear_jax.text import CorpusError, corpus, load_tokenizer, open_corpus
from loglinear_jax.text.sources import share_bounds
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


def test_folder_of_splits_round_trip(folder, texts, bpe, cache):
    opened = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert opened.vocab_size == 300
    for part, tokens in [("train", opened.train), ("valid", opened.validation), ("test", opened.test)]:
        assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 and not tokens.flags.writeable
        assert opened.tokenizer.decode(tokens) == without_blank(texts[part])
    lines = without_blank(texts["valid"]).splitlines(keepends=True)
    assert [i for line in lines for i in opened.tokenizer.encode(line).ids] == opened.validation.tolist()
    manifest = json.loads((opened.train.filename.parent / "manifest.json").read_text(encoding="utf-8"))
    assert manifest == opened.manifest
    assert (manifest["tokenizer"], manifest["dtype"], manifest["vocab_size"]) == (bpe, "uint16", 300)
    text_sha256 = hashlib.sha256(without_blank(texts["train"]).encode()).hexdigest()
    assert manifest["splits"]["train"] == {"tokens": len(opened.train), "text_sha256": text_sha256}
    assert manifest["source_sha256"]["test.txt"] == hashlib.sha256(texts["test"].encode()).hexdigest()


def test_one_file_is_split_by_its_lines(tmp_path, bpe, cache):
    path = tmp_path / "a.text.txt"
    text = make_text(300)
    path.write_text(text, encoding="utf-8")
    opened = open_corpus(str(path), tokenizer=bpe, cache=cache)
    splits = [opened.tokenizer.decode(tokens) for tokens in (opened.train, opened.validation, opened.test)]
    assert "".join(splits) == without_blank(text)
    _, validation, test, end = share_bounds(path)
    assert splits[1] == without_blank(text.encode()[validation:test].decode())
    assert 0.03 < (end - test) / end <= 0.05


def test_cuts_of_a_long_line_do_not_change_its_tokens(folder, bpe, cache, monkeypatch):
    line = make_text(100).replace("\n", " ")
    (folder / "train.txt").write_text(line, encoding="utf-8")
    monkeypatch.setattr("loglinear_jax.text.sources.PIECE_CHARS", 200)
    opened = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert opened.train.tolist() == opened.tokenizer.encode(line).ids


def test_tokens_are_made_once(folder, bpe, cache, monkeypatch):
    first = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    monkeypatch.setattr(corpus, "cut_line", None)
    again = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    assert again.train.filename == first.train.filename and again.manifest == first.manifest


@pytest.mark.parametrize(("name", "length"), [("train.bin", 100), ("train.bin", 0), ("manifest.json", 10)])
def test_a_damaged_cache_is_one_line(folder, bpe, cache, name, length):
    first = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    os.truncate(Path(first.train.filename).parent / name, length)
    with pytest.raises(CorpusError, match="is damaged .*: delete it, and the text is tokenised again"):
        open_corpus(str(folder), tokenizer=bpe, cache=cache)


def test_one_line_without_spaces_is_split_between_characters(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("loglinear_jax.text.sources.BLOCK_BYTES", 200)
    text = "词语很长没有空格" * 200
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    opened = open_corpus(str(tmp_path / "long.txt"), tokenizer="bytes", cache=cache)
    assert "".join(opened.tokenizer.decode(x) for x in (opened.train, opened.validation, opened.test)) == text


def test_another_source_or_tokenizer_makes_them_anew(folder, bpe, cache, tmp_path):
    first = open_corpus(str(folder), tokenizer=bpe, cache=cache)
    (folder / "test.txt").write_text("now another bridge \n", encoding="utf-8")
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
    vocab = json.loads((Path(bpe) / "vocab.json").read_text(encoding="utf-8"))
    vocab["Ġ"] = 70_000  # the space
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    shutil.copy(Path(bpe) / "merges.txt", tmp_path)
    opened = open_corpus(str(folder), tokenizer=str(tmp_path), cache=cache)
    assert opened.train.dtype == np.uint32 and opened.train.max() == 70_000 < opened.vocab_size


def test_a_single_character_that_is_lost_is_found_wherever_it_stands(folder, bpe, cache, monkeypatch):
    monkeypatch.setattr("loglinear_jax.text.sources.BLOCK_BYTES", 2000)
    text = (folder / "test.txt").read_text(encoding="utf-8")
    (folder / "test.txt").write_text(text + "one ﬁsh\n", encoding="utf-8")  # its ligature is two letters in NFKC
    tokenizer = load_tokenizer(bpe)
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(CorpusError, match=r"'one ﬁsh\\n' in the test split of herons comes back as 'one fish\\n'"):
        open_corpus(str(folder), tokenizer=str(folder), cache=cache)


@pytest.mark.slow
def test_one_process_tokenises_and_the_others_wait(folder, bpe, cache):
    """The first is killed in the middle: one that waits does the work, and the last finds it done."""
    code = f"""
import time
from loglinear_jax.text import corpus
real = corpus.check_returned
def check_returned(*args, **kwargs):
    print("tokenising", flush=True)
    time.sleep(SECONDS)
    return real(*args, **kwargs)
corpus.check_returned = check_returned
opened = corpus.open_corpus({str(folder)!r}, tokenizer={bpe!r}, cache={cache!r})
print(len(opened.train), int(opened.train.sum()))
"""

    def start(seconds):
        command = [sys.executable, "-c", code.replace("SECONDS", str(seconds))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    first = start(20)
    assert first.stdout.readline() == "tokenising\n"
    others = [start(0.2), start(0.2)]
    first.kill()
    first.wait()
    outputs = [other.communicate(timeout=60)[0].splitlines() for other in others]
    assert sorted(lines.count("tokenising") for lines in outputs) == [0, 3]  # three splits
    assert outputs[0][-1] == outputs[1][-1]


def test_marks_line_ends_and_zeros_of_other_systems_are_text(tmp_path, bpe, cache):
    path = tmp_path / ("x" * 240 + ".txt")
    path.write_bytes("\ufeffthe heron\r\nin\u2028the \0 north\r\n".encode() * 100)
    opened = open_corpus(str(path), tokenizer=bpe, cache=cache)
    assert opened.tokenizer.decode(opened.train[:40]).startswith("the heron\r\nin\u2028the \0 north\r\n\ufeffthe")


def circle(path):
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is none of wikitext-103-raw, .* and there is no such file or folder"),
        (circle, "x.txt can't be read: Too many levels of symbolic links"),
        (b"", "is empty"),
        (b"one line only\n", "x.txt has too few lines in its 14 bytes: .* left for validation and test; .* train.txt,"),
        (b"\xfe\xff" * 9 + b"\n" * 300, "is not UTF-8 text: byte 0xfe at position 0"),
        (b"text\n" * 10 + b" \n" * 300, "the validation split of x is empty: expected a line that is not blank"),
    ],
)
def test_bad_files(tmp_path, bpe, cache, content, message):
    path = tmp_path / "x.txt"
    if content is not None:
        content(path) if callable(content) else path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        open_corpus(str(path), tokenizer=bpe, cache=cache)
    assert str(caught.value).startswith("corpus: ") and "\n" not in str(caught.value)
    assert not [path for path in Path(cache).glob("*") if path.is_dir()]


def test_bad_arguments(folder, bpe, cache, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    given = {"corpus": str(folder), "tokenizer": bpe, "cache": cache}
    with pytest.raises(CorpusError, match="cache: .*file.* can't be written"):
        open_corpus(**given | {"cache": str(tmp_path / "file" / "cache")})
    for argument in given:
        with pytest.raises(SettingError, match=f"^{argument}: s3://bucket/x is an address"):
            open_corpus(**given | {argument: "s3://bucket/x"})
