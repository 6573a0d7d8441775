"""Interleaved MQAR against its definition, on drawn sequences."""

import numpy as np
import pytest
from scipy.stats import chisquare

from loglinear_jax.tasks import load_task
from tests.tasks.drawing import sample


@pytest.mark.parametrize(("seq_len", "pairs", "vocab"), [(128, 24, 128), (33, 5, 15), (12, 3, 8)])
def test_each_key_stands_twice_and_its_second_place_asks_for_the_value_behind_the_first(seq_len, pairs, vocab):
    task = load_task("interleaved", seq_len=seq_len, num_pairs=pairs, vocab_size=vocab)
    tokens, targets = sample(task)
    assert tokens.min() >= 1 and tokens.max() < vocab
    for row, target in zip(tokens, targets.copy(), strict=True):
        places = np.flatnonzero(row < vocab // 2)  # no key stands by chance
        assert len(places) == 2 * pairs and (places % 2 == 0).all() and places.max() + 1 < seq_len
        seen = {}
        for place in places.tolist():
            if row[place] in seen:
                assert target[place] == row[seen.pop(row[place]) + 1]
                target[place] = -1
            else:
                seen[row[place]] = place
        assert not seen and (target == -1).all()


def test_two_slots_for_each_key_are_drawn_at_random():
    """Every pair of slots is as likely as any other, whichever key it is for; keys, values and filler are uniform."""
    task = load_task("interleaved", seq_len=12, num_pairs=2, vocab_size=12)
    tokens, targets = sample(task, 6000)
    second = targets >= 0
    first = (tokens < 6) & ~second
    [slots, keys] = np.nonzero(first)[1] // 2, tokens[first]
    assert chisquare(np.bincount(keys, minlength=6)[1:]).pvalue > 1e-4
    others = tokens[tokens >= 6]
    assert chisquare(np.bincount(others)[6:]).pvalue > 1e-4
    assert chisquare(np.bincount(targets[second])[6:]).pvalue > 1e-4
    of_first = np.argmax(tokens == tokens[np.arange(6000), 2 * slots[::2], None], axis=1) // 2
    np.testing.assert_array_equal(of_first, slots[::2])
    # Of the four slots in use, the first and its key's second one: the second is any of the other three.
    in_use = np.sort(np.nonzero(first | second)[1].reshape(6000, 4) // 2)
    key = tokens[np.arange(6000), 2 * in_use[:, 0]]
    partner = [np.flatnonzero(row[2 * slot[1:]] == k)[0] for row, slot, k in zip(tokens, in_use, key, strict=True)]
    assert chisquare(np.bincount(partner, minlength=3)).pvalue > 1e-4
    _, subsets = np.unique(in_use, axis=0, return_counts=True)
    assert len(subsets) == 15 and chisquare(subsets).pvalue > 1e-4


def test_roles_say_which_of_a_key_s_places_is_the_query():
    task = load_task("interleaved", seq_len=33, num_pairs=5, vocab_size=15)
    tokens, targets = sample(task)
    named = np.asarray(task.ROLES)[task.roles(tokens)]
    np.testing.assert_array_equal(named == "query", targets >= 0)
    np.testing.assert_array_equal(named == "key", (tokens < 7) & (targets < 0))
    np.testing.assert_array_equal(named[:, 1:] == "value", named[:, :-1] == "key")
    assert ((named == "value").sum(1) == 5).all() and ((named == "filler").sum(1) == 33 - 15).all()
