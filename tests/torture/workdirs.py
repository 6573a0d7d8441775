"""Damaged folders of runs: the same command goes on to the same bits, or says in one line what is damaged; nothing recorded is
lost without a word, and a finished variant is not trained again."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError, config_differences, read_config
from loglinear_jax.runs import NoReadableCheckpoint, load_run
from tests.torture import runs
from tests.torture.judge import Ending, Outcome, command_ending, last_exception, line_failure, traceback_failure

NUMBER = 200
LIMIT_S = 120
# Each as (task, evaluations after which it was stopped). The finished run of a task goes on from the stopped one, and is what
# that is to come to.
RUNS = {
    "recall-stopped": ("recall", 17),
    "recall": ("recall", None),
    "text-stopped": ("text", 4),
    "text": ("text", None),
}
RECORDS = (
    "config.json", "summary.json", "metrics.jsonl", "processes.jsonl", "corpus.json", "tokenizer.json", "learning_curves.png",
)  # fmt: skip


# --- Damages: of a file, of a folder; each leaves something else than it found, if it can --------------------------------


def deleted(path: Path, rng: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def truncated(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(len(content), 1))])


def flipped(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def key_removed(path: Path, rng: random.Random) -> None:
    """Of JSON, or of one line of it."""
    lines = (
        path.read_text(errors="replace", encoding="utf-8").split("\n")
        if path.suffix == ".jsonl"
        else [path.read_text(errors="replace", encoding="utf-8")]
    )
    index = rng.randrange(len(lines))
    try:
        value = inner = json.loads(lines[index])
    except ValueError:
        return truncated(path, rng)
    while isinstance(inner, dict) and inner:
        key = rng.choice(sorted(inner))
        if isinstance(inner[key], dict) and rng.random() < 0.5:
            inner = inner[key]
        else:
            del inner[key]
            break
    lines[index] = json.dumps(value)
    path.write_text("\n".join(lines), encoding="utf-8")


def line_removed(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().split(b"\n")
    del lines[rng.randrange(len(lines))]
    path.write_bytes(b"\n".join(lines))


def a_folder(path: Path, rng: random.Random) -> None:
    deleted(path, rng)
    path.mkdir()


def a_file(path: Path, rng: random.Random) -> None:
    deleted(path, rng)
    path.write_text("not a folder\n", encoding="utf-8")


def dangling(path: Path, rng: random.Random) -> None:
    deleted(path, rng)
    path.symlink_to("/no/such/place")


def noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randint(1, 500)))


def foreign(path: Path, rng: random.Random) -> None:
    """Files that are none of the run's, beside or in what is there."""
    folder = path if path.is_dir() else path.parent
    for name in ("metrics.jsonl.partial", ".nfs0001", "60.orbax-checkpoint-tmp-7", "99", "notes é.txt", "007"):
        target = folder / name
        if rng.random() < 0.5 and not target.exists():
            target.mkdir() if rng.random() < 0.3 else target.write_bytes(rng.randbytes(50))


def _written(text: str) -> Callable:
    def damage(path: Path, rng: random.Random) -> None:
        path.write_text(text, encoding="utf-8")

    damage.__name__ = f"content {text!r}"
    return damage


