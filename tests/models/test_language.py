"""The language model: every mixer, decoding against the full pass, sizes, recomputation."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.lam import count_lam_params
from loglinear_jax.losses import token_losses
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.models.params import decoding_weights, flat_params, params_of
from loglinear_jax.modules import linear

SETTINGS = LanguageSettings(
    vocab_size=37, max_length=64, hidden=32, layers=2, heads=4, head_dim=8, key_dim=16, key_groups=2, dtype="float32",
    implementation="parallel",
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(0), (2, 24), 0, 37)
# Every λ learns in the recall model (tests/models/test_recall.py), which has the same mixers.
VARIANTS = [{"lam": "content_mlp"}, {"mixer": "gated_linear"}, {"mixer": "softmax"}]


def build(**settings):
    """A model and random parameters (zeros at the start would hide a parameter that does nothing)."""
    model = LanguageModel(dataclasses.replace(SETTINGS, **settings))
    rng = np.random.default_rng(0)

    def random(x):  # vectors: norms, decays, biases; matrices keep the size of their inputs
        value = 0.3 + 0.3 * rng.normal(size=x.shape) if x.ndim < 2 else rng.normal(size=x.shape) / x.shape[-2] ** 0.5
        return value.astype(np.float32)

    return model, jax.tree.map(random, jax.eval_shape(model.init, jax.random.key(1), TOKENS))


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_causal_and_every_parameter_learns(settings):
    model, params = build(**settings)
    apply = jax.jit(model.apply)
    logits = apply(params, TOKENS)
    assert logits.shape == (2, 24, 37) and logits.dtype == jnp.float32
    changed = apply(params, TOKENS.at[:, 10:].set(3))
    np.testing.assert_allclose(changed[:, :10], logits[:, :10], atol=1e-5)
    targets = jnp.roll(TOKENS, -1, axis=1).at[:, -1].set(-1)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: model.apply(p, TOKENS, targets, method="summed_loss")))(params)
    assert loss == pytest.approx(float(jnp.sum(token_losses(logits, targets)[0])), rel=1e-5)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(grad).max() > 0, jax.tree_util.keystr(path)


class NoLevels(nn.Module):
    """A λ of one's own with neither levels nor a look at them."""

    needs_input = has_levels = False

    @nn.compact
    def __call__(self, d):
        return jnp.ones_like(d) * self.param("weight", nn.initializers.ones, d.shape[-2:-1])[:, None]


