"""Statistics of many seeds."""

import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.runs.outcome import summarize, table, wilson_interval
from loglinear_jax.train import SeedState


def state(best, converged, diverged=None):
    count = len(best)
    params = {"layer_0": {"mixer": {"lam": {"scale": jnp.zeros((count, 5))}}}, "head": jnp.zeros((count, 20))}
    return SeedState(
        seed=jnp.arange(count),
        step=jnp.full(count, 500),
        params=params,
        opt_state=(),
        best_params=params,
        best_accuracy=jnp.asarray(best, jnp.float32),
        best_loss=jnp.full(count, 0.5),
        best_step=jnp.full(count, 400),
        solved_step=jnp.asarray(converged),
        diverged_step=jnp.asarray(diverged or [-1] * count),
        stopped=jnp.zeros(count, bool),
        loss_sum=jnp.zeros(count),
    )


@pytest.mark.parametrize("successes", [0, 3, 10])
def test_wilson_interval(successes):
    """Against the formula, with z = 1.95996."""
    n, z, p = 10, 1.959964, successes / 10
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    np.testing.assert_allclose(wilson_interval(successes, n), (centre - half, centre + half), atol=1e-6)


def test_summary_of_a_bimodal_outcome():
    s = summarize(state([0.995, 0.03, 0.95, 0.999], [300, -1, -1, 100]))
    assert s["seeds"] == [0, 1, 2, 3] and s["last_step"] == 500
    assert s["mean_accuracy"] == pytest.approx(0.7435, abs=1e-6)
    assert s["std_accuracy"] == pytest.approx(np.std([0.995, 0.03, 0.95, 0.999], ddof=1), abs=1e-6)
    assert s["peak_accuracy"] == pytest.approx(0.999, abs=1e-6)
    assert s["num_converged"] == 3 and s["share_converged"] == 0.75
    assert s["median_solved_step"] == 200 and s["solved_step"] == [300, None, None, 100]
    assert (s["params"], s["lam_params"], s["lam_params_percent"]) == (25, 5, 25.0)


def test_one_seed_that_never_converges():
    s = summarize(state([0.03], [-1], diverged=[7]))
    assert s["std_accuracy"] is None and s["median_solved_step"] is None and s["diverged_step"] == [7]


def test_table_shows_every_variant():
    rows = {
        "linear": summarize(state([0.03, 0.99], [-1, 250])),
        "rope": summarize(state([0.5, 0.6], [-1, -1], [3, -1])),
    }
    text = table(rows)
    assert "| linear" in text and "51.0 ± 67.9" in text and "99.0" in text and "1/2 = 0.50 [0.09, 0.91]" in text
    assert "250" in text and "25.00 %" in text and "diverged" in text
    assert "diverged" not in table({"linear": rows["linear"]})
