"""Where a result comes from."""

import os
import subprocess

from loglinear_jax.provenance import commit


def test_the_commit_is_that_of_this_checkout_whatever_git_is_told(tmp_path, monkeypatch):
    """As a hook of another repository tells it, which runs this code."""
    expected = commit()
    name = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", tmp_path, *command], env=os.environ | name, check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / ".git" / "index"))
    assert commit() == expected