DECODED = [
    {"lam": "mlp_softmax", "layers": 2},
    {"lam": "linear", "lam_levels": 3},
    {"lam": f"{__name__}:NoLevels"},
    {"lam": "content"},
    {"mixer": "gated_linear"},
    {"mixer": "softmax(window=6)"},
    {"mixer": "log_linear,softmax(window=64)", "layers": 2},
    {"mixer": "delta", "beta_max": 2.0},
    {"mixer": "gated_delta"},
    {"mixer": "log_linear_delta", "lam": "mlp_softplus"},
    {"mixer": "log_linear_delta", "lam": "content"},
]


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        pytest.param(settings, prompt, id=f"{settings}-{prompt}", marks=() if number in (0, 6) else pytest.mark.slow)
        for number, (settings, prompt) in enumerate(zip(DECODED, itertools.cycle((1, 5))))
    ],
)
def test_prompts_in_parts_and_decoding_are_the_full_pass(settings, prompt):
    """At the end of each part and at every position after, from states allocated for exactly as many tokens as come."""
    model, params = build(**{"layers": 1} | settings)
    expected = jax.jit(model.apply)(params, TOKENS)
    extend = jax.jit(lambda tokens, caches: model.apply(params, tokens, caches, method="extend"))
    step = jax.jit(lambda token, caches: model.apply(params, token, caches, method="step"))
    logits, caches = jax.jit(lambda x: model.apply(params, x, 24, method="prefill"))(TOKENS[:, :prompt])
    np.testing.assert_allclose(logits, expected[:, prompt - 1], atol=1e-4)
    for first, end in ((prompt, 12), (12, 13)):
        logits, caches = extend(TOKENS[:, first:end], caches)
        np.testing.assert_allclose(logits, expected[:, end - 1], atol=1e-4)
    for position in range(13, 24):
        logits, caches = step(TOKENS[:, position], caches)
        np.testing.assert_allclose(logits, expected[:, position], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", DECODED, ids=str)
def test_documents_in_a_pack_are_as_alone_at_their_positions(settings):
    """Logits, gradients of the parameters, and the last document's next tokens."""
    model, params = build(**{"layers": 1} | settings)
    cuts = (3, 10, 17)
    segment_ids = np.searchsorted(cuts, np.arange(20), side="right") % 2 + np.zeros((2, 1), int)
    shape_of_caches = jax.eval_shape(lambda: model.apply(params, TOKENS[:, :1], 24, method="prefill"))[1]

    def packed(params):
        return model.apply(params, TOKENS[:, :20], segment_ids)

    def alone(params):
        parts = []
        for first, end in zip((0, *cuts), (*cuts, 20), strict=True):
            # Caches that hold nothing: their integers are positions.
            at = functools.partial(
                lambda x, first: jnp.full(x.shape, first * (x.dtype == jnp.int32), x.dtype), first=first
            )
            caches = jax.tree.map(at, shape_of_caches)
            x, _ = model.apply(params, TOKENS[:, first:end], caches, method="features")
            parts.append(model.apply(params, x, method="_logits"))
        return jnp.concatenate(parts, axis=1)

    weights = np.random.default_rng(1).normal(size=(2, 20, 37)).astype(np.float32)

    def weighed(run, params):
        logits = run(params)
        return jnp.sum(logits * weights), logits

    results = [jax.jit(jax.grad(functools.partial(weighed, run), has_aux=True))(params) for run in (packed, alone)]
    (gradients, got), (expected_gradients, expected) = results
    np.testing.assert_allclose(got, expected, atol=1e-4)
    for one, other in zip(*map(jax.tree.leaves, (gradients, expected_gradients)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * (1 + np.abs(other).max()))

    prefill = jax.jit(lambda tokens: model.apply(params, tokens, None, 24, segment_ids[:, :18], method="features"))
    _, caches = prefill(TOKENS[:, :18])
    step = jax.jit(lambda token, caches: model.apply(params, token, caches, method="step"))
    for position in (18, 19):
        logits, caches = step(TOKENS[:, position], caches)
        np.testing.assert_allclose(logits, expected[:, position], atol=1e-4)


@pytest.mark.parametrize("settings", [{"norm_groups": 2}, {"mixer": "gated_delta"}], ids=str)
@pytest.mark.slow
def test_one_token_on_a_gpu_is_computed_in_another_order_and_comes_out_the_same(monkeypatch, settings):
    model, params = build(**settings)
    _, caches = model.apply(params, TOKENS[:1, :11], 24, method="prefill")
    step = functools.partial(model.apply, params, TOKENS[:1, 11], caches, method="step")
    expected = step()
    asked = []
    monkeypatch.setattr(linear, "runs_on_gpu", lambda: asked.append(True) or True)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), step(), expected)
    assert asked


@pytest.mark.parametrize(
    "settings",
    [
        *VARIANTS,
        {"mixer": "gated_delta"},
        {"mixer": "log_linear_delta", "lam": "fixed"},
        {"mixer": "softmax(window=6)"},
    ],
    ids=str,
)
def test_the_numbers_that_a_layer_keeps_are_those_of_its_cache(settings):
    model = LanguageModel(dataclasses.replace(SETTINGS, layers=1, **settings))
    prefill = functools.partial(model.init_with_output, jax.random.key(0), TOKENS[:, :5], 24, method="prefill")
    (_, (cache,)), _ = jax.eval_shape(prefill)
    kept = sum(x.size for x in jax.tree.leaves(cache.mixer) if jnp.issubdtype(x.dtype, jnp.floating)) // len(TOKENS)
    assert kept == model.settings.numbers_kept(24)