OF_FILES = (
    deleted, truncated, truncated, flipped, flipped, flipped, key_removed, line_removed, a_folder, dangling, noise, foreign,
    *(_written(text) for text in ("", "{}", "[]", "null", "\n\n", "3")),
)  # fmt: skip
OF_FOLDERS = (deleted, a_folder, a_file, dangling, foreign)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to copy and damages as (which, where, how): the files and folders are there only once the runs are made."""

    run: str
    damages: tuple[tuple[float, int], ...]

    def __str__(self) -> str:
        return f"{self.run}, {len(self.damages)} damages, as the failure tells"


def prepare(folder: Path, cases: Sequence[Case]) -> None:
    runs.make_text_flags(folder)
    needed = {RUNS[case.run][0] for case in cases}
    for name, (task, evaluations) in RUNS.items():
        if task not in needed:
            continue
        if evaluations is None:
            shutil.copytree(folder / f"{name}-stopped", folder / name)
        runs.make_run(runs.run_flags(task, folder), folder / name, evaluations)


def make_case(rng: random.Random, number: int) -> Case:
    run = rng.choices(list(RUNS), (4, 4, 1, 1))[0]
    return Case(run, tuple((rng.random(), rng.randrange(2**32)) for _ in range(rng.choice((1, 1, 2, 3)))))


def damage(workdir: Path, share: float, seed: int) -> tuple[Path, str]:
    """Damages something in a run's folder; returns what, relative to it, and how. share: below 0.4 a record, then a file of a
    checkpoint or of the events, then a byte in the arrays of a checkpoint, then a folder."""
    rng = random.Random(seed)
    inside = [path for name in ("checkpoints", "tensorboard") for path in sorted((workdir / name).rglob("*"))]
    files, folders = ([path for path in inside if test(path)] for test in (Path.is_file, Path.is_dir))
    steps = [path for path in folders if path.name.isdecimal() or path.name == "default"]
    choices, damages = [workdir / "checkpoints", *folders, *steps, *steps], OF_FOLDERS
    if share < 0.4:
        choices, damages = [workdir / name for name in RECORDS if (workdir / name).is_file()], OF_FILES
    elif share < 0.65:
        choices, damages = files, OF_FILES
    elif share < 0.75:
        choices, damages = [path for path in files if path.parent.parent.name == "default"][-40:], (flipped,)
    if not (choices := [path for path in choices if path.exists()]):
        return Path("."), "nothing left to damage"
    path, how = rng.choice(choices), rng.choice(damages)
    how(path, rng)
    return path.relative_to(workdir), how.__name__


def run_case(case: Case, folder: Path) -> Outcome:
    workdir = Path("run").absolute()
    shutil.copytree(folder / case.run, workdir)
    done = [damage(workdir, *drawn) for drawn in case.damages]
    outcome = _judged(case, folder, workdir, done)
    if outcome.failure is None:
        return outcome
    flipped_numbers = {path.name for path, how in done if how == "flipped"} & {"metrics.jsonl", "summary.json"}
    if outcome.failure.startswith("silent: records") and flipped_numbers:  # what a digit was, nothing can tell
        return Outcome("a flipped digit that can't be detected")
    shown = "; ".join(f"{path} {how}" for path, how in done)
    return dataclasses.replace(outcome, failure=f"{outcome.failure} [{shown}]")


def _judged(case: Case, folder: Path, workdir: Path, done: list[tuple[Path, str]]) -> Outcome:
    task, evaluations = RUNS[case.run]
    reference = folder / task
    before = [record for record in _recorded(workdir) if record in runs.records(reference)]
    flags = [*runs.run_flags(task, folder), f"--workdir={workdir}"]
    ending = command_ending(lambda: main(flags, command="train", called="python run.py"))
    names = tuple(dict.fromkeys(part for path, _ in done for part in path.parts)) or (".",)
    failure = _bad_ending(ending, names) or _lost_records(before, workdir, ending)
    if failure is None and ending.code == 0:
        finished = evaluations is None and "summary.json" not in names
        failure = _not_the_same(workdir, reference, _warned(ending, names), finished)
    unfinished = () if (workdir / "summary.json").exists() else ("summary.json",)
    failure = failure or _bad_reading(workdir, reference, (*names, *unfinished))
    said = " with a warning" if ending.code == 0 and _warned(ending, names) else ""
    return Outcome(f"exit code {ending.code}{said}" if ending.error is None else "traceback", failure)


def _bad_ending(ending: Ending, names: tuple[str, ...]) -> str | None:
    if ending.error is not None:
        return f"traceback: {traceback_failure(ending.error)}"
    if "Traceback" in ending.err:
        return f"traceback on stderr: {last_exception(ending.err)}"
    if ending.code == 0:
        return None
    return line_failure("\n".join(line for line in ending.err.splitlines() if line.startswith("run.py:")), names)


def _recorded(workdir: Path) -> list[dict]:
    """Every whole record in metrics.jsonl and in copies of it that were kept aside."""
    files = [path for path in workdir.rglob("metrics.jsonl*") if path.is_file()]
    lines = [line for path in files for line in runs.lines(path)]
    return [record for line in lines if (record := runs.timeless_record(line)) is not None]


def _lost_records(before: list[dict], workdir: Path, ending: Ending) -> str | None:
    after = _recorded(workdir)
    lost = [record for record in before if record not in after]
    return f"records lost: {len(lost)} of {len(before)}, exit code {ending.code}" if lost else None


def _warned(ending: Ending, names: tuple[str, ...]) -> bool:
    """Whether a line on stderr tells of something that was damaged."""
    said = (
        "can't be read",
        "damaged",
        "gone",
        "lost",
        "missing",
        "aside",
        "again",
        "not a",
        "no checkpoint",
        "kept",
        "lacks",
    )
    lines = [line for line in ending.err.splitlines() if any(word in line for word in said)]
    return any(name in line for name in names for line in lines)


def _not_the_same(workdir: Path, reference: Path, warned: bool, finished: bool) -> str | None:
    """What a run that ended well has not in common with the undamaged one, and did not tell."""
    config = [read_config(path / "config.json") for path in (workdir, reference)]
    if different := config_differences(*config):
        return f"other settings: in config.json: {different[0]}"
    steps = [(record["variant"], record["step"]) for record in runs.records(workdir)]
    if len(steps) != len(set(steps)):
        return "records twice: in metrics.jsonl"
    lines = [line for line in runs.lines(workdir / "processes.jsonl") if b'"from_step": 0' in line]
    from_start = [
        variant
        for variant in runs.outcomes(reference)
        if sum(f'"variant": "{variant}"'.encode() in x for x in lines) > 1
    ]
    if finished and from_start:
        return f"a finished variant was trained again: {from_start}"
    if (missing := [r for r in runs.records(reference) if r not in runs.records(workdir)]) and not warned:
        return f"silent: records: {len(missing)} are not those of the undamaged run"
    try:
        if runs.outcomes(workdir) != runs.outcomes(reference) and not warned:
            return "silent: records: other outcomes in summary.json"
    except (OSError, ValueError) as error:
        return f"no summary after exit code 0: {error}"
    return None


def _bad_reading(workdir: Path, reference: Path, names: tuple[str, ...]) -> str | None:
    """What is wrong with reading the run back, and with its report."""
    for variant in runs.outcomes(reference):
        try:
            run = load_run(workdir, variant)
        except (ConfigError, NoReadableCheckpoint) as error:
            if failure := line_failure(str(error), names):
                return f"load_run: {failure}"
        except Exception as error:
            return f"traceback of load_run: {traceback_failure(error)}"
        else:
            done = run.step == runs.outcomes(reference)[variant]["last_step"]
            if done and runs.parameters(workdir, variant) != runs.parameters(reference, variant):
                return f"silent: other parameters of {variant}"
    ending = command_ending(
        lambda: main(["analyze", f"--workdir={workdir}", "--out=report", "--sections=tables,curves"])
    )
    if ending.error is not None:
        return f"traceback of analyze: {traceback_failure(ending.error)}"
    if "Traceback" in ending.err:
        return f"traceback of analyze: {last_exception(ending.err)}"
    lines = [
        line for line in ending.err.splitlines() if line.startswith(("analysis:", "loglinear_jax")) and ending.code
    ]
    return next((f"analyze: {failure}" for line in lines if (failure := line_failure(line, names))), None)
