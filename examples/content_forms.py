"""Forms of a content-aware λ, which results/interleaved tries beside `content`, and controls (Sharp, Uniform).

Each is a variant, from the repository's root: --config.variants='lam=examples.content_forms:Sum(total=4)'
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from loglinear_jax.lam import UNIT, softmax_of_occupied


class Form(nn.Module):
    """softmax over the occupied levels of γ_h s[ℓ], γ_h > 0 learned from first_scale. `content` begins at 5."""

    first_scale: float = 5.0
    needs_input = False
    needs_scores = True
    has_levels = False

    def logits(self, d, scores):
        log_scale = self.param("log_scale", nn.initializers.constant(np.log(self.first_scale)), scores.shape[-2:-1])
        return jnp.exp(log_scale)[:, None] * scores

    @nn.compact
    def __call__(self, d, scores, occupied):
        return softmax_of_occupied(self.logits(d, scores), occupied)


class Mlp(Form):
    """`content_mlp`, with γ from first_scale."""

    needs_input = True
    has_levels = True

    def logits(self, d, scores):
        hidden = nn.gelu(nn.Dense(64)(d.astype(jnp.float32)))
        return super().logits(d, scores) + nn.Dense(d.shape[-1], kernel_init=nn.initializers.zeros)(hidden)


class TokenTemperature(Form):
    """γ of each token: times exp of a projection of it. (d has one number a level: the first is taken.)"""

    needs_input = True

    def logits(self, d, scores):
        return jnp.exp(d[..., :1].astype(jnp.float32)) * super().logits(d, scores)


class BySize(Form):
    """Scores divided by the square root of the bucket's size, 2^(ℓ-1)."""

    def logits(self, d, scores):
        size = 2.0 ** np.maximum(np.arange(scores.shape[-1]) - 1, 0)
        return super().logits(d, scores / np.sqrt(size).astype(np.float32))


class Gates(Form):
    """λ[ℓ] = softplus(γ_h s[ℓ] + b_h), b learned, from 1 where the score is 0: each level by itself."""

    first_scale: float = 1.0

    @nn.compact
    def __call__(self, d, scores, occupied):
        bias = self.param("bias", nn.initializers.constant(UNIT), scores.shape[-2:-1])
        return nn.softplus(self.logits(d, scores) + bias[:, None])


class Sum(Form):
    """Σλ = total."""

    total: float = 4.0

    @nn.compact
    def __call__(self, d, scores, occupied):
        return self.total * softmax_of_occupied(self.logits(d, scores), occupied)


class SumOfLevels(Form):
    """Σλ = the number of occupied levels, as with λ = 1: SumOfLevels(first_scale=0.1) begins near `fixed`."""

    @nn.compact
    def __call__(self, d, scores, occupied):
        return jnp.sum(occupied, -1, keepdims=True) * softmax_of_occupied(self.logits(d, scores), occupied)


class SumLearned(Form):
    """Σλ = c_h > 0 learned, from 4."""

    @nn.compact
    def __call__(self, d, scores, occupied):
        log_sum = self.param("log_sum", nn.initializers.constant(np.log(4.0)), scores.shape[-2:-1])
        return jnp.exp(log_sum)[:, None] * softmax_of_occupied(self.logits(d, scores), occupied)


class Normalised(Form):
    """What is read of a bucket divided by the sum of its weights q·k, or by 1 if that is less (as in mLSTM)."""

    @nn.compact
    def __call__(self, d, scores, occupied):
        return softmax_of_occupied(self.logits(d, scores), occupied) / jnp.maximum(jnp.abs(scores), 1.0)


class Centred(Form):
    """Scores less what their bucket would have if the query matched every token of the past alike: n s̄, n the bucket's size."""

    @nn.compact
    def __call__(self, d, scores, occupied):
        size = occupied * 2.0 ** np.maximum(np.arange(scores.shape[-1]) - 1, 0).astype(np.float32)
        mean = jnp.sum(scores, -1, keepdims=True) / jnp.sum(size, -1, keepdims=True)
        return softmax_of_occupied(self.logits(d, scores - size * mean), occupied)


class Sharp(Form):
    """A control: γ is first_scale, not learned."""

    def logits(self, d, scores):
        return self.first_scale * scores


class Uniform(Form):
    """A control that does not look: the same λ for every occupied level, Σλ = 1."""

    def logits(self, d, scores):
        return 0 * scores
