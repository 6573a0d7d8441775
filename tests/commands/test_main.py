"""The command line as a user meets it: help, exit codes, what is missing."""

import io
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import loglinear_jax
from loglinear_jax.command_line import EXTRAS, needs_extra
from loglinear_jax.commands import train
from loglinear_jax.commands.main import find_commands, main

ROOT = Path(__file__).parents[2]
# What has a line of help is a command, and main finds them.
COMMANDS = sorted((ROOT / "loglinear_jax" / "commands").glob("[!_]*.py"))
MODULES = [path for path in COMMANDS if "__main__" in path.read_text(encoding="utf-8")]


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
        ([], "loglinear_jax: the following arguments are required: command"),
        (["trian"], "loglinear_jax: argument command: invalid choice: 'trian'"),
        (["train"], "loglinear_jax train: name a config: --config=selective_copy:smoke"),
        (["analyze", "--out=x"], "loglinear_jax analyze: the following arguments are required: --workdir"),
        (["generate", "--workdir=x", "--prompt=y"], "loglinear_jax generate: "),
        (["generate", "--workdir=x", "--prompt=y", "--seed=-1"], "loglinear_jax generate: argument --seed: expected"),
        (
            ["generate", "--workdir=x", "--prompt=y", "--num_tokens=x"],
            "loglinear_jax generate: argument --num_tokens: expected a whole number from 1 on, got 'x'",
        ),
        (
            ["analyze", "--workdir=x", "--out=y", "--sequences=x"],
            "loglinear_jax analyze: argument --sequences: expected a whole number from 1 on, got 'x'",
        ),
        (["analyze", "--workdir=", "--out=y"], "loglinear_jax analyze: argument --workdir: expected a path, got ''"),
        (["analyze", "--workdir=x", "--out="], "loglinear_jax analyze: argument --out: expected a path, got ''"),
        (["train", "--config=mqar", "--workdir="], "loglinear_jax train: argument --workdir: expected a path, got ''"),
        (
            ["analyze", "--workdir=x", "--out=y", "--sections="],
            "loglinear_jax analyze: argument --sections: expected a list, separated by commas, without empty parts, got ''",
        ),
        (
            ["generate", "--workdir=x", "--prompt=a\udcff"],
            "loglinear_jax generate: --prompt: byte 1 is not UTF-8, got b'a\\xff': expected text in UTF-8",
        ),
        (
            ["train", "--config=/"],
            "loglinear_jax train: the config / is a folder: expected a file in it, or one of forgetting, ",
        ),
        (
            ["train", "--config=mqar", "--config.train.stream=maybe"],
            "loglinear_jax train: train.stream: expected true or false, got 'maybe'",
        ),
        (["analyze", "--workdir=x", "--out=y", "--example=64"], "loglinear_jax analyze: example=64: expected 0 to 63"),
        (
            ["analyze", f"--workdir={'x' * 300}", "--out=y"],
            "loglinear_jax analyze: argument --workdir: a name of 300 bytes: expected at most 255",
        ),
        (
            ["results", "--check", f"--folder={'x' * 300}"],
            "loglinear_jax results: argument --folder: a name of 300 bytes",
        ),
        (["train", f"--config={'x' * 300}"], "loglinear_jax train: the config xxx"),
        (
            ["train", "--config=mqar:smoke", "--config=mqar"],
            "loglinear_jax train: --config is given 2 times, as mqar:smoke, mqar: ",
        ),
        (
            ["generate", "--workdir=x", "--prompt=y", f"--num_tokens={'9' * 5000}"],
            "loglinear_jax generate: argument --num_tokens: invalid size value: '999",
        ),
        (
            ["generate", "--model=~nosuchuser/x", "--prompt=y"],
            "loglinear_jax generate: --model: ~nosuchuser/x: there is no home folder for ~nosuchuser: expected a path without",
        ),
        (
            ["generate", "--model=hf://owner/name", "--prompt=y"],
            "loglinear_jax generate: --model: hf://owner/name is an address: expected a path on this machine",
        ),
        *(
            (
                [*command, f"--{argument}=gs://bucket/x"],
                f"loglinear_jax {command[0]}: argument --{argument}: gs://bucket/x is an address: expected a path on this",
            )
            for command, argument in [
                (["train", "--config=mqar"], "workdir"),
                (["analyze", "--workdir=x"], "out"),
                (["analyze", "--out=x"], "workdir"),
                (["generate", "--workdir=x"], "prompt_file"),
                (["evaluate", "--workdir=x"], "text"),
                (["export", "--workdir=x"], "out"),
                (["sweep", "x.toml"], "report"),
                (["results", "--check"], "folder"),
            ]
        ),
        (
            ["train", "--config=~nosuchuser/x"],
            "loglinear_jax train: the config ~nosuchuser/x: there is no home folder for ~nosuchuser: expected",
        ),
        (
            ["benchmark", "lam", "--output=."],
            "loglinear_jax benchmark: --output: . is a folder, expected a file's name",
        ),
        (["benchmark", "atention"], "loglinear_jax benchmark: argument benchmark: invalid choice: 'atention'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(message) and err.count("\n") == 1 and len(err) < 1200


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_a_module_that_stands_for_a_command(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command, "--variant=x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"loglinear_jax.{command}", run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"{command}: ")


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (["train"], "ml_collections", "train"),
        (["train"], "tokenizers", "text"),
        (["analyze", "--workdir=x", "--out=y"], "scipy", "analysis"),
        (["generate", "--workdir=x", "--prompt=y"], "grain", "text"),
    ],
)
def test_an_extra_that_is_missing_is_named(command, missing, extra, monkeypatch, capsys):
    def run(args):
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(find_commands()[command[0]], "run", run)
    assert main(command) == 2
    wanted = f"loglinear_jax {command[0]}: needs {missing}: pip install -e '.[{extra}]' in the checkout\n"
    assert capsys.readouterr().err == wanted


