"""Forgetting MQAR against its definition, on drawn sequences."""

import numpy as np
import pytest
from scipy.stats import chisquare

from loglinear_jax.tasks import load_task
from tests.tasks.drawing import sample


@pytest.mark.parametrize(
    ("seq_len", "pairs", "updates", "vocab", "filler"),
    [(64, 4, 0, 64, "random"), (61, 9, 9, 20, "zero"), (18, 3, 3, 8, "random")],
)
def test_each_key_is_asked_once_and_its_last_value_counts(seq_len, pairs, updates, vocab, filler):
    sizes = dict(seq_len=seq_len, num_pairs=pairs, num_updates=updates, vocab_size=vocab)
    task = load_task("forgetting", **sizes, filler=filler)
    tokens, targets = sample(task)
    half, start = vocab // 2, 2 * (pairs + updates)
    assert tokens.min() >= 0 and tokens.max() < vocab
    scored = np.zeros(seq_len, bool)
    scored[start : seq_len - 1 : 2] = True
    assert (targets[:, ~scored] == -1).all()
    np.testing.assert_array_equal(np.flatnonzero(scored), np.arange(seq_len)[task.scored])
    for row, target in zip(tokens.tolist(), targets, strict=True):
        keys, values = row[0:start:2], row[1:start:2]
        assert len(set(keys[:pairs])) == len(set(values[:pairs])) == pairs
        assert len(set(keys[pairs:])) == updates and set(keys[pairs:]) <= set(keys[:pairs])
        assert all(1 <= key < half <= value < vocab for key, value in zip(keys, values, strict=True))
        memory = {}
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            assert memory.get(key) != value, index  # an update changes the value
            memory[key] = value
        asked = np.flatnonzero(target >= 0)
        assert sorted(row[place] for place in asked) == sorted(keys[:pairs])
        assert all(target[place] == memory[row[place]] for place in asked)
        if filler == "zero":
            assert not any(token for place, token in enumerate(row[start:], start) if place not in asked)


def test_updated_keys_and_their_new_values_are_drawn_uniformly():
    """The slots of the queries are drawn as those of `zoology_mqar`."""
    task = load_task("forgetting", seq_len=30, num_pairs=3, num_updates=2, vocab_size=16)
    tokens, _ = sample(task, 4000)
    which = [np.argmax(tokens[:, 0:6:2] == tokens[:, [place]], axis=1) for place in (6, 8)]
    assert chisquare(np.bincount(3 * which[0] + which[1], minlength=9)[[1, 2, 3, 5, 6, 7]]).pvalue > 1e-4
    step = (tokens[:, 7] - tokens[np.arange(4000), 2 * which[0] + 1]) % 8
    assert chisquare(np.bincount(step, minlength=8)[1:]).pvalue > 1e-4  # any other value
    filler = tokens[:, 11::2]
    assert chisquare(np.bincount(filler.ravel(), minlength=16)).pvalue > 1e-4


def test_roles_and_marks_follow_the_places():
    task = load_task("forgetting", seq_len=20, num_pairs=4, num_updates=2, vocab_size=10, filler="zero")
    tokens, targets = sample(task)
    named = np.asarray(task.ROLES)[task.roles(tokens)]
    assert (named[:, :12] == ["key", "value"] * 4 + ["updated key", "new value"] * 2).all()
    np.testing.assert_array_equal(named == "query", targets >= 0)
    np.testing.assert_array_equal(named[:, 12:] == "filler", tokens[:, 12:] == 0)
    assert task.marks() == {"pairs end": 8, "updates end": 12}
