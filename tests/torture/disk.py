"""No space left, no inodes left, or read-only: one line that names the file and what is free, exit code 1; and after making
room the same command comes to the same bits. On a small file system of its own, where the process may mount one."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.torture import runs
from tests.torture.judge import Outcome, last_exception, line_failure
from tests.torture.kills import ROOT

NUMBER = 20
LIMIT_S = 300
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS: mounts that end with this process
ROOM = "rw,size=64m,nr_inodes=100000"


@dataclasses.dataclass(frozen=True)
class Case:
    """What the file system has room for, as options of mount; from: the run that is in it before it becomes read-only."""

    task: str
    options: str
    stopped: bool = False

    def __str__(self) -> str:
        return f"{self.task} with {self.options}" + (", gone on with" if self.stopped else "")


def prepare(folder: Path, cases: Sequence[Case]) -> None:
    runs.make_text_flags(folder)
    runs.make_run(runs.run_flags("recall", folder), folder / "recall-stopped", 17)
    for task in {case.task for case in cases}:
        runs.make_run(runs.run_flags(task, folder), folder / task)


def make_case(rng: random.Random, number: int) -> Case:
    if number % 5 == 4:
        return Case("recall", "ro", stopped=rng.random() < 0.7)
    if number % 5 == 3:
        return Case("recall", f"nr_inodes={rng.randint(4, 250)}")
    return Case("text" if number % 5 == 2 else "recall", f"size={rng.randint(12, 1_400)}k")


def run_case(case: Case, folder: Path) -> Outcome:
    disk = Path("disk").absolute()
    disk.mkdir()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS) or _mount("--make-rprivate", "/"):
        return Outcome("skipped: this process may not mount")
    if _mount("-t", "tmpfs", "-o", ROOM if case.options == "ro" else case.options, "tmpfs", str(disk)):
        return Outcome("skipped: no file system could be mounted")
    try:
        if case.stopped:
            shutil.copytree(folder / "recall-stopped", disk / "run")
        if case.options == "ro":
            _mount("-o", "remount,ro", str(disk))
        failure = refused(case, folder, disk)
        if failure is not None and not failure.startswith("fits"):
            return Outcome("failed", failure)
        _mount("-o", f"remount,{ROOM}", str(disk))
        code, err = _run(case, folder, disk)
        if code or "Traceback" in err:
            return Outcome("failed", f"not finished with room: exit code {code}: {err.strip().splitlines()[-1][:300]}")
        shutil.copytree(
            disk / "run", "run"
        )  # threads of this process that were there before do not see the mounted one
        different = runs.difference(Path("run").absolute(), folder / case.task)
        ended = "there was room" if failure else "one line, then the same with room"
        return Outcome(ended, different and f"different: {different}")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def refused(case: Case, folder: Path, disk: Path) -> str | None:
    """What is wrong with how the run ends without room; "fits" if there was room."""
    code, err = _run(case, folder, disk)
    if "Traceback" in err:
        return f"traceback: {err.count(chr(10))} lines: {last_exception(err)}"
    if code == 0:
        return "fits"
    own = "\n".join(line for line in err.splitlines() if line.startswith("run.py:"))
    if failure := line_failure(own, (str(disk / "run"),)):
        return failure
    if not own.endswith(err.strip().splitlines()[-1]):
        return f"not the last line: {err.strip().splitlines()[-1][:200]}"
    if case.options != "ro" and not re.search(r"\d\S* ?[kMGT]?i?B? .*(free|left)|(free|left).*\d", own):
        return f"does not name it: what is free in {own[:300]!r}"
    allowed = (1, 2) if case.options == "ro" else (1,)
    return None if code in allowed else f"exit code {code}: {own[:200]}"


def _run(case: Case, folder: Path, disk: Path) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "run.py"), *runs.run_flags(case.task, folder), f"--workdir={disk / 'run'}"]
    process = subprocess.Popen(
        command, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        _, err = process.communicate()
        err += "\nTraceback (most recent call last)\nHang: no end within 120 s"
    return process.returncode, err


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode
