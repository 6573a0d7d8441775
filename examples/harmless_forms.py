"""Forms of a content-aware λ that start as one state, λ = 1, and leave it only as far as training finds that it helps.

Each is a variant, from the repository's root: --config.variants='lam=examples.harmless_forms:GatedContent(gamma=0.1)'
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from examples.content_forms import Form
from loglinear_jax.lam import softmax_of_occupied


class GatedContent(Form):
    """λ = 1 + g_h (content - its mean over the occupied levels), g_h learned from gamma."""

    gamma: float = 0.1

    def gate(self, d, occupied):
        return self.param("gate", nn.initializers.constant(self.gamma), d.shape[-2:-1])[:, None]

    @nn.compact
    def __call__(self, d, scores, occupied):
        content = softmax_of_occupied(self.logits(d, scores), occupied)
        mean = 1 / jnp.sum(occupied, -1, keepdims=True)
        return 1 + self.gate(d, occupied) * jnp.where(occupied, content - mean, 0)


class TokenGatedContent(GatedContent):
    """The same with a gate of each token, n sigmoid(b_h + a projection of it), n the number of occupied levels.

    So λ is a mixture of 1 and of n content, whose mean is 1 as well. gamma: the sigmoid where the projection is 0.
    """

    needs_input = True

    def gate(self, d, occupied):
        start = np.log(self.gamma / (1 - self.gamma))
        bias = self.param("gate", nn.initializers.constant(start), d.shape[-2:-1])[:, None]
        return jnp.sum(occupied, -1, keepdims=True) * nn.sigmoid(bias + d[..., :1].astype(jnp.float32))


class NormalisedReads(nn.Module):
    """λ[ℓ] = m[ℓ]^p_h over its mean over the occupied levels, m = 1 + |score|, p_h learned from `power`.

    A score is q·z, z the sum of a bucket's keys, by which a normalised read is divided. -1: each bucket's read is divided
    by its size. 0: one state. Above: buckets with a larger score count more. What is read itself, λ does not see.
    """

    power: float = 0.0
    needs_input = False
    needs_scores = True
    has_levels = False

    @nn.compact
    def __call__(self, d, scores, occupied):
        power = self.param("power", nn.initializers.constant(self.power), d.shape[-2:-1])[:, None]
        logits = power * jnp.log1p(jnp.abs(scores))
        return jnp.sum(occupied, -1, keepdims=True) * softmax_of_occupied(logits, occupied)
