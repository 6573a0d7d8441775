"""Perplexity of a text under a model that others trained, by the command line."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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
    (tmp_path / "text.txt").write_text(
        "\ufeff" + " ".join(f"w{i}" for i in ids), encoding="utf-8"
    )  # with a byte order mark
    return tmp_path / "model", tmp_path / "text.txt", ids


def test_a_text_in_windows(files, tmp_path, capsys):
    folder, text, ids = files
    arguments = [f"--model={folder}", f"--text={text}", "--length=50", f"--out={tmp_path / 'out'}"]
    assert main(["evaluate", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole, position, *_ = json.loads((tmp_path / "out/documents.json").read_text(encoding="utf-8"))["measures"]
    settings, params = load_model(folder)
    windows = np.stack([ids[50 * i : 50 * i + 51] for i in range(5)])
    losses = window_losses(LanguageModel(settings), params, windows)
    sums = [window["sums"][str(folder)][0] for window in whole["documents"]]
    np.testing.assert_allclose(sums, losses.sum(1), rtol=1e-5)
    assert position["groups"] == ["1", "2 – 3", "4 – 7", "8 – 15", "16 – 31", "32 – 50"]
    assert lines[-2] == f"Perplexity of {folder}: {np.exp(losses.mean()):.2f}"
    assert lines[-1] == "250 of the text's 299 tokens after the first were predicted"


def scale_head(folder, factor):
    path = folder / "model.safetensors"
    arrays = load_file(path)
    save_file(arrays | {"lm_head.weight": arrays["lm_head.weight"] * np.float32(factor)}, path)


def test_losses_that_are_not_finite_are_one_line(files, tmp_path, capsys):
    folder, text, _ = files
    scale_head(folder, 1e38)
    assert main(["evaluate", f"--model={folder}", f"--text={text}", "--length=50"]) == 2
    assert "params give losses that are not finite, first at position 1 of window 1" in capsys.readouterr().err


def test_beyond_the_levels_of_lam(files, capsys):
    folder, text, ids = files
    assert main(["evaluate", f"--model={folder}", f"--text={text}", "--length=200", "--extend_lam"]) == 0
    settings, params = load_model(folder)
    losses = window_losses(LanguageModel(settings.extended()), params, ids[None, :201])
    assert f"{np.exp(losses.mean()):.2f}" in capsys.readouterr().out


def test_a_text_that_the_tokenizer_loses_is_refused(files, capsys):
    folder, text, _ = files
    text.write_text("w3 w5 hello w7", encoding="utf-8")
    assert main(["evaluate", f"--model={folder}", f"--text={text}"]) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and f"{folder} loses a part of the text: 'w3 w5 hello w7' in {text} comes back as" in error
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length=50", "--windows=6"], "has 300 tokens: expected at least 301, for 6 window"),
        (
            ["--length=65"],
            "65 tokens of a document, for .*: the model's λ, linear, has levels for 64; .*a smaller --length",
        ),
        (["--text=none.txt"], "--text: none.txt can't be read: No such file"),
    ],
)
def test_what_does_not_fit_is_one_line(files, arguments, message, capsys):
    folder, text, _ = files
    code = main(["evaluate", f"--model={folder}", f"--text={text}", *arguments])
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error and re.search(message, error.splitlines()[-1]), error
