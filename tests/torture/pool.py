"""Cases run in worker processes, so that a hang, a crash or a flood of memory is a finding and not the end of the campaign."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.torture.judge import Outcome

KINDS = ("settings", "workdirs", "calls", "kills", "disk")  # a file beside this one each
MEMORY = 1 << 30  # bytes by which a case may make its worker grow
PREPARING_S = 600
# Small programs, compiled once and run briefly, with the compiler's flags of the suite where that is what runs them. What is
# started as a user would start it drops XLA_FLAGS.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip(),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "HF_HUB_OFFLINE": "1",
}


def find_kind(name: str) -> Any:
    """The module of a kind: NUMBER of cases, LIMIT_S seconds for each, prepare(folder, cases), make_case(rng, number)
    and run_case(case, folder) -> Outcome. A case is made from the seed alone, and its str() tells it."""
    return importlib.import_module(f"tests.torture.{name}")


def made_case(kind: str, seed: int, number: int) -> Any:
    return find_kind(kind).make_case(random.Random(f"{seed} {kind} {number}"), number)


def run_cases(
    kind: str, numbers: Sequence[int], seed: int, workers: int, folder: Path, each: Callable[[], object]
) -> dict[int, Outcome]:
    """The outcome of each of these cases, by number. folder: where what they share is kept; each: called after every case."""
    outcomes: dict[int, Outcome] = {}
    left, lock = iter(numbers), threading.Lock()
    first = Worker(folder)
    failed = first.ask((kind, seed, list(numbers)), PREPARING_S)
    if failed.failure is not None:
        first.end()
        raise RuntimeError(f"{kind} can't be prepared: {failed.failure}")

    def work(worker: Worker) -> None:
        try:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                outcome = worker.ask((kind, seed, number), find_kind(kind).LIMIT_S)
                with lock:
                    outcomes[number] = outcome
                    each()
        finally:
            worker.end()

    threads = [threading.Thread(target=work, args=(w,)) for w in [first, *(Worker(folder) for _ in range(workers - 1))]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(outcomes.items()))


class Worker:
    """A process that runs one case after the other; replaced when one of them hangs it, ends it or takes too much memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.process, self.idle = None, False

    def ask(self, request: tuple, limit_s: float) -> Outcome:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, str(self.folder)), daemon=False)
            self.process.start()
            theirs.close()
            self.connection.recv()  # imported and ready: the limits are those of the case
        self.idle = False
        self.connection.send(request)
        before, deadline = self._memory(), time.monotonic() + limit_s
        while not self.connection.poll(0.02):
            grown = self._memory() - before
            if grown > MEMORY:
                self.end()
                return Outcome("took too much memory", f"memory: grew by {grown >> 20} MiB")
            if time.monotonic() > deadline:
                self.end()
                return Outcome("hung", f"hang: no end after {limit_s} s")
        try:
            outcome = self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            self.end()
            return Outcome("crashed", f"crash: the process ended with {code}")
        self.idle = True
        return outcome

    def _memory(self) -> int:
        """Resident bytes; 0 once the process has ended."""
        try:
            return int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf(
                "SC_PAGESIZE"
            )
        except (OSError, IndexError):
            return 0

    def end(self) -> None:
        """Ends the process with all that it started: at once if it is at work, else asked to first."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):  # it has ended already
            if self.idle:
                self.connection.send(None)
                self.process.join(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()
        self.process = None


def _serve(connection: Any, folder: str) -> None:
    os.setsid()  # with what it starts, one group to end
    os.environ |= ENVIRONMENT
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(folder) / "compiled"))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # what C++ writes; Python's own is kept by the judge
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    from loglinear_jax.commands import main, train  # noqa: F401
    from loglinear_jax.runs import training  # noqa: F401

    connection.send("ready")
    while (request := connection.recv()) is not None:
        kind, seed, number = request
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            os.chdir(empty)
            try:
                if isinstance(number, list):  # of all that will come
                    find_kind(kind).prepare(Path(folder), [made_case(kind, seed, n) for n in number])
                    outcome = Outcome("prepared")
                else:
                    outcome = find_kind(kind).run_case(made_case(kind, seed, number), Path(folder))
            except BaseException:
                outcome = Outcome("error of the campaign", f"error of the campaign: {traceback.format_exc()}")
            os.chdir(folder)
        connection.send(outcome)
