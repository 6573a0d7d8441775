import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loglinear_jax.text import PACKINGS, CutDocuments, PackedBatches, evaluation_packs
from loglinear_jax.text.batches import PARTS

LENGTHS = [7, 1, 30, 12, 3, 10, 25, 2, 41, 5]  # of documents, each with its end token
SETTINGS = dict(batch_size=3, seeds=[0, 7])


def documents_of(lengths, seq_len):
    """A token is its position: it predicts the next number."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return CutDocuments(np.arange(starts[-1] + 1, dtype=np.uint16), starts, seq_len)


def runs_of(tokens, targets, segments):
    """(first token, length) of each segment of each pack, after checking that a segment is a run of consecutive tokens."""
    for row, to, of in zip(tokens, targets, segments, strict=True):
        assert ((to < 0) == (of == 0)).all() and (np.diff(of[of > 0]) >= 0).all()
        for segment in range(1, of.max() + 1):
            own = row[of == segment]
            np.testing.assert_array_equal(own, own[0] + np.arange(len(own)))
            np.testing.assert_array_equal(to[of == segment], own + 1)
            yield int(own[0]), len(own)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 12), st.sampled_from(PACKINGS))
def test_an_evaluation_scores_every_token_once_in_its_own_document(lengths, seq_len, packing):
    packs = evaluation_packs(documents_of(lengths, seq_len), packing=packing)
    assert all(x.shape == (len(packs[0]), seq_len) and x.dtype == np.int32 for x in packs)
    targets = packs[1][packs[1] >= 0]
    np.testing.assert_array_equal(np.sort(targets), 1 + np.arange(sum(lengths)))
    starts = np.cumsum([0, *lengths])
    for first, length in runs_of(*packs):
        document = np.searchsorted(starts, first, "right") - 1
        assert first + length <= starts[document + 1]
        if packing == "first_fit":  # a rest is never cut
            assert (first - starts[document]) % seq_len == 0
    for limited, whole in zip(
        evaluation_packs(documents_of(lengths, seq_len), packing=packing, limit=2), packs, strict=True
    ):
        np.testing.assert_array_equal(limited, whole[:2])
    if packing == "concatenate":  # only the last of the packs that are shared has room left
        assert len(packs[0]) == -(-sum(lengths) // seq_len)


def read(batches, num, first=0, state=None):
    iterator = batches.iterate(first, state)
    return [next(iterator) for _ in range(num)]


def same(batch, other):
    return batch.keys() == other.keys() and all(np.array_equal(batch[name], other[name]) for name in batch)


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_seed_reads_all_documents_every_epoch_in_its_own_order(packing):
    batches = PackedBatches(documents_of(LENGTHS, 10), packing=packing, **SETTINGS)
    steps = read(batches, 18)
    assert {name: (x.shape, x.dtype) for name, x in steps[0].items()} == dict.fromkeys(PARTS, ((2, 3, 10), np.int32))
    orders = []
    for seed in range(2):
        packs = [np.concatenate([step[name][seed] for step in steps]) for name in PARTS]
        targets = packs[1][packs[1] >= 0]
        assert len(list(runs_of(*packs))) > len(packs[0])  # some share a pack
        counts = np.bincount(targets, minlength=sum(LENGTHS) + 1)[1:]
        assert len(targets) > 3 * sum(LENGTHS) and counts.max() - counts.min() <= 3
        whole = [first for first, length in runs_of(*packs) if length == 10]
        orders += [whole[i : i + 6] for i in (0, 6)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("packing", PACKINGS)
def test_iterators_go_on_from_a_state_and_from_a_step(packing):
    batches = PackedBatches(documents_of(LENGTHS, 10), packing=packing, **SETTINGS)
    expected = read(batches, 14)
    iterator = batches.iterate(0)
    for step in range(10):
        state = json.loads(json.dumps(iterator.get_state()))
        assert all(map(same, read(batches, 3, step, state), expected[step:]))
        next(iterator)
    for other in (None, {"7": state["7"]}):  # one seed is new
        assert all(map(same, read(batches, 5, 9, other), expected[9:]))
    alone = PackedBatches(documents_of(LENGTHS, 10), packing=packing, **SETTINGS | {"seeds": [7]})
    of_seed = [{name: x[1:] for name, x in step.items()} for step in expected]
    assert all(map(same, read(alone, 14), of_seed))  # a seed does not depend on the others


@pytest.mark.parametrize("lengths", [[400], [405], [10] * 40, [3] * 40])
def test_documents_may_all_be_long_or_short(lengths):
    """Also if there is no rest, or one in an epoch: a pack is there at once."""
    for packing in PACKINGS:
        batches = PackedBatches(documents_of(lengths, 10), packing=packing, **SETTINGS)
        for step, seed in itertools.product(read(batches, 5), range(2)):
            found = {length for _, length in runs_of(*(step[name][seed] for name in PARTS))}
            assert found <= {3, 5, 10} or packing == "concatenate"
        assert len(json.dumps(batches.iterate(3).get_state())) < 1_000
