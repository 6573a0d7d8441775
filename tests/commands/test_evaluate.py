"""Perplexity of a text, and losses on documents, under models by the command line."""

import argparse
import csv
import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from loglinear_jax.command_line import BadInput
from loglinear_jax.commands import evaluate
from loglinear_jax.commands.main import main
from loglinear_jax.commands.trained_models import trained_of_run
from loglinear_jax.evaluate import window_losses
from loglinear_jax.hub import load_model
from loglinear_jax.models import LanguageModel
from loglinear_jax.runs.loading import load_run
from tests.hub.checkpoints import write, write_tokenizer


@pytest.fixture
def files(tmp_path):
    write(tmp_path / "model", "HGatedDeltaNetForCausalLM")
    write_tokenizer(tmp_path / "model", 19)
    ids = np.random.default_rng(0).integers(0, 19, 300)
    text = "\ufeff" + " ".join(f"w{i}" for i in ids)  # with a byte order mark
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    return tmp_path / "model", tmp_path / "text.txt", ids


def test_a_text_in_windows(files, tmp_path, capsys):
    folder, text, ids = files
    arguments = [str(folder), f"--text={text}", "--length=50", f"--out={tmp_path / 'out'}"]
    assert main(["evaluate", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole, position, *_ = json.loads((tmp_path / "out/documents.json").read_text(encoding="utf-8"))["measures"]
    settings, params = load_model(folder)
    windows = np.stack([ids[50 * i : 50 * i + 51] for i in range(5)])
    losses = window_losses(LanguageModel(settings), params, windows)
    sums = [window["sums"][str(folder)][0][0] for window in whole["documents"]]
    np.testing.assert_allclose(sums, losses.sum(1), rtol=1e-5)
    assert position["groups"] == ["1", "2 – 3", "4 – 7", "8 – 15", "16 – 31", "32 – 50"]
    assert lines[-2] == f"Perplexity of {folder}: {np.exp(losses.mean()):.2f}"
    assert lines[-1] == "250 of the text's 299 tokens after the first were predicted"


def test_beyond_the_levels_of_lam(files, capsys):
    folder, text, ids = files
    assert main(["evaluate", str(folder), f"--text={text}", "--length=200", "--extend_lam"]) == 0
    settings, params = load_model(folder)
    losses = window_losses(LanguageModel(settings.extended()), params, ids[None, :201])
    assert f"{np.exp(losses.mean()):.2f}" in capsys.readouterr().out


def test_a_text_that_the_tokenizer_loses_is_refused(files, capsys):
    folder, text, _ = files
    text.write_text("w3 w5 hello w7", encoding="utf-8")
    assert main(["evaluate", str(folder), f"--text={text}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"loses a part of the text: 'w3 w5 hello w7' in {text} comes back as" in error


# --- Models beside each other on documents ------------------------------------------------------------------------------

RUN = [
    "train", "--config=books:smoke", "--config.variants=linear,mixer=softmax", "--config.task.seq_len=32",
    *(f"--config.model.{name}" for name in ("hidden=16", "layers=1", "head_dim=8", "key_dim=8", "max_length=512")),
    *(f"--config.train.{name}=2" for name in ("num_steps", "num_seeds", "batch_size", "eval_every", "checkpoint_every")),
    "--config.train.warmup_steps=1",
]  # fmt: skip
RNG = np.random.default_rng(0)


@pytest.fixture
def books(tmp_path):
    """Documents of words w0 to w17, twelve of them to test; w18 stands between documents."""
    for split, number in (("train", 3), ("valid", 1), ("test", 12)):
        (tmp_path / "books" / split).mkdir(parents=True)
        for index in range(number):
            words = " ".join(f"w{i}" for i in RNG.integers(0, 18, 30 + index))
            (tmp_path / "books" / split / f"{index:02}.txt").write_text(words, encoding="utf-8")
    return tmp_path / "books"


@pytest.fixture
def models(tmp_path):
    """Two external checkpoints, with a tokenizer of w0 to w18 and of an end token."""
    names = {"a": "HGatedDeltaNetForCausalLM", "b": "GatedDeltaNetForCausalLM"}
    for name, architecture in names.items():
        write(tmp_path / name, architecture)
        write_tokenizer(tmp_path / name, 19)
    return [str(tmp_path / name) for name in names]


@pytest.mark.slow
def test_two_models_are_compared_document_by_document(models, books, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    out, options = tmp_path / "out", [f"--corpus={books}", "--end_token=w18"]
    assert main(["evaluate", *models, *options, "--length=33", f"--out={out}"]) == 0
    record = json.loads((out / "documents.json").read_text(encoding="utf-8"))
    whole, position, *_ = record["measures"]
    assert [one["document"] for one in whole["documents"]] == list(range(12)) and whole["groups"][0] == "all"
    text = (tmp_path / "books/test/07.txt").read_text(encoding="utf-8").split()
    tokens = np.array([18, *(int(word[1:]) for word in text)])[:34]
    for model in models:
        settings, params = load_model(model)
        losses = window_losses(LanguageModel(settings), params, tokens[None])[0]
        np.testing.assert_allclose(whole["documents"][7]["sums"][model][0][0], losses.sum(), rtol=1e-4)
        np.testing.assert_allclose(position["documents"][7]["sums"][model][0][1], losses[1:3].sum(), rtol=1e-4)
    differences = [np.subtract(*(one["sums"][model][0][0] for model in models[::-1])) for one in whole["documents"]]
    expected = sum(differences) / sum(one["tokens"][0] for one in whole["documents"])
    printed = capsys.readouterr().out
    found = re.search(r"^all .*([+-]\d\.\d{3}) \[([+-]\d\.\d{3}), ([+-]\d\.\d{3})\]$", printed, re.MULTILINE)
    mean, low, high = map(float, found.groups())
    assert mean == pytest.approx(expected, abs=1e-3) and low < mean < high
    assert {file.suffix for file in out.iterdir()} == {".json", ".png", ".svg", ".md", ".csv", ".tex"}
    write_tokenizer(tmp_path / "b", 18)
    assert main(["evaluate", *models, *options]) == 2
    assert "b has another tokenizer than" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_variants_of_a_run_on_its_own_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([*RUN, f"--workdir={tmp_path / 'run'}"]) == 0
    arguments = ["evaluate", str(tmp_path / "run"), f"--out={tmp_path / 'out'}", "--documents=1"]
    assert main(arguments) == 0
    record = json.loads((tmp_path / "out/documents.json").read_text(encoding="utf-8"))
    (document,) = record["measures"][0]["documents"]
    run = load_run(tmp_path / "run", "linear")
    corpus = run.task.data
    for stops, ends in ((True, (corpus.manifest["end_token"],)), (False, ())):
        trained = trained_of_run(argparse.Namespace(variant="linear", model_seed=None), tmp_path / "run", stops)
        assert trained.stop_tokens == ends
    first, end = corpus.starts["test"][:2]
    losses = window_losses(run.model, run.params(0), corpus.test[first : end + 1].astype(np.int32)[None])
    assert document["sums"].keys() == {"linear", "mixer=softmax"}
    assert document["sums"]["linear"][0][0] == pytest.approx(losses.sum(), rel=1e-3)
    assert document["tokens"][0] == end - first
    assert main([*arguments, "--needle", "--lengths=128,200", "--depths=0,75"]) == 0
    record = json.loads((tmp_path / "out/documents.json").read_text(encoding="utf-8"))
    loss, by_depth, accuracy, _ = record["measures"]
    assert loss["groups"] == ["128", "200"] and by_depth["groups"] == ["128, 0 %", "128, 75 %", "200, 0 %", "200, 75 %"]
    assert loss["documents"][0]["tokens"] == [14, 14] and accuracy["documents"][0]["tokens"] == [2, 2]
    assert (tmp_path / "out/needle-accuracy-by-length-and-depth.png").stat().st_size > 1000
    assert main([*arguments, "--model_seed=all"]) == 0
    record = json.loads((tmp_path / "out/documents.json").read_text(encoding="utf-8"))
    assert record["seeds"] == {"linear": [0, 1], "mixer=softmax": [0, 1]}
    (of_seeds,) = record["measures"][0]["documents"]
    assert of_seeds["sums"]["linear"][0] == pytest.approx(document["sums"]["linear"][0])
    with (tmp_path / "out/seeds.csv").open(encoding="utf-8", newline="") as file:
        every = {row["seed"]: row for row in csv.DictReader(file) if row["group"] == "all"}
    of_second = window_losses(run.model, run.params(1), corpus.test[first : end + 1].astype(np.int32)[None]).mean()
    assert every.keys() == {"0", "1"} and float(every["1"]["linear"]) == pytest.approx(of_second, abs=1e-3)
    assert "95 % over seeds (Student's t)" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        second_untrained = dataclasses.replace(run, best_loss=np.array([3.0, np.nan]))
        patch.setattr("loglinear_jax.runs.loading.load_run", lambda *_: second_untrained)
        assert main([*arguments, "--model_seed=all", "--variant=linear"]) == 0
        assert "seeds [1] have no finite validation loss and are left out" in capsys.readouterr().err
        assert main([*arguments, "--model_seed=1", "--variant=linear", f"--out={tmp_path / 'second'}"]) == 0
        assert "seed 1 has no finite validation loss: its parameters are the initial ones" in capsys.readouterr().err
        of_the_next_but_one = SimpleNamespace(target_offset=2, predicts="token after the next")
        patch.setattr(
            "loglinear_jax.runs.loading.load_run", lambda *_: dataclasses.replace(run, task=of_the_next_but_one)
        )
        assert main(arguments) == 2
        assert "predicts the token after the next (task.target_offset=2)" in capsys.readouterr().err
    with (tmp_path / "out/seeds.csv").open(encoding="utf-8", newline="") as file:
        assert {row["seed"] for row in csv.DictReader(file)} == {"0"}
    assert main([*arguments, "--model_seed=0,9"]) == 2
    assert "--model_seed=9 is not in this run, which has [0, 1]" in capsys.readouterr().err
    assert main([*arguments, "--model_seed=0-7"]) == 2
    expected = "--model_seed: expected all, or whole numbers separated by commas, got '0-7'"
    assert expected in capsys.readouterr().err.splitlines()[-1]
    assert main([*arguments, "--variant=linear", "--length=600"]) == 2
    assert "600 tokens of a document, for linear: the model's λ, linear, has levels for 512" in capsys.readouterr().err

    def window_losses_of_nan(model, params, windows, tick):
        return window_losses(model, jax.tree.map(lambda x: x * np.nan, params), windows, tick)

    monkeypatch.setattr("loglinear_jax.evaluate.documents.window_losses", window_losses_of_nan)
    assert main([*arguments, "--model_seed=1"]) == 2
    assert "linear, seed 1: params give losses that are not finite" in capsys.readouterr().err.splitlines()[-1]


CORPUS = ["--corpus={books}", "--end_token=w18"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: MODEL"),
        (["{a}"], "--corpus is missing: .*a was not trained on documents here"),
        (["{books}/test/00.txt"], "MODEL: .*00.txt is not a folder: expected one with config.json"),
        (["{a}", "--end_token=w18"], "--end_token is of a --corpus"),
        (["{a}", "--needle", "--length=9"], "--length has no meaning with --needle"),
        (["{a}", "--depths=101"], "--depths: expected a number from 0 to 100, got '101'"),
        (["{a}", "--needle", *CORPUS, "--lengths=50"], "--lengths: no document .* has 50 tokens: the longest has 42"),
        (["{a}", "--needle", *CORPUS, "--lengths=40"], "the tokenizer makes .* of the needle's ' The secret number of [A-Z]"),
        (["{a}", "--needle", *CORPUS, "--lengths=99"], "has levels for 64; give a smaller --lengths"),
        (["{a}", "--text=x", "--needle"], "--needle is of documents, and has no meaning with --text"),
        (["{a}", "--text=none.txt"], "--text: none.txt can't be read: No such file"),
        (["{a}", "--text={books}/test/00.txt", "--length=30"], "has 30 tokens: expected at least 31, for 1 window"),
        (["{a}", *CORPUS, "--length=99"], "99 tokens of a document, for .*has levels for 64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_and_leaves_no_folder(models, books, arguments, message, tmp_path, capsys):
    places = dict(zip("ab", models, strict=True), books=books)
    code = main(["evaluate", *(argument.format(**places) for argument in arguments), f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error and re.search(message, error.splitlines()[-1]), error


def test_a_variant_is_named_with_its_run_only_where_another_run_has_it(monkeypatch):
    runs = {"runs/a": ["fixed", "content"], "runs/b": ["fixed", "linear"]}
    monkeypatch.setattr(evaluate, "_is_run", lambda folder: str(folder) in runs)
    monkeypatch.setattr("loglinear_jax.runs.loading.read_run", lambda run: SimpleNamespace(variants=runs[run]))
    monkeypatch.setattr("loglinear_jax.text.tokenizer.tokenizer_sha256", lambda tokenizer: "the same")

    def load(args, run, model):
        return SimpleNamespace(of=(run and str(run), model, args.variant), tokenizer=None, seeds={})

    monkeypatch.setattr(evaluate, "load_trained", load)
    args = argparse.Namespace(models=["runs/a", "other/model", "runs/b"], variant=None, model_seed=None)
    assert {name: trained.of for name, trained in evaluate._load_all(args).items()} == {
        "runs/a, fixed": ("runs/a", None, "fixed"),
        "content": ("runs/a", None, "content"),
        "other/model": (None, "other/model", None),
        "runs/b, fixed": ("runs/b", None, "fixed"),
        "linear": ("runs/b", None, "linear"),
    }
    for others, message in (
        ({2: None, 1: None}, "expected --model_seed=1, which both have"),
        ({3: None}, "runs of the same seeds"),
    ):
        of_run = {"runs/a": {0: None, 1: None}, "runs/b": others}
        monkeypatch.setattr(
            evaluate,
            "load_trained",
            lambda args, run, _, of=of_run: SimpleNamespace(tokenizer=None, seeds=of[str(run)]),
        )
        with pytest.raises(BadInput, match=message):
            evaluate._load_all(argparse.Namespace(models=["runs/a", "runs/b"], variant="fixed", model_seed="all"))
