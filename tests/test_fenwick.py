"""The tree's arithmetic against the sets it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loglinear_jax import fenwick_level, init_fenwick_state, num_levels
from loglinear_jax.fenwick import (
    bit_length,
    capacity,
    merge_for_token,
    occupied_levels,
)


def partition(t):
    """The Fenwick partition of [0, t]: level -> set of tokens, one bucket for each set bit of t."""
    buckets = {0: {t}}
    end = t
    for bit in range(t.bit_length()):
        if t >> bit & 1:
            buckets[bit + 1] = set(range(end - 2**bit, end))
            end -= 2**bit
    assert end == 0
    return buckets


@given(st.integers(0, 300))
def test_levels_are_the_fenwick_partition(t):
    for level, tokens in partition(t).items():
        assert all(fenwick_level(t, s) == level for s in tokens)


@given(st.integers(1, 2**20))
def test_num_levels(length):
    assert num_levels(length) == int(np.ceil(np.log2(length))) + 1
    assert fenwick_level(length - 1, 0) <= num_levels(length) - 1
    if length < 5000:
        assert fenwick_level(np.arange(length), 0).max() == num_levels(length) - 1


@given(st.integers(0, 2**63 - 1))
def test_bit_length_of_numpy_and_jax(x):
    assert bit_length(x) == x.bit_length()
    assert bit_length(jnp.int32(x >> 32)) == (x >> 32).bit_length()


def test_level_is_vectorised_and_traceable():
    t, s = np.arange(16)[:, None], np.arange(16)
    expected = fenwick_level(t, s)
    assert expected.shape == (16, 16) and expected.dtype == np.int32
    np.testing.assert_array_equal(jax.jit(fenwick_level)(t, s), expected)
    np.testing.assert_array_equal(fenwick_level([5, 6], [1, 6]), fenwick_level(np.array([5, 6]), np.array([1, 6])))


@given(st.integers(1, 127))
def test_merging_keeps_every_bucket_at_its_level(t):
    """Each level holds the number and the sum of its tokens."""
    num = num_levels(128)

    def sums(position):
        levels = np.zeros((1, 1, num, 1, 2))
        for level, tokens in partition(position).items():
            levels[0, 0, level, 0] = (len(tokens), sum(tokens))
        return levels

    merged = merge_for_token(jnp.asarray(sums(t - 1), jnp.float32), t)
    expected = sums(t)
    expected[0, 0, 0] = 0  # token t itself is put there afterwards
    np.testing.assert_array_equal(merged, expected)
    assert not np.any(merge_for_token(merged, 0))


def test_occupied_levels_are_those_with_tokens():
    occupied = occupied_levels(np.arange(20), 6)
    assert (occupied == occupied_levels(jnp.arange(20), 6)).all()
    for position in range(20):
        levels = {int(fenwick_level(position, s)) for s in range(position + 1)}
        assert set(np.flatnonzero(occupied[position])) == levels
        for first in range(position + 1):
            levels = {int(fenwick_level(position, s)) for s in range(first, position + 1)}
            assert set(np.flatnonzero(occupied_levels(position, 6, first))) == levels
    for one_byte in (np.uint8(200), jnp.uint8(200)):
        assert occupied_levels(one_byte, 14).tolist() == occupied_levels(200, 14).tolist()
    for end in (2**31 - 1, jnp.asarray(2**31 - 1, jnp.int32)):
        assert occupied_levels(end, 40).tolist() == [True] * 32 + [False] * 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda x=x: num_levels(x), "length must be an integer ≥ 1") for x in (0, 2.0, True, "8")),
        (lambda: fenwick_level(1.0, 0), "t has dtype float64: expected integers"),
        (lambda: fenwick_level(np.array([4, -1]), 0), "t has -1: expected positions, at least 0"),
        (lambda: init_fenwick_state(1, 1, 2, 2, 8, dtype=int), "dtype is int.*expected a floating dtype, of 16 bits"),
        (lambda: occupied_levels(3, 0), "num_levels must be an integer ≥ 1, got 0"),
    ],
)
def test_what_is_no_length_position_or_state_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.integers(1, 40))
def test_capacity_is_the_last_length_with_so_many_levels(levels):
    assert num_levels(capacity(levels)) == levels and num_levels(capacity(levels) + 1) == levels + 1
