"""The oracle λ of examples/oracle.py."""

import jax
import numpy as np
import pytest

from examples.oracle import OracleRecall
from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.models import OwnModel, OwnSettings
from loglinear_jax.tasks import load_task
from loglinear_jax.train import ManySeeds, SeedTrainer, TrainSettings
from tests.tasks.drawing import sample


@pytest.mark.parametrize(("name", "mixer"), [("interleaved", "log_linear"), ("power_law", "log_linear_delta")])
def test_lam_of_every_layer_is_one_hot_at_a_query_at_the_level_of_its_source(name, mixer):
    task = load_task(name, seq_len=33, num_pairs=5, vocab_size=15)
    tokens, targets = sample(task, 4)
    model = OracleRecall(15, 40, state=4, mixer=mixer)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    _, seen = jax.jit(lambda params: model.apply(params, tokens, mutable="intermediates"))(params)
    found = [np.asarray(layer["mixer"]["lam_value"][0]) for layer in seen["intermediates"]["recall"].values()]
    assert len(found) == 2
    for lam in found:
        assert lam.shape == (4, 33, 1, 7)
        scored = targets >= 0
        assert (lam[~scored] == 1).all()
        levels = fenwick_level(np.arange(33), np.where(scored, task.sources(tokens, targets), np.arange(33)))
        np.testing.assert_array_equal(lam[scored][:, 0], np.eye(7)[levels[scored]])


@pytest.mark.slow
def test_it_trains():
    task = load_task("power_law", seq_len=16, num_pairs=2, vocab_size=8)
    settings = TrainSettings(
        num_steps=40, batch_size=16, learning_rate=0.01, num_train=256, num_validation=64, eval_batch_size=64
    )
    model = OwnModel(OwnSettings(8, 16, "examples.oracle:OracleRecall(state=8)"))
    many = ManySeeds(SeedTrainer(model, task, settings), seeds=[0])
    state, data = many.init(many.seeds), many.data()
    state, before, _ = many.evaluate_and_record(state, data)
    state, after, _ = many.evaluate_and_record(many.train_steps(state, data, num_steps=40), data)
    assert after[0] < 0.7 * before[0]
