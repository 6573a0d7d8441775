"""Losses at each sequence's own positions: those of all positions, with the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.losses import token_losses
from loglinear_jax.models import LanguageModel, LanguageSettings, RecallModel, RecallSettings
from loglinear_jax.modules.positions import at_positions, first_true

SIZES = {"hidden": 16, "layers": 2, "head_dim": 8, "key_dim": 8, "implementation": "parallel"}
MODELS = {
    "recall": RecallModel(RecallSettings(vocab_size=13, max_length=12, norm="pre", **SIZES)),
    "language": LanguageModel(LanguageSettings(vocab_size=13, max_length=12, heads=2, dtype="float32", **SIZES)),
}


def drawn():
    """(tokens, targets), with three targets in each of four sequences."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 13, (4, 12))
    targets = np.full((4, 12), -1)
    for row in range(4):
        targets[row, rng.choice(12, 3, replace=False)] = rng.integers(0, 13, 3)
    return jnp.asarray(tokens), jnp.asarray(targets)


def test_positions_of_each_sequence():
    _, targets = drawn()
    positions = jax.jit(first_true, static_argnums=1)(targets >= 0, 3)
    np.testing.assert_array_equal(np.sort(positions, axis=1), np.nonzero(targets >= 0)[1].reshape(4, 3))
    x = np.random.default_rng(1).normal(size=(4, 12, 5)).astype(np.float32)
    np.testing.assert_array_equal(
        at_positions(jnp.asarray(x), positions), np.take_along_axis(x, positions[..., None], 1)
    )
    np.testing.assert_array_equal(at_positions(jnp.asarray(x), slice(3, None, 2)), x[:, 3::2])


@pytest.mark.parametrize(("name", "most_logits"), [("recall", 10_000), ("recall", 13 * 7), ("language", 10_000)])
@pytest.mark.slow
def test_losses_where_targets_are_alone_are_all_losses(name, most_logits, monkeypatch):
    """Those of more logits are computed in parts."""
    monkeypatch.setattr("loglinear_jax.models.recall.MOST_LOGITS", most_logits)
    model, (tokens, targets) = MODELS[name], drawn()
    params = jax.jit(model.init)(jax.random.key(0), tokens)

    @jax.jit
    def losses(params, positions):
        def summed(params):
            return model.apply(params, tokens, targets, positions, method="summed_loss")

        each, right = model.apply(params, tokens, targets, positions, method="token_losses")
        return jax.value_and_grad(summed)(params), jnp.sum(each), jnp.sum(right)

    found, every = losses(params, first_true(targets >= 0, 3)), losses(params, jnp.arange(12)[None].repeat(4, 0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, every)
    whole = jnp.sum(token_losses(model.apply(params, tokens), targets)[0])
    np.testing.assert_allclose([found[0][0], found[1]], [whole, whole], rtol=1e-5)
