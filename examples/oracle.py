"""What levels can give at most: a recall model whose λ is told where the answer stands, for interleaved and power-law MQAR.

From the repository's root:

    loglinear_jax train --config=power_law --config.model.kind='examples.oracle:OracleRecall(state=16)'
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from loglinear_jax import fenwick_level, num_levels
from loglinear_jax.config import default_config, robust_config, set_state
from loglinear_jax.models import RecallModel, RecallSettings


class GivenLam(nn.Module):
    """λ that `OracleRecall` puts in; 1 without it."""

    needs_input = False

    def __call__(self, d):
        return jnp.ones_like(d)


def oracle_lam(tokens, vocab_size: int, levels: int):
    """λ [B, T, 1, levels] for tokens [B, T] of `Interleaved`: at a query one-hot at the level of its answer, else 1.

    A key (1 .. vocab_size // 2 - 1) that stood before is a query. Its answer is the value behind the key's first place: there a
    convolution, or the layer before, puts key and value together.
    """
    place = jnp.arange(tokens.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    first = jnp.full((tokens.shape[0], vocab_size), tokens.shape[1]).at[rows, tokens].min(place)[rows, tokens]
    is_query = (tokens >= 1) & (tokens < vocab_size // 2) & (first < place)
    level = fenwick_level(place, jnp.where(is_query, first + 1, place))
    return jnp.where(is_query[..., None], jax.nn.one_hot(level, levels), 1.0)[:, :, None]


class OracleRecall(nn.Module):
    """The recall model of `configs/interleaved.py:robust`, every layer with `oracle_lam`.

    state: K and V of its one head. mixer: one that has λ, "log_linear" or "log_linear_delta".
    """

    vocab_size: int
    max_length: int
    dtype: str = "float32"
    state: int = 16
    mixer: str = "log_linear"

    def setup(self):
        robust_config(config := default_config())
        set_state(config, self.state)
        options = config.model.to_dict() | {
            "mixer": self.mixer, "lam": "examples.oracle:GivenLam", "max_length": self.max_length,
            "vocab_size": self.vocab_size, "dtype": jnp.dtype(self.dtype).name,
        }  # fmt: skip
        del options["kind"]
        self.recall = RecallModel(RecallSettings(**options))

    def __call__(self, tokens):
        lam = oracle_lam(tokens, self.vocab_size, num_levels(self.max_length))

        def give(method, args, kwargs, context):
            out = method(*args, **kwargs)
            return jnp.broadcast_to(lam, out.shape) if isinstance(context.module, GivenLam) else out

        with nn.intercept_methods(give):
            return self.recall(tokens)
