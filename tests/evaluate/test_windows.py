"""Losses of long windows in parts against the full forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.evaluate import window_losses, window_scores
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.settings import SettingError

WINDOWS = np.random.default_rng(0).integers(0, 23, (5, 30))


SETTINGS = LanguageSettings(23, 32, hidden=16, layers=1, heads=2, head_dim=8, key_dim=16, dtype="float32")


def build(**settings):
    model = LanguageModel(dataclasses.replace(SETTINGS, **settings))
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(WINDOWS))
    return model, jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lam": "content"}, {"mixer": "softmax"}], ids=str)
def test_windows_in_parts_are_the_full_pass(settings, monkeypatch):
    model, params = build(**settings)
    run = jax.jit(lambda p, x, y: model.apply(p, x, y, method="token_losses"))
    expected, expected_right = run(params, WINDOWS[:, :-1], WINDOWS[:, 1:])
    done = []
    for tokens in (8, 70):  # parts of a window; two windows together
        monkeypatch.setattr("loglinear_jax.generate.PROMPT_TOKENS", tokens)
        losses, right = window_scores(model, params, WINDOWS, done.append)
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(right, expected_right)
    assert sum(done) == 2 * 5 * 29


def test_losses_that_are_not_finite_are_named(monkeypatch, built):
    model, params = built
    windows = np.where(WINDOWS == 7, 8, WINDOWS)
    windows[3, 17] = 7
    embedding = params["params"]["embed"]["embedding"].at[7].set(jnp.inf)
    damaged = {"params": params["params"] | {"embed": {"embedding": embedding}}}
    monkeypatch.setattr("loglinear_jax.generate.PROMPT_TOKENS", 8)
    with pytest.raises(SettingError, match=r"losses that are not finite, first at position 1?\d of window 4: expected"):
        window_losses(model, damaged, windows)


def test_levels_of_lam_can_be_extended():
    model, params = build(lam="linear")
    extended = LanguageModel(model.settings.extended())
    long = np.random.default_rng(1).integers(0, 23, (2, 101))
    losses = window_losses(extended, params, long)
    np.testing.assert_allclose(losses[:, :32], window_losses(model, params, long[:, :33]), rtol=1e-5)
    assert losses.shape == (2, 100) and extended.settings.longest is None and extended.settings.lam_levels == 6
    assert LanguageModel(extended.settings.extended()) == extended
    content = dataclasses.replace(SETTINGS, lam="content")
    assert content.extended() == content


@pytest.fixture(scope="module")
def built():
    return build()


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (WINDOWS[:, :1], r"windows has shape \(5, 1\): expected at least one window of at least two"),
        (WINDOWS + 1, "windows has ids 1 to 23: expected 0 to 22"),
        (WINDOWS.tolist(), r"windows is of type list: expected an array \[windows, tokens\] of whole numbers"),
        (np.zeros((1, 34), int), "33 tokens in a window: the model's λ, mlp_softplus, has levels for 32"),
    ],
)
def test_windows_that_cannot_be_are_named(windows, message, built):
    model, params = built
    with pytest.raises(SettingError, match=message):
        window_losses(model, params, windows)
