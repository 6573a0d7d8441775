"""Files of a run's folder."""

import contextlib
import errno
import fcntl
import os
import time

import pytest

from loglinear_jax.config import ConfigError
from loglinear_jax.runs import lock
from loglinear_jax.runs.workdir import Workdir
from loglinear_jax.runs.writing import CannotWrite, keep_aside, replace_file, writing


def record(step, variant="linear"):
    per_seed = {name: [0.5, None] for name in ("train_loss", "val_loss", "val_accuracy", "active")}
    rates = {name: 1.5 for name in ("seconds", "seed_steps_per_second", "tokens_per_second")}
    return {"variant": variant, "step": step} | per_seed | rates


def test_a_line_that_a_kill_cut_off_is_left_out_and_replaced(tmp_path):
    directory = Workdir(tmp_path)
    first, second = record(5), record(10)
    directory.append_metrics(first)
    with directory.metrics_file.open("a", encoding="utf-8") as file:
        file.write('{"variant": "lin')
    assert directory.read_metrics() == [first]
    directory.append_metrics(second)
    assert directory.read_metrics() == [first, second]


def test_what_is_past_a_checkpoint_is_replaced_by_what_comes_anew(tmp_path):
    directory = Workdir(tmp_path)
    for made in (record(5), record(10), record(15), record(5, "rope"), record(15, "rope")):
        directory.append_metrics(made)
    directory.append_metrics(record(8), after=5)
    assert directory.read_metrics() == [record(5), record(5, "rope"), record(15, "rope"), record(8)]
    assert [made["step"] for made in directory.read_metrics("linear")] == [5, 8]


def test_nothing_is_kept_under_a_name_that_is_taken(tmp_path):
    names = []
    for _ in range(3):
        (tmp_path / "a.json").write_text("", encoding="utf-8")
        names.append(keep_aside(tmp_path / "a.json").name)
    assert names == ["a.json.damaged", "a.json.damaged2", "a.json.damaged3"]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    path = tmp_path / "file"
    replace_file(path, lambda file: file.write("before"))

    def full(file):
        file.write("half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CannotWrite, match=rf"^{path} can't be written: No space left on device \([\d.,]+ MB free in "):
        replace_file(path, full)
    assert path.read_text(encoding="utf-8") == "before" and os.listdir(tmp_path) == ["file"]


def test_only_what_the_file_system_says_is_a_refusal(tmp_path):
    # As TensorStore says it: no OSError, but the words of the operating system.
    with pytest.raises(CannotWrite, match="Disk quota exceeded"), writing(tmp_path, quoted=True):
        raise ValueError('Error writing "params/0": Failed to write 46208 bytes to file 4: Disk quota exceeded')
    with pytest.raises(ValueError, match="Not a directory"), writing(tmp_path):
        raise ValueError("Not a directory: said by somebody's own code")
    with pytest.raises(AttributeError), writing(tmp_path):
        try:
            (tmp_path / "none").read_text(encoding="utf-8")
        except OSError:
            tmp_path.nope  # noqa: B018 - a bug, though it comes after an OSError


def test_a_record_that_cannot_be_written_names_its_file(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("loglinear_jax.runs.writing.to_disk", full)
    with pytest.raises(CannotWrite, match=r"metrics\.jsonl can't be written: Disk quota exceeded \("):
        Workdir(tmp_path).append_metrics(record(5))


def test_a_process_that_asks_whether_a_folder_is_in_use_is_in_no_runs_way(tmp_path, monkeypatch):
    """A sweep asks so for every cell, while others begin."""
    directory, waited = Workdir(tmp_path), []
    with directory.lock_file.open("a+", encoding="utf-8") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        # It has its answer while the run waits.
        monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(fcntl.flock(asking, fcntl.LOCK_UN)))
        with directory.hold():
            assert directory.is_in_use()
    assert waited


def test_a_run_is_in_the_way_however_long_another_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    with Workdir(tmp_path / "run").hold():
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"is in use: process {os.getpid()} on"), contextlib.ExitStack() as stack:
            stack.enter_context(Workdir(tmp_path / "run").hold())
        assert time.monotonic() - began >= 0.1
