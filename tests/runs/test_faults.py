"""Damaged checkpoints, killed processes, full disks, two processes: what can be saved is, and one line says what is wrong."""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import pytest

from loglinear_jax.config import ConfigError
from loglinear_jax.runs import load_run, read_run
from loglinear_jax.runs.writing import NoReadableCheckpoint
from loglinear_jax.train import ManySeeds
from tests.runs.tiny import assert_same_run, finish, start, wait_for_lines


def truncate(step_directory):
    for path in step_directory.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)


def is_one_line(text):
    return text.count("\n") == 1 and "Traceback" not in text


@pytest.mark.slow
def test_the_checkpoint_before_an_unreadable_one_is_used_and_named(undisturbed, copied, train):
    truncate(copied / "mlp_softplus" / "checkpoints" / "60")
    (copied / "mlp_softplus" / "outcome.json").unlink()
    code, _, err = train(copied)
    assert code == 0 and "mlp_softplus/checkpoints/60 can't be read" in err and "trying the one before it" in err
    assert "mlp_softplus: going on from step 50" in err and "linear: going on" not in err
    assert_same_run(copied, undisturbed[0])


def test_when_no_checkpoint_can_be_read_nothing_is_overwritten(copied, train):
    for path in (copied / "linear" / "checkpoints").iterdir():
        truncate(path)
    (copied / "linear" / "outcome.json").unlink()
    before = sorted(copied.rglob("*"))
    code, _, err = train(copied)
    assert code == 2 and "none of its checkpoints (40, 50, 60) can be read" in err and "Traceback" not in err
    assert sorted(copied.rglob("*")) == before
    with pytest.raises(NoReadableCheckpoint):
        load_run(copied, "linear")
    assert load_run(copied, "mlp_softplus").seeds == [0, 1]


def test_finished_stays_finished_without_checkpoints(undisturbed, copied, train, monkeypatch):
    """And an outcome is made again from the last checkpoint."""
    shutil.rmtree(copied / "linear" / "checkpoints")
    (copied / "mlp_softplus" / "outcome.json").unlink()
    (copied / "summary.json").unlink()
    monkeypatch.setattr(ManySeeds, "train_steps", None)
    code, _, err = train(copied)
    assert code == 0 and "linear: going on from" not in err
    assert read_run(copied).outcomes == read_run(undisturbed[0]).outcomes
    with pytest.raises(ConfigError, match="'linear' has no checkpoint in the folder linear/checkpoints"):
        load_run(copied, "linear")
    code, _, err = train(copied, "--config.train.num_steps=70")
    assert code == 2 and "linear is finished, but has no checkpoint to go on from" in err


def test_an_outcome_that_cannot_be_read_is_one_line(copied, train):
    message = "outcome.json can't be read: "
    (copied / "linear" / "outcome.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_run(copied)
    code, _, err = train(copied)
    assert code == 2 and is_one_line(err.splitlines()[-1] + "\n") and message in err


def test_a_run_that_has_ended_is_shown_where_nothing_can_be_written(copied, train, monkeypatch):
    def refused(self, mode="r", *arguments, **named):
        if set(mode) & set("wa+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return opened(self, mode, *arguments, **named)

    opened = type(copied).open
    monkeypatch.setattr(type(copied), "open", refused)
    assert train(copied)[0] == 0
    code, _, err = train(copied.with_name("new"))
    assert code == 1 and "config.json can't be written: Read-only file system" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(undisturbed, tmp_path):
    rng, workdir, kills = random.Random(0), tmp_path / "run", 0
    while kills < 4:
        process = start(workdir)
        wait_for_lines(workdir / "linear" / "metrics.jsonl", 1 + 3 * kills, process)
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.communicate()
        if process.returncode == 0:
            break
    code, _, err = finish(start(workdir))
    assert kills >= 2 and code == 0, err
    assert_same_run(workdir, undisturbed[0])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [4, 64])
def test_a_run_on_a_full_disk_goes_on_with_room(undisturbed, tmp_path, blocks):
    """Files of more than so many blocks of 512 bytes are refused."""
    workdir = tmp_path / "run"
    limited = ("sh", "-c", f'ulimit -S -f {blocks}; exec "$@"', "sh")
    only_read = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000"}
    code, _, err = finish(start(workdir, within=limited, env=only_read))
    said = re.findall(f"run.py: {re.escape(str(workdir))}.*", err)  # a thread of Orbax may be in the middle of a line
    assert code == 1 and len(said) == 1, err
    assert " can't be written: " in said[0] and "File too large" in said[0]
    code, _, err = finish(start(workdir))
    assert code == 0, err
    assert_same_run(workdir, undisturbed[0])


def test_too_little_memory_names_the_settings_to_reduce(tmp_path, train, monkeypatch):
    def too_much(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.\nmore")

    monkeypatch.setattr(ManySeeds, "train_steps", too_much)
    code, _, err = train(tmp_path / "run")
    assert code == 1 and "Traceback" not in err
    last = err.splitlines()[-1]
    assert "linear: cpu has too little memory: reduce train.num_seeds=2, train.batch_size=8" in last
    assert "Out of memory while trying to allocate 123 bytes." in last


@pytest.mark.slow
def test_a_second_process_is_refused_with_the_first_ones_number(tmp_path, train):
    """It may train another variant of the run meanwhile. A dead process holds no lock."""
    workdir, long = tmp_path / "run", "--config.train.num_steps=100000"
    first = start(workdir, long)
    wait_for_lines(workdir / "linear" / "metrics.jsonl", 1, first)
    code, _, err = train(workdir, long)
    assert code == 2 and is_one_line(err.splitlines()[-1] + "\n"), err
    assert f"{workdir}/linear is in use: process {first.pid} on {os.uname().nodename} trains in it" in err
    second = start(workdir, long, "--only=mlp_softplus")
    wait_for_lines(workdir / "mlp_softplus" / "metrics.jsonl", 1, second)
    first.kill()
    first.communicate()
    second.send_signal(signal.SIGTERM)
    assert finish(second)[0] == 130
    again = start(workdir, long)
    again.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        again.wait(2)
    again.send_signal(signal.SIGTERM)
    assert finish(again)[0] == 130
