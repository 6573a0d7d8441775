"""Malformed and odd settings: each is refused in one line that names it, or means what was asked; and nothing is written.

Command lines go through `main`, up to where training would begin.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import random
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loglinear_jax import runs
from loglinear_jax.commands.main import main
from loglinear_jax.config import describe_settings, flat_settings, with_none
from loglinear_jax.config.files import config_names, get_config, load_config_file, read_config_arguments
from loglinear_jax.runs.training import checked_experiments
from tests.torture.judge import Outcome, command_ending, line_failure, traceback_failure
from tests.torture.user_files import MISTAKES, Mistake, write_mistake

NUMBER = 1_000
LIMIT_S = 30
LARGEST = 2**31 - 1  # of every size

WORDS = (
    "", " ", "word", "None", "none", "null", "true", "False", "yes", "on", "λ", "東京", "'", '"', "a\nb", "a b", "=", ",",
)  # fmt: skip
NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "64", "1.5", "-0.5", "1e3", "1_000", "0x10", "50.0", " 8", "007", "1000003", "0.0",
)  # fmt: skip
HUGE = (
    str(2 ** 31), str(2 ** 63), str(10 ** 30), str(-2 ** 31), "1e400", "-1e400", "1e-400", "nan", "inf", "-inf", "1e38",
    "1e20",
)  # fmt: skip
LISTS = (
    "[]", "[1, 2]", "{}", "()", "1,2", "{'a': 1}", "[[]]", "lambda: 0", "__import__('os')", "${HOME}", "%d", "\\",
)  # fmt: skip

# (argument, words of which one is to be in the message)
SYNTAX = (
    ("--config", ("--config",)), ("--config=", ("--config",)), ("--config=.", ("config",)), ("--config=/", ("config",)),
    ("--config=/dev/null", ("/dev/null",)), ("--config=nope", ("nope",)), ("--config=mqar.py", ("mqar",)),
    ("--config=:smoke", ("--config", "config file")), ("--config=mqar::smoke", (":smoke",)),
    ("--config=mqar:smoke:smoke", ("smoke:smoke",)), ("--config= mqar", ("mqar",)), ("--config=task:", ("task",)),
    ("--config=task:..", ("task",)), ("--config=task:no.such", ("no.such",)), ("--noconfig=mqar", ("config",)),
    ("--config.", ("--config", "setting")), ("--config..", ("--config", "setting")),
    ("--config.=3", ("--config", "setting")), ("--config.train", ("train",)), ("--config.train=", ("train",)),
    ("--config.train={}", ("train",)), ("--config.train=3", ("train",)), ("--config.train.=3", ("train",)),
    ("--config..train.num_steps=3", ("train.num_steps",)), ("--config.train.num_steps", ("num_steps",)),
    ("--config.train.num_steps==3", ("num_steps",)), ("--config.train.num_steps =3", ("num_steps",)),
    ("--config.train.num_steps=3=4", ("num_steps",)), ("--config.TRAIN.num_steps=3", ("TRAIN",)),
    ("--config.train.num_steps.x=1", ("num_steps",)), ("--config.train[0]=1", ("train[0]",)),
    ("--config.train['num_steps']=1", ("train",)), ("--config.λ=1", ("λ",)), ("--config.task=mqar", ("task",)),
    ("--config.variants", ("variants",)), ("--config.__class__=1", ("__class__",)),
    ("--config.train.__class__=2", ("__class__",)), ("--config.train.update=1", ("update",)),
    ("--config.lock=1", ("lock",)), ("--configs=mqar", ("--configs",)), ("--config-train.num_steps=1", ("--config-train",)),
    ("--config.model.kind=", ("model.kind",)), ("--config.task.name=", ("task.name",)),
    ("--config.task.name=mqar:x", ("task.name",)),
)  # fmt: skip
FLAGS = (
    ("--wrokdir=x", ("--wrokdir",)), ("--workdir", ("--workdir",)), ("--work=x", ("--work",)), ("extra", ("extra",)),
    ("--", ("--",)), ("-x", ("-x",)), ("--num_processes=0", ("--num_processes",)),
    ("--num_processes=-1", ("--num_processes",)), ("--num_processes=1.5", ("--num_processes",)),
    ("--num_processes=²", ("--num_processes",)), ("--num_processes=2", ("--num_processes",)),
    ("--process_id=nan", ("--process_id",)), ("--process_id=0", ("--process_id",)), ("--coordinator=x", ("--coordinator",)),
    ("--distributed=yes", ("--distributed",)), ("--flagfile=x", ("--flagfile",)), ("--workdir=/dev/null", ("/dev/null",)),
    ("--retrain=maybe", ("--retrain",)),
)  # fmt: skip
PIECES = (
    "linear", "mlp_softplus", "fixed", "rope", "nope", "mixer=softmax", "lam=rope", "lam_hidden=32", "layers=2", "train",
)  # fmt: skip
PIECES += (
    "train.learning_rate=0.003", "model.heads=2", "train.num_seeds=3", "task.seq_len=3", "implementation=pallas", "λ",
)  # fmt: skip
PIECES += (
    "lam_hidden=", "=3", "lam=", "lam==rope", "no:Such", ":", "os:path", "a.b", "None", "heads=x", "norm_epsilon=nan",
)  # fmt: skip
JOINTS = (",", "+", "", " ", ",,", "++", ", ", " + ", "=", ":", "\n")
PRESETS = (
    "smoke", "robust", "released", "d_h", "words", "kv=4", "seq=64", "hidden=32", "kv=", "kv", "kv=-1", "kv=1e3",
)  # fmt: skip
PRESETS += (
    "kv=²", f'kv={2 ** 63}', "SMOKE", "seq=0", f'seq={2 ** 31}', "hidden=0", "smok", "smoke=3", "λ", "", " ", " smoke", "=",
)  # fmt: skip


# Configs that need a task by name, with one each.
NAMED_TASKS = {"task": "mqar", "mad": "recall"}
PRESET_VALUES = {"kv=": "16", "pairs=": "16", "seq=": "256", "updates=": "4"}  # where 64 does not fit its config
OF_OTHER_TASKS = ("noise=", "tokens=")  # presets of configs/mad.py that its task recall has not


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line and what it is about. names: one of them is to be in a refusal. setting, text: what was asked for."""

    argv: tuple[str, ...]
    names: tuple[str, ...] = ()
    setting: str | None = None
    text: str = ""
    mistake: Mistake | None = None

    def __str__(self) -> str:
        return str(self.mistake) if self.mistake else repr(list(self.argv))


