"""Every property that the tasks promise, on drawn sequences."""

import collections
import itertools
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from loglinear_jax.settings import SettingError, setting
from loglinear_jax.tasks import Task, check_sample, load_task
from loglinear_jax.tasks.draws import distinct, distinct_of_many, increasing, weighted
from tests.tasks.drawing import sample


@pytest.mark.parametrize(("seq_len", "pairs", "vocab"), [(128, 4, 128), (256, 8, 128), (20, 3, 10), (12, 3, 8)])
def test_mqar(seq_len, pairs, vocab):
    task = load_task("mqar", seq_len=seq_len, num_pairs=pairs, vocab_size=vocab)
    tokens, targets = sample(task)
    half, start = vocab // 2, seq_len - 2 * pairs
    keys, values = tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2]
    assert keys.min() >= 1 and keys.max() <= half - 1 and values.min() >= half and values.max() <= vocab - 1
    assert all(len(set(row)) == pairs for row in keys) and all(len(set(row)) == pairs for row in values)
    for key_row, value_row, row, target in zip(keys, values, tokens, targets, strict=True):
        answer = dict(zip(key_row, value_row, strict=True))
        assert sorted(row[start::2]) == sorted(key_row)
        np.testing.assert_array_equal(target[start::2], [answer[key] for key in row[start::2]])
    scored = np.zeros(seq_len, bool)
    scored[start::2] = True
    assert (targets[:, ~scored] == -1).all()
    np.testing.assert_array_equal(np.arange(seq_len)[task.scored], np.flatnonzero(scored))
    filler = np.concatenate([tokens[:, 2 * pairs : start].ravel(), tokens[:, start + 1 :: 2].ravel()])
    assert set(filler) == set(range(1, vocab))
    assert chisquare(np.bincount(filler, minlength=vocab)[1:]).pvalue > 1e-4
    # Query order is random: the first query is any of the pairs.
    first = np.argmax(keys == tokens[:, start, None], axis=1)
    assert chisquare(np.bincount(first, minlength=pairs)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("seq_len", "vocab", "data", "noise"), [(40, 128, range(3, 66), range(67, 128)), (256, 64, range(3, 34), range(35, 64))]
)  # fmt: skip
def test_selective_copy(seq_len, vocab, data, noise):
    task = load_task("selective_copy", seq_len=seq_len, vocab_size=vocab, num_tokens=16)
    tokens, targets = sample(task)
    context = seq_len - 17
    assert (tokens[:, context] == 1).all() and (tokens[:, context + 1 :] == 2).all()
    seen_data, seen_noise, places = set(), set(), collections.Counter()
    for row, target in zip(tokens[:, :context], targets, strict=True):
        is_data = np.isin(row, data)
        assert is_data.sum() == 16 and len(set(row[is_data])) == 16
        assert np.isin(row[~is_data], noise).all()
        np.testing.assert_array_equal(target[context : context + 16], row[is_data])
        seen_data |= set(row[is_data])
        seen_noise |= set(row[~is_data])
        places.update(np.flatnonzero(is_data).tolist())
    assert (targets[:, :context] == -1).all() and (targets[:, -1] == -1).all()
    np.testing.assert_array_equal(np.arange(seq_len)[task.scored], np.arange(context, context + 16))
    assert seen_data == set(data) and seen_noise == set(noise)
    assert chisquare([places[p] for p in range(context)]).pvalue > 1e-4


def test_roles_and_marks():
    task = load_task("mqar", seq_len=32, num_pairs=3)
    named = np.asarray(task.ROLES)[task.roles(sample(task, 5)[0])]
    assert (named[:, :6] == ["key", "value"] * 3).all() and (named[:, 6:26] == "filler").all()
    assert task.marks() == {"pairs end": 6, "queries": 26}
    task = load_task("selective_copy", seq_len=32, num_tokens=4, vocab_size=32)
    named = np.asarray(task.ROLES)[task.roles(sample(task, 5)[0])]
    assert (named[:, task.marks()["copy target"]] == "separator").all() and (named[:, 28:] == "blank").all()


