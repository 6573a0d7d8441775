"""The examples in README.md, docs/ and the public docstrings are run; commands are read by the command line's own parser."""

import doctest
import importlib
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

import loglinear_jax
from configs.books import FABLES
from configs.selective_copy import get_config
from loglinear_jax.commands.main import find_commands, main
from loglinear_jax.config import check_effects, variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import run
from loglinear_jax.runs.folders import RunFolder
from loglinear_jax.text.sources import find_documents

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FILE_NAME = re.compile(r"# (\w+)\.py\n")  # the first line of an example that is to be saved


class RunPython(PythonEvaluator):
    """Runs an example; one that is to be saved is saved and imported."""

    def __call__(self, example):
        saved = FILE_NAME.match(example.parsed)
        if saved is None:
            return super().__call__(example)
        Path(f"{saved[1]}.py").write_text(example.parsed, encoding="utf-8")
        importlib.invalidate_caches()
        example.namespace |= vars(importlib.import_module(saved[1]))
        return None


def examples_of(page, language, evaluator):
    return list(Sybil([CodeBlockParser(language, evaluator)]).parse(page).examples())


def pages_with(language):
    pages = [page for page in PAGES if f"```{language}\n" in page.read_text(encoding="utf-8")]
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with what the first command in README.md leaves, only trained less."""
    folder = tmp_path_factory.mktemp("checkout")
    config = get_config("smoke")
    config.variants = "mlp_softplus"
    config.model.layers = 1
    config.train.update(
        num_seeds=1, num_steps=1, eval_every=1, checkpoint_every=1, steps_per_dispatch=1, num_train=100, num_validation=50,
        num_test=50,
    )  # fmt: skip
    run(config, folder / "runs/selective_copy-smoke")
    return folder


@pytest.fixture
def folder(page, request, tmp_path, monkeypatch):
    """Where the examples of a page are run, and importable from."""
    folder = request.getfixturevalue("trained") if "load_run(" in page.read_text(encoding="utf-8") else tmp_path
    before = set(sys.modules)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == folder:
            del sys.modules[name]


@pages_with("python")
@pytest.mark.slow
def test_python_runs(page, folder):
    for example in examples_of(page, "python", RunPython()):
        example.evaluate()


@pytest.mark.parametrize("name", [name for name in loglinear_jax.__all__ if name != "FenwickState"])
def test_examples_of_public_names_run(name):
    """And their docstring's first sentence is a line."""
    text = getattr(loglinear_jax, name).__doc__
    first = text.splitlines()[0]
    assert first.endswith(".") and len(first) > 20, first
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def commands_in(text):
    """The arguments of every call of loglinear_jax or run.py in a block of shell commands."""
    for line in text.replace("\\\n", " ").replace("&&", "\n").splitlines():
        words = shlex.split(line, comments=True)
        for index, word in enumerate(words):
            if Path(word).name in ("loglinear_jax", "run.py"):
                yield Path(word).name, words[index + 1 :]
                break


@pages_with("bash")
def test_commands_are_read(page, folder, monkeypatch):
    """With every setting, by the parser that a user meets; nothing is trained."""

    def read_config(args):
        chosen = read_config_arguments(args.config_arguments)
        variant_names(chosen.config)
        if chosen.config.task.name not in ("text", "documents"):  # whose files are not here
            check_effects(chosen.config, chosen.given)
        return 0

    for example in examples_of(page, "python", RunPython()):
        if FILE_NAME.match(example.parsed):  # what a command names
            example.evaluate()
    monkeypatch.syspath_prepend(str(ROOT))
    for name, command in find_commands().items():
        monkeypatch.setattr(command, "run", read_config if name == "train" else lambda args: 0)
    for example in examples_of(page, "bash", lambda example: None):
        for program, arguments in commands_in(example.parsed):
            command = "train" if program == "run.py" else None
            arguments = [word.replace("--config=configs/", f"--config={ROOT}/configs/") for word in arguments]
            assert main(arguments, command=command, called=program) == 0, (page.name, program, arguments)


@pytest.mark.slow
def test_a_model_is_trained_on_documents_as_the_page_says(tmp_path, monkeypatch):
    """The page's commands, as they are where they name the smoke preset, else with a smaller model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    source = find_documents(str(FABLES))
    for split, folder in (("train", "train"), ("validation", "valid"), ("test", "test")):
        Path("books", folder).mkdir(parents=True)
        for index, text in enumerate(source.texts(split)):
            Path("books", folder, f"{index}.txt").write_text(text, encoding="utf-8")
    small = ["--config.variants=linear", "--config.task.seq_len=32", "--config.train.precision=float32"]
    small += [f"--config.model.{name}" for name in ("hidden=16", "layers=1", "head_dim=8", "key_dim=8")]
    small += [f"--config.train.{name}=2" for name in ("num_steps", "batch_size", "eval_every", "checkpoint_every")]
    page = (ROOT / "docs/how-to/language-models.md").read_text(encoding="utf-8")
    section = page.split("## Train on your own documents\n")[1].split("\n## ")[0]
    commands = [
        arguments for _, arguments in commands_in("\n".join(re.findall("```bash\n(.*?)```", section, re.DOTALL)))
    ]
    assert [arguments[0] for arguments in commands] == ["tokenizer", "train", "train", "train"]
    for arguments in commands:
        is_small = arguments[0] == "train" and arguments[1:] != ["--config=books:smoke"]
        assert main([*arguments, *(["--config.train.warmup_steps=1", *small] if is_small else [])]) == 0
    summary = RunFolder("runs/books-smoke").read_summary().variants["mlp_softplus"]
    assert summary.best_loss[0] < 0.4 * math.log(257)  # chance, for a byte
    assert RunFolder("runs/books").read_summary().variants["linear"].last_step == 2