def prepare(folder: Path, cases: Sequence[Case]) -> None:
    """A small text, where configs of a text find it."""
    from tests.torture.runs import make_text_flags

    make_text_flags(folder)


def make_case(rng: random.Random, number: int) -> Case:
    if number % 10 == 0:
        return Case((), mistake=MISTAKES[number // 10 % len(MISTAKES)])
    sort = rng.choices(("setting", "syntax", "variants", "presets", "flags"), (70, 8, 12, 6, 4))[0]
    if sort == "syntax":
        argument, names = rng.choice(SYNTAX)
        before = (
            ()
            if argument.startswith(("--config=", "--noconfig=")) or argument == "--config"
            else ("--config=mqar:smoke",)
        )
        return Case((*before, argument), names)
    if sort == "flags":
        argument, names = rng.choice(FLAGS)
        return Case(("--config=mqar:smoke", argument), names)
    if sort == "presets":
        config = rng.choice([name for name in config_names() if name not in NAMED_TASKS])
        presets = ",".join(rng.choices(PRESETS, k=rng.randint(1, 3)))
        names = ("preset", "num_pairs", "seq_len", "hidden", "vocab_size")
        return Case((f"--config={config}:{presets}",), names)
    if sort == "variants":
        text = rng.choice(PIECES)
        for _ in range(rng.randint(0, 3)):
            text += rng.choice(JOINTS) + rng.choice(PIECES)
        parts = {part for piece in PIECES if piece in text and len(piece) > 2 for part in piece.split("=")} - {""}
        config = rng.choice(("mqar:smoke", "wikitext2:smoke"))
        return Case((f"--config={config}", f"--config.variants={text}"), ("variants", *sorted(parts)), "variants", text)
    config = rng.choice(bases())
    setting = rng.choice([s.name for s in described(config)])
    text = rng.choice(rng.choice((WORDS, NUMBERS, NUMBERS, HUGE, LISTS)))
    short = setting.partition(".")[2] or setting
    return Case((f"--config={config}", f"--config.{setting}={text}"), (short,), setting, text)


def bases() -> list[str]:
    """Every config with none or one of its presets."""
    found = []
    for name in config_names():
        first = f"{name}:{NAMED_TASKS[name]}," if name in NAMED_TASKS else f"{name}:"
        presets = [
            preset + PRESET_VALUES.get(preset, "64") * preset.endswith("=")
            for preset in load_config_file(name).presets
            if preset not in OF_OTHER_TASKS
        ]
        found += [first.rstrip(":,"), *(first + preset for preset in presets)]
    return found


def described(config: str) -> list:
    name, _, presets = config.partition(":")
    return describe_settings(get_config(load_config_file(name), presets))


def run_case(case: Case, folder: Path) -> Outcome:
    if case.mistake is not None:
        return _run_mistake(case.mistake)
    argv = [*case.argv[:1], *_flags_of_texts(case, folder), *case.argv[1:]]
    return _run(argv, case)


def _flags_of_texts(case: Case, folder: Path) -> tuple[str, ...]:
    """For a config of a text: a small one, in place of one to download."""
    if "=wikitext" not in case.argv[0]:
        return ()
    from tests.torture.runs import text_flags

    long = ("--config.task.seq_len=16", "--config.task.validation_windows=8") if case.setting != "task.seq_len" else ()
    return (*text_flags(folder), *long)


class Accepted(BaseException):
    """Raised where training would begin."""


def _reach_training(argv: list[str]):
    """(exit code, exception, stderr) of `main`, and what it would have trained: the config and the experiments, or None."""
    accepted: list[Any] = []

    def instead(config, *arguments):
        accepted.extend((config, checked_experiments(config)[0]))
        raise SystemExit(0)

    original, runs.run = runs.run, instead
    try:
        return command_ending(lambda: main(argv, command="train", called="python run.py")), accepted
    finally:
        runs.run = original


def _run(argv: list[str], case: Case) -> Outcome:
    ending, accepted = _reach_training(argv)
    left = sorted(path.name for path in Path.cwd().iterdir())
    if left and case.setting != "task.cache":
        return Outcome("wrote something", f"written before training: {left}")
    if ending.error is not None:
        return Outcome("traceback", f"traceback: {traceback_failure(ending.error)}")
    if accepted:
        failure = _wrongly_accepted(argv, case, *accepted)
        return Outcome("accepted", failure and f"accepted: {failure}")
    if ending.code != 2:
        return Outcome("ended", f"exit code {ending.code}: {ending.err[:200]}")
    failure = line_failure(ending.err, case.names)
    return Outcome("refused in one line" if failure is None else "refused otherwise", failure)


def _wrongly_accepted(argv: list[str], case: Case, config, experiments) -> str | None:
    """Why these settings are not what was asked for."""
    if case.setting is None:
        return None
    if case.setting == "variants":
        if case.text in ("", "None"):
            return None  # the paper's
        asked = [name.strip() for name in case.text.split(",")]
        got = list(experiments)
        return None if got == asked else f"variants are {got}, asked for {asked}"
    section, _, name = case.setting.partition(".")
    value = config[section][name]
    if isinstance(value, float) and not math.isfinite(value):
        return f"{case.setting}={value} is not finite"
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"{case.setting}={value} is beyond 2**31 - 1"
    if not means(case.text, value):
        return f"{case.setting}={case.text!r} was read as {value!r}"
    if section == "train":
        for experiment in experiments.values():
            used = getattr(experiment.train, name)
            several = value if isinstance(value, list) else [value]  # each of which makes a variant
            if used not in [with_none({name: one}, type(experiment.train))[name] for one in several]:
                return f"{case.setting}={value!r} is trained with as {used!r}"
    without = read_config_arguments([a for a in argv if a != case.argv[-1]]).config
    if section == "task" and name == "name":
        return None
    before, after = flat_settings(without), flat_settings(config)
    others = sorted(key for key in before if before[key] != after.get(key) and key not in (case.setting, "variants"))
    return f"{case.setting}={case.text!r} also changed {others}" if others else None


def means(text: str, value: Any) -> bool:
    """Whether a setting's text can stand for this value."""
    if value is None:
        return text in ("", "None", "none")
    if isinstance(value, bool):
        true, false = ("true", "t", "1", "yes", "on", "y"), ("false", "f", "0", "no", "off", "n")
        return text.strip().lower() in (true if value else false)
    if isinstance(value, str):
        return value == text
    if isinstance(value, list):
        parts = text.split(",")
        return len(parts) == len(value) and all(map(means, parts, value))
    for read in (float, lambda t: int(t, 0), ast.literal_eval):
        try:
            return read(text) == value
        except (ValueError, SyntaxError, OverflowError):
            continue
    return False


def _run_mistake(mistake: Mistake) -> Outcome:
    """A config file, a task or a λ of a user's own with a mistake in it."""
    with tempfile.TemporaryDirectory() as own:
        path, argv = write_mistake(mistake, Path(own))
        sys.path.insert(0, own)
        try:
            ending, accepted = _reach_training(argv)
        finally:
            sys.path.remove(own)
            sys.modules.pop(path.stem, None)
        if mistake.expected == "traceback":
            if ending.error is None:
                return Outcome("a bug in one line", f"a user's bug lost its traceback: {ending.err[:200]!r}")
            frames = [frame.filename for frame in traceback.extract_tb(ending.error.__traceback__)]
            frames.append(getattr(ending.error, "filename", ""))  # of a syntax error
            missing = str(path) not in frames and str(path) not in str(ending.error)
            failure = f"a user's bug without the user's file: {traceback_failure(ending.error)}" if missing else None
            return Outcome("traceback of the user's file", failure)
        if ending.error is not None:
            return Outcome("traceback", f"traceback: {traceback_failure(ending.error)}")
        if accepted or mistake.expected == "accepted":
            wrong = bool(accepted) != (mistake.expected == "accepted")
            return Outcome(
                "accepted" if accepted else "refused", f"accepted or not: {ending.err[:200]!r}" if wrong else None
            )
        failure = line_failure(ending.err, (*mistake.names, path.stem))
        return Outcome("refused in one line" if failure is None else "refused otherwise", failure)
