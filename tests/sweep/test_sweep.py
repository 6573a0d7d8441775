"""Sweeps as a user starts them, with submitit's own executors: cells that are killed, fail, are stopped, preempted, kept."""

import functools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import submitit

from loglinear_jax.commands.main import main
from loglinear_jax.runs.folders import read_lines, write_record
from loglinear_jax.runs.loading import read_run
from loglinear_jax.runs.outcome import RunSummary
from loglinear_jax.runs.writing import only_process, write_json
from loglinear_jax.sweep.grid import read_grid
from loglinear_jax.sweep.jobs import MEMORY_VARIABLES, LocalJobs, _last_line, gpus_here, supervise
from loglinear_jax.sweep.states import State, Tracked, track
from loglinear_jax.sweep.worker import Worker
from tests.runs.tiny import ROOT, TINY, read_json

train = functools.partial(main, command="train", called="python run.py")
STEPS = {"endless": 20_000, "long": 1_200, "short": 20}

EVERY = {"eval_every": 20, "checkpoint_every": 100}
OWN = {"variants", "train.num_steps", *(f"train.{name}" for name in EVERY)}


def grid_file(folder, *names):
    """A grid with a cell for each name, whose beginning says how long it takes."""
    lines = ['keep_in = "kept"', "[settings]", 'variants = "linear"']
    settings = dict(argument.removeprefix("--config.").split("=", 1) for argument in TINY[2:])
    lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items() if name not in OWN]
    lines += [f"train.{name} = {every}" for name, every in EVERY.items()]
    for name in names:
        steps = STEPS[name.partition("-")[0]]
        lines += ["[[grid]]", f'name = "{name}"', 'config = "mqar"', f"settings.train.num_steps = {steps}"]
        lines += ["settings.train.stop_at = 0"]
    (folder / "grid.toml").write_text("\n".join(lines), encoding="utf-8")
    return folder / "grid.toml"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")


def sweep(grid, *arguments):
    return main(["sweep", str(grid), f"--out={grid.parent / 'runs'}", *arguments])


def meanwhile(workdir, number, signal_it, processes=1):
    """Calls signal_it(process number of the cell) once so many processes have trained in it, and a checkpoint of step `number`
    or later is on disk."""

    def wait():
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            if max(saved(workdir), default=-1) >= number and len(starts(workdir)) == processes:
                lock = (workdir / "linear" / "lock").read_text(encoding="utf-8")
                return signal_it(int(re.search(r"process (\d+)", lock)[1]))
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def starts(workdir):
    """From which step each process trained."""
    return [process["from_step"] for process in read_lines(workdir / "linear" / "processes.jsonl")]


def saved(workdir):
    """The steps of the checkpoints that are complete."""
    return [int(path.name) for path in (workdir / "linear" / "checkpoints").glob("*") if path.name.isdecimal()]


