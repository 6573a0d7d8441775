"""Training the variants of cells through submitit, here, so many at a time, or as a SLURM array: starting them, saying what
becomes of them, and stopping them when asked to."""

from __future__ import annotations

import abc
import datetime
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import UncompletedJobError

from loglinear_jax.command_line import FAILED, INTERRUPTED
from loglinear_jax.config import ConfigError
from loglinear_jax.progress import LOG_FILE_SECONDS
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.sweep.states import State, Tracked
from loglinear_jax.sweep.worker import Worker

YEAR_MINUTES = 60 * 24 * 365  # submitit ends a local job after a time that must be given
POLL_SECONDS = 0.5
MOST_OF_ARRAY = 1_000  # cells at a time
MOST_TIMEOUTS = 1_000  # each saves first, so there is progress from one to the next
MOST_RESTARTS = 2  # of a variant that was killed
Train = Callable[[list[str]], int]  # the command `train`: its exit code, by run.py's arguments


def gpus_here() -> list[str]:
    """Lists what CUDA_VISIBLE_DEVICES calls each GPU of this machine; JAX is not asked, as it would take their memory."""
    if os.environ.get("JAX_PLATFORMS", "cuda") not in ("cuda", "gpu", "cuda,cpu"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))] if listed.returncode == 0 else []


class Jobs(abc.ABC):
    """Variants that are to run, `waiting`, and the jobs of those that do, `running`.

    Args:
        cells: the variants.
        out: folder of the workdirs, with logs in .sweep/.
        train: the command `train`.
    """

    def __init__(self, cells: Sequence[Tracked], out: Path, train: Train):
        self.train = train
        self.waiting = deque(cells)
        self.running: dict[str, tuple[Tracked, submitit.Job]] = {}
        self.stopping = False
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.logs = (out / ".sweep" / f"{started}-{os.getpid()}").absolute()
        self._stopped = self.logs / "stopped"
        # Cells that compile the same program do so once.
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str((out / ".sweep" / "compiled").absolute()))
        shortest = os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
        self.environment = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": shortest}

    @abc.abstractmethod
    def start(self) -> list[Tracked]:
        """Starts what there is room for."""

    def stop(self) -> None:
        """Starts no more, and has what runs save and end."""
        self.stopping = True
        self.waiting.clear()
        self.logs.mkdir(parents=True, exist_ok=True)
        self._stopped.touch()
        for _, job in self.running.values():
            if not job.done():
                self._end(job)

    @abc.abstractmethod
    def _end(self, job: submitit.Job) -> None:
        """Sends SIGTERM to what runs, and drops what does not yet."""

    def poll(self) -> list[Tracked]:
        """The cells that have ended since the last call, each with its state."""
        ended = []
        for name, (tracked, job) in list(self.running.items()):
            if job.done():
                del self.running[name]
                self._set_outcome(tracked, job)
                ended.append(tracked)
        return ended

    def _set_outcome(self, tracked: Tracked, job: submitit.Job) -> None:
        """The state of a cell whose job has ended: by the exit codes of its tasks where they have one, and by the workdir."""
        tasks = [job.task(number) for number in range(job.num_tasks)]
        # Where one fails, the others are ended without a code.
        last = {None: 1, INTERRUPTED: 2, 0: 3}
        code, task = min(((_exit_code(task), task) for task in tasks), key=lambda ended: last.get(ended[0], 0))
        tracked.look(tracked.of.read_summary())
        if code == 0:
            tracked.state = State.FINISHED
        elif tracked.state in (State.FINISHED, State.IN_USE):
            return
        elif code is None and not self.stopping:
            self._was_killed(tracked, job)
        elif code not in (None, INTERRUPTED):
            tracked.log = Path(task.paths.stderr)
            tracked.state, tracked.why = State.FAILED, _last_line(tracked.log)

    def _was_killed(self, tracked: Tracked, job: submitit.Job) -> None:
        """Has the variant started again, MOST_RESTARTS times at most, and not if SLURM was asked to end it."""
        how = "" if isinstance(job, submitit.LocalJob) else f" ({job.state})"  # here submitit does not know
        tracked.why = f"its process ended without a word{how}: was it killed?"
        if tracked.restarts < MOST_RESTARTS and not job.state.startswith("CANCELLED"):
            tracked.restarts += 1
            tracked.why += f" It is started again ({tracked.restarts} of {MOST_RESTARTS})"
            self.waiting.append(tracked)
        else:
            tracked.state = State.FAILED


