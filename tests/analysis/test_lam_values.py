"""λ of a model, its variation, and rows of the attention matrix, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax import fenwick_level, log_linear_attention, log_linear_delta_attention
from loglinear_jax.analysis import (
    attention_row,
    input_dependence,
    lam_values,
    scores_by_length,
    static_lam,
)
from loglinear_jax.analysis.lam_values import mixer_values
from loglinear_jax.analysis.lengths import lengths_to_test
from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.lam import LAMS, lam_traits, rotate_by_level


@pytest.mark.parametrize("variant", ["mlp_softplus", "mixer=gated_linear", "mixer=log_linear_delta+lam=content"])
def test_an_attention_row_is_what_the_attention_does(make_trained, variant):
    """With the unit vectors as values, the attention's output is its matrix."""
    trained = make_trained(variant, key_groups=1)
    tokens, _ = trained.inspection_sequences(3)
    layer = mixer_values(trained, 1, tokens)[1]
    length = tokens.shape[1]
    identity = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None], (3, length, 2, length))
    lam = layer.get("lam_value", np.ones((3, length, 2, 6), np.float32))
    arrays = (layer["queries"], layer["keys"], identity, layer["log_decay"])
    if "beta" in layer:
        matrix = log_linear_delta_attention(*arrays, layer["beta"], lam, implementation="recurrent")
    else:
        matrix = log_linear_attention(*arrays, lam, implementation="recurrent")
    for position in (0, 5, 15):
        row = attention_row(trained, 1, tokens[2], layer=1, head=1, position=position)
        np.testing.assert_allclose(row.weight, matrix[2, position, 1, : position + 1], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(row.level, fenwick_level(position, np.arange(position + 1)))
    last = attention_row(trained, 1, tokens[2], layer=-1, head=-1, position=-1)
    np.testing.assert_array_equal(last.weight, row.weight)


def test_what_is_not_there_is_named(make_trained):
    trained = make_trained()
    tokens, _ = trained.inspection_sequences(1)
    with pytest.raises(ValueError, match="head=2: expected -2 to 1"):
        attention_row(trained, 0, tokens[0], layer=0, head=2, position=0)
    with pytest.raises(ValueError, match="has no states: its mixer is softmax"):
        attention_row(make_trained("mixer=softmax"), 0, tokens[0], layer=0, head=0, position=0)
    with pytest.raises(ValueError, match="has no λ: its mixer is gated_linear"):
        lam_values(make_trained("mixer=gated_linear"), 0, tokens)
    with pytest.raises(ValueError, match="has levels for 32 tokens"):
        lam_values(trained, 0, np.zeros((1, 33), np.int32))
    with pytest.raises(ValueError, match=r"lengths=\[64\]: λ of mlp_softplus has levels for 32 tokens"):
        scores_by_length(trained, 0, [64])


def test_lengths_are_the_doubles_and_the_longest(make_trained):
    assert lengths_to_test(make_trained(), 24) == [16, 24]
    assert lengths_to_test(make_trained(), 1000) == [16, 32]  # for which λ has levels
    assert lengths_to_test(make_trained("mixer=gated_linear"), 100) == [16, 32, 64, 100]


@pytest.mark.parametrize("lam", [lam for lam in LAMS if not lam_traits(lam).needs_scores])
def test_static_lam_is_what_no_token_changes(make_trained, lam):
    trained = make_trained(lam)
    tokens, _ = trained.inspection_sequences(2)
    values, what = static_lam(trained, 0)
    assert values.shape == (2, 2, 6)
    if lam == "fixed":
        lam = lam_values(trained, 0, tokens)[..., :5]
        np.testing.assert_allclose(lam, np.broadcast_to(values[:, None, None, :, :5], lam.shape), rtol=1e-6)
        assert np.isnan(values[..., 5]).all()  # sequences of 16 never reach the sixth level
    elif lam == "linear":
        assert "Λ" in what
        scale = trained.params(0)["params"]["layer_1"]["mixer"]["lam"]["scale"]
        np.testing.assert_array_equal(values[1, :, :5], scale[:, :5])
    else:
        assert "input is 0" in what
        weights = trained.params(0)["params"]["layer_1"]["mixer"]["lam"]
        if lam == "rope":
            a = weights["base"] @ rotate_by_level(jnp.asarray(weights["w0"]), 6) + weights["b0"]
            expected = jax.nn.softplus(a * weights["b1"])
        else:
            hidden = jax.nn.gelu(weights["hidden"]["bias"], approximate=False)
            logits = hidden @ weights["out_proj"]["kernel"] + weights["out_proj"]["bias"]
            expected = jax.nn.softplus(logits) if lam == "mlp_softplus" else jax.nn.softmax(logits)
        np.testing.assert_allclose(values[1, :, :5], np.broadcast_to(expected, (2, 6))[:, :5], rtol=1e-5)


def test_a_lam_that_looks_into_its_buckets(make_trained):
    """It has no static part; one without levels takes sequences of any length, and has the levels of their tokens."""
    with pytest.raises(ValueError, match="has no static part of λ: lam=content_mlp is content-aware"):
        static_lam(make_trained("content_mlp"), 0)
    trained = make_trained("content")
    tokens, _ = trained.inspection_sequences(2, 64)
    lam = lam_values(trained, 0, tokens)
    assert lam.shape == (2, 2, 64, 2, 7)
    occupied = occupied_levels(np.arange(64), 7)[:, None]
    np.testing.assert_allclose(np.where(occupied, lam, 0).sum(-1), 1, rtol=1e-5)
    assert (np.where(occupied, 0, lam) == 0).all()


def test_input_dependence_against_sums_by_hand():
    rng = np.random.default_rng(0)
    lam = rng.gamma(2.0, size=(1, 4, 8, 2, 4))
    roles = rng.integers(0, 2, (4, 8))
    found = input_dependence(lam, roles, 3)
    used = occupied_levels(np.arange(8), 4)
    for level in range(4):
        values = lam[0][:, used[:, level], 1, level].ravel()
        of = roles[:, used[:, level]].ravel()
        np.testing.assert_allclose(found["mean"][0, 1, level], values.mean())
        np.testing.assert_allclose(found["std"][0, 1, level], values.std())
        for role in (0, 1):
            np.testing.assert_allclose(found["role_mean"][role, 0, 1, level], values[of == role].mean())
        assert np.isnan(found["role_mean"][2]).all()  # which no token has
        within = sum(((values[of == r] - values[of == r].mean()) ** 2).sum() for r in (0, 1))
        np.testing.assert_allclose(found["role_share"][0, 1, level], 1 - within / (values.var() * len(values)))
    weights = np.where(used[None, :, None], lam[0], 0)
    weights /= weights.sum(-1, keepdims=True)
    bits = -np.sum(np.where(weights > 0, weights * np.log2(np.where(weights > 0, weights, 1)), 0), -1)
    np.testing.assert_allclose(found["entropy"][0], bits.mean((0, 1)))


def test_scores_are_those_of_the_model(make_trained):
    trained = make_trained("linear")
    scores = scores_by_length(trained, 1, [16, 32], num=20)
    for index, length in enumerate((16, 32)):
        tokens, targets = trained.inspection_sequences(20, length)
        assert tokens.shape == (20, length)
        logits = jax.jit(trained.model.apply)(trained.params(1), jnp.asarray(tokens))
        scored = targets >= 0
        right = (np.argmax(logits, -1) == targets)[scored]
        np.testing.assert_allclose(scores["accuracy"][index], right.mean())
        log_p = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.maximum(targets, 0)[..., None], -1)
        np.testing.assert_allclose(scores["loss"][index], -log_p[scored].mean(), rtol=1e-4)
