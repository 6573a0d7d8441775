"""Statistics of many seeds, against their formulas."""

import numpy as np
import pytest

from loglinear_jax.statistics import wilson_interval


@pytest.mark.parametrize("successes", [0, 3, 10])
def test_wilson_interval(successes):
    """Against the formula, with z = 1.95996."""
    n, z, p = 10, 1.959964, successes / 10
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    np.testing.assert_allclose(wilson_interval(successes, n), (centre - half, centre + half), atol=1e-6)
