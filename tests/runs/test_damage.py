"""Damaged folders, full disks, two processes: nothing recorded is lost, nothing is made up, and one line says what is wrong."""

import errno
import json
import os
import re
import shutil
import signal

import jax
import numpy as np
import pytest

from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError
from loglinear_jax.runs import load_run, read_run
from loglinear_jax.runs.errors import NoReadableCheckpoint
from loglinear_jax.train import ManySeeds
from tests.runs.tiny import ROOT, TINY, assert_same_run, finish, start, wait_for_lines


@pytest.fixture
def train(monkeypatch, capsys):
    """A command line in this process: (exit code, standard error)."""
    monkeypatch.chdir(ROOT)

    def call(workdir, *arguments):
        code = main(["train", *TINY, *arguments, f"--workdir={workdir}"])
        return code, capsys.readouterr().err

    return call


def truncate(step_directory):
    for path in step_directory.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)


def is_one_line(text):
    return text.count("\n") == 1 and "Traceback" not in text


def without_outcome(workdir, *variants):
    """As if the run had been stopped before it recorded their outcomes."""
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    for variant in variants:
        del summary["variants"][variant]
    (workdir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def test_a_damaged_newest_checkpoint_falls_back(undisturbed, copied):
    truncate(copied / "checkpoints" / "mlp_softplus" / "60")
    without_outcome(copied, "mlp_softplus")
    summary = json.loads((copied / "summary.json").read_text(encoding="utf-8"))
    outcome = summary["variants"]["linear"]  # which is not trained again
    test_loss, outcome["test_loss"] = outcome["test_loss"], [1.0, 2.0]
    (copied / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    code, _, err = finish(start(copied))
    assert code == 0, err
    assert "mlp_softplus/60 can't be read" in err and "trying the one before it" in err
    assert "mlp_softplus: going on from step 50" in err
    summary = json.loads((copied / "summary.json").read_text(encoding="utf-8"))
    assert summary["variants"]["linear"]["test_loss"] == [1.0, 2.0]
    summary["variants"]["linear"]["test_loss"] = test_loss
    (copied / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert_same_run(copied, undisturbed[0])


def test_when_no_checkpoint_can_be_read_nothing_is_overwritten(copied, train):
    for path in (copied / "checkpoints" / "linear").iterdir():
        truncate(path)
    without_outcome(copied, "linear")
    before = sorted(copied.rglob("*"))
    code, err = train(copied)
    assert code == 2 and "none of its checkpoints (40, 50, 60) can be read" in err and "Traceback" not in err
    assert sorted(copied.rglob("*")) == before
    with pytest.raises(NoReadableCheckpoint):
        load_run(copied, "linear")
    assert load_run(copied, "mlp_softplus").seeds == [0, 1]


def test_finished_stays_finished_without_checkpoints(undisturbed, copied, train):
    shutil.rmtree(copied / "checkpoints" / "linear")
    kept = {name: (copied / name).read_bytes() for name in ("summary.json", "metrics.jsonl", "processes.jsonl")}
    code, err = train(copied)
    assert code == 0 and "linear: its checkpoint of step 60, the last, is gone. Its outcome stands; --retrain" in err
    assert kept == {name: (copied / name).read_bytes() for name in kept}
    with pytest.raises(ConfigError, match="'linear' has no checkpoint: the folder checkpoints/linear is missing"):
        load_run(copied, "linear")
    code, _, err = finish(start(copied, "--retrain"))
    assert code == 0 and "till it is trained again" in err
    assert_same_run(copied, undisturbed[0])
    assert (copied / "metrics.jsonl.earlier").read_bytes() == kept["metrics.jsonl"]
    assert (copied / "summary.json.earlier").read_bytes() == kept["summary.json"]


def test_finished_stays_finished_when_another_variant_goes_on(copied, train):
    """One variant is finished, and its checkpoints are gone; the other one was stopped."""
    without_outcome(copied, "mlp_softplus")
    shutil.rmtree(copied / "checkpoints" / "linear")
    shutil.rmtree(copied / "checkpoints" / "mlp_softplus" / "60")
    curves, outcome = read_run(copied).metrics("linear"), read_run(copied).outcomes["linear"]
    code, err = train(copied)
    assert code == 0 and "linear: its checkpoint of step 60, the last, is gone" in err
    assert "mlp_softplus: going on from step 50" in err and "linear: 2 seed(s)" not in err
    run = read_run(copied)
    assert run.outcomes["linear"] == outcome and list(run.outcomes) == ["linear", "mlp_softplus"]
    jax.tree.map(np.testing.assert_array_equal, run.metrics("linear"), curves)
    # With a damaged record of its outcome, nothing is left of what was finished but its curves.
    (copied / "summary.json").write_text("{", encoding="utf-8")
    before = (copied / "metrics.jsonl").read_bytes()
    code, err = train(copied)
    assert code == 2 and "linear is finished, as its metrics say, but its checkpoints are gone" in err
    assert "--retrain" in err and (copied / "metrics.jsonl").read_bytes() == before


def test_a_run_of_before_there_were_tests_goes_on(copied, train, capsys):
    """And its accuracies, of which some have a test, are compared in validation."""
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    del config["train"]["num_test"]
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    without_outcome(copied, "mlp_softplus")
    summary = json.loads((copied / "summary.json").read_text(encoding="utf-8"))
    for name in ("test_loss", "test_accuracy"):
        del summary["variants"]["linear"][name]
    (copied / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    code, err = train(copied)
    assert code == 2 and is_one_line(err) and "train.num_test: 1000 → 40" in err
    assert main(["train", *TINY, "--config.train.num_test=1_000", f"--workdir={copied}"]) == 0
    run = read_run(copied)
    assert run.outcomes["linear"].test_accuracy is None and len(run.outcomes["mlp_softplus"].test_accuracy) == 2
    assert f"| {100 * np.mean(run.outcomes['mlp_softplus'].best_accuracy):.1f} ±" in (shown := capsys.readouterr().out)
    assert "best validation accuracy %" in shown and "test accuracy" not in shown


def test_a_folder_without_a_config_is_no_run(copied, train, tmp_path):
    (copied / "config.json").unlink()
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and path.name != "lock"}
    code, err = train(copied)
    assert code == 2 and is_one_line(err) and "there is no config.json" in err
    assert before == {path: path.read_bytes() for path in before}
    (tmp_path / "started").mkdir()  # killed before it wrote anything
    for left in ("lock", "config.json.partial"):
        (tmp_path / "started" / left).write_text("{", encoding="utf-8")
    code, err = train(tmp_path / "started", "--config.train.num_steps=10", "--config.variants=linear")
    assert code == 0, err


@pytest.mark.parametrize("where", ["checkpoints", "checkpoints/linear", "tensorboard/linear"])
def test_a_file_where_a_folder_should_be(copied, train, where):
    without_outcome(copied, "linear")
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_bytes(b"".join(lines[:5]))  # stopped early on
    shutil.rmtree(copied / where)
    (copied / where).write_text("", encoding="utf-8")
    before = (copied / "metrics.jsonl").read_bytes()
    code, err = train(copied)
    assert code == 1 and "Traceback" not in err
    assert re.search(
        rf"{copied}/{where}\S* can't be written: (it is a file, expected a folder|Not a directory)",
        err.splitlines()[-1],
    )
    assert (copied / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"[]", b'{"variants": {"linear": {}}}', b"\xff\x00\x93"])
def test_a_damaged_summary_is_derived_again(undisturbed, copied, train, content):
    (copied / "summary.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"summary\.json can't be read"):
        read_run(copied)
    code, err = train(copied)
    assert code == 0 and "kept as summary.json.damaged" in err and "going on from" not in err
    assert (copied / "summary.json.damaged").read_bytes() == content
    assert read_run(copied).outcomes == read_run(undisturbed[0]).outcomes


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_accuracy", [0.5]), ("seeds", "0"), ("best_loss", [None, "low"]), ("params", -1), ("metric", "speed")],
)
def test_an_outcome_that_cannot_be_is_damage(copied, name, value):
    summary = json.loads((copied / "summary.json").read_text(encoding="utf-8"))
    summary["variants"]["linear"][name] = value
    (copied / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"summary\.json can't be read: of another version: linear: "):
        read_run(copied)


def test_damaged_metrics_are_named_and_kept(copied, train):
    lines = (copied / "metrics.jsonl").read_bytes().split(b"\n")
    damaged = [*lines[:3], b"\xff\x00", lines[4][:40], b'{"variant": "linear", "step": 30}', *lines[6:]]
    (copied / "metrics.jsonl").write_bytes(b"\n".join(damaged))
    assert len(read_run(copied).metrics("linear")["step"]) == 9
    code, err = train(copied)
    assert (
        code == 0 and "lines 4, 5, 6 can't be read and are left out; the file is kept as metrics.jsonl.damaged" in err
    )
    assert "linear: metrics.jsonl lacks the evaluations at step 20, 25, 30 (3 of 12)" in err
    assert (copied / "metrics.jsonl").read_bytes().split(b"\n") == [*lines[:3], *lines[6:]]
    assert (copied / "metrics.jsonl.damaged").read_bytes().split(b"\n") == damaged
    # And an outcome that is derived then does not claim seconds that it does not know.
    without_outcome(copied, "linear")
    assert train(copied)[0] == 0 and read_run(copied).outcomes["linear"].seconds is None


def test_metrics_that_end_too_early_are_told(copied, train):
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_bytes(b"".join(lines[:20]))
    code, err = train(copied)
    assert code == 0 and "mlp_softplus: metrics.jsonl lacks the evaluations at step 45, 50, 55, 60 (4 of 12)" in err
    (copied / "metrics.jsonl").unlink()
    (copied / "learning_curves.png").unlink()
    code, err = train(copied)
    assert code == 0 and "linear: metrics.jsonl lacks the evaluations at step 5, 10, 15, 20, 25, ... (12 of 12)" in err
    assert (copied / "learning_curves.png").exists()
    assert read_run(copied).metrics("linear")["val_loss"].shape == (0, 2)


def test_damaged_processes_do_not_keep_a_run_from_its_end(copied, train):
    (copied / "processes.jsonl").write_text('{"variant": "linear"}\n[]\nnot a line\n', encoding="utf-8")
    without_outcome(copied, "mlp_softplus")
    shutil.rmtree(copied / "checkpoints" / "mlp_softplus" / "60")
    code, err = train(copied)
    assert code == 0 and "lines 1, 2, 3 can't be read" in err
    assert len(json.loads((copied / "processes.jsonl").read_text(encoding="utf-8"))["provenance"]) == 2


def test_without_any_checkpoint_it_is_trained_again_and_nothing_is_lost(undisturbed, copied):
    """As after a full disk, or a kill, just before the only checkpoint was saved."""
    without_outcome(copied, "linear")
    shutil.rmtree(copied / "checkpoints" / "linear")
    before = (copied / "metrics.jsonl").read_bytes()
    code, _, err = finish(start(copied))
    assert code == 0 and "recorded up to step 60, but there is no checkpoint after step 0" in err
    assert (copied / "metrics.jsonl.earlier").read_bytes() == before
    assert_same_run(copied, undisturbed[0])


def test_a_run_that_has_ended_is_shown_where_nothing_can_be_written(undisturbed, copied, train, monkeypatch):
    def refused(self, mode="r", *arguments, **named):
        if set(mode) & set("wa+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return opened(self, mode, *arguments, **named)

    opened = type(copied).open
    monkeypatch.setattr(type(copied), "open", refused)
    assert train(copied)[0] == 0
    code, err = train(copied.with_name("new"))
    assert code == 1 and "config.json can't be written: Read-only file system" in err.splitlines()[-1]


# --- The machine ------------------------------------------------------------------------------------------------------


def test_what_the_disk_does_not_take_is_one_line(tmp_path):
    """Files of more than so many blocks of 512 bytes are refused. (That it then goes on: `python -m tests.torture disk`.)"""
    workdir, settings = tmp_path / "run", ("--config.variants=linear",)
    limited = ("sh", "-c", 'ulimit -S -f 24; exec "$@"', "sh")
    only_read = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000"}
    code, _, err = finish(start(workdir, *settings, within=limited, env=only_read))
    last = err.splitlines()[-1]
    assert code == 1 and "Traceback" not in err and len(err.splitlines()) < 20
    assert (
        f"run.py: {workdir / 'checkpoints/linear/10'} can't be written: File too large (" in last
        and "MB free in" in last
    )


def test_too_little_memory_names_the_settings_to_reduce(tmp_path, train, monkeypatch):
    def too_much(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.\nmore")

    monkeypatch.setattr(ManySeeds, "train_steps", too_much)
    code, err = train(tmp_path / "run")
    assert code == 1 and "Traceback" not in err
    last = err.splitlines()[-1]
    assert "linear: cpu has too little memory: reduce train.num_seeds=2, train.batch_size=8" in last
    assert "Out of memory while trying to allocate 123 bytes." in last


# --- Two processes ----------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_with_the_first_ones_number(tmp_path, train):
    workdir = tmp_path / "run"
    first = start(workdir, "--config.train.num_steps=100000")
    wait_for_lines(workdir / "metrics.jsonl", 1, first)
    before = (workdir / "config.json").stat().st_mtime_ns
    code, err = train(workdir, "--config.train.num_steps=100000")
    assert code == 2 and is_one_line(err), err
    assert f"{workdir} is in use: process {first.pid} on {os.uname().nodename} trains in it" in err
    assert (workdir / "config.json").stat().st_mtime_ns == before
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 130


def test_a_dead_process_holds_no_lock(tmp_path, train):
    workdir, short = tmp_path / "run", ("--config.train.num_steps=10", "--config.variants=linear")
    first = start(workdir, *short)
    wait_for_lines(workdir / "lock", 0, first)
    first.kill()
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    code, err = train(workdir, *short)
    assert code == 0, err
