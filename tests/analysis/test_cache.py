"""Kept evaluations."""

import pickle
import random

import numpy as np
import pytest

from loglinear_jax.analysis.section import Cache

KEY = {"checkpoint": "a", "seed": 1}


@pytest.fixture
def kept(tmp_path):
    """A cache with one evaluation: what gets it, its file, and how often it was computed."""
    calls = []

    def compute():
        calls.append(1)
        return {"x": np.arange(300), "y": np.ones((2, 3))}

    def get(**key):
        return Cache(tmp_path / "cache").get(KEY | key, compute)

    get()
    (path,) = (tmp_path / "cache").iterdir()
    return get, path, calls


def test_cache_computes_once(kept):
    get, _, calls = kept
    np.testing.assert_array_equal(get()["x"], np.arange(300))
    assert len(calls) == 1
    get(checkpoint="b")
    assert len(calls) == 2


def test_a_damaged_file_is_computed_again_and_never_read_wrong(kept):
    get, path, calls = kept
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(100):
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:at] if bit > 8 else whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        np.testing.assert_array_equal(get()["x"], np.arange(300))
    assert len(calls) > 50  # some bits mean nothing


@pytest.mark.parametrize("kind", ["pickle", "objects", "text"])
def test_a_file_of_another_kind_is_not_unpickled_but_computed_again(kept, kind):
    get, path, calls = kept
    with path.open("wb") as file:
        if kind == "pickle":
            pickle.dump({"x": random.Random()}, file)
        elif kind == "objects":
            np.savez(file, x=np.array([random.Random()], object))
        else:
            file.write(b"no array")
    np.testing.assert_array_equal(get()["x"], np.arange(300))
    assert len(calls) == 2
