"""Interleaved MQAR, and that with distances by a power law, against their definitions, on drawn sequences."""

import numpy as np
import pytest
from scipy.stats import chisquare

from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.tasks import load_task
from tests.tasks.drawing import sample


@pytest.mark.parametrize("name", ["interleaved", "power_law"])
@pytest.mark.parametrize(("seq_len", "pairs", "vocab"), [(128, 24, 128), (33, 5, 15), (12, 3, 8)])
def test_each_key_stands_twice_and_its_second_place_asks_for_the_value_behind_the_first(name, seq_len, pairs, vocab):
    task = load_task(name, seq_len=seq_len, num_pairs=pairs, vocab_size=vocab)
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


def _distances(task, num):
    """[num, num_pairs] in slots, and the levels of the answers."""
    tokens, targets = sample(task, num)
    queries = np.nonzero(targets >= 0)[1].reshape(num, -1)
    sources = task.sources(tokens, targets)[targets >= 0].reshape(num, -1)
    return (queries - sources + 1) // 2, fenwick_level(queries, sources)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_distances_follow_the_power_law_and_places_are_uniform(alpha):
    distances, levels = _distances(load_task("power_law", seq_len=32, num_pairs=1, alpha=alpha), 8000)
    law = np.arange(1.0, 16) ** -alpha
    law /= law.sum()
    assert chisquare(np.bincount(distances[:, 0], minlength=16)[1:], 8000 * law).pvalue > 1e-4
    shares = np.zeros(6)
    for distance, share in enumerate(law, 1):
        first = np.arange(16 - distance)
        np.add.at(shares, fenwick_level(2 * (first + distance), 2 * first + 1), share / len(first))
    assert shares[:2].sum() == 0
    assert chisquare(np.bincount(levels[:, 0], minlength=6)[2:], 8000 * shares[2:]).pvalue > 1e-4


def test_with_alpha_1_each_level_holds_about_an_equal_share_of_many_pairs():
    _, levels = _distances(load_task("power_law"), 2000)
    shares = np.bincount(levels.ravel(), minlength=8)[2:] / levels.size
    assert shares.min() > 0.09 and shares.max() < 0.31  # with alpha = 0 from 0.01 to 0.69
