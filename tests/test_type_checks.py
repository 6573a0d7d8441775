"""Annotations are enforced in tests: each of these fails if they are not."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from loglinear_jax.losses import summed_loss, token_losses
from loglinear_jax.ops.decays import decay_matrix
from loglinear_jax.ops.levels import split_heads


def test_a_wrong_rank_is_caught():
    with pytest.raises(TypeCheckError, match="token_losses"):
        token_losses(jnp.zeros((2, 3, 8)), jnp.zeros((3,), jnp.int32))


def test_a_size_that_differs_from_another_arguments_is_caught():
    with pytest.raises(TypeCheckError, match="summed_loss"):
        summed_loss(jnp.zeros((2, 3, 8)), jnp.zeros((7, 11)), jnp.zeros((2, 3), jnp.int32))


def test_a_wrong_dtype_is_caught():
    with pytest.raises(TypeCheckError, match="decay_matrix"):
        decay_matrix(jnp.zeros(4, jnp.int32))


def test_a_wrong_type_is_caught():
    with pytest.raises(TypeCheckError, match="split_heads"):
        split_heads(jnp.zeros((1, 4, 2)), 2.0)
