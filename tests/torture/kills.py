"""Runs as users start them (own processes, the compiler's own optimisation), killed again and again at random moments, gone on
with, and finished: bit for bit what an undisturbed run is. And two processes in one folder: the second is refused.

A case is one run, killed eight times. Compiled programs are kept for all of them, for speed.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.torture import runs
from tests.torture.judge import Outcome, last_exception, line_failure

NUMBER = 16  # of 8 kills each, but for three with two processes in one folder
LIMIT_S = 1_200
KILLS = 8
NOT_OF_USERS = ("XLA_FLAGS",)  # in the environment of the campaign's own processes
ROOT = Path(__file__).parents[2]
SIGNALS = {"SIGKILL": 5, "SIGTERM": 2, "SIGINT": 2, "SIGINT twice": 1}
# Long enough to be hit anywhere, and with a checkpoint at nearly every moment.
LONGER = {
    "recall": {"train.num_steps": 800, "train.eval_every": 20, "train.checkpoint_every": 40},
    "text": {
        "train.num_steps": 160,
        "train.eval_every": 10,
        "train.checkpoint_every": 20,
        "train.steps_per_dispatch": 5,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """task: what is trained. kills: each as (signal, seconds after the start, or after the last evaluation if negative);
    none: two processes in one folder."""

    task: str
    kills: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        if not self.kills:
            return f"{self.task}: two processes in one folder"
        return f"{self.task}: " + ", ".join(f"{name} at {seconds:.2f} s" for name, seconds in self.kills)


def prepare(folder: Path, cases: Sequence[Case]) -> None:
    runs.make_text_flags(folder)
    for task in {case.task for case in cases}:
        process = start(task, folder, folder / task)
        _, err = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"an undisturbed run of {task} fails: {err}")


def make_case(rng: random.Random, number: int) -> Case:
    task = "text" if number % 4 == 1 else "recall"
    if number % 6 == 2:
        return Case(task, ())
    kills = [(rng.choices(list(SIGNALS), SIGNALS.values())[0], rng.uniform(0, 10)) for _ in range(KILLS)]
    return Case(task, (*kills[:-1], (kills[-1][0], -rng.uniform(0.001, 1.5))))  # the last one at the end of the run


def start(task: str, folder: Path, workdir: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        *runs.run_flags(task, folder, LONGER[task]),
        f"--workdir={workdir}",
    ]
    env = {name: value for name, value in os.environ.items() if name not in NOT_OF_USERS} | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run_case(case: Case, folder: Path) -> Outcome:
    workdir = Path("run").absolute()
    failure = two_processes(case.task, folder, workdir) if not case.kills else None
    for kill in case.kills:
        failure = failure or killed(case.task, folder, workdir, *kill)
    if failure is not None:
        return Outcome("failed", failure)
    process = start(case.task, folder, workdir)
    _, err = process.communicate(timeout=600)
    if process.returncode or "Traceback" in err:
        return Outcome("failed", f"not finished: exit code {process.returncode}: {err.strip().splitlines()[-1][:300]}")
    different = runs.difference(workdir, folder / case.task)
    ended = f"the same after {len(case.kills)} kills" if case.kills else "the second refused, the first the same"
    return Outcome(ended, different and f"different: {different}")


def killed(task: str, folder: Path, workdir: Path, name: str, seconds: float) -> str | None:
    """Starts or goes on, and ends that by a signal. What is wrong with how it ended; a run may have finished before."""
    process = start(task, folder, workdir)
    if seconds < 0:
        whole = len(runs.lines(folder / task / "metrics.jsonl"))
        while process.poll() is None and len(runs.lines(workdir / "metrics.jsonl")) < whole:
            time.sleep(0.01)
    deadline = time.monotonic() + abs(seconds)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    number = getattr(signal, name.split()[0])
    process.send_signal(number)  # nothing, if it has ended
    if "twice" in name:
        time.sleep(abs(seconds) % 0.3)
        process.send_signal(number)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"hang: no end within 60 s after {name} at {seconds:.2f} s"
    if "Traceback" in err and not last_exception(err).startswith("KeyboardInterrupt"):  # before Python reaches `main`
        return f"traceback: after {name} at {seconds:.2f} s: {last_exception(err)}"
    if process.returncode not in (0, 130, -number):
        return f"exit code {process.returncode}: after {name} at {seconds:.2f} s: {err.strip().splitlines()[-1:]}"
    return None


def two_processes(task: str, folder: Path, workdir: Path) -> str | None:
    """What is wrong with how a second process in a folder at work is refused; the first goes on and ends well."""
    first = start(task, folder, workdir)
    while first.poll() is None and len(runs.lines(workdir / "metrics.jsonl")) < 3:
        time.sleep(0.01)
    second = start(task, folder, workdir)
    _, err = second.communicate(timeout=300)
    _, first_err = first.communicate(timeout=300)
    if first.returncode or "Traceback" in first_err:
        return f"the first was disturbed: exit code {first.returncode}: {first_err.strip().splitlines()[-1][:300]}"
    if second.returncode != 2:
        return f"not refused: the second ends with {second.returncode}"
    failure = line_failure(err, (str(first.pid),)) or line_failure(err, (socket.gethostname(),))
    return failure and f"refused otherwise: {failure}"
