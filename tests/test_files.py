"""Paths as users give them: the same rule for every argument."""

import os
import pwd
from pathlib import Path

import pytest

from loglinear_jax.files import local_path
from loglinear_jax.settings import SettingError


def test_a_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/runs/a", "workdir") == tmp_path / "runs" / "a"
    assert local_path(f"~{pwd.getpwuid(os.getuid()).pw_name}", "workdir").is_absolute()
    for plain in ("runs/~", "./~x", "gs:/x", "owner/name"):
        assert local_path(plain, "workdir") == Path(plain)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("~/runs", "~/runs: there is no home folder for ~: expected a path without it"),
        ("~nobody-here/x", "~nobody-here/x: there is no home folder for ~nobody-here: expected a path without it"),
        (
            "gs://bucket/run",
            "gs://bucket/run is an address: expected a path on this machine, as only local folders and",
        ),
    ],
)
def test_what_is_not_on_this_machine_is_named(monkeypatch, path, problem):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)  # as in a container, whose user has no entry
    with pytest.raises(SettingError) as raised:
        local_path(path, "task.cache")
    assert str(raised.value).startswith(f"task.cache: {problem}")
