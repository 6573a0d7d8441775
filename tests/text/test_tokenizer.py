import huggingface_hub
import pytest
import tokenizers
from huggingface_hub.errors import LocalEntryNotFoundError

from loglinear_jax.text import CorpusError, load_tokenizer
from loglinear_jax.text.tokenizer import tokenizer_sha256, tokenizer_size

LINE = " The heron , é 東京\t = \n"


def test_folder_with_vocab_and_merges_is_byte_level_and_lossless(bpe):
    tokenizer = load_tokenizer(bpe)
    ids = tokenizer.encode(LINE, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == LINE
    assert max(ids) < tokenizer_size(tokenizer) == 300
    assert tokenizer.encode("the").ids != tokenizer.encode(" the").ids  # no space is added in front


def test_tokenizer_json_gives_the_same_ids_uncut(bpe, tmp_path):
    tokenizer = load_tokenizer(bpe)
    expected = tokenizer.encode(LINE).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode(LINE).ids == expected
    assert tokenizer_sha256(loaded) == tokenizer_sha256(load_tokenizer(bpe))


def test_size_counts_holes_in_the_vocabulary():
    assert tokenizer_size(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a"))) == 10


@pytest.mark.parametrize("name", ["", "./nowhere", "/nowhere", "two words!"])
def test_no_tokenizer_of_that_name(name):
    with pytest.raises(CorpusError, match=f"tokenizer: '{name}' is not .*vocab.json"):
        load_tokenizer(name)


def test_folder_without_or_with_broken_files(tmp_path):
    with pytest.raises(CorpusError, match="holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(CorpusError, match="not a byte-level BPE"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match="can't be read"):
        load_tokenizer(str(tmp_path))


def test_hub_is_asked_only_for_what_is_not_here_yet(bpe, tmp_path, monkeypatch):
    asked = []

    def download(name, file, local_files_only=False):
        asked.append((name, file, local_files_only))
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        load_tokenizer(bpe).save(str(tmp_path / file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_tokenizer("gpt2").get_vocab_size() == 300
    assert asked == [("gpt2", "tokenizer.json", True), ("gpt2", "tokenizer.json", False)]


def test_no_network_says_what_to_give(monkeypatch):
    def download(*args, **kwargs):
        raise LocalEntryNotFoundError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(CorpusError, match="Name or service not known.*Without a network, give a folder") as caught:
        load_tokenizer("gpt2")
    assert "\n" not in str(caught.value)
