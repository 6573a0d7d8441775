"""Mixtures of sequences: which part comes at which step, and how many sequences each has."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loglinear_jax.analysis import answer_levels
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import load_task
from loglinear_jax.tasks.mixture import MOST_PIECES, Mixture

TASK = load_task(
    "zoology_mqar", seq_len=16, vocab_size=16, num_pairs=4, mixture="8/1*50,12/2*10,16/4*10", tests="8/2,24/6"
)


def test_each_part_comes_as_often_in_a_round_as_its_weight_says():
    parts = np.asarray(jax.jit(TASK.trained_on.at)(jnp.arange(10 * 7)))
    rounds = parts.reshape(10, 7)
    np.testing.assert_array_equal(np.sort(rounds, axis=1), [[0, 0, 0, 0, 0, 1, 2]] * 10)
    assert len({tuple(row) for row in rounds.tolist()}) > 3  # in another order
    np.testing.assert_array_equal(TASK.trained_on.at(jnp.arange(11, 40)), parts[11:40])
    np.testing.assert_array_equal(Mixture.of(TASK).at(jnp.arange(3)), 0)


@pytest.mark.slow
def test_sequences_are_split_in_proportion_and_drawn_by_the_parts_own_tasks():
    assert TASK.trained_on.split(180_000) == (128_571, 25_714, 25_714)
    assert TASK.trained_on.split(1) == (1, 1, 1) and TASK.evaluated_on.split(7_000) == (3_500, 3_500)
    drawn = TASK.trained_on.draw(jax.random.key(3), 70)
    for (tokens, targets), shape, pairs in zip(drawn, [(50, 8), (10, 12), (10, 16)], (1, 2, 4), strict=True):
        assert tokens.shape == shape
        np.testing.assert_array_equal((np.asarray(targets) >= 0).sum(axis=1), pairs)
    alone = load_task("zoology_mqar", seq_len=8, vocab_size=16, num_pairs=1)
    np.testing.assert_array_equal(drawn[0], alone.sample(jax.random.split(jax.random.key(3), 3)[0], 50))
    np.testing.assert_array_equal(Mixture.of(alone).draw(jax.random.key(3), 9)[0], alone.sample(jax.random.key(3), 9))
    assert (drawn[1][0][:, :8] != drawn[2][0][:, :8]).any()


def test_lengths_of_a_mixture():
    assert TASK.max_seq_len == 24 and TASK.trained_on.longest == 16 and TASK.evaluated_on.names == ("8/2", "24/6")
    assert TASK.trained_on.mean_length == pytest.approx((50 * 8 + 10 * 12 + 10 * 16) / 70)
    assert "mixture" not in dataclasses.replace(TASK, mixture="").describe() and "8/1*50" in TASK.describe()
    same = dataclasses.replace(TASK, mixture="8/1,8/2", tests="8/1,8/2")
    assert "tests" in TASK.describe() and "mixture 8/1 8/2" in same.describe() and "tests" not in same.describe()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mixture", "64", "task.mixture must be like 64/4"),
        ("mixture", "64/4*0", "task.mixture must have weights from 1 on"),
        ("tests", "64/4*2", "task.tests has no weights, as each test counts the same, got '64/4*2'"),
        ("mixture", "64/4*10001", "that add up to at most 10000"),
        ("mixture", "64/4,64/4*2", "the same sequences twice: 64/4, 64/4"),
        ("tests", "64/4,12/4", "task.tests: 12/4: task.seq_len=12 is too short for num_pairs=4"),
    ],
)
def test_what_is_no_mixture_is_refused(name, text, message):
    with pytest.raises(SettingError, match=message.replace("*", r"\*")):
        load_task("zoology_mqar", vocab_size=64, num_pairs=4, seq_len=64, **{name: text})


@pytest.mark.parametrize("given", ["mixture", "tests"])
def test_where_one_is_empty_the_sequences_have_the_tasks_own_sizes(given):
    task = load_task("zoology_mqar", vocab_size=64, seq_len=64, num_pairs=4, **{given: "16/2,128/16"})
    other = task.evaluated_on if given == "mixture" else task.trained_on
    ((tokens, targets),) = other.draw(jax.random.key(0), 30)
    alone = load_task("zoology_mqar", vocab_size=64, seq_len=64, num_pairs=4)
    np.testing.assert_array_equal((tokens, targets), alone.sample(jax.random.key(0), 30))


def test_what_is_looked_at_is_the_longest_part():
    """Whatever seq_len and num_pairs say."""
    task = load_task("zoology_mqar", vocab_size=16, mixture="8/1,16/2,16/4", tests="8/2")
    tokens, targets = task.inspection_sequences(20)
    assert tokens.shape == (20, 16) and ((targets >= 0).sum(axis=1) == 4).all()
    answers = np.take_along_axis(tokens, np.maximum(task.sources(tokens, targets), 0), axis=1)
    np.testing.assert_array_equal(answers[targets >= 0], targets[targets >= 0])
    assert task.marks() == {"pairs end": 8} and (task.roles(tokens)[:, :8] == [0, 1] * 4).all()
    assert answer_levels(task).argmax() == 4


@given(st.integers(3, 20_000), st.integers(3, 2_000))
def test_a_set_is_cut_into_as_few_pieces_as_hold_it(num, like):
    count, each = TASK.trained_on.pieces(num, like)
    ours, theirs = np.array(TASK.trained_on.split(num)), np.array(TASK.trained_on.split(like))
    if (MOST_PIECES * theirs < ours).any():
        assert (count, each) == (1, num)
    else:
        assert each == like and (count * theirs >= ours).all() and ((count - 1) * theirs < ours).any()
