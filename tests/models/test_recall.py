"""The recall model: shapes, causality, initial values, every mixer and λ, and reading λ out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pallas_kernels
from loglinear_jax import bucket_scores, num_levels
from loglinear_jax.lam import LAMS
from loglinear_jax.mixers import MIXERS, init_dt_bias
from loglinear_jax.models import LanguageModel, LanguageSettings, RecallModel, RecallSettings

SMALL = {"vocab_size": 16, "max_length": 24, "implementation": "parallel"}
TOKENS = jax.random.randint(jax.random.key(0), (2, 24), 0, 16)


def build(**settings):
    model = RecallModel(RecallSettings(**(SMALL | settings)))
    return model, jax.jit(lambda key: {"params": model.init(key, TOKENS)["params"]})(jax.random.key(1))


def read(model, params):
    """(logits, what the model sows)"""
    return jax.jit(lambda p: model.apply(p, TOKENS, mutable=["intermediates"]))(params)


@pytest.mark.parametrize(
    "settings",
    [{"lam": name} for name in LAMS]
    + [
        {"mixer": "gated_linear"},
        {"mixer": "delta", "beta_max": 2.0},
        {"mixer": "gated_delta", "key_groups": 1, "conv_width": 4},
        {"mixer": "log_linear_delta", "lam": "content"},
        {"mixer": "softmax", "key_dim": 8, "qk_norm": True, "key_groups": 1},
        {"dtype": "bfloat16"},
        {"norm": "pre", "conv_width": 4, "qk_norm": True, "lam_head_slope": 1.0, "heads": 4, "key_groups": 2},
    ],
    ids=str,
)
def test_logits_are_causal_and_every_parameter_learns(settings):
    # From random parameters: zeros at the start would hide a parameter that does nothing.
    rng = np.random.default_rng(0)
    model = RecallModel(RecallSettings(**(SMALL | {"layers": 1} | settings)))
    params = {"params": jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]}
    params = jax.tree.map(lambda x: rng.normal(scale=0.3, size=x.shape).astype(np.float32), params)
    weights = rng.normal(size=(2, 24, 16)).astype(np.float32)
    positions = slice(9, None, 2)

    @jax.jit
    def gradients_and_logits(params, tokens):
        def scalar(params):
            logits = model.apply(params, tokens)
            some = model.apply(params, tokens, positions)
            return jnp.sum(weights * logits), (logits, some)

        return jax.grad(scalar, has_aux=True)(params)

    grads, (logits, some) = gradients_and_logits(params, TOKENS)
    np.testing.assert_allclose(some, logits[:, positions], atol=2e-2 if "dtype" in settings else 1e-5)
    assert logits.shape == (2, 24, 16) and logits.dtype == jnp.float32
    _, (changed, _) = gradients_and_logits(params, TOKENS.at[:, 10:].set(3))
    np.testing.assert_allclose(changed[:, :10], logits[:, :10], atol=1e-5)
    assert np.abs(changed[:, 10:] - logits[:, 10:]).max() > 1e-3
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(grad).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "pre", "conv_width": 4},
        {"mixer": "log_linear_delta", "lam": "content"},
        {"mixer": "softmax,gated_linear", "qk_norm": True},
    ],
    ids=str,
)
def test_documents_in_a_pack_are_as_alone_at_their_positions(settings):
    """Logits and gradients of the parameters. Alone, a document starts at the position that its random key draws."""
    cuts, rng = (3, 10, 17), np.random.default_rng(0)
    segment_ids = np.searchsorted(cuts, np.arange(20), side="right")[None] % 2
    settings = SMALL | {"max_length": 64, "random_first_position": 20, "dtype": "float64"} | settings
    model, weights = RecallModel(RecallSettings(**settings)), rng.normal(size=(1, 20, 16))
    key_of = {int(jax.random.randint(key, (1,), 0, 20)[0]): key for key in jax.random.split(jax.random.key(0), 200)}

    def packed(params):
        return model.apply(params, TOKENS[:1, :20], segment_ids=segment_ids)

    def alone(params):
        return jnp.concatenate([
            model.apply(params, TOKENS[:1, first:end], rngs={"first_position": key_of[first]})
            for first, end in zip((0, *cuts), (*cuts, 20), strict=True)
        ], axis=1)  # fmt: skip

    def weighed(run, params):
        logits = run(params)
        return jnp.sum(logits * weights), logits

    with jax.enable_x64(True):
        params = {"params": jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]}
        params = jax.tree.map(lambda x: rng.normal(scale=0.3, size=x.shape), params)
        got, expected = (
            jax.jit(jax.grad(functools.partial(weighed, run), has_aux=True))(params) for run in (packed, alone)
        )
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10 * np.abs(other).max())


def test_no_bits_of_segment_ids_are_lost():
    model, params = build(layers=1, hidden=8, head_dim=8, key_dim=8, heads=1, lam="linear")
    ids = np.arange(24)[None].repeat(2, axis=0) // 9
    expected = model.apply(params, TOKENS, segment_ids=ids.astype(np.int32))
    np.testing.assert_array_equal(model.apply(params, TOKENS, segment_ids=ids << 32), expected)


def test_initial_values():
    model, params = build(layers=2, hidden=64)
    p = params["params"]
    assert np.std(p["layer_0"]["in_proj"]["kernel"]) == pytest.approx(0.02, rel=0.1)
    assert np.std(p["layer_0"]["out_proj"]["kernel"]) == pytest.approx(0.01, rel=0.1)
    assert np.std(p["embed"]["embedding"]) == pytest.approx(0.02, rel=0.1)
    assert np.std(p["head"]["kernel"]) == pytest.approx(0.02, rel=0.15)
    np.testing.assert_allclose(p["layer_1"]["mixer"]["a_log"], np.log([1, 2]), rtol=1e-6)
    dt = np.log1p(np.exp(init_dt_bias(1e-3, 0.1)(jax.random.key(0), (10_000,))))
    assert 0.001 <= dt.min() < 0.00105 and 0.095 < dt.max() <= 0.1001
    assert np.median(dt) == pytest.approx(0.01, rel=0.1)  # log-uniform


def test_what_the_papers_model_does_not_have():
    model, params = build(
        lam="fixed", lam_head_slope=2.0, heads=3, key_dim=8, head_dim=8, embed_std=1.0, weight_std=0.1
    )
    p = params["params"]
    assert np.std(p["embed"]["embedding"]) == pytest.approx(1.0, rel=0.2)
    assert np.std(p["layer_0"]["out_proj"]["kernel"]) == pytest.approx(0.05, rel=0.1)
    _, sown = read(model, params)
    lam = sown["intermediates"]["layer_0"]["mixer"]["lam_value"][0][0, 0]
    np.testing.assert_allclose(lam, np.exp(2 * np.outer([-1, 0, 1], np.linspace(-1, 1, 6))), rtol=1e-5)

    model, params = build(dt_min=1e-4, dt_max=1e-3, heads=8, key_dim=8, head_dim=8)
    dt = np.concatenate([np.log1p(np.exp(params["params"][f"layer_{i}"]["mixer"]["dt_bias"])) for i in (0, 1)])
    assert (dt >= 0.99e-4).all() and (dt <= 1.01e-3).all() and dt.std() > 1e-4

    model, params = build(qk_norm=True)
    _, sown = read(model, params)
    for name in ("queries", "keys"):
        length = np.linalg.norm(sown["intermediates"]["layer_0"]["mixer"][name][0], axis=-1)
        np.testing.assert_allclose(length, 1, atol=0.01)

    model, params = build(norm="pre")  # with nothing from the layers, the embedding goes straight to the last norm
    silent = jax.tree_util.tree_map_with_path(lambda path, x: 0 * x if "out_proj" in str(path) else x, params)
    x = params["params"]["embed"]["embedding"][TOKENS]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(jax.jit(model.apply)(silent, TOKENS), x @ params["params"]["head"]["kernel"], atol=1e-4)


def test_size_of_the_papers_model():
    """q, k, v, d, dt from 64 features, W_o, λ MLP, decays, norm: counted by hand for two layers and T = 128."""
    _, params = build(vocab_size=128, max_length=128)
    levels, heads = num_levels(128), 2
    layer = 64 * (3 * 64 + heads + heads * levels) + 64 * 64 + 2 * levels * 64 + 64 + levels + 2 * heads + 2 * 64
    assert sum(x.size for x in jax.tree.leaves(params)) == 2 * 128 * 64 + 2 * layer + 2 * 64


@pytest.mark.slow
def test_the_delta_rule_has_keys_of_length_1_and_beta_up_to_its_bound():
    model, params = build(mixer="log_linear_delta", lam="fixed")
    twice = RecallModel(dataclasses.replace(model.settings, beta_max=2.0))
    values, of_twice = (read(x, params)[1]["intermediates"]["layer_0"]["mixer"] for x in (model, twice))
    np.testing.assert_allclose(np.linalg.norm(values["keys"][0], axis=-1), 1, atol=0.01)
    assert 0 < values["beta"][0].min() < values["beta"][0].max() < 1
    np.testing.assert_allclose(of_twice["beta"][0], 2 * values["beta"][0], rtol=1e-5)


def test_linear_mixer_is_log_linear_with_lambda_one():
    model, params = build(mixer="gated_linear")
    with_lam, lam_params = build(lam="fixed")  # starts at λ = 1 and takes no input
    assert jax.tree.structure(params) != jax.tree.structure(lam_params)
    for layer in ("layer_0", "layer_1"):
        params["params"][layer]["mixer"]["lam"] = lam_params["params"][layer]["mixer"]["lam"]
    np.testing.assert_allclose(jax.jit(with_lam.apply)(params, TOKENS), jax.jit(model.apply)(params, TOKENS), atol=2e-5)


def test_lam_for_longer_sequences_than_seen():
    model, params = build(max_length=64)
    assert jax.eval_shape(model.apply, params, jnp.zeros((1, 64), jnp.int32)).shape == (1, 64, 16)
    with pytest.raises(ValueError, match="lam='mlp_softplus' has 7 levels, for 64 tokens, got 65: train with a larger"):
        model.apply(params, jnp.zeros((1, 65), jnp.int32))


def test_a_lam_without_levels_takes_any_length():
    model, params = build(lam="content")
    longer, padded = (RecallModel(dataclasses.replace(model.settings, max_length=n)) for n in (32, 4096))
    tokens = jnp.tile(TOKENS, (1, 5))
    expected = jax.jit(longer.apply)(params, tokens)
    np.testing.assert_array_equal(jax.jit(padded.apply)(params, tokens), expected)
    np.testing.assert_allclose(expected[:, :24], jax.jit(model.apply)(params, TOKENS), atol=1e-5)
    assert model.settings.longest is None and build()[0].settings.longest == 24


def test_higher_levels_may_take_the_lam_of_the_highest_trained():
    model, params = build(lam="linear", max_length=64)
    extended = RecallModel(dataclasses.replace(model.settings, lam_levels=4))
    _, sown = jax.jit(lambda p: extended.apply(p, jnp.tile(TOKENS, (1, 4)), mutable=["intermediates"]))(params)
    (lam,) = sown["intermediates"]["layer_0"]["mixer"]["lam_value"]
    _, sown = read(model, params)
    (known,) = sown["intermediates"]["layer_0"]["mixer"]["lam_value"]
    assert lam.shape == (2, 96, 2, 8)
    np.testing.assert_allclose(lam[:, :24, :, :4], known[..., :4], rtol=1e-6)
    np.testing.assert_array_equal(lam[..., 4:], np.repeat(lam[..., 3:4], 4, axis=-1))


def test_what_lam_looks_at_are_the_scores_of_unit_queries_and_keys():
    model, params = build(lam="content")
    _, sown = read(model, params)
    for layer in sown["intermediates"].values():
        values = {name: value[0] for name, value in layer["mixer"].items()}
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (values["queries"], values["keys"]))
        expected = bucket_scores(q, k, values["log_decay"], num_levels=num_levels(24))
        np.testing.assert_allclose(values["bucket_scores"], expected, atol=1e-2)  # some keys are short
        np.testing.assert_allclose(np.sum(values["lam_value"], -1), 1.0, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mixer": "mamba"},
            "model.mixer must be one of log_linear, log_linear_delta, .*, or my_module:MyMixer, got 'mamba'",
        ),
        ({"chunk_size": 3}, "chunk_size must be a power of two"),
        ({"lam": "content", "lam_head_slope": 1.0}, "model.lam_head_slope=1.0: lam=content has no levels"),
        ({"lam": "content", "lam_levels": 3}, "model.lam_levels must be None .* got 3 with lam=content"),
        ({"norm": "both"}, "model.norm must be one of post, pre, got 'both'"),
        ({"conv_width": -1}, "model.conv_width must not be negative, got -1"),
        ({"dt_min": 0.2}, "model.dt_min must not be above dt_max, got dt_min=0.2, dt_max=0.1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RecallSettings(**(SMALL | settings)).check()


@pytest.mark.parametrize(("conv_width", "widths"), [(0, [96 + 12]), (4, [96, 12])])
def test_linear_maps_are_one_product_where_no_convolution_takes_its_own(conv_width, widths):
    """To queries, keys and values; and to step sizes and λ's inputs, 5 levels, of two heads."""
    settings = RecallSettings(
        vocab_size=32, max_length=16, hidden=32, layers=1, heads=2, head_dim=16, key_dim=16, conv_width=conv_width
    )
    model, tokens = RecallModel(settings), jnp.zeros((1, 16), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    equations = jax.make_jaxpr(model.apply)(params, tokens).jaxpr.eqns
    products = [
        equation.outvars[0].aval.shape[-1] for equation in equations if equation.primitive.name == "dot_general"
    ]
    assert products[: len(widths)] == widths


def test_the_delta_rule_takes_the_form_that_is_asked_for():
    """A scan over tokens is there with "recurrent" alone; the logits are the same."""
    logits = {}
    for implementation, scans in (("recurrent", True), ("parallel", False)):
        model, _ = build(mixer="gated_delta", implementation=implementation)
        params = jax.jit(model.init)(jax.random.key(1), TOKENS)
        assert ("scan" in str(jax.make_jaxpr(model.apply)(params, TOKENS))) == scans
        logits[implementation] = jax.jit(model.apply)(params, TOKENS)
    np.testing.assert_allclose(logits["recurrent"], logits["parallel"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_model_has_forward_mode_derivatives(mixer):
    """Also of its gradient: the matrix of second derivatives is symmetric. On a GPU of the gradient alone."""
    if mixer == "softmax" and pallas_kernels.runs_on_gpu():
        pytest.skip("cuDNN's attention has no second derivatives")
    sizes = dict(vocab_size=16, max_length=16, hidden=16, head_dim=8, key_dim=8, layers=1)
    settings = sizes | dict(mixer=mixer, implementation="xla")
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 16)
    model = (
        LanguageModel(LanguageSettings(**settings))
        if mixer == "log_linear"
        else RecallModel(RecallSettings(**settings))
    )
    params = {"params": jax.jit(model.init)(jax.random.key(0), tokens)["params"]}

    def loss(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), tokens)
        return jnp.mean(losses)

    @jax.jit
    def both_ways(params, u, v):
        gradient = jax.grad(loss)
        backward = optax.tree.vdot(gradient(params), u)
        forward = backward if pallas_kernels.runs_on_gpu() else jax.jvp(loss, (params,), (u,))[1]
        second = [jax.jvp(gradient, (params,), (x,))[1] for x in (u, v)]
        return (forward, backward), (optax.tree.vdot(second[0], v), optax.tree.vdot(second[1], u))

    u, v = (optax.tree.random_like(jax.random.key(seed), params) for seed in (2, 3))
    for one, other in both_ways(params, u, v):
        assert one == pytest.approx(float(other), rel=2e-2) and one != 0  # float32, with cancellation
