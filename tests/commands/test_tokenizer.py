"""A tokenizer trained on documents, by the command line."""

from configs.books import FABLES
from loglinear_jax.commands.main import main
from loglinear_jax.text import load_tokenizer
from loglinear_jax.text.sources import find_documents


def train(out, *arguments):
    return main(["tokenizer", f"--corpus={FABLES}", f"--out={out}", *arguments])


def test_a_tokenizer_learns_from_the_training_documents(tmp_path, capsys):
    assert train(tmp_path / "tok", "--vocab_size=400") == 0
    assert capsys.readouterr().out == f"Written to {tmp_path / 'tok' / 'tokenizer.json'}\n"
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert tokenizer.get_vocab_size() == 400 and tokenizer.token_to_id("<|endoftext|>") == 0
    text = next(find_documents(str(FABLES)).texts("train")) + " 東京"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode()) / 1.5
    assert load_tokenizer(str(tmp_path / "tok" / "tokenizer.json")).to_str() == tokenizer.to_str()


def test_few_documents_make_few_tokens(tmp_path, capsys):
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "aaaa"}\n')
    assert main(["tokenizer", f"--corpus={path}", f"--out={tmp_path}", "--vocab_size=500"]) == 0
    assert capsys.readouterr().out.startswith("The documents make only 25")


def test_what_can_not_be_is_refused_in_one_line(tmp_path, capsys):
    for arguments, message in (
        (["--vocab_size=256"], "--vocab_size must be at least 257, the bytes and <|endoftext|>, got 256"),
        ([f"--corpus={tmp_path}"], f"corpus: {tmp_path} has no documents: expected .txt or .jsonl files"),
    ):
        assert train(tmp_path / "out", *arguments) == 2
        assert capsys.readouterr().err == f"loglinear_jax tokenizer: {message}\n"
    (tmp_path / "out" / "tokenizer.json").write_text("kept", encoding="utf-8")
    assert train(tmp_path / "out") == 2
    assert "tokenizer.json exists: expected another folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "kept"