def test_draws_are_uniform():
    rows = np.asarray(distinct(jax.random.key(0), 6000, 2, 3))
    assert chisquare(list(collections.Counter(map(tuple, rows.tolist())).values())).pvalue > 1e-4
    assert len({tuple(row) for row in rows.tolist()}) == 6  # every ordered pair
    subsets = collections.Counter(map(tuple, np.asarray(increasing(jax.random.key(1), 6000, 3, 5)).tolist()))
    assert len(subsets) == 10 and all(a < b < c for a, b, c in subsets)
    assert chisquare(list(subsets.values())).pvalue > 1e-4
    np.testing.assert_array_equal(increasing(jax.random.key(2), 3, 4, 4), [[0, 1, 2, 3]] * 3)
    rows = collections.Counter(map(tuple, np.asarray(distinct_of_many(jax.random.key(3), 6000, 2, 4)).tolist()))
    assert len(rows) == 12 and all(a != b for a, b in rows)
    assert chisquare(list(rows.values())).pvalue > 1e-4


def test_weighted_draws_take_each_in_proportion_to_what_is_left():
    weights = jnp.array([1.0, 2.0, 5.0])
    rows = np.asarray(weighted(jax.random.key(0), 6000, 2, weights))
    pairs = itertools.permutations(enumerate((1, 2, 5)), 2)
    expected = {(a, b): wa / 8 * wb / (8 - wa) for (a, wa), (b, wb) in pairs}
    found = collections.Counter(map(tuple, rows.tolist()))
    assert set(found) == set(expected)
    assert chisquare([found[pair] for pair in expected], [6000 * p for p in expected.values()]).pvalue > 1e-4


TASKS = [
    *("mqar", "selective_copy", "interleaved", "power_law", "forgetting", "state_tracking"),
    *("zoology_mqar", "mad_recall", "mad_fuzzy", "mad_copying", "mad_memorisation"),
]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.slow
def test_one_seed_is_one_data_set_and_what_is_scored_is_where_the_task_says(name):
    task = load_task(name, seq_len=128)
    (a, targets), (b, _), (c, _) = (sample(task, 10, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    task.check_sequences()
    if "query" in task.ROLES:
        is_query = task.roles(a) == task.ROLES.index("query")
        assert is_query[targets >= 0].all()
        assert name in ("forgetting", "zoology_mqar") or not is_query[targets < 0].any()
    with warnings.catch_warnings(), jax.enable_x64(True):  # by a user who calls `sample`
        warnings.simplefilter("error")
        tokens, targets = task.sample(jax.random.key(0), 4)
    assert np.issubdtype(tokens.dtype, np.integer) and (np.asarray(targets) >= 0).any()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mqar", {"seq_len": 63, "num_pairs": 16}, "seq_len=63 is too short for num_pairs=16: it takes at least 64"),
        ("mqar", {"vocab_size": 32, "num_pairs": 16}, "vocab_size=32 is too small for num_pairs=16"),
        ("mqar", {"num_pairs": 0}, "num_pairs must be at least 1, got 0"),
        ("selective_copy", {"seq_len": 32}, "seq_len=32 is too short for num_tokens=16: it takes at least 33"),
        ("selective_copy", {"pairs": 3}, "task.pairs: selective_copy has no such setting; it has num_tokens"),
        ("interleaved", {"vocab_size": 48}, "vocab_size=48 is too small for num_pairs=24 .*: it takes at least 50"),
        ("forgetting", {"num_updates": 9}, "num_updates must be at most num_pairs=8, got 9"),
        ("forgetting", {"seq_len": 39}, "seq_len=39 is too short .* num_updates=4: it takes at least 40"),
        ("state_tracking", {"group": "s3"}, "task.vocab_size must be 6, the elements of group=s3, got 2"),
        ("state_tracking", {"group": "z3"}, "task.group must be one of parity, s3, s4, s5, got 'z3'"),
        ("state_tracking", {"tests": "8;9"}, "task.tests must be lengths with commas between them, .* got '8;9'"),
        ("state_tracking", {"tests": "8,0"}, "task.tests: length 0: task.seq_len must be at least 1, got 0"),
        ("copying", {}, "no task 'copying'"),
        ("base", {}, "TASK of loglinear_jax.tasks.base is None"),
        ("mad_recall", {"seq_len": 127}, "task.seq_len must be even and at least 4, got 127"),
        ("mad_recall", {"frac_noise": 0.2}, "task.frac_noise=0.2 needs a noise_vocab_size of at least 1, got 0"),
        ("mad_recall", {"frac_noise": 1.0, "noise_vocab_size": 4}, "task.frac_noise must be below 1, got 1.0"),
        ("mad_recall", {"noise_vocab_size": 15}, "task.vocab_size=16 is too small .*: it takes at least 17"),
        ("mad_fuzzy", {"seq_len": 17}, "task.seq_len=17 is too short for key_motif=3 .*: it takes at least 18"),
        ("mad_fuzzy", {"value_motif": 9}, "task.vocab_size=16 is too small .* value_motif=9: it takes at least 18"),
        ("mad_copying", {"seq_len": 33}, "task.seq_len=33 is too short for num_tokens=16: it takes at least 34"),
        ("mad_memorisation", {"map_seed": -1}, "task.map_seed must not be negative, got -1"),
        ("zoology_mqar", {"vocab_size": 33}, "vocab_size=33 is too small for num_pairs=16 .*: it takes at least 34"),
    ],
)
def test_bad_settings_are_named(name, settings, message):
    with pytest.raises(SettingError, match=message):
        load_task(name, **settings)


