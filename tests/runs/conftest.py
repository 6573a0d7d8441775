"""A finished run, and copies of it to damage."""

import shutil

import pytest

from tests.runs.tiny import finish, start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    code, out, err = finish(start(workdir))
    assert code == 0, err
    return workdir, out, err


@pytest.fixture
def copied(undisturbed, tmp_path):
    """A copy of the finished run to damage."""
    workdir = tmp_path / "copy"
    shutil.copytree(undisturbed[0], workdir)
    return workdir
