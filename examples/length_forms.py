"""Forms of λ for sequences longer than the trained ones, whose highest levels training seldom or never reaches.

Each is a variant, from the repository's root: --config.variants='lam=examples.length_forms:TopTied(levels=7)'
All compute λ from the token, as `mlp_softplus` does, and start with λ near 1.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from loglinear_jax.lam import UNIT, MlpLam


class TopTied(nn.Module):
    """`mlp_softplus` of the first `levels` levels; those above take the λ of the highest of them.

    Of 128 tokens, levels=7 ties level 7, which alone reaches back over half of the length, to level 6.
    """

    levels: int = 7
    hidden: int | None = MlpLam.hidden

    @nn.compact
    def __call__(self, d):
        lam = MlpLam(out="softplus", hidden=self.hidden, name="mlp")(d[..., : self.levels])
        above = np.minimum(np.arange(d.shape[-1]), lam.shape[-1] - 1)
        return lam[..., above]


def _of_index(module: nn.Module, d, index, width: int | None):
    """softplus of a function of the token and of each level's index [..., L], in units of SPAN levels.

    width None: a line in the index, whose height and slope follow from the token. A number: an MLP with a hidden layer so wide,
    of height, slope and index.
    """
    # Two numbers of the token: d has one a level, of which the first two exist at every length.
    height, slope = (d[..., i, None].astype(jnp.float32) for i in (0, 1))
    bias, tilt = (module.param(name, nn.initializers.zeros, (d.shape[-2],))[:, None] for name in ("bias", "tilt"))
    logits = height + bias + (slope + tilt) * index
    if width is not None:
        index = jnp.broadcast_to(index, logits.shape)
        inputs = jnp.stack([jnp.broadcast_to(x, logits.shape) for x in (height, slope)] + [index], axis=-1)
        hidden = nn.gelu(nn.Dense(width, name="hidden")(inputs))
        logits += nn.Dense(1, kernel_init=nn.initializers.zeros, name="out_proj")(hidden)[..., 0]
    return nn.softplus(logits + UNIT)


SPAN = 8  # levels over which an index goes from 0 to 1


class Smooth(nn.Module):
    """λ a smooth function of the level's index, which grows by 1 where its bucket's size doubles, and of the token.

    width: of an MLP's hidden layer; None: a line.
    """

    width: int | None = None

    @nn.compact
    def __call__(self, d):
        return _of_index(self, d, jnp.arange(d.shape[-1]) / SPAN, self.width)


class FromTop(nn.Module):
    """`Smooth` of the index counted down from the token's highest occupied level, so that the farthest bucket always has 0."""

    needs_scores = True
    width: int | None = None

    @nn.compact
    def __call__(self, d, scores, occupied):
        del scores
        levels = jnp.arange(d.shape[-1])
        top = jnp.max(jnp.where(occupied, levels, 0), axis=-1, keepdims=True)
        return _of_index(self, d, jnp.maximum(top - levels, 0) / SPAN, self.width)
