"""Statistics of many seeds, against their formulas."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from loglinear_jax.statistics import (
    RESAMPLES,
    _first_halves,
    cross_fit,
    cross_fit_difference,
    cross_fit_interval,
    cross_fit_resamples,
    mcnemar,
    mean_difference,
    mean_interval,
    sign_flip,
    student_interval,
    wilson_interval,
)


@pytest.mark.parametrize("successes", [0, 3, 10])
def test_wilson_interval(successes):
    """Against the formula, with z = 1.95996."""
    n, z, p = 10, 1.959964, successes / 10
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    np.testing.assert_allclose(wilson_interval(successes, n), (centre - half, centre + half), atol=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_mcnemar_is_a_fair_coin_on_the_discordant_pairs(pairs):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    only_a, only_b, p = mcnemar(a, b)
    assert only_a == sum(x and not y for x, y in pairs) and only_b == sum(y and not x for x, y in pairs)
    n, k = only_a + only_b, min(only_a, only_b)
    assert p == pytest.approx(min(1.0, 2 * binom.cdf(k, n, 0.5)))


def test_mean_difference_has_the_interval_of_the_mean():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1.0, 2.0, 400), rng.normal(0.0, 2.0, 400)
    mean, low, high = mean_difference(a, b)
    half = 1.96 * np.std(a - b, ddof=1) / 20
    assert mean == pytest.approx((a - b).mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.05)
    assert np.isnan(mean_difference(a[:9], b[:9])[1])  # too few
    assert mean_difference([2.0] * 10, [1.0] * 10) == (1.0, 1.0, 1.0)


def test_student_interval():
    """Of 1, 2, 3: t of 2 degrees of freedom is 4.302653 at 97.5 %, and the standard error 1 / sqrt(3)."""
    assert student_interval([1, 2, 3]) == pytest.approx((2, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert student_interval([3.0])[0] == 3 and np.isnan(student_interval([3.0])[1:]).all()
    assert np.isnan(student_interval([])).all()


def test_no_seed_chooses_where_it_is_reported():
    """Each seed is alone in having the best value of a row: chosen with it, that row would be reported for it."""
    values = 10 * np.eye(6) - np.arange(6)[:, None]
    chosen, of_seeds = cross_fit(values)
    assert set(chosen) == {0, 1, 2, 3} and (of_seeds <= 0).all()
    np.testing.assert_array_equal(cross_fit(-values, higher_is_better=False).values, -of_seeds)
    assert cross_fit(np.array([[1.0], [2.0]])).values.size == 0


def test_choices_are_averaged_over_halvings():
    values = np.random.default_rng(0).normal(size=(3, 10))
    by_halving = []
    for first in _first_halves(10):
        assert first.sum() == 5
        rows = [values[:, half].mean(1).argmax() for half in (first, ~first)]
        by_halving.append(np.where(first, values[rows[1]], values[rows[0]]))
    np.testing.assert_allclose(cross_fit(values).values, np.mean(by_halving, axis=0))
    assert len({tuple(first) for first in _first_halves(10)}) > 15


def test_resamples_choose_again():
    """Against a loop over the same resamples."""
    values = np.random.default_rng(0).normal(size=(3, 11))
    found = cross_fit_resamples(values)
    counts = np.random.default_rng(0).multinomial(11, np.full(11, 1 / 11), size=RESAMPLES)
    for resample in range(20):
        means = []
        for first in _first_halves(11):
            drawn = [
                np.repeat(np.flatnonzero(half), counts[resample, half] if counts[resample, half].any() else 1)
                for half in (first, ~first)
            ]
            best = [values[:, half].mean(1).argmax() for half in drawn]
            means.append(np.concatenate([values[best[1], drawn[0]], values[best[0], drawn[1]]]).mean())
        assert found[resample] == pytest.approx(np.mean(means))
    mean, low, high = cross_fit_interval(values)
    assert mean == pytest.approx(cross_fit(values).values.mean()) and low < mean < high
    assert np.isnan(cross_fit_interval(values[:, :9])[1])  # too few
    alone = np.random.default_rng(1).normal(size=64)  # nothing to choose: the usual interval
    assert cross_fit_interval(alone[None]) == pytest.approx(mean_interval(alone), abs=0.02)
    np.testing.assert_allclose(cross_fit_resamples(-values, higher_is_better=False), -found)


def test_a_seed_without_a_value_is_left_out_where_it_reports():
    values = np.random.default_rng(0).normal([[2], [0]], size=(2, 24))
    values[0, 3] = np.nan  # the half with it chooses the second row, the other half the first
    chosen, fitted = cross_fit(values)
    assert set(chosen) == {0, 1} and np.isnan(fitted[3])
    mean, low, high = cross_fit_interval(values)
    assert mean == pytest.approx(np.mean(np.delete(fitted, 3))) and low < mean < high
    assert np.isnan(cross_fit_interval(np.full((2, 24), np.nan))).all() and np.isnan(mean_interval([])).all()


def test_differences_of_two_choices():
    rng = np.random.default_rng(0)
    seeds = rng.normal(size=64)
    a, b = (seeds + 0.1 * rng.normal(size=(3, 64)) + shift for shift in ([[0], [1], [0]], [[0], [0], [0.5]]))
    mean, low, high, p = cross_fit_difference(a, b)
    assert mean == pytest.approx((a[1] - b[2]).mean()) and low < 0.5 < high and high - low < 0.1 and p < 2e-4
    assert cross_fit_difference(a[:, :16], a[:, :16]) == (0, 0, 0, 1)
    mean, low, high, p = cross_fit_difference(a[:, :8], b[:, :8])
    assert np.isnan(low) and p == 2 / 2**8
    assert np.isnan(cross_fit_difference(a[:, :16], np.full((3, 16), np.nan))).all()


def test_sign_flip_is_exact_for_few_seeds_and_near_it_for_many():
    differences = np.random.default_rng(0).normal(0.3, 1, 10)
    flips = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=10)]
    assert sign_flip(differences) == np.mean(np.array(flips) >= abs(differences.sum()) - 1e-12)
    few = np.append(differences, [0] * 4)  # zeros change nothing, but make it draw
    assert sign_flip(few) == pytest.approx(sign_flip(differences), abs=0.02)
    assert sign_flip(np.zeros(20)) == 1
    assert sign_flip(np.ones(13)) == 2 / 2**13
    assert sign_flip(np.random.default_rng(0).uniform(1, 2, 40)) == 1 / 10_001  # no drawn way is as far from 0


@pytest.mark.parametrize(
    ("seeds", "share", "held"), [(10, 0.5, 0.98), (10, 0.9, 0.65), (16, 0.8, 0.85), (16, 0.95, 0.55)]
)
def test_how_often_the_interval_of_binary_outcomes_holds_their_mean(seeds, share, held):
    """As its docstring says."""
    chance = 0.0
    for ones in range(seeds + 1):
        _, low, high = mean_interval(np.arange(seeds) < ones)
        chance += binom.pmf(ones, seeds, share) * (low - 1e-12 <= share <= high + 1e-12)
    assert chance == pytest.approx(held, abs=0.01)
