"""State tracking against its definition, on drawn sequences."""

import itertools

import jax
import numpy as np
import pytest
from scipy.stats import chisquare

from loglinear_jax.tasks import load_task
from loglinear_jax.tasks.state_tracking import products
from tests.tasks.drawing import sample


@pytest.mark.parametrize(("group", "objects", "size"), [("s3", 3, 6), ("s4", 4, 24), ("s5", 5, 120)])
def test_targets_are_where_the_objects_have_come(group, objects, size):
    task = load_task("state_tracking", group=group, vocab_size=size, seq_len=33)
    tokens, targets = sample(task)
    permutations = list(itertools.permutations(range(objects)))
    for row, target in zip(tokens[:50], targets, strict=False):
        places = list(range(objects))  # of object 0, 1, ..
        for token, expected in zip(row, target, strict=True):
            places = [permutations[token][place] for place in places]
            assert permutations[expected] == tuple(places)
    assert chisquare(np.bincount(tokens.ravel(), minlength=size)).pvalue > 1e-4
    assert chisquare(np.bincount(targets[:, -1], minlength=size)).pvalue > 1e-4  # nothing is known without all tokens
    assert task.shown(1) == "".join(map(str, permutations[1]))


def test_parity_counts_ones():
    tokens, targets = sample(load_task("state_tracking", seq_len=40))
    np.testing.assert_array_equal(targets, np.cumsum(tokens, axis=1) % 2)
    assert chisquare(np.bincount(tokens.ravel())).pvalue > 1e-4


@pytest.mark.slow
def test_longer_sequences_are_tests_alone():
    task = load_task("state_tracking", seq_len=8, tests="8, 20")
    assert (task.trained_on.longest, task.max_seq_len) == (8, 20)
    assert task.evaluated_on.names == ("length 8", "length 20")
    tokens, targets = task.evaluated_on.draw(jax.random.key(0), 10)[1]
    assert tokens.shape == (5, 20)
    np.testing.assert_array_equal(targets, np.cumsum(tokens, axis=1) % 2)


@pytest.mark.parametrize("group", ["parity", "s3", "s4"])
def test_the_table_is_a_group(group):
    table = products(group)
    numbers = np.arange(len(table))
    np.testing.assert_array_equal(table[table[:, :, None], numbers], table[numbers[:, None, None], table])
    np.testing.assert_array_equal([table[0], table[:, 0]], [numbers, numbers])
    assert (np.sort(table, axis=0) == numbers[:, None]).all() and (np.sort(table, axis=1) == numbers).all()
