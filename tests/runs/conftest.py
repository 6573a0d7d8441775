"""A finished run, and copies of it to damage."""

import contextlib
import io
import shutil

import pytest

from loglinear_jax.commands.main import main
from tests.runs.tiny import ROOT, TINY


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """(its folder, standard output, standard error) of a run that nothing interrupted."""
    workdir, out, err = tmp_path_factory.mktemp("undisturbed") / "run", io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*TINY, f"--workdir={workdir}"], command="train", called="python run.py")
    assert code == 0, err.getvalue()
    return workdir, out.getvalue(), err.getvalue()


@pytest.fixture
def copied(undisturbed, tmp_path):
    """A copy of the finished run to damage."""
    workdir = tmp_path / "copy"
    shutil.copytree(undisturbed[0], workdir)
    return workdir


@pytest.fixture
def train(monkeypatch, capsys):
    """A command line in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(ROOT)

    def call(workdir, *arguments):
        code = main([*TINY, *arguments, f"--workdir={workdir}"], command="train", called="python run.py")
        return code, *capsys.readouterr()

    return call