def drawing(sample, **settings):
    class Own(Task):
        pass

    Own.sample = sample
    return Own(seq_len=8, vocab_size=10, **settings)


def ids(num, value=1, length=8, dtype=jnp.int32):
    return jnp.full((num, length), value, dtype)


@pytest.mark.parametrize(
    ("tokens", "targets", "more", "message"),
    [
        (ids, lambda num: ids(num, length=9), {}, r"shape \(4, 9\) .*: expected integers \[4, task.seq_len=8\]"),
        (lambda num: ids(num, dtype=jnp.float32), ids, {}, "tokens of shape .* and dtype float32"),
        (lambda num: ids(num, 10), ids, {}, "tokens from 10 to 10: expected 0 to task.vocab_size - 1 = 9"),
        (lambda num: [1, 2], ids, {}, "sample.* returns tokens of shape None and dtype list"),
        (ids, lambda num: ids(num, -2), {}, "targets from -2 to -2: expected -1 to"),
        (ids, lambda num: ids(num, -1), {}, "expected something to predict, a target ≥ 0"),
        (ids, ids, {"scored": slice(4, 8)}, r"expected targets within scored = slice\(4, 8, None\) alone"),
        (ids, ids, {"num_scored": 9}, "sequences with 8 to 8 targets: expected num_scored = 9"),
    ],
)
def test_what_a_task_draws_is_checked(tokens, targets, more, message):
    task = drawing(lambda self, key, num: (tokens(num), targets(num)))
    for name, value in more.items():
        setattr(type(task), name, value)
    with pytest.raises(SettingError, match=message):
        check_sample(task)


def test_what_is_no_pair_and_no_sample_is_named_and_what_a_sample_raises_is_a_bug():
    with pytest.raises(SettingError, match="sample returns a .*: expected the pair"):
        check_sample(drawing(lambda self, key, num: ids(num)))
    with pytest.raises(SettingError, match="Task has no method sample"):
        check_sample(Task())
    with pytest.raises(ZeroDivisionError):
        check_sample(drawing(lambda self, key, num: 1 // 0))


def test_a_sample_that_does_not_use_its_key_and_what_is_drawn_for_evaluation_are_checked_too():
    """As validation and test would have the sequences of the training."""
    task = drawing(lambda self, key, num: (jax.random.randint(key, (num, 8), 0, 10), ids(num)))
    task.check_sequences()
    type(task).sample_evaluation = lambda self, key, num: (ids(num, 10), ids(num))
    with pytest.raises(SettingError, match="sample_evaluation returns tokens from 10 to 10"):
        task.check_sequences()
    task = drawing(lambda self, key, num: (jax.random.randint(jax.random.key(3), (num, 8), 0, 10), ids(num)))
    with pytest.raises(SettingError, match="expected another key to draw others"):
        task.check_sequences()


class Undecorated(Task):
    delay: int = setting(4, "tokens between")


def test_what_is_no_class_of_tasks_is_named(monkeypatch):
    for task, message in (
        (3, "TASK of own_task is 3: expected a dataclass that is a subclass of Task"),
        (Undecorated, "Undecorated of own_task lacks @dataclasses.dataclass.* above it"),
    ):
        monkeypatch.setitem(sys.modules, "own_task", types.SimpleNamespace(TASK=task))
        with pytest.raises(SettingError, match=message):
            load_task("own_task")