# They say how much of a GPU's memory JAX takes. Where none is set, cells that share a GPU have equal parts of MEMORY_SHARE of
# its memory.
MEMORY_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
MEMORY_SHARE = 0.9


class LocalJobs(Jobs):
    """Jobs on this machine, one process for each place.

    Args:
        cells, out, train: as in `Jobs`.
        places: the GPU of each, or several with commas between them, or None; a place may be named several times.
    """

    def __init__(self, cells: Sequence[Tracked], out: Path, train: Train, places: Sequence[str | None]):
        super().__init__(cells, out, train)
        self.free = list(places)
        sharing = max(map(places.count, places))
        if sharing > 1 and places[0] is not None and not any(name in os.environ for name in MEMORY_VARIABLES):
            self.environment[MEMORY_VARIABLES[0]] = f"{MEMORY_SHARE / sharing:.3f}"
        self._places: dict[str, str | None] = {}

    def start(self) -> list[Tracked]:
        started = []
        while self.waiting and self.free:
            tracked = self.waiting.popleft()
            tracked.look(tracked.of.read_summary())  # another sweep may have had it meanwhile
            if tracked.state not in (State.IN_USE, State.FINISHED):
                self._start(tracked)
            started.append(tracked)
        return started

    def _start(self, tracked: Tracked) -> None:
        gpu = self.free.pop(0)
        chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        # A folder of its own for each: submitit's job numbers are those of processes, which come again.
        executor = submitit.AutoExecutor(self.logs / tracked.folder_name, cluster="local")
        executor.update_parameters(timeout_min=YEAR_MINUTES)
        # Ctrl-C in a terminal is for this process alone, which then stops the others: they inherit that it is blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            job = executor.submit(Worker(self.train, tracked.arguments, self.environment | chosen, self._stopped))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        tracked.state, tracked.place, tracked.why = State.RUNNING, "here" if gpu is None else f"GPU {gpu}", ""
        tracked.log = Path(job.paths.stderr)
        self._places[tracked.name] = gpu
        self.running[tracked.name] = (tracked, job)

    def poll(self) -> list[Tracked]:
        ended = super().poll()
        self.free += [self._places.pop(tracked.name) for tracked in ended]
        return ended

    def _end(self, job: submitit.Job) -> None:
        os.kill(int(job.job_id), signal.SIGTERM)  # submitit's process hands it on to the cell's


