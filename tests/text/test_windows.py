import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loglinear_jax.text import CorpusError, SeedBatches, evaluation_windows

TOKENS = np.arange(1003, dtype=np.uint16)  # a token is its position
SETTINGS = dict(seq_len=10, target_offset=1, batch_size=4, seeds=[0, 1, 7])


def same(batch, other):
    return all(np.array_equal(batch[key], other[key]) for key in ("tokens", "targets"))


def test_batches_are_windows_and_the_tokens_after_them():
    batch = SeedBatches(TOKENS, **SETTINGS)[5]
    for value in batch.values():
        assert value.shape == (3, 4, 10) and value.dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(
        batch["tokens"] - batch["tokens"][..., :1], np.broadcast_to(np.arange(10), (3, 4, 10))
    )
    assert not (batch["tokens"][..., 0] % 10).any()


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_every_epoch_is_a_permutation_of_all_whole_windows(num_tokens, seq_len, offset, seed):
    num_windows = max(0, num_tokens - offset) // seq_len
    given = dict(seq_len=seq_len, target_offset=offset, batch_size=1, seeds=[seed])
    tokens = np.arange(num_tokens)
    if not num_windows:
        with pytest.raises(CorpusError, match=f"seq_len={seq_len}: {num_tokens} tokens make 0 windows"):
            SeedBatches(tokens, **given)
        return
    batches = SeedBatches(tokens, **given)
    for epoch in range(2):
        seen = [batches[epoch * num_windows + step]["tokens"][0, 0] for step in range(num_windows)]
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(num_windows * seq_len))


def test_seeds_and_epochs_have_their_own_order():
    batches = SeedBatches(TOKENS, **SETTINGS)
    epochs = np.stack([batches[step]["tokens"][..., 0] // 10 for step in range(50)]).reshape(2, 25, 3, 4)
    orders = epochs.transpose(0, 2, 1, 3).reshape(6, 100)
    np.testing.assert_array_equal(np.sort(orders), [np.arange(100)] * 6)
    assert all((x == y).sum() < 20 for x, y in itertools.combinations(orders, 2))


def test_a_seed_does_not_depend_on_the_others():
    alone = SeedBatches(TOKENS, **SETTINGS | {"seeds": [7]})
    together = SeedBatches(TOKENS, **SETTINGS)
    assert same({key: value[2:] for key, value in together[11].items()}, alone[11])


def test_iterators_go_on_from_a_state():
    batches = SeedBatches(TOKENS, **SETTINGS)
    iterator = batches.iterate(4)
    for _ in range(3):
        next(iterator)
    state = iterator.get_state()
    with contextlib.closing(batches.iterate(40)) as later:
        assert same(next(later), batches[40])
    expected = [next(iterator) for _ in range(3)]
    other = SeedBatches(TOKENS, **SETTINGS).iterate(0)
    next(other)
    other.set_state(state)
    iterator.set_state(state)
    for step, batch in enumerate(expected, 7):
        assert same(batch, batches[step]) and same(batch, next(other)) and same(batch, next(iterator))
    iterator.close()
    other.close()


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 12), st.one_of(st.none(), st.integers(1, 5)))
def test_evaluation_predicts_every_token_once(num_tokens, seq_len, offset, limit):
    tokens = np.arange(num_tokens, dtype=np.uint16) + 5
    if num_tokens <= offset:
        with pytest.raises(CorpusError, match=f"{num_tokens} tokens have no targets {offset} later"):
            evaluation_windows(tokens, seq_len=seq_len, target_offset=offset)
        return
    inputs, targets = evaluation_windows(tokens, seq_len=seq_len, target_offset=offset, limit=limit)
    assert inputs.shape == targets.shape and inputs.shape[1] == seq_len and inputs.dtype == targets.dtype == np.int32
    expected = tokens[offset:] if limit is None else tokens[offset:][: limit * seq_len]
    scored = targets >= 0
    np.testing.assert_array_equal(targets[scored], expected)
    np.testing.assert_array_equal(inputs[scored], expected - offset)
    assert not inputs[~scored].any() and (~scored).sum() < seq_len
    assert (targets[~scored] == -1).all()
