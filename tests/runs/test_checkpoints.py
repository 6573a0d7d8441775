"""Checkpoints by themselves: the newest good one is found, whatever happened to those after it."""

import pickle
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loglinear_jax.runs.checkpoints import Checkpoints, on_this_machine


def state(step):
    return {"step": jnp.asarray(step), "params": jnp.arange(3000.0).reshape(50, 60) + step}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 10, 20 and 30."""
    directory = tmp_path_factory.mktemp("checkpoints") / "variant"
    with Checkpoints(directory) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state(step))
    return directory


def cut_file(rng, step):
    path = rng.choice(sorted(path for path in step.rglob("*") if path.is_file()))
    path.write_bytes(path.read_bytes()[: rng.randrange(max(path.stat().st_size, 1))])


def flip_byte(rng, step):
    path = rng.choice(sorted(p for p in step.rglob("*") if p.is_file() and p.stat().st_size))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def file_in_its_place(rng, step):
    shutil.rmtree(step)
    step.write_text("", encoding="utf-8")


DAMAGES = st.sampled_from([cut_file, flip_byte, file_in_its_place])


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(DAMAGES, min_size=1, max_size=2))
def test_the_newest_good_checkpoint_is_found_after_any_damage(saved, rng, damages):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "variant"
        shutil.copytree(saved, directory)
        for step, damage in zip((30, 20), damages, strict=False):
            damage(rng, directory / str(step))
        abstract = on_this_machine(state(0))
        before = sorted(directory.rglob("*"))
        read = Checkpoints(directory, read_only=True).restore_latest(abstract)
        assert sorted(directory.rglob("*")) == before
        with Checkpoints(directory) as checkpoints:
            restored = checkpoints.restore_latest(abstract)
            checkpoints.save(40, state(40))
        # Damage to nothing but the list of sums leaves a checkpoint good; else it is the one before.
        assert read["step"] == restored["step"] >= 30 - 10 * len(damages)
        np.testing.assert_array_equal(restored["params"], state(restored["step"])["params"])
        assert Checkpoints(directory, read_only=True).restore_latest(abstract)["step"] == 40


def test_sums_are_those_of_sha256sum(saved):
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=saved / "30", capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_pickles_in_a_checkpoint_are_not_loaded(saved, tmp_path):
    class Planted:
        def __reduce__(self):
            return (tmp_path.joinpath("planted").touch, ())

    directory = tmp_path / "variant"
    shutil.copytree(saved, directory)
    (directory / "30" / "SHA256SUMS").unlink()
    # One without sums is read all the same.
    assert Checkpoints(directory, read_only=True).restore_latest(on_this_machine(state(0)))["step"] == 30
    for name in ("default/state.pkl", "default/checkpoint", "default/_METADATA", "extra/data.pickle"):
        path = directory / "30" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(Planted()))
    restored = Checkpoints(directory, read_only=True).restore_latest(on_this_machine(state(0)))
    assert restored["step"] == 20 and not (tmp_path / "planted").exists()
    pickle.loads((directory / "30" / "default" / "state.pkl").read_bytes())
    assert (tmp_path / "planted").exists()  # it would have shown
