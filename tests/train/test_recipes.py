"""What optimisers and losses are made of the settings of training."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.losses import token_losses
from loglinear_jax.models import OwnModel, OwnSettings, RecallModel, RecallSettings
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import load_task
from loglinear_jax.train import SeedTrainer, TrainSettings, make_optimizer
from loglinear_jax.train.seed_trainer import schedule_of

SETTINGS = TrainSettings(num_steps=20, batch_size=4, learning_rate=0.5, stop_at=None)


def with_settings(**changes):
    return dataclasses.replace(SETTINGS, **changes)


def test_wsd_rises_stays_and_falls_to_0_at_the_last_step():
    steps = np.arange(21)
    for decay_steps, fall in ((5, 5), (None, 4)):  # a fifth of all
        shares = [schedule_of(with_settings(schedule="wsd", warmup_steps=4, decay_steps=decay_steps))(s) for s in steps]
        np.testing.assert_allclose(shares, np.clip(np.minimum(steps / 4, (20 - steps) / fall), 0, 1), atol=1e-6)
    assert schedule_of(with_settings(schedule="wsd"))(0) == 1.0  # without a warm-up


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(schedule="wsd", warmup_steps=12, decay_steps=9), "decay_steps=9 together must be at most .*num_steps=20"),
        (dict(schedule="linear"), "train.schedule must be one of constant, cosine, wsd, got 'linear'"),
        (dict(z_loss=-1.0), "train.z_loss must be finite and not negative, got -1.0"),
    ],
)
def test_impossible_recipes_are_named(changes, message):
    with pytest.raises(SettingError, match=message):
        with_settings(**changes).check()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_first_moment_can_be_bfloat16(weight_decay):
    params = {"x": jnp.linspace(-1, 1, 64)}
    updates = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(with_settings(moment_dtype=dtype, weight_decay=weight_decay))
        state = optimizer.init(params)
        for _ in range(3):
            updates[dtype], state = optimizer.update({"x": jnp.sin(9 * params["x"])}, state, params)
        [moments] = [x for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")]
        assert (moments.mu["x"].dtype, moments.nu["x"].dtype) == (dtype, jnp.float32)
    np.testing.assert_allclose(updates["bfloat16"]["x"], updates["float32"]["x"], rtol=2e-2, atol=1e-3)
    assert updates["float32"]["x"].dtype == updates["bfloat16"]["x"].dtype


class Table(nn.Module):
    """Logits of each token."""

    vocab_size: int

    @nn.compact
    def __call__(self, tokens):
        return nn.Embed(self.vocab_size, self.vocab_size)(tokens)


@pytest.mark.slow
def test_training_adds_z_loss_whatever_the_model():
    task = load_task("mqar", seq_len=16, num_pairs=2, vocab_size=16)
    sizes = dict(vocab_size=16, max_length=16)
    for model in (
        RecallModel(RecallSettings(**sizes, hidden=8, layers=1, head_dim=8, key_dim=8)),
        OwnModel(OwnSettings(**sizes, kind=f"{__name__}:Table")),
    ):
        tokens, targets = batch = task.sample(jax.random.key(0), 4)
        params = jax.jit(model.init)(jax.random.key(0), tokens)
        trainers = (SeedTrainer(model, task, with_settings(z_loss=z)) for z in (0, 0.1))
        plain, more = (trainer.losses[0](model, params, batch) for trainer in trainers)
        expected = [jnp.sum(token_losses(model.apply(params, tokens), targets, z)[0]) for z in (0, 0.1)]
        np.testing.assert_allclose((more - plain) * jnp.sum(targets >= 0), expected[1] - expected[0], rtol=1e-4)
        assert more > plain
