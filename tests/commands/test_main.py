"""The command line as a user meets it: help, exit codes, what is missing."""

import errno
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import loglinear_jax
from loglinear_jax.commands import train
from loglinear_jax.commands.main import find_commands, main
from tests.runs.tiny import TINY

ROOT = Path(__file__).parents[2]


def test_every_command_has_a_line_of_help(capsys):
    assert set(find_commands()) >= {"analyze", "benchmark", "generate", "train"}
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and all(module.HELP in out for module in find_commands().values())


def test_help_does_not_wait_for_jax():
    code = "import sys; sys.argv = ['loglinear_jax', '--help']\nfrom loglinear_jax.commands.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: command"),
        ("trian", "argument command: invalid choice: 'trian'"),
        ("train --config=/", "there is no config file /, and the configs by name are books, forgetting, "),
        ("train --config=mqar:smoke --config=mqar", "--config is given 2 times, as mqar:smoke, mqar: "),
        ("train --config=mqar --config.train.stream=maybe", "train.stream: expected true or false, got 'maybe'"),
        ("train --config=mqar --workdir=", "argument --workdir: expected a path, got ''"),
        ("analyze --workdir=x --out=y --example=64", "example=64: expected 0 to 63"),
        (f"results --check --folder={'x' * 300}", "argument --folder: a name of 300 bytes: expected at most 255"),
        (f"generate --workdir=x --prompt=y --num_tokens={'9' * 5000}", "argument --num_tokens: invalid size value: '999"),
        ("generate --workdir=x --prompt=a\udcff", "--prompt: byte 1 is not UTF-8, got b'a\\xff': expected text in UTF-8"),
        ("generate --model=hf://owner/name --prompt=y", "--model: hf://owner/name is an address: expected a path on this"),
        ("benchmark lam --output=.", "--output: . is a folder, expected a file's name"),
        ("analyze --out=x --workdir=gs://x", "argument --workdir: gs://x is an address: expected"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    name = arguments.partition(" ")[0] if message != "argument command: invalid choice: 'trian'" else ""
    assert out == "" and err.startswith(f"loglinear_jax {name}".rstrip() + f": {message}")
    assert err.count("\n") == 1 and len(err) < 1200


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (["train"], "tokenizers", "all"),
        (["train"], "wandb", "wandb"),
        (["tokenizer", "--corpus=a/b", "--out=x"], "datasets", "datasets"),
        (["analyze", "--workdir=x", "--out=y"], "scipy", "analysis"),
    ],
)
def test_an_extra_that_is_missing_is_named(command, missing, extra, monkeypatch, capsys):
    def run(args):
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(find_commands()[command[0]], "run", run)
    assert main(command) == 2
    wanted = f"loglinear_jax {command[0]}: needs {missing}: pip install -e '.[{extra}]' in the checkout\n"
    assert capsys.readouterr().err == wanted


def test_the_version_stands_in_the_citation_and_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert version in versions[: 1 + (versions[0] == "Unreleased")] and loglinear_jax.__version__ == version


def test_characters_that_a_terminal_lacks_are_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    sys.stdout.flush()
    assert ended.value.code == 0 and b"attention with adaptive ?: experiments" in sys.stdout.buffer.getvalue()


def test_a_bug_keeps_its_traceback_and_an_interrupt_with_nothing_to_save_ends_with_130(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", run)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "loglinear_jax train: interrupted\n"
    monkeypatch.setattr(train, "run", lambda args: importlib.import_module("scipy.no_such_module"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["train"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", [["train"], ["train", "--help"]])
def test_an_output_on_a_full_disk_is_one_line(arguments, buffered, monkeypatch, capsys):
    """Also where the last line is only written when the command has ended."""

    def run(args):
        print("some text")
        return 0

    monkeypatch.setattr(train, "run", run)
    with Path("/dev/full").open("wb", buffering=-1 if buffered else 0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, "utf-8", write_through=not buffered))
        assert main(arguments) == 1
        sys.stdout.flush()  # what is left goes nowhere
    assert capsys.readouterr().err == "loglinear_jax train: the output can't be written: No space left on device\n"


def test_a_file_on_a_full_disk_is_one_line_if_its_name_is_known(monkeypatch, capsys):
    def run(args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *name)

    monkeypatch.setattr(train, "run", run)
    name = ["/a/file"]
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "loglinear_jax train: /a/file can't be written: No space left on device\n"
    name = []
    with pytest.raises(OSError, match="No space left"):
        main(["train"])


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_names_the_configs_and_shows_the_one_that_is_given(capsys):
    assert "configs by name: books, forgetting, interleaved, mad, mqar, power_law, selective_copy, " in help_of(capsys)
    shown = help_of(capsys, "--config=mqar:smoke", "--config.train.num_seeds=3")
    assert "Multi-query associative recall: the paper's section 4.2" in shown
    assert "\n  kv=N\n" in shown and "\n  robust\n" in shown
    assert "\n  task.num_pairs = 7\n" in shown and "\n  train.num_seeds = 3\n" in shown
    assert "optimiser steps" in shown
    assert main(["train", "--config=nothing", "--help"]) == 2
    assert "there is no config file nothing, and the configs by name are books, forgetting, " in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_one_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    run = next((ROOT / "results").glob("*/runs/*.json"))

    def analyze(out):
        code = main(["analyze", f"--workdir={run}", f"--out={tmp_path / out}"])
        return code, capsys.readouterr().err.removeprefix(f"loglinear_jax analyze: --out: {tmp_path}")

    def full(**kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert analyze("file") == (2, "/file is a file, expected a folder\n")
    assert analyze("link") == (2, "/link can't be written: No such file or directory\n")
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert analyze("new") == (1, " can't be written: No space left on device\n")


@pytest.mark.slow
def test_a_config_is_found_by_name_from_any_folder(tmp_path):
    """As `python run.py` too, and with the default workdir; the run records the command."""
    command = [sys.executable, str(ROOT / "run.py"), "--config", "mqar:smoke", "--config.train.num_steps", "4"]
    command += [
        "--config.variants=linear",
        *TINY[2:],
        *(f"--config.train.{name}=4" for name in ("eval_every", "checkpoint_every")),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    workdir = tmp_path / "runs" / "mqar-smoke"
    assert (workdir / "learning_curves.png").exists() and str(workdir) in done.stdout
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    assert summary["command"] == " ".join(["python", "run.py", *command[2:]])
