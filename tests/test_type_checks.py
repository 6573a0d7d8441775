"""Annotations are enforced in tests: each of these fails if they are not."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from loglinear_jax.losses import summed_loss, token_losses
from loglinear_jax.ops.decays import decay_matrix
from loglinear_jax.ops.levels import split_heads


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (token_losses, (jnp.zeros((2, 3, 8)), jnp.zeros((3,), jnp.int32))),  # a rank
        (summed_loss, (jnp.zeros((2, 3, 8)), jnp.zeros((7, 11)), jnp.zeros((2, 3), jnp.int32))),  # not another's size
        (decay_matrix, (jnp.zeros(4, jnp.int32),)),  # a dtype
        (split_heads, (jnp.zeros((1, 4, 2)), 2.0)),  # a type
    ],
)
def test_what_is_not_as_annotated_is_caught(function, arguments):
    with pytest.raises(TypeCheckError, match=function.__name__):
        function(*arguments)
