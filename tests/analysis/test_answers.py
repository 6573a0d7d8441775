"""Which Fenwick levels hold a task's answers: each share against what the definition of the task says, and the section."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax import fenwick_level
from loglinear_jax.analysis import answer_levels
from loglinear_jax.analysis.answers import answer_places, levels_table
from loglinear_jax.tasks import BaseTask, Task, load_task


@pytest.mark.parametrize(("seq_len", "pairs", "level"), [(128, 1, 7), (128, 32, 7), (512, 128, 9)])
def test_in_the_paper_s_mqar_one_level_holds_every_answer(seq_len, pairs, level):
    """Of any number of pairs: also by the places alone, of any value and any query."""
    shares = answer_levels(load_task("mqar", seq_len=seq_len, num_pairs=pairs, vocab_size=260), num=16)
    np.testing.assert_array_equal(shares, np.arange(level + 1) == level)
    queries, values = np.arange(seq_len - 2 * pairs, seq_len, 2), np.arange(1, 2 * pairs, 2)
    assert set(fenwick_level(queries[:, None], values).ravel()) == {level}


def within_sampling_error(shares, expected, answers):
    """Both of them sum to 1, and differ by at most five standard deviations of a count of so many answers."""
    assert len(shares) == len(expected) and abs(shares.sum() - 1) < 1e-9 and abs(sum(expected) - 1) < 1e-9
    p = np.asarray(expected)
    return (np.abs(shares - p) <= 5 * np.sqrt(p * (1 - p) / answers)).all()


def test_interleaved_has_its_answers_at_every_level_that_its_slots_meet_at():
    """Of two of 64 slots, half meet at the highest level, and half as many at each lower one."""
    slots = itertools.combinations(range(64), 2)
    expected = np.bincount([fenwick_level(2 * late, 2 * early + 1) for early, late in slots]) / (64 * 63 / 2)
    np.testing.assert_allclose(np.round(100 * expected), [0, 0, 2, 3, 6, 13, 25, 51])
    assert within_sampling_error(answer_levels(load_task("interleaved")), expected, 1024 * 24)


@dataclasses.dataclass(frozen=True)
class Echo(Task):
    """Say again what came three tokens before."""

    moved: int = 0

    def sample(self, key, num):
        tokens = jax.random.randint(key, (num, self.seq_len), 0, self.vocab_size)
        return tokens, jnp.full_like(tokens, -1).at[:, 3:].set(tokens[:, :-3])

    def sources(self, tokens, targets):
        return np.where(targets >= 0, np.arange(tokens.shape[1]) - 3 + self.moved, -1)


def test_a_task_of_one_s_own_says_where_its_answers_stand():
    expected = np.bincount(fenwick_level(np.arange(3, 16), np.arange(13)), minlength=5) / 13
    np.testing.assert_allclose(answer_levels(Echo(seq_len=16, vocab_size=8), 2), expected)


def test_an_answer_is_pointed_at_where_the_task_says_it_stands():
    """Not wherever its token stands, as in a task that does not say."""
    tokens, targets = np.array([2, 2, 2, 5, 5, 2, 2, 2]), np.array([-1, -1, -1, 2, 2, 2, 5, 5])
    echo = Echo(seq_len=8, vocab_size=8)
    assert answer_places(echo, tokens, targets, 5).tolist() == [2]
    assert answer_places(echo, tokens, targets, 2).tolist() == []
    silent = Silent(seq_len=8, vocab_size=8)
    assert answer_places(silent, tokens, targets, 5).tolist() == [0, 1, 2, 5]
    assert answer_places(silent, tokens, targets, 2).tolist() == []


class Misshapen(Echo):
    def sources(self, tokens, targets):
        return np.arange(3.0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Echo(seq_len=16, vocab_size=8, moved=4), "Echo.sources returns 4 at position 3: expected 0 to 3, as the position"),
        (Misshapen(seq_len=16, vocab_size=8), r"shape \(3,\) and dtype float64: expected integers \(2, 16\)"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_are_named(task, message):
    with pytest.raises(ValueError, match=message):
        answer_levels(task, 2)


def test_a_text_is_not_opened_for_answers_that_it_does_not_have():
    assert answer_levels(load_task("text", corpus="nowhere", cache="nowhere")) is None


class Silent(Echo):
    def sources(self, tokens, targets):
        return BaseTask.sources(self, tokens, targets)


def test_the_table_has_the_levels_that_hold_answers_and_rounds_none_of_them_away():
    shares = {"a": np.array([0, 0.0004, 0.9996]), "b": np.array([0, 0, 0, 0, 1.0])}
    found = levels_table(shares)
    assert found.rows == [
        {"task": "a", "level 1": "0.1 %", "level 2": "99.9 %", "level 4": "–"},
        {"task": "b", "level 1": "–", "level 2": "–", "level 4": "100 %"},
    ]
    assert found.raw[0] == {"task": "a", "level 1: share": 0.0004, "level 2: share": 0.9996, "level 4: share": 0.0}
