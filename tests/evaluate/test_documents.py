"""Losses of documents of different lengths, each as alone; their groups; means with intervals over documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loglinear_jax.analysis.documents import seed_rows
from loglinear_jax.evaluate import documents
from loglinear_jax.evaluate.documents import (
    bigram_counts,
    bigrams,
    document_losses,
    hit_distances,
    loss_measures,
    mean_of_tokens,
    padded_lengths,
)
from loglinear_jax.evaluate.windows import window_losses
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.statistics import mean_interval, student_interval

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 23, size).astype(np.int32) for size in (2, 31, 65, 66, 100, 7)]


@pytest.mark.slow
def test_a_document_has_the_losses_that_it_has_alone():
    settings = LanguageSettings(23, 128, hidden=16, layers=1, heads=2, head_dim=8, key_dim=16, dtype="float32")
    model = LanguageModel(settings)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    done = []
    losses = document_losses(model, params, DOCUMENTS, done.append)
    assert padded_lengths(DOCUMENTS) == [64, 64, 64, 99, 99, 64] and sum(done) == sum(padded_lengths(DOCUMENTS))
    for document, found in zip(DOCUMENTS, losses, strict=True):
        np.testing.assert_allclose(found, window_losses(model, params, document[None])[0], rtol=1e-5, atol=1e-5)


def test_every_token_is_in_its_group():
    losses = {name: [[RNG.exponential(size=len(document) - 1) for document in DOCUMENTS]] for name in ("a", "b")}
    train = RNG.integers(0, 23, 3000).astype(np.uint16)
    measures = {measure.name: measure for measure in loss_measures(DOCUMENTS, losses, train)}
    hits, position, distance, frequency = measures.values()
    own = [len(document) - 1 for document in DOCUMENTS]
    every = [x.sum() for x in losses["b"][0]]
    for counts, sums in ((position.counts, position.sums["b"][0]), (hits.counts[:, 1:], hits.sums["b"][0, :, 1:])):
        np.testing.assert_array_equal(counts.sum(1), own)
        np.testing.assert_allclose(sums.sum(1), every)
    np.testing.assert_array_equal(hits.counts[:, 0], own)
    np.testing.assert_allclose(hits.sums["b"][0, :, 0], every)
    assert position.groups == ["1", "2 – 3", "4 – 7", "8 – 15", "16 – 31", "32 – 63", "64 – 99"]
    assert position.sums["a"][0, 4, 1] == pytest.approx(losses["a"][0][4][1:3].sum())

    pairs = list(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
    for d, document in enumerate(DOCUMENTS):
        expected = {name: np.zeros(len(measures[name].groups), int) for name in (distance.name, frequency.name)}
        for t, apart in enumerate(hit_distances(document)):
            if apart:
                times = pairs.count((document[t], document[t + 1]))
                expected[distance.name][int(apart).bit_length() - 1] += 1
                expected[frequency.name][len(str(times)) if times else 0] += 1
        for name, counts in expected.items():
            np.testing.assert_array_equal(measures[name].counts[d], counts)
    np.testing.assert_array_equal(distance.counts.sum(1), hits.counts[:, 1])
    assert frequency.groups[:2] == ["0", "1 – 9"]
    difference = hits.mean("b", 1, "a")
    assert difference[0] == pytest.approx(hits.mean("b", 1)[0] - hits.mean("a", 1)[0])


def test_of_several_seeds_intervals_are_over_seeds_and_differences_paired_by_seed():
    losses = {
        model: [[RNG.normal(3.0, 1.0, len(document) - 1) for document in DOCUMENTS] for _ in range(4)] for model in "ab"
    }
    position = loss_measures(DOCUMENTS, losses)[1]
    for group, name in enumerate(position.groups):
        inside = slice((1 << group) - 1, (2 << group) - 1)  # of a document's tokens after the first
        a, b = (
            np.array([np.concatenate([x[inside] for x in of_seed]).mean() for of_seed in losses[model]])
            for model in "ab"
        )
        np.testing.assert_allclose(position.mean("b", group), student_interval(b))
        np.testing.assert_allclose(position.mean("b", group, "a"), student_interval(b - a))
        rows = [row for row in seed_rows([position], [5, 6, 7, 8]) if row["group"] == name]
        assert [row["seed"] for row in rows] == [5, 6, 7, 8] and [row["a"] for row in rows] == [f"{x:.4f}" for x in a]
        assert {row["tokens"] for row in rows} == {position.counts[:, group].sum()}


def test_measures_of_ar_hits_are_left_out_where_there_are_none():
    distinct = [np.arange(size, dtype=np.int32) for size in (2, 5)]
    losses = {"a": [[np.ones(len(document) - 1) for document in distinct]]}
    names = ["loss on AR hits and on the rest", "loss by position"]
    assert [measure.name for measure in loss_measures(distinct, losses, distinct[0])] == names


def test_a_mean_of_tokens_weighs_documents_by_their_length():
    values = RNG.normal(size=40)
    np.testing.assert_allclose(mean_of_tokens(7 * values, np.full(40, 7)), mean_interval(values))
    sums, counts = np.array([1.0, 0.0, 8.0]), np.array([1, 0, 4])
    assert mean_of_tokens(sums, counts)[0] == pytest.approx(9 / 5) and np.isnan(mean_of_tokens(sums, counts)[1])
    assert np.isnan(mean_of_tokens(sums, np.zeros(3, int))).all()


def test_the_interval_holds_the_mean_of_all_tokens():
    """Of drawn documents whose loss depends on their length, where the mean over documents is another one."""
    held, times = 0, 100
    for _ in range(times):
        counts = RNG.integers(1, 100, 60)
        sums = counts * (1 + counts / 100 + RNG.normal(size=60))
        _, low, high = mean_of_tokens(sums, counts)
        lengths = np.arange(1, 100)
        held += low < (lengths * (1 + lengths / 100)).sum() / lengths.sum() < high
    assert 0.89 < held / times < 0.99


TOKENS = st.integers(2, 60).flatmap(lambda size: arrays(np.int32, size, elements=st.integers(0, 4)))


def slow_distances(tokens):
    found = []
    for t in range(1, len(tokens)):
        before = [s for s in range(1, t) if (tokens[s - 1], tokens[s]) == (tokens[t - 1], tokens[t])]
        found.append(t - before[-1] if before else 0)
    return found


@given(TOKENS)
def test_a_hit_completes_a_bigram_that_was_there_before(tokens):
    np.testing.assert_array_equal(hit_distances(tokens), slow_distances(tokens.tolist()))
    large = tokens.astype(np.uint32) + np.uint32(2**31 - 5)  # of a large vocabulary, they are told apart all the same
    np.testing.assert_array_equal(hit_distances(large), slow_distances(large.tolist()))


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_bigrams_are_counted_in_chunks(tokens, asked, chunk):
    pairs = list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    wanted, first = np.unique(bigrams(asked), return_index=True)
    before, documents.CHUNK = documents.CHUNK, chunk
    try:
        counts = bigram_counts(tokens.astype(np.uint16), wanted)
    finally:
        documents.CHUNK = before
    expected = [pairs.count((asked[i], asked[i + 1])) for i in first]
    np.testing.assert_array_equal(counts, expected)