def test_caches_of_another_lam_and_too_many_tokens_are_refused():
    of = {lam: build(lam=lam, layers=1) for lam in ("content", "fixed")}
    for lam, other, found in (("content", "fixed", "FenwickState"), ("fixed", "content", "LookingCache")):
        (model, params), (given, of_given) = of[lam], of[other]
        prefill = functools.partial(given.apply, of_given, TOKENS[:, :5], 8, method="prefill")
        caches = jax.eval_shape(prefill)[1]
        with pytest.raises(ValueError, match=f"cache of lam='{lam}' is of type {found}: expected a"):
            jax.eval_shape(lambda caches: model.apply(params, TOKENS[:, 5], caches, method="step"), caches)
    with pytest.raises(ValueError, match="T = 5 tokens: expected no more than max_length=4"):
        model.apply(params, TOKENS[:, :5], None, 4, method="features")
    with pytest.raises(
        ValueError, match=r"x has shape \(\d+, 0, \d+\): expected \[B, T, D\] with at least one of each"
    ):
        model.apply(params, TOKENS[:, :0])


def gradients_of(remat):
    """(the gradients as a function of parameters, parameters)."""
    model, params = build(remat=remat)
    targets = jnp.roll(TOKENS, -1, axis=1)
    return jax.grad(lambda p: model.apply(p, TOKENS, targets, method="summed_loss")), params


@pytest.mark.slow
def test_a_policy_says_which_products_are_computed_again_and_gradients_are_the_same():
    """Those with batch dimensions are the attention's."""
    gradients = [
        gradients_of(remat) for remat in ("none", "dots_saveable", "dots_with_no_batch_dims_saveable", "block")
    ]
    products = [str(jax.make_jaxpr(gradient)(params)).count("dot_general") for gradient, params in gradients]
    assert products[0] == products[1] < products[2] < products[3]
    results = [jax.jit(gradient)(params) for gradient, params in (gradients[0], gradients[3])]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


def test_size_of_the_papers_model():
    """Counted by hand: hidden 512, 8 heads of 64, state 128, one key group, GPT-2's vocabulary, λ for 512 tokens."""
    settings = LanguageSettings(vocab_size=50_257, max_length=512)
    params = jax.eval_shape(LanguageModel(settings).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    lam, other = count_lam_params(params)
    levels, heads, inner, conv = 10, 8, 512, 512 + 2 * 128
    mixer = 512 * (inner + conv + heads + heads * levels) + 5 * conv + 3 * heads + inner + inner * 512
    block = mixer + 3 * 512 * 1536 + 2 * 512
    assert other == 6 * block + 2 * 50_257 * 512 + 512
    assert lam == 6 * (2 * levels * 2 * levels + 3 * levels)
    assert 100 * lam / other < 0.007  # the paper's claim, for d_h = 2 L


def test_bfloat16_is_close_to_float32():
    model, params = build()
    exact = jax.jit(model.apply)(params, TOKENS)
    rough = jax.jit(LanguageModel(dataclasses.replace(model.settings, dtype="bfloat16")).apply)(params, TOKENS)
    assert rough.dtype == jnp.float32
    assert np.linalg.norm(rough - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixer": "delta", "beta_max": 2.5}, "model.beta_max must be at most 2, got 2.5"),
        (
            {"remat": "all"},
            "model.remat must be one of none, block, dots_saveable, dots_with_no_batch_dims_saveable, got 'all'",
        ),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **settings).check()


@pytest.mark.slow
def test_decoding_weights_give_the_same_outputs():
    mixer = "log_linear,softmax"
    model = LanguageModel(LanguageSettings(50, 64, mixer=mixer, hidden=64, layers=2, dtype="bfloat16"))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 50)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    weights = decoding_weights(model, params)
    rounded = params_of(weights)

    @jax.jit
    def run(params):
        logits, caches = model.apply(params, tokens, 20, method="prefill")
        return model.apply(params, tokens), logits, model.apply(params, tokens[:, 0], caches, method="step")[0]

    inside = jax.jit(lambda weights: run(params_of(weights)))
    for expected, same_bits, close in zip(run(params), run(rounded), inside(weights), strict=True):
        tolerance = 0.02 * float(jnp.max(jnp.abs(expected)))
        on_gpu = jax.default_backend() == "gpu"  # where XLA chooses products anew in each program
        np.testing.assert_allclose(same_bits, expected, rtol=0, atol=tolerance if on_gpu else 0)
        np.testing.assert_allclose(close, expected, atol=tolerance)
    matrices = [x.dtype for path, x in flat_params(model, rounded).items() if x.ndim > 1 and "/lam/" not in path]
    assert set(matrices) == {jnp.bfloat16.dtype}
