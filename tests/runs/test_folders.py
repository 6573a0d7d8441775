"""Files of a run's folder."""

import errno
import fcntl
import os
import time

import pytest

from loglinear_jax.config import ConfigError, default_config
from loglinear_jax.runs import writing
from loglinear_jax.runs.folders import RunFolder, VariantFolder
from loglinear_jax.runs.writing import CannotWrite, only_process, replace_file


def record(step):
    return {"step": step, "val_loss": [0.5, None]}


def test_lines_that_a_kill_cut_off_or_past_the_checkpoint_are_dropped(tmp_path):
    folder = VariantFolder(tmp_path)
    folder.cut_metrics(0)  # nothing is there yet
    folder.append(folder.metrics_file, record(5))
    with folder.metrics_file.open("a", encoding="utf-8") as file:
        file.write('{"step": 1')
    assert folder.read_metrics() == [record(5)]
    folder.append(folder.metrics_file, record(10))
    assert folder.read_metrics() == [record(5), record(10)] and folder.read_metrics(until=5) == [record(5)]
    folder.cut_metrics(5)
    assert folder.read_metrics() == [record(5)]
    folder.metrics_file.write_bytes(b"\xff\x00\n" + folder.metrics_file.read_bytes())
    with pytest.raises(ConfigError, match=r"metrics\.jsonl can't be read: "):
        folder.read_metrics()


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, full_disk):
    path = tmp_path / "file"
    path.write_text("before", encoding="utf-8")
    with pytest.raises(CannotWrite, match=rf"^{path} can't be written: No space left on device;"):
        replace_file(path, lambda file: file.write("half of"))
    assert path.read_text(encoding="utf-8") == "before" and os.listdir(tmp_path) == ["file"]


def test_a_process_that_asks_whether_a_variant_is_in_use_is_in_no_runs_way(tmp_path, monkeypatch):
    """A sweep asks so for every variant, while others begin."""
    file, waited = tmp_path / "lock", []
    with file.open("a+", encoding="utf-8") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        # It has its answer while the run waits.
        monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(fcntl.flock(asking, fcntl.LOCK_UN)))
        with only_process(file):
            assert writing.is_held(file)
    assert waited


@pytest.mark.parametrize("argument", ["widths=[1, 2]", "name='a\\\\b'", "file='../../x'"])
def test_a_variant_that_can_not_be_the_name_of_a_folder_is_refused_before_training(argument, tmp_path):
    config = default_config(task="mqar")
    config.variants = f"linear,my_lams:Lam({argument})"
    with pytest.raises(ConfigError, match="the variant my_lams:Lam"):
        RunFolder(tmp_path / "run").prepare(config)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_does_not_keep_a_lock_from_being_taken(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "write", full)
    with only_process(tmp_path / "lock"):
        pass


def test_a_variant_whose_name_no_folder_can_have_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"the variant x{60}\.\.\.: its folder's name would have 300 bytes, expected at most 255"
    ):
        RunFolder(tmp_path / "run")._check_path(["x" * 300])
