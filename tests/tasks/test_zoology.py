"""Zoology's MQAR against its definition, and beside a sampler in plain NumPy."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare

from loglinear_jax.tasks import load_task
from tests.tasks.drawing import sample


def numpy_sample(rng, num, seq_len, pairs, vocab):
    """(tokens, targets), one sequence after another."""
    tokens, targets = rng.integers(0, vocab, (num, seq_len)), np.full((num, seq_len), -1)
    weights = np.arange(1, (seq_len - 2 * pairs) // 2 + 1) ** -0.99
    for row, target in zip(tokens, targets, strict=True):
        keys = rng.choice(np.arange(1, vocab // 2), pairs, replace=False)
        values = rng.choice(np.arange(vocab // 2, vocab), pairs, replace=False)
        row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2] = keys, values
        places = 2 * pairs + 2 * rng.choice(len(weights), pairs, replace=False, p=weights / weights.sum())
        row[places], target[places] = keys, values
    return tokens, targets


@pytest.mark.parametrize(("seq_len", "pairs", "vocab"), [(61, 9, 20), (12, 3, 8)])
def test_every_key_is_asked_once_after_all_pairs(seq_len, pairs, vocab):
    task = load_task("zoology_mqar", seq_len=seq_len, num_pairs=pairs, vocab_size=vocab)
    tokens, targets = sample(task)
    assert tokens.min() >= 0 and tokens.max() < vocab
    unscored = np.ones(seq_len, bool)
    unscored[2 * pairs : seq_len - 1 : 2] = False
    assert (targets[:, unscored] == -1).all()
    np.testing.assert_array_equal(np.flatnonzero(~unscored), np.arange(seq_len)[task.scored])
    for row, target in zip(tokens.tolist(), targets, strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < vocab // 2 <= value < vocab for key, value in zip(keys, values, strict=True))
        value_of, asked = dict(zip(keys, values, strict=True)), np.flatnonzero(target >= 0)
        assert sorted(row[place] for place in asked) == sorted(keys)
        assert all(target[place] == value_of[row[place]] for place in asked)


def test_places_and_tokens_are_drawn_as_by_numpy():
    task = load_task("zoology_mqar", seq_len=30, num_pairs=3, vocab_size=16)
    ours, theirs = sample(task, 4000), numpy_sample(np.random.default_rng(0), 4000, 30, 3, 16)
    (slots_ours, early), (slots_theirs, _) = ((measured(*drawn)) for drawn in (ours, theirs))
    assert early > 0.5  # the first slots are likely
    for a, b in zip(slots_ours.T, slots_theirs.T, strict=True):  # of the first pair's key, of the second's, ..
        assert chi2_contingency([np.bincount(x, minlength=12) for x in (a, b)]).pvalue > 1e-4
    for place in (0, 1, 4, 5, 6, 7, 16, 29):
        counts = np.array([np.bincount(tokens[:, place], minlength=16) for tokens, _ in (ours, theirs)])
        assert chi2_contingency(counts[:, counts.any(0)]).pvalue > 1e-4, place


def measured(tokens, targets):
    """The slot of each pair's query, and the share of queries in the first four slots."""
    is_query = targets >= 0
    at = [np.argmax(is_query & (tokens == tokens[:, [2 * pair]]), axis=1) for pair in range(3)]
    slots = (np.stack(at, axis=1) - 6) // 2
    return slots, (slots < 4).mean()


def test_the_token_behind_a_query_does_not_show_the_answer():
    tokens, targets = sample(load_task("zoology_mqar", seq_len=30, num_pairs=3, vocab_size=16), 4000)
    behind, answers = tokens[:, 1:][targets[:, :-1] >= 0], targets[targets >= 0]
    assert abs((behind == answers).mean() - 1 / 16) < 0.01
    assert chisquare(np.bincount(behind, minlength=16)).pvalue > 1e-4


def test_roles_and_marks_follow_the_places():
    task = load_task("zoology_mqar", seq_len=60, num_pairs=4, vocab_size=8192)
    tokens, targets = sample(task, 50)
    named = np.asarray(task.ROLES)[task.roles(tokens)]
    assert (named[:, :8] == ["key", "value"] * 4).all() and task.marks() == {"pairs end": 8}
    again = [row[:8:2].tolist().count(token) for row in tokens for token in row[8:]]
    np.testing.assert_array_equal((named[:, 8:] == "query").ravel(), np.array(again) * (np.arange(len(again)) % 2 == 0))
    assert (named[targets >= 0] == "query").all() and np.isin(named[:, 8:], ["query", "filler"]).all()