def test_an_import_that_needs_an_extra_names_it():
    code = "import sys; sys.modules['ml_collections'] = None; import loglinear_jax.analysis"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.endswith(
        "\nModuleNotFoundError: this part of loglinear_jax needs ml_collections: pip install -e '.[analysis]' in the checkout\n"
    )
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"), needs_extra("text"):
        import no_such_module  # noqa: F401


def test_every_dependency_of_an_extra_is_known_to_the_command_line():
    """By the names that are imported, where they differ from those that are installed."""
    imported = {"absl-py": "absl", "ml-collections": "ml_collections", "tensorflow-datasets": "tensorflow_datasets"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[\[<>=]", requirement)[0] for requirement in extras[extra]} - {"loglinear_jax"}
        names -= {"absl-py", "orbax-checkpoint"}  # Flax brings them
        assert {imported.get(name, name) for name in names} == set(modules)


def test_the_version_stands_in_the_citation_and_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    versions = [
        part.partition("]")[0] for part in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## [")[1:]
    ]
    assert version in versions[: 1 + (versions[0] == "Unreleased")]


def test_the_version_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"loglinear_jax {loglinear_jax.__version__}\n"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert loglinear_jax.__version__ == version


def test_characters_that_a_terminal_lacks_are_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    sys.stdout.flush()
    assert ended.value.code == 0 and b"attention with adaptive ?: experiments" in sys.stdout.buffer.getvalue()


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend")], ids=str)
def test_a_platform_without_a_device_is_named(error, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(type(error)):  # it has to do with no platform
        main(["train"])
    monkeypatch.setattr(jax, "devices", fail)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        assert main(["train"]) == 2
    finally:
        jax.config.update("jax_platforms", before)
    why = f" ({error})" if str(error) else ""
    line = f"JAX_PLATFORMS=cuda: JAX finds no such device here{why}: expected another, such as cpu\n"
    assert capsys.readouterr().err == f"loglinear_jax train: {line}"


def test_a_bug_keeps_its_traceback(monkeypatch):
    def run(args):
        import scipy.no_such_module  # noqa: F401

    monkeypatch.setattr(train, "run", run)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["train"])


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_a_command_runs_as_a_module(file, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--nonsense"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1, err


def test_an_interrupt_with_nothing_to_save_ends_with_130(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", run)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "loglinear_jax train: interrupted\n"


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_names_the_configs_and_shows_the_one_that_is_given(capsys):
    names = (
        "configs by name: forgetting, interleaved, mad, mqar, selective_copy, state_tracking, task, wikitext103, "
        "wikitext2, zoology_mqar"
    )
    assert names in help_of(capsys)
    shown = help_of(capsys, "--config=mqar:smoke", "--config.train.num_seeds=3")
    assert "Multi-query associative recall: the paper's section 4.2" in shown
    assert "\n  kv=N\n" in shown and "\n  robust\n" in shown
    assert "\n  task.num_pairs = 7\n" in shown and "\n  train.num_seeds = 3\n" in shown
    assert "optimiser steps" in shown


@pytest.mark.parametrize(
    ("config", "reason"),
    [("task", "settings: name the task's module: "), ("mqar:nope", "settings: no preset 'nope': there are smoke, ")],
)
def test_help_of_a_config_without_its_presets_names_them(config, reason, capsys):
    shown = help_of(capsys, f"--config={config}")
    assert "python run.py --config=configs/" in shown and "\n  robust\n" in shown and reason in shown


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_a_bug_in_the_analysis_keeps_its_traceback(error, tmp_path, monkeypatch):
    def make_report(*arguments):
        raise error("a bug")

    monkeypatch.setattr("loglinear_jax.analysis.report.make_report", make_report)
    run = next((ROOT / "results").glob("*/runs/*.json"))
    with pytest.raises(error, match="a bug"):
        main(["analyze", f"--workdir={run}", f"--out={tmp_path}"])


def test_an_output_folder_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    run = next((ROOT / "results").glob("*/runs/*.json"))
    assert main(["analyze", f"--workdir={run}", f"--out={tmp_path / 'file'}"]) == 2
    assert "--out: " in (err := capsys.readouterr().err) and "is a file, expected a folder" in err
    arguments = ["train", "--config=mqar:smoke", "--config.variants=linear", f"--workdir={tmp_path / 'file'}"]
    assert main(arguments) == 2
    assert "is a file, expected a folder" in capsys.readouterr().err


def test_help_of_a_config_that_is_none_is_one_line(capsys):
    assert main(["train", "--config=nothing", "--help"]) == 2
    assert "there is no config file nothing, and the configs by name are forgetting, " in capsys.readouterr().err


def test_a_config_is_found_by_name_from_any_folder(tmp_path):
    """As `python run.py` too, and with the default workdir; the run records the command."""
    command = [sys.executable, str(ROOT / "run.py"), "--config", "mqar:smoke", "--config.variants=linear"]
    command += ["--config.train.num_steps", "4", "--config.train.num_seeds=2", "--config.train.eval_every=4"]
    command += ["--config.train.checkpoint_every=4", "--config.train.steps_per_dispatch=4", "--config.model.layers=1"]
    command += ["--config.train.num_train=100", "--config.train.num_validation=50", "--config.train.num_test=50"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    workdir = tmp_path / "runs" / "mqar-smoke"
    assert (workdir / "learning_curves.png").exists() and str(workdir) in done.stdout
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    assert summary["command"] == " ".join(["python", "run.py", *command[2:]])
