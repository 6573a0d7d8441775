"""Drop-in layers: decoding against the full pass, types, and clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax import GatedDeltaNetBlock, LogLinearAttention, LogLinearMamba2Block
from loglinear_jax.mixers import TokenMixer
from loglinear_jax.settings import SettingError

X = jax.random.normal(jax.random.key(0), (2, 12, 16))
LAYERS = [
    LogLinearAttention(16, heads=2, lam="mlp_softplus(hidden=4)", max_length=16),
    LogLinearAttention(16, heads=2, conv_width=3, lam="content"),
    LogLinearMamba2Block(16, heads=4, key_groups=1, max_length=16),
    GatedDeltaNetBlock(16, heads=2, mixer="gated_delta(beta_max=2)"),
]


every_layer = pytest.mark.parametrize(
    "layer",
    [LAYERS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in LAYERS[1:])],
    ids=lambda layer: f"{type(layer).__name__}-{layer.mixer}-{layer.lam}",
)


@every_layer
def test_decoding_is_the_full_pass(layer):
    params = jax.jit(layer.init)(jax.random.key(1), X)
    expected = jax.jit(layer.apply)(params, X)
    assert expected.shape == X.shape
    out, cache = jax.jit(lambda x: layer.apply(params, x, max_length=12))(X[:, :7])
    outs, step = [out], jax.jit(lambda x, cache: layer.apply(params, x, cache))
    for first, end in ((7, 10), (10, 11), (11, 12)):
        out, cache = step(X[:, first:end], cache)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), expected, atol=1e-5)


@every_layer
def test_a_document_in_a_pack_sees_no_other(layer):
    segment_ids = jnp.asarray([[1] * 5 + [2] * 7, [1] * 12])
    params = jax.jit(layer.init)(jax.random.key(1), X)
    apply = jax.jit(layer.apply)
    out = apply(params, X, segment_ids=segment_ids)
    np.testing.assert_allclose(out[1], apply(params, X)[1], atol=1e-5)
    np.testing.assert_allclose(out[0, :5], apply(params, X[:1, :5])[0], atol=1e-5)
    other = apply(params, X.at[:, :5].set(X[:, 5:10]), segment_ids=segment_ids)
    np.testing.assert_array_equal(other[0, 5:], out[0, 5:])


def test_types_of_activations_and_parameters():
    layer = LogLinearMamba2Block(16, heads=2, max_length=16, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    out, params = jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), X))
    assert out.dtype == jnp.bfloat16
    own = {
        path: x for path, x in jax.tree_util.tree_leaves_with_path(params) if "lam" not in jax.tree_util.keystr(path)
    }
    assert {x.dtype for x in own.values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ("log_linear(dt_min=-1)", "dt_min must be positive, got -1"),
        ("log_linear(dt_min='a')", "dt_min must be a number, got 'a'"),
        ("log_linear(qk_norm='False')", "qk_norm must be true or false, got 'False'"),
        ("log_linear(random_first_position=-5)", "random_first_position must not be negative, got -5"),
        ("gated_delta(beta_max=3)", "beta_max must be"),
    ],
)
def test_arguments_of_a_mixer_are_checked(mixer, message):
    with pytest.raises(SettingError, match=message):
        jax.eval_shape(LogLinearAttention(16, heads=2, mixer=mixer, max_length=16).init, jax.random.key(0), X)


@pytest.mark.parametrize(
    ("sizes", "x", "segment_ids", "message"),
    [
        ({"heads": 0}, X, None, "heads must be at least 1, got 0"),
        ({"key_groups": 0}, X, None, "key_groups must be at least 1, got 0"),
        ({}, X[0], None, r"x has shape \(12, 16\): expected \[B, T, D\] with at least one of each"),
        ({}, X[:0], None, r"x has shape \(0, 12, 16\): expected \[B, T, D\]"),
        ({}, X[:, :0], None, r"x has shape \(2, 0, 16\): expected \[B, T, D\]"),
        ({}, X, np.zeros((2, 11), int), r"segment_ids has shape \(2, 11\): expected \[B, T\] = \(2, 12\)"),
    ],
)
@pytest.mark.parametrize("layer", LAYERS[1:], ids=lambda layer: type(layer).__name__)
def test_arguments_of_a_layer_are_checked(layer, sizes, x, segment_ids, message):
    """Shapes by the check alone: before it the types of a call are checked, which only tests do."""
    layer = layer.clone(**sizes)
    with pytest.raises(ValueError, match=message):
        layer._check(x, segment_ids)
    if x.ndim == 3 and segment_ids is None:
        with pytest.raises(ValueError, match=message):
            layer.init(jax.random.key(0), x)


class Swapped(TokenMixer):
    def mix(self, q, k, v, *, cache, max_length):
        return v.swapaxes(2, 3)


class Without(TokenMixer):
    def mix(self, q, k, v, *, cache, max_length):
        return v


def test_what_a_mixer_of_ones_own_returns_is_checked():
    q = jnp.ones((2, 3, 4, 8))
    with pytest.raises(SettingError, match=r"Swapped.mix returns shape \(2, 3, 8, 4\): expected .* \(2, 3, 4, 8\)"):
        Swapped().apply({}, q, q, q)
    with pytest.raises(SettingError, match="Without.mix returns a .*: expected .* and a cache"):
        Without().apply({}, q, q, q, max_length=3)


def test_no_rank_is_promoted_for_the_user():
    with jax.numpy_rank_promotion("raise"):
        for layer in LAYERS:
            jax.eval_shape(layer.init, jax.random.key(0), X)
