"""Settings as a command line gives them."""

import pytest

from loglinear_jax.config import ConfigError, default_config
from loglinear_jax.config.variants import override


def changed(argument):
    config = default_config(task="mqar")
    config.task.lags = (1, 2)
    config.lock()
    section, _, field = override(config, argument).partition(".")
    return config[section][field] if field else config[section]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("train.num_steps=1000", 1000),
        ("train.num_steps=1e3", 1000),
        ("train.first_seed=-3", -3),
        ("train.grad_clip=1e-3", 0.001),
        ("train.grad_clip=None", None),
        ("train.stream=true", True),
        ("train.stream", True),
        ("train.stream=Yes", True),
        ("train.patience=", None),
        ("model.lam=fixed", "fixed"),
        ("variants=linear,mixer=softmax", "linear,mixer=softmax"),
        ("task.lags=(3, 4)", (3, 4)),
        ("train.learning_rate=1e-3,2.0", [0.001, 2.0]),
    ],
)
def test_what_can_mean_one_thing_alone_is_read(argument, value):
    found = changed(f"--config.{argument}")
    assert found == value and type(found) is type(value)


def test_a_setting_is_negated():
    assert changed("--noconfig.train.stream") is False


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.num_steps=1.5", "^train.num_steps: expected a whole number, got '1.5'$"),
        ("train.num_steps=1e400", "expected a whole number, got '1e400'"),
        ("train.num_steps", "expected a whole number, got ''"),
        ("train.grad_clip=few", "expected a number, got 'few'"),
        ("train.stream=maybe", "expected true or false, got 'maybe'"),
        ("train=3", "^there is no setting train$"),
        ("train.num_steps=None2", "expected a whole number, got 'None2'"),
        ("train.num_sedes=3", "^there is no setting train.num_sedes: did you mean train.num_seeds[?]$"),
        ("num_seeds=3", "^there is no setting num_seeds: did you mean train.num_seeds[?]$"),
        ("train.num_seeds.x=3", "^there is no setting train.num_seeds.x: did you"),
        ("__class__=1", "^there is no setting __class__$"),
        ("=1", "there is no setting ''"),
    ],
)
def test_what_came_is_named_with_what_was_expected(argument, message):
    with pytest.raises(ConfigError, match=message):
        changed(f"--config.{argument}")
