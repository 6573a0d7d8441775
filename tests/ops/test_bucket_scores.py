"""What bucket scores have of their own; what they share with other operations: test_forms.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax import (
    FenwickState,
    bucket_scores,
    init_fenwick_state,
    log_linear_attention,
    num_levels,
    occupied_levels,
)

from .forms import BUCKET_SCORES, FORMS
from .inputs import in_float64, random_inputs, relative_error

every_form = pytest.mark.parametrize("form", [form for form in FORMS if form.operation is BUCKET_SCORES], ids=str)


@in_float64
def test_scores_are_the_derivative_of_the_attention_by_lambda_for_values_of_one():
    q, k, _, log_decay, lam = random_inputs(0, 2, 21, 2, 4, 3, 5)
    ones = jnp.ones((2, 21, 4, 1))
    derivative = jax.grad(lambda lam: jnp.sum(log_linear_attention(q, k, ones, log_decay, lam)))(lam)
    assert relative_error(bucket_scores(q, k, log_decay), derivative) < 1e-12


@every_form
def test_levels_of_empty_buckets_are_zero_and_no_others(form):
    length = 23
    scores = np.asarray(form(form.inputs(0, 1, length, 1, 2), num_levels=9))
    assert scores.shape == (1, length, 2, 9)
    np.testing.assert_array_equal(scores[0, :, 0] != 0, occupied_levels(np.arange(length), 9))


@every_form
@pytest.mark.slow
def test_tokens_beyond_the_levels_are_nan_from_a_traced_position_and_those_before_are_not(form):
    """4 levels are for 8 positions: of 6 tokens from position 5 on, 3."""
    inputs = form.inputs(0, 2, 6, 1, 2)
    levels = BUCKET_SCORES.draw_state(1, inputs, levels=4)

    def score(inputs, position):
        return form(inputs, initial_state=FenwickState(levels, position), return_state=True, num_levels=4)

    out, state = jax.jit(score)(inputs, 5)
    known, _ = jax.jit(score)([x[:, :3] for x in inputs], 5)
    assert np.isnan(out[:, 3:]).all() and relative_error(out[:, :3], known) < form.tolerance
    again, state = jax.jit(lambda state: form(inputs, initial_state=state, return_state=True, num_levels=4))(state)
    assert np.isnan(again).all() and state.position > 8


def test_as_many_levels_as_the_tokens_or_the_state_need():
    inputs = BUCKET_SCORES.inputs(0, 1, 6, 1, 2, 3, 5, dtype=np.float32)

    def levels(max_length, position, **kwargs):
        state = init_fenwick_state(1, 2, 3, 1, max_length).replace(position=position)
        scores, state = bucket_scores(*inputs, initial_state=state, return_state=True, **kwargs)
        return scores.shape[3], state.levels.shape[2]

    assert bucket_scores(*inputs).shape[3] == num_levels(6)
    assert levels(3, 2) == (4, 4)  # 8 tokens in all
    assert levels(100, 2) == (8, 8)
    assert levels(100, 2, num_levels=4) == (4, 8)
    assert levels(3, 2, num_levels=9) == (9, 9)


def bad(**changes):
    q, k, _, log_decay, _ = random_inputs(0, 2, 9, 2, 4, 3, 5, dtype=np.float32)
    return {"q": q, "k": k, "log_decay": log_decay} | changes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (bad(k=np.zeros((2, 9, 2, 4), np.float32)), r"k has shape \(2, 9, 2, 4\): expected .* K = 3, as in q"),
        (bad(log_decay=np.zeros((2, 9, 3), np.float32)), "log_decay has shape .* H = 3 heads: .* of the G = 2 groups"),
        (bad(q=np.zeros((2, 9, 2, 3), int)), r"q has dtype int\d+: expected a floating dtype"),
        (bad(num_levels=4), r"num_levels is 4: expected an integer ≥ num_levels\(9\) = 5 for T tokens"),
        (bad(num_levels=5.0), "num_levels is 5.0: expected an integer"),
        (bad(return_state="no"), "return_state must be True or False, got 'no'"),
        (bad(chunk_size=12), "chunk_size must be a power of two ≥ 1 or None, got 12"),
        (bad(implementation="cuda"), "implementation must be one of .*'xla'.* got 'cuda'"),
        (
            bad(initial_state=init_fenwick_state(2, 4, 3, 5, 9)),
            r"initial_state.levels has shape \(2, 4, 5, 3, 5\): expected \[2, 4, L, 3, 1\]",
        ),
        (
            bad(initial_state=init_fenwick_state(2, 4, 3, 1, 20).replace(position=16), num_levels=5),
            r"num_levels is 5: expected an integer ≥ num_levels\(25\) = 6 for initial_state.position \+ T tokens",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bucket_scores(**arguments)


@in_float64
def test_segments_of_chunks_change_nothing(monkeypatch):
    inputs = BUCKET_SCORES.inputs(11, 2, 45, 1, 2, 3, 4)
    expected = bucket_scores(*inputs, implementation="parallel")
    monkeypatch.setattr("loglinear_jax.ops.tree.MAX_ELEMENTS_CPU", 4 * 5 * 4 * 4)  # 5 of 12 chunks at a time
    monkeypatch.setattr("loglinear_jax.ops.tree.MAX_ELEMENTS", 4 * 5 * 4 * 4)
    assert relative_error(bucket_scores(*inputs, implementation="xla", chunk_size=4), expected) < 1e-12
