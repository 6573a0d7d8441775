import socket

import huggingface_hub.constants
import pytest
import tokenizers

from loglinear_jax.text import CorpusError, load_tokenizer, sources
from loglinear_jax.text.tokenizer import check_returned, tokenizer_sha256, tokenizer_size
from tests.text.conftest import server

LINE = " The heron , é 東京\t = \n"


def test_a_tokenizer_is_byte_level_lossless_and_uncut(bpe, tmp_path):
    tokenizer = load_tokenizer(bpe)
    ids = tokenizer.encode(LINE, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == LINE
    assert max(ids) < tokenizer_size(tokenizer) == 300
    assert tokenizer.encode("the").ids != tokenizer.encode(" the").ids  # no space is added in front
    before = tokenizer_sha256(tokenizer)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode(LINE).ids == ids and tokenizer_sha256(loaded) == before
    with_a_hole = tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a")
    assert tokenizer_size(tokenizers.Tokenizer(with_a_hole)) == 10


def test_no_tokenizer_of_that_name():
    for name in ("", "./nowhere", "two words!"):
        with pytest.raises(CorpusError, match=f"tokenizer: '{name}' is not .*vocab.json"):
            load_tokenizer(name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json can't be read as a tokenizer"),
        ({"tokenizer.json": b""}, "tokenizer.json is empty"),
        ({"tokenizer.json": None}, "tokenizer.json can't be read: Is a directory"),
        ({"vocab.json": b"[]", "merges.txt": b"a b"}, "merges.txt are not a byte-level BPE"),
        ({"vocab.json": b'{"a": 0, "b": 1}', "merges.txt": b""}, "merges.txt is empty"),
    ],
)
def test_broken_files_are_named_in_one_line(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        load_tokenizer(str(tmp_path))
    assert str(caught.value).startswith("tokenizer: ") and "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "decoder", "text", "shown"),
    [
        ("Lowercase", "ByteLevel", "ByteLevel", "the Heron", "'the Heron' in the split y comes back as 'the heron'"),
        (None, "Whitespace", "ByteLevel", "the  heron", "'the  heron' in the split y comes back as 'theheron'"),
        (None, "ByteLevel", None, "the heron", "in the split y comes back as "),
    ],
)
def test_a_tokenizer_that_does_not_return_a_text_is_refused(bpe, normalizer, pre_tokenizer, decoder, text, shown):
    tokenizer = load_tokenizer(bpe)
    if normalizer:
        tokenizer.normalizer = getattr(tokenizers.normalizers, normalizer)()
    if pre_tokenizer == "Whitespace":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.ByteLevel() if decoder else None
    with pytest.raises(
        CorpusError, match=f"tokenizer: x loses a part of the text: .*{shown}.*expected a tokenizer that loses"
    ):
        check_returned(tokenizer, [text], [tokenizer.encode(text).ids], name="x", where="the split y")


def test_what_differs_in_code_points_alone_is_returned(bpe):
    tokenizer = load_tokenizer(bpe)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    piece = "the e\u0301 \n"
    ids = tokenizer.encode(piece).ids
    assert tokenizer.decode(ids) == "the é \n" != piece
    check_returned(tokenizer, [piece], [ids], name="x", where="y")


def use_hub(monkeypatch, cache, address):
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))


def test_hub_is_asked_only_for_what_is_not_here_yet(bpe, tmp_path, monkeypatch):
    expected, file = load_tokenizer(bpe), tmp_path / "gpt2" / "resolve" / "main" / "tokenizer.json"
    file.parent.mkdir(parents=True)
    expected.save(str(file))
    with server(tmp_path) as (address, came):
        use_hub(monkeypatch, tmp_path / "cache", address)
        assert load_tokenizer("gpt2").to_str() == expected.to_str()
        assert sum(line.startswith("GET /gpt2/resolve/main/tokenizer.json") for line in came) == 1
    assert load_tokenizer("gpt2").to_str() == expected.to_str()


def test_a_hub_that_can_not_be_reached_is_tried_once_and_told_in_one_line(tmp_path, monkeypatch, caplog, capfd):
    """First it refuses, then it never answers. The hub's library tries seven times, and logs each."""
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.2)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        use_hub(monkeypatch, tmp_path, f"http://127.0.0.1:{bound.getsockname()[1]}")
        for _ in range(2):
            with pytest.raises(
                CorpusError, match="can't be had from the hub.*Without a network, give a fold"
            ) as caught:
                load_tokenizer("gpt2")
            bound.listen()
        bound.setblocking(False)
        bound.accept()[0].close()
        with pytest.raises(BlockingIOError):
            bound.accept()
    assert "\n" not in str(caught.value) and not caplog.records and capfd.readouterr() == ("", "")
