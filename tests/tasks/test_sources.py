"""Where the answers stand: of every task that says it, and of one of one's own."""

import numpy as np
import pytest

from loglinear_jax.tasks import load_task
from loglinear_jax.tasks.base import BaseTask
from tests.tasks.drawing import sample

TASKS = [
    ("mqar", {"seq_len": 20, "vocab_size": 10, "num_pairs": 3}),
    ("selective_copy", {"seq_len": 7, "vocab_size": 8, "num_tokens": 3}),
    ("interleaved", {"seq_len": 33, "vocab_size": 15, "num_pairs": 5}),
    ("power_law", {"seq_len": 33, "vocab_size": 15, "num_pairs": 5}),
    ("forgetting", {"seq_len": 20, "vocab_size": 10, "num_pairs": 4, "num_updates": 2, "filler": "zero"}),
    ("zoology_mqar", {"seq_len": 20, "vocab_size": 10, "num_pairs": 4}),
    ("mad_recall", {"seq_len": 30, "vocab_size": 12, "noise_vocab_size": 4, "frac_noise": 0.5}),
    ("mad_fuzzy", {"seq_len": 40, "vocab_size": 9}),
    ("mad_copying", {"seq_len": 12, "vocab_size": 3, "num_tokens": 5}),
]


@pytest.mark.parametrize(("name", "settings"), TASKS)
def test_a_source_holds_the_target_and_is_not_after_it(name, settings):
    task = load_task(name, **settings)
    tokens, targets = sample(task)
    sources, scored = task.sources(tokens, targets), targets >= 0
    assert sources.shape == tokens.shape and sources.dtype == np.int32
    np.testing.assert_array_equal(sources == -1, ~scored)
    assert (sources <= np.arange(tokens.shape[1])).all() and sources[scored].min() >= 0
    np.testing.assert_array_equal(np.take_along_axis(tokens, np.maximum(sources, 0), 1)[scored], targets[scored])
    answers = np.isin(task.roles(tokens), [task.ROLES.index(role) for role in task.ANSWERS])
    assert np.take_along_axis(answers, np.maximum(sources, 0), 1)[scored].all()


def test_where_values_are_equal_the_source_is_still_the_key_s_own():
    """Interleaved values are drawn with replacement, and an update may give one key another's value."""
    for name, settings in (("interleaved", {}), ("forgetting", {"num_updates": 3})):
        task = load_task(name, seq_len=18, vocab_size=8, num_pairs=3, **settings)
        tokens, targets = sample(task)
        rows, queries = np.nonzero(targets >= 0)
        behind = task.sources(tokens, targets)[rows, queries]
        np.testing.assert_array_equal(tokens[rows, behind - 1], tokens[rows, queries])
    assert behind.min() >= 6 and behind.max() < 12  # of three pairs all are updated


def test_a_task_that_says_nothing_has_no_sources():
    tokens = np.zeros((2, 8), np.int32)
    assert BaseTask().sources(tokens, tokens) is None
    assert load_task("text").sources(tokens, tokens) is None
