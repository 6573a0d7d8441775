"""Initial values, parameter counts and definitions of the λ parameterisations."""

import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, softmax

from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.lam import KERNEL_ROWS, LAMS, count_lam_params, lam_arguments, lam_traits, make_lam, rotate_by_level
from loglinear_jax.models import RecallModel, RecallSettings

HEADS, LEVELS = 3, 7


def d_of_a_fresh_model(seed=0):
    """What a normal(0.02) projection of 64 unit-variance features gives: d ≈ normal(0.16)."""
    return 0.16 * jax.random.normal(jax.random.key(seed), (5, 11, HEADS, LEVELS))


def scores_and_occupied(levels=LEVELS, position=0b101101):
    """Bucket scores for tokens that all stand at one position, whose occupied levels are 0, 1, 3, 4 and 6."""
    scores = jax.random.normal(jax.random.key(3), (5, 11, HEADS, levels))
    occupied = occupied_levels(jnp.full(11, position), levels)[:, None]
    return jnp.where(occupied, scores, 0), occupied


def init_and_apply(name, d, **settings):
    module = make_lam(name, **settings)
    inputs = d, *(scores_and_occupied(d.shape[-1]) if lam_traits(name).needs_scores else ())
    params = jax.jit(module.init)(jax.random.key(1), *inputs)
    return jax.jit(module.apply)(params, *inputs), params["params"]


@pytest.mark.parametrize("name", LAMS)
def test_shape_dtype_and_sign(name):
    lam, _ = init_and_apply(name, d_of_a_fresh_model().astype(jnp.bfloat16))
    assert lam.shape == (5, 11, HEADS, LEVELS) and lam.dtype == jnp.float32
    assert (lam >= 0).all() if lam_traits(name).needs_scores else (lam > 0).all()


