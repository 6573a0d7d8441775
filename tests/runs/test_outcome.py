"""The outcomes of variants: from a state, as JSON and back, as a table."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.analysis.outcomes import outcome_columns
from loglinear_jax.runs.folders import is_finished
from loglinear_jax.runs.outcome import DERIVED, RunSummary, VariantOutcome, on_one_set, outcome_of
from loglinear_jax.runs.writing import to_json
from loglinear_jax.tasks import ACCURACY
from loglinear_jax.train import SeedState, TrainSettings


def state(best, converged, diverged=None):
    count = len(best)
    params = {"layer_0": {"mixer": {"lam": {"scale": jnp.zeros((count, 5))}}}, "head": jnp.zeros((count, 20))}
    return SeedState(
        seed=jnp.arange(count), step=jnp.full(count, 500), params=params, opt_state=(), best_params=params,
        best_accuracy=jnp.asarray(best, jnp.float32), best_loss=jnp.full(count, 0.5), best_step=jnp.full(count, 400),
        solved_step=jnp.asarray(converged), diverged_step=jnp.asarray(diverged or [-1] * count),
        stopped=jnp.zeros(count, bool), loss_sum=jnp.zeros(count),
    )  # fmt: skip


def test_outcome_of_a_bimodal_run():
    o = outcome_of(state([0.995, 0.03, 0.95, 0.999], [300, -1, -1, 100]), "accuracy")
    assert o.seeds == [0, 1, 2, 3] and o.last_step == 500
    assert o.mean_accuracy == pytest.approx(0.7435, abs=1e-6)
    assert o.std_accuracy == pytest.approx(np.std([0.995, 0.03, 0.95, 0.999], ddof=1), abs=1e-6)
    assert o.peak_accuracy == pytest.approx(0.999, abs=1e-6)
    assert o.num_converged == 3 and o.share_converged == 0.75 and o.num_solved == 2
    assert o.median_solved_step == 200 and o.solved_step == [300, None, None, 100]
    assert (o.params, o.lam_params, o.lam_params_percent) == (25, 5, 25.0)
    np.testing.assert_allclose(o.best, [99.5, 3, 95, 99.9], rtol=1e-6)
    o = outcome_of(state([0.03], [-1], diverged=[7]), "accuracy")
    assert o.std_accuracy is None and o.median_solved_step is None and o.diverged_step == [7]


def test_what_follows_from_accuracies_is_of_the_test_if_there_is_one():
    trained = state([0.995, 0.91], [300, -1])
    outcome = outcome_of(trained, "accuracy", test_loss=[0.1, 0.2], test_accuracy=[0.985, 0.89])
    assert (outcome.mean_accuracy, outcome.peak_accuracy) == (pytest.approx(0.9375), 0.985)
    assert outcome.num_converged == 1 and outcome.num_solved == 1  # solved: in validation
    np.testing.assert_allclose(outcome.shown, [98.5, 89])
    np.testing.assert_allclose(outcome.best, [99.5, 91])
    untested = outcome_of(trained, "accuracy")
    text = outcome_of(trained, "loss", test_loss=[1.0, 2.0])
    together = on_one_set({"new": outcome, "text": text})  # a text's perplexities are compared with no accuracy
    assert [o.shown_as for o in together.values()] == ["test accuracy", "best validation perplexity"]
    mixed = on_one_set({"new": outcome, "old": untested})
    assert mixed["old"] == untested and mixed["new"].num_converged == 2
    assert {o.shown_as for o in mixed.values()} == {"best validation accuracy"}


def test_a_test_without_anything_scored_has_no_accuracy():
    outcome = outcome_of(state([0.5, 0.95], [-1, -1]), "accuracy", test_accuracy=[float("nan"), 1.0])
    again = VariantOutcome.from_json(json.loads(to_json(outcome.to_json())))
    assert again.test_accuracy == [None, 1.0] and again.num_converged == 1 and np.isnan(again.mean_accuracy)


def test_a_seed_without_a_finite_evaluation_has_no_best_loss():
    trained = state([0.1, -1], [-1, -1], diverged=[-1, 3])
    trained = trained.replace(best_loss=jnp.array([2.0, np.finfo(np.float32).max]), best_step=jnp.array([400, -1]))
    outcome = outcome_of(trained, "loss")
    assert outcome.best_loss == [2.0, None] and np.isnan(outcome.best).tolist() == [False, True]


@pytest.mark.parametrize(
    "parts, finished_until",  # (steps asked for, last step) of each
    [
        ([(40, 20), (60, 60)], 60),
        ([(60, 60), (40, 20)], 60),
        ([(40, 40), (60, 50)], 40),
        ([(40, 40), (60, 50), (60, 60)], 40),
        ([(40, 40), (60, 60)], 40),
        ([(40, 20), (60, 50)], 10**6),
    ],
)
def test_seeds_that_stopped_before_others_were_added_are_finished(parts, finished_until):
    outcomes = []
    for seed, (num_steps, last_step) in enumerate(parts):
        trained = state([0.95], [-1]).replace(seed=jnp.array([seed]), step=jnp.array([last_step]))
        outcomes.append(outcome_of(trained, "accuracy", num_steps=num_steps))
    joined = functools.reduce(VariantOutcome.with_seeds_of, outcomes)
    for num_steps in (40, 60, 70, 10**6):
        asked = TrainSettings(num_seeds=len(parts), num_steps=num_steps)
        assert is_finished(joined, asked) == (num_steps <= finished_until)


def test_a_summary_comes_back_from_json():
    of_text = dict(seconds=3.5, predicts="next token", test_loss=[1.0, 2.0])
    outcome = outcome_of(state([0.03, 0.99], [-1, 250]), "loss", **of_text)
    tested = outcome_of(state([0.03], [-1]), "accuracy", test_loss=[1.0], test_accuracy=[0.5])
    summary = RunSummary({"linear": outcome, "rope": tested}, command="python run.py", provenance={"commit": "abc"})
    assert RunSummary.from_json(json.loads(to_json(summary.to_json()))) == summary
    np.testing.assert_allclose(outcome.best, np.exp([0.5, 0.5]))


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("results/*/runs/*.json"))[::9], ids=str)
def test_earlier_summaries_say_the_same_of_their_seeds(path):
    """What follows from the seeds is computed again, from files that had it written down."""
    written = json.loads(path.read_text(encoding="utf-8"))["variants"]
    for name, outcome in RunSummary.from_json(json.loads(path.read_text(encoding="utf-8"))).variants.items():
        again = outcome.to_json()
        of_accuracy = set(DERIVED[ACCURACY]) - set(DERIVED[outcome.score])  # earlier summaries of texts have them too
        assert again.keys() >= {key for key, value in written[name].items() if value is not None} - of_accuracy
        for key, value in ((key, written[name][key]) for key in again):
            assert again[key] == (pytest.approx(value) if isinstance(value, (float, list)) else value), key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "not a summary of a run"),
        ({"variants": []}, "it has no variants"),
        ({"variants": {"linear": {"metric": "accuracy"}}}, "of another version: linear: there is no seeds"),
    ],
)
def test_what_is_no_summary_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        RunSummary.from_json(values)


def test_what_a_table_shows_of_accuracies():
    row = outcome_columns(outcome_of(state([0.03, 0.99], [-1, 250]), "accuracy"))
    assert row["best validation accuracy %, mean ± std"] == "51.0 ± 67.9" and row["peak %"] == "99.0"
    assert row["share ≥ 90% [95 % interval]"] == "1/2 = 0.50 [0.09, 0.91]" and row["λ adds"] == "25.00 %"
    assert row["seeds ≥ 99% in validation; median step"] == "1/2; 250"
