"""Perplexity of a text under a model that others trained, by the command line."""

import json
import re

import numpy as np
import pytest

from loglinear_jax.commands.main import main
from loglinear_jax.evaluate import window_losses
from loglinear_jax.hub import load_model
from loglinear_jax.models import LanguageModel
from tests.hub.checkpoints import write, write_tokenizer


@pytest.fixture
def files(tmp_path):
    write(tmp_path / "model", "HGatedDeltaNetForCausalLM")
    write_tokenizer(tmp_path / "model", 19)
    ids = np.random.default_rng(0).integers(0, 19, 300)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in ids))
    return tmp_path / "model", tmp_path / "text.txt", ids


def test_a_text_by_position(files, tmp_path, capsys):
    folder, text, ids = files
    arguments = [f"--model={folder}", f"--text={text}", "--length=50", f"--out={tmp_path / 'out'}"]
    assert main(["evaluate", *arguments]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "out/perplexity.json").read_text())
    settings, params = load_model(folder)
    windows = np.stack([ids[50 * i : 50 * i + 51] for i in range(5)])
    losses = window_losses(LanguageModel(settings), params, windows)
    assert record["all"]["perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    assert [span["first"] for span in record["by_position"]] == [1, 2, 4, 8, 16, 32]
    assert record["by_position"][-1]["last"] == 50 and "command" in record
    assert f"{record['all']['perplexity']:.2f}" in out.splitlines()[-2]
    assert {file.suffix for file in (tmp_path / "out").iterdir()} == {".json", ".png", ".svg"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length=300"], "has 300 tokens: expected at least 301, for 1 window"),
        (["--length=50", "--windows=6"], "has 300 tokens: expected at least 301, for 6 window"),
        (["--length=65"], "65 tokens in a window: the model's λ, linear, has levels for 64; .*a smaller --length"),
        (["--text=none.txt"], "--text: none.txt can't be read: No such file"),
        (["--length=0"], "argument --length: expected a whole number from 1 on, got '0'"),
    ],
)
def test_what_does_not_fit_is_one_line(files, arguments, message, capsys):
    folder, text, _ = files
    try:
        code = main(["evaluate", f"--model={folder}", f"--text={text}", *arguments])
    except SystemExit as ended:  # argparse
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error and re.search(message, error.splitlines()[-1]), error
