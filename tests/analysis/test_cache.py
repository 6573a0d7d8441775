"""Kept evaluations."""

import numpy as np

from loglinear_jax.analysis.cache import Cache


def test_cache_computes_once(tmp_path):
    cache, calls = Cache(tmp_path / "cache"), []

    def compute():
        calls.append(1)
        return {"x": np.arange(3)}

    key = {"checkpoint": "a", "seed": 1}
    for _ in range(2):
        np.testing.assert_array_equal(cache.get(key, compute)["x"], np.arange(3))
    assert len(calls) == 1
    cache.get(key | {"checkpoint": "b"}, compute)
    assert len(calls) == 2
    for path in (tmp_path / "cache").glob("*.npz"):
        path.write_bytes(path.read_bytes()[:20])
    np.testing.assert_array_equal(cache.get(key, compute)["x"], np.arange(3))
    assert len(calls) == 3
