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


def test_what_can_not_be_is_refused_in_one_line_and_leaves_no_folder(tmp_path, capsys):
    bad, file, empty = tmp_path / "bad.jsonl", tmp_path / "file", tmp_path / "empty"
    bad.write_text('{"text": "good"}\n' * 100 + "bad\n", encoding="utf-8")
    file.write_text("", encoding="utf-8")
    empty.mkdir()
    for arguments, message in (
        (["--vocab_size=256"], "--vocab_size must be at least 257, the bytes and <|endoftext|>, got 256"),
        ([f"--corpus={empty}"], f"corpus: {empty} has no documents: expected .txt or .jsonl files"),
        ([f"--corpus={tmp_path / 'none'}"], f"corpus: there is no folder '{tmp_path / 'none'}': expected one with "),
        ([f"--corpus={bad}"], f"--corpus: {bad}, line 101: not JSON ("),
        ([f"--out={file}"], f"--out: {file} is a file, expected a folder"),
        ([f"--out={file / 'tok'}"], f"--out: {file} can't be written: Not a directory"),
    ):
        assert train(tmp_path / "new" / "out", *arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"loglinear_jax tokenizer: {message}") and err.count("\n") == 1
        assert not (tmp_path / "new").exists()


def test_a_full_disk_is_one_line(tmp_path, full_disk, capsys):
    assert train(tmp_path, "--vocab_size=300") == 1
    err = capsys.readouterr().err
    assert err.startswith(
        f"loglinear_jax tokenizer: {tmp_path}/tokenizer.json can't be written: No space left on device;"
    )
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_tokenizer_that_is_there_is_kept(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text("kept", encoding="utf-8")
    assert train(tmp_path) == 2
    assert "tokenizer.json exists: expected another folder" in capsys.readouterr().err
    assert (tmp_path / "tokenizer.json").read_text() == "kept"
