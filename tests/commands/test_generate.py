"""Text from a model that others trained, by the command line."""

import re

import pytest

from loglinear_jax.commands.main import main
from tests.hub.checkpoints import write, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "model", "HGatedDeltaNetForCausalLM")
    write_tokenizer(tmp_path / "model", 19)
    return tmp_path / "model"


def test_text_from_a_folder(folder, capsys):
    assert main(["generate", f"--model={folder}", "--prompt=w3 w5 w2", "--num_tokens=7", "--temperature=0"]) == 0
    words = re.findall(r"w\d+", capsys.readouterr().out)
    assert words[:3] == ["w3", "w5", "w2"] and len(words) == 10
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    arguments = [f"--tokenizer={folder.parent}", "--prompt=w3 w5 w2", "--num_tokens=7", "--temperature=0"]
    assert main(["generate", f"--model={folder}", *arguments]) == 0
    assert re.findall(r"w\d+", capsys.readouterr().out) == words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model={folder}", "--variant=x"], "--variant is of a run, and has no meaning with --model"),
        (["--model={folder}", "--workdir=x"], "argument --workdir: not allowed with argument --model"),
        ([], "one of the arguments --workdir --model is required"),
        (["--workdir={folder}", "--tokenizer=x"], "--tokenizer is of a --model: a run has its own"),
        (
            ["--model={folder}/config.json"],
            "--model: .*config.json is not a folder: expected one with config.json, or owner/name",
        ),
        (
            ["--model={folder}", "--tokenizer={folder}/../large"],
            "has ids up to 19: expected at most 18, as in the model",
        ),
        (["--model={folder}/../large"], "--model: .*config.json is missing"),
        (
            ["--model={folder}", "--num_tokens=64"],
            "65 tokens, prompt included: the model's λ, linear, has levels for 64",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(folder, arguments, message, capsys):
    write_tokenizer(folder.parent / "large", 20)
    command = ["generate", *(a.format(folder=folder) for a in arguments), "--prompt=w3"]
    try:
        code = main(command)
    except SystemExit as ended:  # argparse
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error
    assert re.search(message, error.splitlines()[-1]), error