class SlurmJobs(Jobs):
    """Jobs under SLURM, as one array, and another of those that are started again.

    Args:
        cells, out, train: as in `Jobs`.
        parameters: of submitit's AutoExecutor, such as slurm_partition.
        at_once: how many variants run at a time; None: all.

    Raises:
        ConfigError: for parameters that submitit does not know, or without SLURM.
    """

    def __init__(
        self,
        cells: Sequence[Tracked],
        out: Path,
        train: Train,
        parameters: Mapping[str, Any],
        at_once: int | None = None,
    ):
        super().__init__(cells, out, train)
        try:
            self.executor = submitit.AutoExecutor(self.logs, cluster="slurm", slurm_max_num_timeout=MOST_TIMEOUTS)
            self.executor.update_parameters(slurm_array_parallelism=at_once or MOST_OF_ARRAY, **parameters)
        except RuntimeError as error:
            raise ConfigError(f"--cluster=slurm: {error}") from error
        except (NameError, ValueError) as error:
            raise ConfigError(f"--slurm: {' '.join(str(error).split())}") from error

    def start(self) -> list[Tracked]:
        cells = list(self.waiting)
        self.waiting.clear()
        if not cells:
            return []
        jobs = self.executor.submit_array(
            [Worker(self.train, tracked.arguments, self.environment, self._stopped) for tracked in cells]
        )
        for tracked, job in zip(cells, jobs, strict=True):
            tracked.state, tracked.place, tracked.why = State.QUEUED, f"job {job.job_id}", ""
            tracked.log = Path(job.paths.stderr)
            self.running[tracked.name] = (tracked, job)
        return cells

    def poll(self) -> list[Tracked]:
        ended = super().poll()
        for tracked, job in self.running.values():
            tracked.state = State.RUNNING if job.state == "RUNNING" else State.QUEUED
        return ended

    def _end(self, job: submitit.Job) -> None:
        job.cancel(check=False)  # what runs then has SLURM's KillWait to save


def _exit_code(task: submitit.Job) -> int | None:
    """The exit code of run.py in this task, or None if the task's process ended without one."""
    if not task.paths.result_pickle.exists():
        return None
    try:
        return task.result()
    except UncompletedJobError:  # a bug, whose traceback is in the log
        return FAILED


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        lines = []
    while lines and (lines[-1].startswith(("For simplicity, JAX has removed", "-----"))):  # below the error itself
        lines.pop()
    return lines[-1].strip() if lines else "it left no message"


def supervise(variants: list[Tracked], jobs: Jobs) -> bool:
    """Runs jobs until none is left; returns whether it was stopped before, by Ctrl-C or SIGTERM."""
    began: dict[str, float] = {}
    counted = time.monotonic()
    with StopOnSignal() as stop:
        while jobs.running or jobs.waiting:
            if stop.requested and not jobs.stopping:
                say("Stopping: what runs saves and ends; a second Ctrl-C does not wait for it.")
                jobs.stop()
            started = jobs.start()
            for tracked in started:
                began[tracked.name], tracked.seconds = time.monotonic(), 0.0
            ended = jobs.poll()
            for tracked in ended:
                tracked.seconds = time.monotonic() - began[tracked.name]
            for tracked in started + ended:
                place = f" ({tracked.place})" if tracked.state in (State.RUNNING, State.QUEUED) else ""
                after = f" after {tracked.seconds / 60:.1f} min" if tracked.seconds else ""
                say(f"{tracked.name}: {tracked.state}{place}{after}{tracked.why and ': ' + tracked.why}")
                if tracked.state is State.FINISHED:  # maybe by another sweep, meanwhile
                    tracked.why = tracked.of.keep()
            if time.monotonic() - counted >= LOG_FILE_SECONDS:
                counted = time.monotonic()
                say(counts(variants))
            time.sleep(POLL_SECONDS)
    return jobs.stopping


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def counts(variants: Sequence[Tracked]) -> str:
    """Counts variants by their state: "112 variant(s): 3 finished, 4 running, 105 not started"."""
    found = Counter(tracked.state for tracked in variants)
    return f"{len(variants)} variant(s): " + ", ".join(f"{found[state]} {state}" for state in State if found[state])


def end_report(variants: Sequence[Tracked]) -> str:
    """Lists what is left to do: of each variant that failed why, and where its log is; the others by their state."""
    failed = [tracked for tracked in variants if tracked.state is State.FAILED]
    left = [t for t in variants if t.state not in (State.FAILED, State.FINISHED)]
    lines = [f"{t.name}: {t.why}" + (f"\n    log: {t.log}" if t.log is not None else "") for t in failed]
    lines += [f"{t.name}: {t.state}" for t in left]
    lines += [f"{t.name}: {t.state}, {t.why}" for t in variants if t.state is State.FINISHED and t.why]
    return "\n".join([*lines, counts(variants)])