@pytest.mark.slow
def test_cells_that_are_killed_fail_and_are_preempted(tmp_path, capsys, monkeypatch):
    """The first start: one cell is killed, is started again, and is killed again; one fails, one ends well. The second: the
    killed one goes on from its checkpoint, is preempted, put back in the queue, and goes on from where it was. The third has
    nothing to do."""
    monkeypatch.setattr("loglinear_jax.sweep.jobs.MOST_RESTARTS", 1)
    grid, runs = grid_file(tmp_path, "long-killed", "short-other", "short"), tmp_path / "runs"
    (runs / "short-other").mkdir(parents=True)
    (runs / "short-other" / "notes.txt").write_text("", encoding="utf-8")
    killings = [
        meanwhile(runs / "long-killed", step, lambda process: os.kill(process, signal.SIGKILL), number)
        for number, step in ((1, 100), (2, 200))
    ]
    assert sweep(grid, "--workers=3") == 1
    for killing in killings:
        killing.join()
    out, err = capsys.readouterr()
    killed = "its process ended without a word: was it killed?"
    assert f"long-killed linear: {killed}\n    log: " in out
    refused = f"run.py: workdir {runs}/short-other holds no run, as there is no config.json, but notes.txt: "
    assert re.search(rf"^short-other linear: {refused}.*\n    log: ", out, re.MULTILINE)
    assert out.endswith("3 variant(s): 1 finished, 2 failed\n")
    assert "\nshort linear: running (here)\n" in err and "\nshort linear: finished after " in err
    assert refused in Path(re.findall("    log: (.*)", out)[1]).read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["short.json"]
    summary = read_json(tmp_path / "kept", "short.json")
    assert summary["command"].startswith("python run.py --config=mqar ")
    assert summary["variants"]["linear"]["last_step"] == 20

    assert sweep(grid, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["interrupted", "not started", "finished"]
    assert lines[-1] == "3 variant(s): 1 finished, 1 interrupted, 1 not started"

    reached = max(saved(runs / "long-killed")) + 100
    preempting = meanwhile(runs / "long-killed", reached, lambda process: os.kill(process, signal.SIGUSR2), processes=3)
    short = (runs / "short" / "linear" / "processes.jsonl").read_bytes()
    assert sweep(grid, "--only=long*,short") == 0
    preempting.join()
    assert capsys.readouterr().out == "2 variant(s): 2 finished\n"
    first, again, second, third = starts(runs / "long-killed")
    assert first == 0 and again >= 100 and second == reached - 100 and third >= reached and third % 5 == 0
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["long-killed.json", "short.json"]

    before = (runs / "long-killed" / "linear" / "processes.jsonl").read_bytes()
    assert sweep(grid, "--only=long*,short", f"--report={tmp_path / 'report'}") == 0
    out = capsys.readouterr().out
    assert out.startswith("2 variant(s): 2 finished\n") and out.endswith(f"{tmp_path}/report/report.html\n")
    assert {"curves-long-killed.png", "outcomes-short.csv"} <= {path.name for path in (tmp_path / "report").iterdir()}
    assert (runs / "long-killed" / "linear" / "processes.jsonl").read_bytes() == before
    assert (runs / "short" / "linear" / "processes.jsonl").read_bytes() == short
    assert len([path for path in (runs / ".sweep").iterdir() if path.name[0].isdecimal()]) == 2


@pytest.mark.slow
def test_a_sweep_that_is_stopped_saves_and_says_what_is_left(tmp_path):
    """By Ctrl-C in a terminal, which every process of the group gets. One cell runs, the other waits, the third is another
    process's."""
    grid, runs = grid_file(tmp_path, "endless", "endless-later", "endless-elsewhere"), tmp_path / "runs"
    (runs / "endless-elsewhere" / "linear").mkdir(parents=True)
    command = [sys.executable, "-m", "loglinear_jax", "sweep", str(grid), f"--out={runs}"]
    with only_process(runs / "endless-elsewhere" / "linear" / "lock"):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        meanwhile(runs / "endless", 100, lambda _: os.killpg(process.pid, signal.SIGINT))
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert out == (
        "endless linear: interrupted\nendless-later linear: not started\nendless-elsewhere linear: in use\n"
        "3 variant(s): 1 interrupted, 1 in use, 1 not started\n"
    )
    assert "Stopping: what runs saves and ends" in err and "endless linear: interrupted after " in err
    last = max(saved(runs / "endless"))
    (log,) = (path.read_text(encoding="utf-8") for path in (runs / ".sweep").rglob("*_log.err"))
    assert last >= 100 and f"linear: stopping at step {last}\n" in log


def test_a_cell_that_was_too_young_to_hear_the_signal_does_not_begin(tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    (tmp_path / "stopped").touch()
    try:
        assert Worker(train, ["--config=mqar", f"--workdir={tmp_path / 'run'}"], {}, tmp_path / "stopped")() == 130
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_variants_of_a_cell_are_trained_in_one_folder_and_kept_together(tmp_path, capsys):
    """Several at a time; what is finished is listed as such, and what is missing is trained."""
    grid, runs, kept = grid_file(tmp_path, "short"), tmp_path / "runs" / "short", tmp_path / "kept"
    variants = 'variants = "mlp_softplus,fixed"\nmodel.lam_hidden = 8'  # which fixed, by itself, does not read
    grid.write_text(grid.read_text(encoding="utf-8").replace('variants = "linear"', variants), encoding="utf-8")
    assert sweep(grid, "--workers=2", f"--report={tmp_path / 'report'}") == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 variant(s): 2 finished\n") and "short fixed: finished after " in err
    assert "analysis:" not in err and (tmp_path / "report" / "curves-short.png").exists()
    summary = read_json(runs, "summary.json")
    assert list(summary["variants"]) == ["mlp_softplus", "fixed"] and "--only" not in summary["command"]
    assert read_json(kept, "short.json") == {"config": read_json(runs, "config.json")} | summary
    assert [path.name for path in kept.iterdir()] == ["short.json"]
    again = read_run(kept / "short.json")
    assert again.outcomes == read_run(runs).outcomes and again.name == "short"

    shutil.rmtree(kept)
    (runs / "fixed" / "outcome.json").unlink()
    (runs / "summary.json").unlink()
    assert sweep(grid, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["finished", "interrupted"]
    (_, tracked) = track(read_grid(grid), read_grid(grid).cells, tmp_path / "runs")  # as another sweep began
    assert sweep(grid) == 0
    assert not supervise([tracked], LocalJobs([tracked], tmp_path / "runs", train, [None]))
    assert tracked.state is State.FINISHED  # meanwhile
    processes = [len(read_lines(runs / name / "processes.jsonl")) for name in ("mlp_softplus", "fixed")]
    assert processes == [1, 1]  # its last checkpoint was there
    assert list(read_json(kept, "short.json")["variants"]) == ["mlp_softplus", "fixed"]

    shutil.rmtree(runs)  # what is kept is enough; a longer grid trains the rest
    longer = grid.read_text(encoding="utf-8").replace('"mlp_softplus,fixed"', '"mlp_softplus,fixed,linear"')
    grid.write_text(longer, encoding="utf-8")
    assert sweep(grid) == 0
    assert [path.name for path in runs.iterdir() if path.is_dir()] == ["linear"]
    assert list(read_json(kept, "short.json")["variants"]) == ["mlp_softplus", "fixed", "linear"]


def test_the_list_has_names_or_commands(tmp_path, capsys):
    grid = grid_file(tmp_path, "short", "long-b")
    assert sweep(grid, "--list") == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["not started  short linear", "not started  long-b linear"]
    assert sweep(grid, "--list=commands") == 0
    assert capsys.readouterr().out.startswith("not started  python run.py --config=mqar ")


def test_folders_that_hold_something_else_are_named_before_anything_starts(tmp_path, capsys):
    """A workdir with a run of another config, or what is kept of another one."""
    grid, runs = grid_file(tmp_path, "short", "short-b"), tmp_path / "runs"
    tracked, _ = track(read_grid(grid), read_grid(grid).cells, runs)
    other = tracked.of.config
    other.train.num_steps = 30

    def refused(message, *more):
        assert sweep(grid, *more) == 2
        out, err = capsys.readouterr()
        assert out == "" and f"cell short: {message}" in err and err.count("\n") == 1

    tracked.of.kept.parent.mkdir()
    write_record(tracked.of.kept, other, RunSummary({}))
    refused(f"{tracked.of.kept} keeps the outcome of another config (train.num_steps: 30 → 20): give the same settings")
    tracked.of.kept.unlink()
    (runs / "short").mkdir(parents=True)
    write_json(runs / "short" / "config.json", other.to_dict())
    refused(f"{runs}/short holds a run with another config (train.num_steps: 30 → 20): give the same", "--list")
    assert [path.name for path in runs.iterdir()] == ["short"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands, of which sbatch and scancel write down how they are called."""
    commands = tmp_path / "commands"
    commands.mkdir()
    answers = {"srun": "", "sbatch": "Submitted batch job 12", "sacct": "", "scancel": ""}
    for name, answer in answers.items():
        script = f'#!/bin/sh\necho "$@" >> {commands}/{name}.log\necho "{answer}"\n'
        (commands / name).write_text(script, encoding="utf-8")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    return commands


def jobs_of(grid, *arguments):
    """(The cells, their jobs) of a sweep that is stopped before it starts any."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loglinear_jax.sweep.jobs.supervise", lambda cells, jobs: made.append((cells, jobs)) or True)
        assert sweep(grid, *arguments) == 130
    return made[0]


def test_slurm_gets_an_array_with_its_parameters(tmp_path, slurm, monkeypatch):
    """And the end of a cell is read from what submitit leaves; what is stopped is cancelled."""
    grid, runs = grid_file(tmp_path, "short-a", "short-b", "short-c"), tmp_path / "runs"
    arguments = ["--cluster=slurm", "--partition=gpu", "--time=240", "--gpus=2", "--workers=2", "--slurm=account=ours"]
    cells, jobs = jobs_of(grid, *arguments)
    assert jobs.start() == cells and not jobs.waiting
    (script,) = jobs.logs.glob("*_submission.sh")
    flags = set(re.findall(r"^#SBATCH --(.*)$", script.read_text(encoding="utf-8"), re.MULTILINE))
    assert flags >= {"partition=gpu", "time=240", "gpus-per-node=2", "account=ours", "array=0-2%2", "signal=USR2@90"}
    for index, (tracked, job) in enumerate(jobs.running.values()):
        worker = job.submission().function
        assert worker.arguments == tracked.arguments
        assert worker.arguments[-1] == f"--workdir={runs}/short-{'abc'[index]}"
        assert worker.checkpoint().function is worker
        assert (tracked.state, tracked.place, job.job_id) == (State.QUEUED, f"job 12_{index}", f"12_{index}")
    job = jobs.running["short-b linear"][1]
    job.paths.result_pickle.write_bytes(pickle.dumps(("success", 1)))
    job.paths.stderr.write_text("something\nrun.py: no memory\n\n", encoding="utf-8")
    (ended,) = jobs.poll()
    assert (ended.name, ended.state, ended.why) == ("short-b linear", State.FAILED, "run.py: no memory")
    killed, ended_job = jobs.running["short-a linear"]
    for state, again in ("OUT_OF_MEMORY", True), ("CANCELLED by 7", False):  # this one as somebody wanted
        jobs.running["short-a linear"] = killed, ended_job
        with monkeypatch.context() as patch:
            patch.setattr(submitit.SlurmJob, "done", lambda job: job is ended_job)
            patch.setattr(submitit.SlurmJob, "state", state)
            assert jobs.poll() == [killed] and list(jobs.waiting) == [killed] * again
        jobs.waiting.clear()
        assert killed.why.startswith(f"its process ended without a word ({state}): was it killed?")
        assert killed.state is (State.NOT_STARTED if again else State.FAILED)
    jobs.running = {"short-a linear": (killed, ended_job)} | jobs.running
    jobs.stop()
    assert (slurm / "scancel.log").read_text(encoding="utf-8").split() == ["12_0", "12_2"]


TWO_TASKS = "--cluster=slurm", "--slurm=nodes=2"


@pytest.mark.parametrize(
    ("codes", "state", "why"),
    [
        ((0, 0), State.FINISHED, ""),
        ((None, 1), State.FAILED, "run.py: no memory"),
        ((None, 0), State.NOT_STARTED, "its process ended without a word (FAILED): was it killed? It is started again"),
        ((130, 130), State.NOT_STARTED, ""),
    ],
)  # fmt: skip
def test_the_end_of_a_variant_that_several_tasks_train(codes, state, why, tmp_path, slurm, monkeypatch):
    (tracked,), jobs = jobs_of(grid_file(tmp_path, "short"), *TWO_TASKS)
    jobs.start()
    [(_, job)] = jobs.running.values()
    for number, code in enumerate(codes):
        if code is not None:
            job.task(number).paths.result_pickle.write_bytes(pickle.dumps(("success", code)))
        job.task(number).paths.stderr.write_text(f"run.py: {'no memory' * number}\n", encoding="utf-8")
    monkeypatch.setattr(submitit.SlurmJob, "done", lambda job: True)
    monkeypatch.setattr(submitit.SlurmJob, "state", "FAILED")
    assert jobs.poll() == [tracked] and tracked.state is state and tracked.why.startswith(why)
    assert state is not State.FAILED or tracked.log == job.task(1).paths.stderr


@pytest.mark.slow
def test_two_tasks_train_one_variant(tmp_path, slurm):
    """As srun starts them, on a device each."""
    (tracked,), jobs = jobs_of(grid_file(tmp_path, "short"), *TWO_TASKS)
    jobs.start()
    job = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "12", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}
    command = [sys.executable, "-m", "submitit.core._submit", str(jobs.logs)]
    places = [{"SLURM_PROCID": str(number), "SLURM_NODEID": str(number)} for number in range(2)]
    processes = [subprocess.Popen(command, env=os.environ | job | place, cwd=ROOT) for place in places]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    assert jobs.poll() == [tracked] and tracked.state is State.FINISHED
    outcome = read_json(tmp_path, "runs", "short", "summary.json")["variants"]["linear"]
    assert outcome["last_step"] == STEPS["short"]
    assert starts(tmp_path / "runs" / "short") == [0]


def test_each_worker_has_a_gpu_and_shares_it_if_there_are_more(tmp_path, monkeypatch):
    """Of each process the GPU, and which part of its memory."""
    for name in MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    grid = grid_file(tmp_path, *(f"short-{i}" for i in range(4)))
    started = []

    def submit(executor, worker):
        started.append(worker.environment)
        return submitit.LocalJob(executor.folder, str(os.getpid()))

    monkeypatch.setattr(submitit.AutoExecutor, "submit", submit)
    for places, part in (["0", "1"], None), (["0", "1", "0"], "0.450"):
        started.clear()
        cells = track(read_grid(grid), read_grid(grid).cells, tmp_path / "runs")
        jobs = LocalJobs(cells, tmp_path / "runs", train, places)
        assert len(jobs.start()) == len(places) and len(jobs.waiting) == 4 - len(places)
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in started] == places
        assert [environment.get(MEMORY_VARIABLES[0]) for environment in started] == [part] * len(places)


def test_wrong_usage_is_one_line(tmp_path, capsys, slurm):
    for arguments, message in (
        (["--config=mqar"], "--config is each cell's own: expected settings alone, --config.section.setting=value"),
        (["--partition=gpu"], "--partition is for --cluster=slurm: here --workers says how many variants run"),
        (["--gpus=2"], "--gpus=2: this machine has 0 for all variants: expected no more than that"),
        (["--cluster=slurm", "--slurm=x"], "--slurm=x: expected KEY=VALUE, such as account=ours"),
        (["--cluster=slurm", "--slurm=acount=x"], "--slurm: Unknown argument 'acount' for executor 'slurm'"),
        ([f"--report={tmp_path / 'grid.toml'}"], "grid.toml is a file, expected a folder"),
        (["--only=x*"], "no cell's name matches 'x*': there are short"),
    ):
        assert sweep(grid_file(tmp_path, "short"), *arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_the_gpus_of_this_machine_and_how_many_a_cell_has(tmp_path, monkeypatch):
    two = "GPU 0: A\nGPU 1: A"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for environment, listed, gpus in (
        ({}, two, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-ab"}, two, ["2", "GPU-ab"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, two, []),
        ({"JAX_PLATFORMS": "cpu"}, two, []),
        ({}, "No devices found.", []),
    ):
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n", encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert gpus_here() == gpus
    made = []
    monkeypatch.setattr("loglinear_jax.sweep.jobs.gpus_here", lambda: ["0", "1", "2", "3", "4"])
    monkeypatch.setattr("loglinear_jax.sweep.jobs.supervise", lambda cells, jobs: made.append(jobs) or True)
    for arguments, places in (
        ([], ["0", "1", "2", "3", "4"]),
        (["--workers=2"], ["0", "1"]),
        (["--gpus=2", "--workers=3"], ["0,1", "2,3", "0,1"]),
    ):
        assert sweep(grid_file(tmp_path, "short"), *arguments) == 130
        assert made.pop().free == places


def test_the_message_of_a_failed_variant_is_its_error_not_what_jax_writes_below_it(tmp_path):
    below = "-" * 20 + "\nFor simplicity, JAX has removed its internal frames from the traceback.\n"
    (tmp_path / "log").write_text("Traceback\nNameError: name 'e' is not defined\n" + below, encoding="utf-8")
    assert _last_line(tmp_path / "log") == "NameError: name 'e' is not defined"


def test_the_folder_of_a_variant_s_logs_has_a_name_that_a_folder_can_have():
    of = types.SimpleNamespace(cell=types.SimpleNamespace(name="λ" * 80))
    short, first, second = (Tracked(of, variant, ()).folder_name for variant in ("a", "x" * 200 + "1", "x" * 200 + "2"))
    assert short == "λ" * 80 + "--a"
    assert first != second and all(len(os.fsencode(name)) <= 255 for name in (first, second))