@pytest.mark.parametrize("name", ["mlp_softplus", "mlp_softmax", "content_mlp"])
def test_few_tokens_are_as_many(name):
    """Few go another way through the MLP."""
    d = jax.random.normal(jax.random.key(0), (5, 2 * KERNEL_ROWS // HEADS, HEADS, LEVELS))
    module, more = make_lam(name, implementation="xla"), ()
    if lam_traits(name).needs_scores:
        more = jax.random.normal(jax.random.key(1), d.shape), jnp.ones((1, 1, 1, LEVELS), bool)
    params = jax.jit(module.init)(jax.random.key(1), d, *more)
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    few, *more_of_few = (x[:1, :7] for x in (d, *more))
    np.testing.assert_allclose(
        jax.jit(module.apply)(params, few, *more_of_few), jax.jit(module.apply)(params, d, *more)[:1, :7], rtol=1e-5
    )


def test_content_is_its_formula():
    scores, occupied = scores_and_occupied()
    params = {"log_scale": np.log([0.5, 2.0, 7.0]).astype(np.float32)}
    lam = make_lam("content").apply({"params": params}, scores, scores, occupied)
    levels = np.flatnonzero(occupied[0, 0])
    assert levels.tolist() == [0, 1, 3, 4, 6]
    expected = np.zeros(scores.shape)
    expected[..., levels] = softmax(np.array([0.5, 2.0, 7.0])[:, None] * np.asarray(scores)[..., levels], axis=-1)
    np.testing.assert_allclose(lam, expected, rtol=1e-5)
    assert not np.any(np.asarray(lam)[..., [2, 5]])


def test_content_mlp_starts_as_content_and_adds_the_mlp_to_the_logits():
    d, (scores, occupied) = d_of_a_fresh_model(), scores_and_occupied()
    module, content = make_lam("content_mlp"), make_lam("content")
    params = module.init(jax.random.key(0), d, scores, occupied)["params"]
    scale = {"log_scale": params["log_scale"]}
    expected = content.apply({"params": scale}, d, scores, occupied)
    np.testing.assert_allclose(module.apply({"params": params}, d, scores, occupied), expected, rtol=1e-6)
    bias = np.arange(LEVELS, dtype=np.float32)
    params["out_proj"]["bias"] = bias
    expected = content.apply({"params": scale}, d, scores + bias / np.exp(scale["log_scale"][:, None]), occupied)
    np.testing.assert_allclose(module.apply({"params": params}, d, scores, occupied), expected, rtol=1e-5)


def test_initial_values_of_the_paper_and_of_the_released_code():
    d = d_of_a_fresh_model()
    np.testing.assert_allclose(init_and_apply("mlp_softplus", d)[0], 1.0, atol=1e-2)
    np.testing.assert_allclose(init_and_apply("mlp_softmax", d)[0], 1 / LEVELS, rtol=1e-6)
    np.testing.assert_allclose(init_and_apply("fixed", d)[0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(init_and_apply("linear", jnp.zeros_like(d))[0], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(init_and_apply("rope", jnp.zeros_like(d))[0], 1.0, atol=1e-2)
    _, params = init_and_apply("mlp_softplus", d)
    kernel, limit = np.asarray(params["hidden"]["kernel"]), np.sqrt(6 / (LEVELS + 64))  # Xavier's, uniform
    assert np.abs(kernel).max() <= limit and np.std(kernel) == pytest.approx(limit / np.sqrt(3), rel=0.1)
    assert not np.any(params["out_proj"]["kernel"])
    for name in ("mlp_softplus", "mlp_softmax", "rope"):
        lam, params = init_and_apply(name, d, init_scheme="released")
        expected = 1 / LEVELS if name == "mlp_softmax" else np.log(2)  # the paper's figure shows 0.688 to 0.698
        np.testing.assert_allclose(lam, expected, rtol=2e-2)
        if name != "rope":
            assert 0.01 < np.std(params["out_proj"]["kernel"]) < 0.03 and not np.any(params["out_proj"]["bias"])


@pytest.mark.parametrize(
    ("name", "settings", "count"),
    [
        ("mlp_softplus", dict(hidden=32), 2 * LEVELS * 32 + 32 + LEVELS),  # the paper's formula; heads share them
        ("mlp_softplus", dict(hidden=None), 4 * LEVELS**2 + 3 * LEVELS),
        ("fixed", {}, HEADS * LEVELS),
        ("linear", {}, HEADS * LEVELS),
        ("rope", {}, HEADS * LEVELS + 2 * LEVELS + 2),
        ("content", {}, HEADS),
        ("content_mlp", {}, HEADS + 2 * LEVELS * 64 + 64 + LEVELS),
    ],
)
def test_parameter_counts(name, settings, count):
    _, params = init_and_apply(name, d_of_a_fresh_model(), **settings)
    assert count_lam_params({"lam": params, "rest": np.zeros(3)}) == (count, 3)


@pytest.mark.parametrize("activation", ["gelu", "identity"])
@pytest.mark.parametrize("name", ["mlp_softplus", "mlp_softmax"])
def test_mlp_is_its_formula(name, activation):
    d = d_of_a_fresh_model()
    module = make_lam(name, hidden=4, activation=activation)
    params = module.init(jax.random.key(0), d)
    params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    p = jax.tree.map(np.asarray, params["params"])
    h = np.asarray(d, np.float64) @ p["hidden"]["kernel"] + p["hidden"]["bias"]
    if activation == "gelu":
        h = h * (1 + erf(h / np.sqrt(2))) / 2
    logits = h @ p["out_proj"]["kernel"] + p["out_proj"]["bias"]
    expected = np.log1p(np.exp(logits)) if name == "mlp_softplus" else softmax(logits, axis=-1)
    np.testing.assert_allclose(module.apply(params, d), expected, rtol=1e-4, atol=1e-6)


def test_linear_and_fixed_are_their_formulas():
    d = d_of_a_fresh_model()
    scale = np.random.default_rng(0).normal(size=(HEADS, LEVELS)).astype(np.float32)
    linear = make_lam("linear").apply({"params": {"scale": scale}}, d)
    np.testing.assert_allclose(linear, np.log1p(np.exp(scale * np.asarray(d))), rtol=1e-5)
    fixed = make_lam("fixed").apply({"params": {"bias": scale}}, d)
    np.testing.assert_allclose(fixed, np.broadcast_to(np.log1p(np.exp(scale)), d.shape), rtol=1e-5)


@pytest.mark.parametrize("size", [6, 7])
def test_rope_rotates_pairs_by_the_level(size):
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=size), rng.normal(size=size)
    for level in range(4):
        rotated = x.copy()
        for pair in range(size // 2):
            turn = np.exp(1j * level * 10000 ** (-2 * pair / size))
            z = (x[2 * pair] + 1j * x[2 * pair + 1]) * turn
            rotated[2 * pair : 2 * pair + 2] = z.real, z.imag
        assert x @ np.asarray(rotate_by_level(jnp.asarray(weight), 4))[:, level] == pytest.approx(
            weight @ rotated, rel=1e-5
        )


def test_a_lam_of_ones_own_gets_the_settings_that_it_has(monkeypatch):
    class BoundedLam(nn.Module):
        most: float = 2.0
        init_scheme: str = "text"

        @nn.compact
        def __call__(self, d):
            return self.most * nn.sigmoid(d + self.param("bias", nn.initializers.zeros, d.shape[-2:]))

    monkeypatch.setitem(sys.modules, "my_lams", types.SimpleNamespace(BoundedLam=BoundedLam))
    assert make_lam("my_lams:BoundedLam", init_scheme="released", hidden=3).init_scheme == "released"
    assert make_lam("my_lams:BoundedLam(most=4, init_scheme='text')", init_scheme="released").most == 4
    assert lam_arguments("my_lams:BoundedLam(most=4)") == {"init_scheme"}
    model = RecallModel(RecallSettings(vocab_size=8, max_length=16, lam="my_lams:BoundedLam(most=3.0)", layers=1))
    params = model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]["layer_0"]
    assert params["mixer"]["lam"]["bias"].shape == (2, 5) and params["in_proj"]["kernel"].shape == (64, 192 + 2 + 2 * 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam": "mlp"}, "lam must be one of fixed, .*, got 'mlp'"),
        ({"lam": "linear", "activation": "relu"}, "lam_activation must be one of gelu, identity"),
        ({"lam": "fixed", "lam_hidden": 8}, "a λ has no setting lam_hidden: expected some of hidden, .*mean hidden?"),
        ({"lam": "fixed", "implementation": "triton"}, "implementation must be one of 'parallel', .*, got 'triton'"),
        ({"lam": "mlp_softplus(width=3)"}, "lam='mlp_softplus' has no argument width: it has hidden, activation, "),
        ({"lam": "mlp_softplus(hidden=0)"}, r"lam='mlp_softplus\(hidden=0\)': hidden must be a whole number from 1 on"),
        ({"lam": "mlp_softplus(32)"}, r"expected name\(key=value, ...\), each value a number"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make_lam(**settings)
