"""Text from a model that others trained, by the command line."""

import json
import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from loglinear_jax.commands.generate import _unicode
from loglinear_jax.commands.main import main
from loglinear_jax.text.tokenizer import text_after
from tests.hub.checkpoints import write, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "model", "HGatedDeltaNetForCausalLM")
    write_tokenizer(tmp_path / "model", 19)
    return tmp_path / "model"


@pytest.mark.slow
def test_several_prompts_of_any_lengths_and_where_their_texts_end(folder, capsys):
    prompts = ["w3 w5 w2", "w4", "w1 w7 w9"]
    together = [*(f"--prompt={prompt}" for prompt in prompts), "--num_tokens=6"]
    alone = [words_after(capsys, folder, f"--prompt={prompt}", "--num_tokens=6")[0] for prompt in prompts]
    assert [len(words) for words in alone] == [9, 7, 9] and alone[0][:3] == ["w3", "w5", "w2"]
    assert words_after(capsys, folder, *together) == alone
    end = alone[0][5]
    ended = alone[0][: alone[0].index(end, 3) + 1]
    assert words_after(capsys, folder, *together, f"--stop={end}")[0] == ended
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for eos in (
        int(end[1:]),
        [int(end[1:])],
        19,
    ):  # the last is of another tokenizer: only where it is used is it in the way
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}), encoding="utf-8")
        assert words_after(capsys, folder, *together, "--go_on") == alone
        if eos != 19:
            assert words_after(capsys, folder, *together)[0] == ended
    assert main(["generate", f"--model={folder}", "--prompt=w3"]) == 2
    assert "eos_token_id=19: expected a token id from 0 to 18" in capsys.readouterr().err


def test_beyond_the_levels_of_lam_with_a_tokenizer_in_the_root_of_a_repository(folder, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **patterns: str(folder.parent))
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    monkeypatch.chdir(folder)
    arguments = "--prompt=w3 w5 w2", "--num_tokens=90", "--extend_lam"
    (words,) = words_after(capsys, "somebody/models/model", *arguments)
    assert len(words) == 93
    assert words_after(capsys, folder, *arguments, f"--tokenizer={folder.parent}") == [words]


def words_after(capsys, folder, *arguments):
    assert main(["generate", f"--model={folder}", "--temperature=0", *arguments]) == 0
    return [re.findall(r"w\d+", text) for text in capsys.readouterr().out.split("\n\n")]


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_word_begins_with_a_space_after_another(scheme):
    """Also by a tokenizer that takes the space before a text's first word for none."""
    words = {word: i for i, word in enumerate(["\u2581The", "\u2581city", "\u2581of", "\u2581the", "s"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="s"))
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    assert "".join(text_after(tokenizer, [0, 1], [2, 3, 4])) == " of thes"


def with_bytes():
    """A tokenizer of some words that writes other characters as one token a byte, as Llama's does."""
    words = ["\u2581", "\u2581a", "b", "\u2581of"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    of = tokenizers.decoders
    tokenizer.decoder = of.Sequence([of.Replace("\u2581", " "), of.ByteFallback(), of.Fuse(), of.Strip(" ", 1, 0)])
    return tokenizer


def bytes_of(text):
    return [4 + byte for byte in (text.encode() if isinstance(text, str) else text)]


def test_a_byte_that_is_no_utf_8_is_replaced():
    assert "".join(text_after(with_bytes(), [1], [*bytes_of("\n"), *bytes_of(b"\xc3"), 2])) == "\n\ufffdb"


def test_a_last_character_that_is_not_complete_is_replaced():
    assert "".join(text_after(with_bytes(), [1], [3, *bytes_of("字".encode()[:2])])) == " of\ufffd\ufffd"


def test_text_is_shown_as_soon_as_its_characters_are_complete():
    shown = text_after(with_bytes(), [1], [3, *bytes_of("字"), 2, 3])
    assert list(shown) == [" of", "", "", "字", "b", " of"]


@given(st.lists(st.sampled_from([*range(4), "漢", "é"]), max_size=100))
def test_text_shown_token_by_token_is_that_of_all_tokens(parts):
    tokenizer = with_bytes()
    ids = [i for part in parts for i in (bytes_of(part) if isinstance(part, str) else [part])]
    assert " a" + "".join(text_after(tokenizer, [0, 1], ids)) == " " + tokenizer.decode([1, *ids])


def test_prompts_from_files(folder, capsys):
    assert _unicode("prompt", "a\udcc3\udca9\udce6\udcbc\udca2") == "aé漢"  # where the locale has ASCII alone
    (alone,) = words_after(capsys, folder, "--prompt=w3 w5 w2", "--num_tokens=6")
    files = [folder / "first", folder / "second"]
    files[0].write_text("\ufeffw3 w5 w2", encoding="utf-8")  # with a byte order mark
    files[1].write_bytes(b"w3 \xff")
    assert words_after(capsys, folder, f"--prompt_file={files[0]}", "--num_tokens=6") == [alone]
    for file, problem in ((files[1], "is not UTF-8, at byte 3"), (folder / "none", "can't be read: No such file")):
        assert main(["generate", f"--model={folder}", f"--prompt_file={file}"]) == 2
        assert f"--prompt_file: {file} {problem}" in capsys.readouterr().err
    files[1].write_bytes(b"")
    assert main(["generate", f"--model={folder}", f"--prompt_file={files[1]}"]) == 2
    assert "--prompt_file is empty: expected some text to go on from" in capsys.readouterr().err


def test_a_tokenizer_that_is_too_small_is_told_and_its_ids_alone_are_taken(folder, capsys, caplog):
    (all_words,) = words_after(capsys, folder, "--prompt=w3 w5 w2", "--num_tokens=20")
    assert not caplog.records and max(int(word[1:]) for word in all_words) > 6
    write_tokenizer(folder.parent / "small", 6)
    small = f"--tokenizer={folder.parent / 'small'}"
    (words,) = words_after(capsys, folder, "--prompt=w3 w5 w2", "--num_tokens=20", small)
    assert len(words) == 23 and max(int(word[1:]) for word in words) < 6
    assert "has only 6 ids of the 19 in the model's vocabulary" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model={folder}", "--variant=x"], "--variant is for a run, but --model"),
        (["--model={folder}/config.json"], "--model: .*config.json is not a folder: expected one with config.json, or"),
        (
            ["--model={folder}", "--tokenizer={folder}/../large"],
            "has ids up to 19: expected at most 18, as in the model",
        ),
        (
            ["--model={folder}", "--num_tokens=64"],
            "65 tokens, prompt included: the model's λ, linear, has levels for 64",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(folder, arguments, message, capsys):
    write_tokenizer(folder.parent / "large", 20)
    code = main(["generate", *(a.format(folder=folder) for a in arguments), "--prompt=w3"])
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error
    assert re.search(message, error.splitlines()[-1]), error
