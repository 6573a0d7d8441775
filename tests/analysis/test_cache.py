"""Kept evaluations."""

import errno
import os
import pickle
import random

import numpy as np
import pytest

from loglinear_jax.analysis.cache import Cache

KEY = {"checkpoint": "a", "seed": 1}


class Computed:
    """What counts how often it was computed."""

    calls = 0

    def __call__(self):
        self.calls += 1
        return {"x": np.arange(300), "y": np.ones((2, 3))}


@pytest.fixture
def kept(tmp_path):
    """A cache with one evaluation: the cache, what computes it, its file."""
    cache, compute = Cache(tmp_path / "cache"), Computed()
    cache.get(KEY, compute)
    (path,) = (tmp_path / "cache").iterdir()
    return cache, compute, path


def test_cache_computes_once(kept):
    cache, compute, _ = kept
    np.testing.assert_array_equal(cache.get(KEY, compute)["x"], np.arange(300))
    assert compute.calls == 1
    cache.get(KEY | {"checkpoint": "b"}, compute)
    assert compute.calls == 2


def test_a_damaged_file_is_computed_again_and_never_read_wrong(kept, caplog):
    cache, compute, path = kept
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(100):
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:at] if bit > 8 else whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        found = cache.get(KEY, compute)
        np.testing.assert_array_equal(found["x"], np.arange(300))
        np.testing.assert_array_equal(found["y"], np.ones((2, 3)))
    assert 50 < compute.calls - 1 == len(caplog.messages)  # some bits mean nothing


def test_what_was_computed_is_returned_though_the_disk_is_full(kept, monkeypatch, caplog):
    cache, compute, path = kept

    def full(file, **arrays):
        file.write(b"begun")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    np.testing.assert_array_equal(cache.get(KEY | {"seed": 2}, compute)["x"], np.arange(300))
    assert compute.calls == 2 and "No space left on device" in caplog.text
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["pickle", "objects", "text"])
def test_a_file_of_another_kind_is_not_unpickled_but_computed_again(kept, kind):
    cache, compute, path = kept
    with path.open("wb") as file:
        if kind == "pickle":
            pickle.dump({"x": random.Random()}, file)
        elif kind == "objects":
            np.savez(file, x=np.array([random.Random()], object))
        else:
            file.write(b"no array")
    np.testing.assert_array_equal(cache.get(KEY, compute)["x"], np.arange(300))
    assert compute.calls == 2
