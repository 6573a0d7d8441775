"""AR hits and counts of bigrams against slow ones."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loglinear_jax.evaluate import hits
from loglinear_jax.evaluate.hits import bigram_counts, bigrams, hit_distances

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


def test_hits_of_a_known_document():
    np.testing.assert_array_equal(hit_distances(np.array([3, 7, 8, 3, 7, 7, 7])), [0, 0, 0, 3, 0, 1])
    np.testing.assert_array_equal(hit_distances(np.array([5, 6])), [0])


def test_tokens_of_large_vocabularies_are_told_apart():
    large = 2**31 - 1
    tokens = np.array([large, 0, large, 0, 1, large], np.uint32)
    np.testing.assert_array_equal(hit_distances(tokens), [0, 0, 2, 0, 0])
    assert len(set(bigrams(tokens).tolist())) == 4


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_bigrams_are_counted_in_chunks(tokens, asked, chunk):
    pairs = list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    wanted, first = np.unique(bigrams(asked), return_index=True)
    before, hits.CHUNK = hits.CHUNK, chunk
    try:
        counts = bigram_counts(tokens.astype(np.uint16), wanted)
    finally:
        hits.CHUNK = before
    expected = [pairs.count((asked[i], asked[i + 1])) for i in first]
    np.testing.assert_array_equal(counts, expected)
