"""What surrounds the kernels in plain JAX: sums of decays along the tree."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.api import _sum_over_reads
from pallas_kernels.common.chunks import since_block_start
from tests.ops.inputs import in_float64


@pytest.mark.slow
@in_float64
@settings(max_examples=30)
@given(num_chunks=st.integers(2, 300), seed=st.integers(0, 2**32 - 1))
def test_sums_from_the_start_of_a_block(num_chunks, seed):
    decay = np.random.default_rng(seed).normal(size=(2, num_chunks))
    heights = (num_chunks - 1).bit_length()
    expected = np.zeros((2, num_chunks, heights))
    for chunk in range(num_chunks):
        for height in range(heights):
            expected[:, chunk, height] = decay[:, chunk >> height << height : chunk].sum(-1)
    with jax.disable_jit():
        np.testing.assert_allclose(since_block_start(decay), expected, atol=1e-5)


@in_float64
@settings(max_examples=30)
@given(num_chunks=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_sums_over_the_states_that_a_chunk_reads(num_chunks, seed):
    x = np.random.default_rng(seed).normal(size=num_chunks)
    expected = np.zeros(num_chunks)
    for chunk in range(num_chunks):
        end = chunk
        while end:
            expected[chunk] += x[end]
            end &= end - 1
    with jax.disable_jit():
        np.testing.assert_allclose(_sum_over_reads(x), expected)
