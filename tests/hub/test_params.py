"""Models of others against their own recurrences, there and back; and what does not fit."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from loglinear_jax.hub import LAYOUTS, export_params, import_params
from loglinear_jax.hub.layouts import config_of, layout_for, settings_of
from loglinear_jax.models import LanguageModel, LanguageSettings
from tests.hub.checkpoints import CONFIGS, LEVELS, draw
from tests.hub.transcription import logits
from tests.ops.inputs import relative_error

TOKENS = np.random.default_rng(0).integers(0, 19, 21)
FIRST = "backbone.layers.0."


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_logits_are_those_of_the_recurrence_and_arrays_come_back(architecture):
    """Levels for 16,384 tokens are as Guo et al.'s models have them."""
    config = CONFIGS[architecture]
    arrays = draw(config, levels=15 if architecture.startswith("H") else LEVELS)
    settings, params = import_params(arrays, config)
    found = jax.jit(LanguageModel(settings).apply)(params, jnp.asarray(TOKENS)[None])[0]
    assert relative_error(found, logits(config, arrays, TOKENS)) < 1e-4
    written, again = export_params(settings, params, architecture)
    assert written["model_type"] == config["model_type"] and written["architectures"] == [architecture]
    same = {name: config.get(name) or value for name, value in written.items() if name != "residual_in_fp32"}
    assert same == {name: written[name] for name in same}
    assert again.keys() == arrays.keys()
    jax.tree.map(np.testing.assert_array_equal, again, arrays)
    assert import_params(again, written)[0] == settings
    with_names = import_params(arrays, {**config, "architectures": [architecture], "model_type": "whatever"})
    assert with_names[0] == settings


def test_tied_embeddings_are_the_head():
    config = CONFIGS["Mamba2ForCausalLM"] | {"tie_word_embeddings": True}
    arrays = {name: x for name, x in draw(config).items() if name != "lm_head.weight"}
    settings, params = import_params(arrays, config)
    found = jax.jit(LanguageModel(settings).apply)(params, jnp.asarray(TOKENS)[None])[0]
    assert relative_error(found, logits(config, arrays, TOKENS)) < 1e-4


def replaced(name, change):
    return lambda d: d.update({name: change(d[name])})


@pytest.mark.parametrize(
    ("architecture", "change", "message"),  # of the arrays, or of the config
    [
        ("Mamba2", lambda d: d.pop("lm_head.weight"), "lm_head.weight is missing: expected all parameters of a Mamba2For"),
        ("Mamba2", lambda d: d.update({f"{FIRST}mixer.bias": np.zeros(3)}), "Unexpected parameter .*mixer.bias .*Mamba2"),
        ("Mamba2", replaced(f"{FIRST}mixer.D", lambda x: np.repeat(x, 8)), r"0.mixer.D has shape \(32,\): expected \(4,\)"),
        ("LogLinearMamba2", replaced(f"{FIRST}mixer.L", lambda x: np.zeros((4, 40))), "at most 32 levels"),
        ("Mamba2", replaced(f"{FIRST}mixer.D", lambda x: x.astype(int)), r"mixer.D has dtype int\d+: expected a floating"),
        ("Mamba2", replaced("lm_head.weight", lambda x: np.full(x.shape, 1e39)), "lm_head.weight has 608 of 608 values that"),
        ("LogLinearMamba2", {"model_type": "llama"}, "config has model_type='llama': expected one of log_linear"),
        ("LogLinearMamba2", {"architectures": ["Llama"]}, r"config has architectures=\['Llama'\]: expected one of LogLinear"),
        ("Mamba2", {"vocab_size": 20}, r"embeddings.weight has shape \(19, 32\): expected \(20, 32\), by the"),
        ("Mamba2", {"num_heads": 3}, "config has num_heads=3, head_dim=8: expected 32 together"),
        ("Mamba2", {"hidden_act": "gelu"}, "config has hidden_act='gelu': expected 'silu', the only value"),
        ("Mamba2", {"layer_norm_epsilon": 1e-3}, "config has norm_eps=1e-05, layer_norm_epsilon=0.001: expected"),
        ("Mamba2", {"vocab_size": 2**31 - 1}, "config makes no model of ours: .* is a matrix of"),
        ("GatedDeltaNet", {"expand_v": 1.3}, "config has expand_v, which makes 10.4: expected a whole number"),
        ("HGatedDeltaNet", {"num_v_heads": 8}, "config has num_v_heads=8, num_heads=4: expected as many"),
        ("HAttention", {"n_groups": None}, "config has no n_groups: expected it"),
        *(("Mamba2", {"conv_kernel": x}, f"config has conv_kernel={x!r}: expected a whole number") for x in (True, 4.0, "4")),
        *(("Mamba2", {"norm_eps": x}, f"config has norm_eps={x!r}: expected a positive number") for x in (True, -1, math.inf)),
        ("Mamba2", {"use_conv_bias": 0}, "config has use_conv_bias=0: expected true or false"),
        ("Mamba2", {"hidden_size": 10**400}, "config has hidden_size=10+…: expected a whole number from 1 to 2,147,483,647"),
        ("GatedDeltaNet", {"hidden_ratio": 1e308}, r"config has hidden_ratio=1e\+308: expected a positive number, at most 2,"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(architecture, change, message):
    config = CONFIGS[f"{architecture}ForCausalLM"]
    arrays = draw(config)
    if callable(change):
        change(arrays)
    else:
        config = {name: x for name, x in (config | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        import_params(arrays, config)


def test_the_norms_epsilon_goes_by_two_names_and_dtypes_are_those_of_the_model():
    config = CONFIGS["HAttentionForCausalLM"]
    arrays, of_norms = draw(config), {name: x for name, x in config.items() if name != "layer_norm_epsilon"}
    for name in ("norm_eps", "layer_norm_epsilon"):
        assert import_params(arrays, of_norms | {name: 0.25})[0].norm_epsilon == 0.25
    with pytest.raises(ValueError, match="dtype is 'int8': expected one of float32, bfloat16"):
        import_params(arrays, config, dtype="int8")
    with jax.enable_x64(False), pytest.raises(ValueError, match="dtype is 'float64': expected a narrower one while"):
        import_params(arrays, config, dtype="float64")


def test_lower_precisions_are_taken():
    config = CONFIGS["LogLinearMamba2ForCausalLM"]
    low = {name: jnp.asarray(x, jnp.bfloat16) for name, x in draw(config).items()}
    expected = import_params(low, config)[1]
    for dtype in (np.float16, np.float64):
        _, params = import_params({n: np.asarray(x, np.float32).astype(dtype) for n, x in low.items()}, config)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


@pytest.mark.parametrize(
    ("name", "changes", "asked", "message"),
    [
        ("LogLinearMamba2", {"norm_groups": 4}, None, "norm_groups=4: expected what a LogLinearMamba2ForCausalLM has"),
        ("LogLinearMamba2", {"lam": "fixed"}, None, "lam='fixed'.*: expected what a .* has, mixer='log_linear', lam='linear'"),
        ("LogLinearMamba2", {"mixer": "delta"}, None, "settings have mixer='delta', of which there is no layout"),
        ("LogLinearMamba2", {}, "HAttentionForCausalLM", "norm_groups=None: expected what a HAttentionForCausalLM"),
        ("LogLinearMamba2", {}, "Llama", "architecture is 'Llama': expected one of LogLinearMamba2ForCausalLM"),
        ("LogLinearMamba2", {"layers": 3}, None, "params has no layer_2/"),
        ("HGatedDeltaNet", {"key_groups": 2}, None, "key_groups=2: expected what a HGatedDeltaNetForCausalLM has"),
        ("GatedDeltaNet", {"beta_max": 1.5}, None, "settings have beta_max=1.5: expected 1 or 2"),
    ],
)  # fmt: skip
def test_what_a_config_of_others_cannot_say_is_not_exported(name, changes, asked, message):
    """The arrays are the same: it would come back as another model."""
    config = CONFIGS[f"{name}ForCausalLM"]
    settings, params = import_params(draw(config), config)
    with pytest.raises(ValueError, match="embed/embedding has 608 of 608 values that are not"):
        export_params(settings, jax.tree.map(lambda x: x * jnp.nan, params))
    with pytest.raises(ValueError, match=message):
        export_params(dataclasses.replace(settings, **changes), params, asked)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("HAttentionForCausalLM", {"key_groups": 1, "norm_groups": None}),
        ("LogLinearMamba2ForCausalLM", {"key_groups": 1, "norm_groups": 1, "mlp_hidden": 256}),
        ("HGatedDeltaNetForCausalLM", {"key_groups": 4, "mlp_hidden": 256}),
        ("GatedDeltaNetForCausalLM", {"mlp_hidden": 256}),
    ],
)
def test_equal_models_are_exported_however_they_are_spelled(architecture, changes):
    config = CONFIGS[architecture] | ({"n_groups": 1} if "Mamba" in architecture or "HAtt" in architecture else {})
    settings, params = import_params(draw(config), config)
    written = export_params(dataclasses.replace(settings, **changes), params, architecture)
    assert import_params(written[1], written[0])[0] == settings


@settings_of_hypothesis(max_examples=60, deadline=None)
@given(st.sampled_from(["gated_linear", "gated_delta"]), *(st.integers(1, most) for most in (200, 6, 120, 120)))
@example("gated_linear", 107, 1, 15, 4).via("15/107 · 107 is 14.999999999999998")
def test_any_sizes_come_back(mixer, hidden, heads, head_dim, key_dim):
    """Through the ratios by which others' configs say them, which others round down."""
    settings = LanguageSettings(
        19, 64, mixer=mixer, hidden=hidden, layers=1, heads=heads, head_dim=head_dim, key_dim=key_dim, key_groups=heads,
        mlp=mixer != "gated_linear", conv_bias=mixer == "gated_linear",
    )  # fmt: skip
    name, layout = layout_for(settings, None)
    config = config_of(name, layout, settings)
    found = settings_of(layout, json.loads(json.dumps(config)), None, settings.dtype)
    assert (found.heads, found.head_dim, found.inner) == (heads, head_dim, settings.inner)
    if mixer == "gated_linear":
        assert int(config["expand"] * hidden) == settings.inner
    else:
        assert int(key_dim * config["expand_v"]) == head_dim
        assert int(heads * key_dim * config["expand_v"]) == settings.inner


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float32", 1e-3)])
@pytest.mark.parametrize("name", ["LogLinearMamba2", "Mamba2", "GatedDeltaNet"])
def test_the_same_logits_as_fla(name, dtype, tolerance):
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("fla.models")
    if (name, dtype) == ("GatedDeltaNet", "float32"):
        pytest.skip("its kernel takes no float32")
    sizes = (
        dict(num_heads=2, head_dim=64, expand_v=2.0)
        if name == "GatedDeltaNet"
        else dict(head_dim=64, expand=1, state_size=128)
    )
    if name == "LogLinearMamba2":
        sizes["num_heads"] = 4
    config = getattr(models, f"{name}Config")(hidden_size=256, num_hidden_layers=3, vocab_size=500, **sizes)
    torch.manual_seed(0)
    theirs = getattr(models, f"{name}ForCausalLM")(config).cuda().to(getattr(torch, dtype)).eval()
    tokens = np.random.default_rng(0).integers(0, 500, (2, 320))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).cuda()).logits.float().cpu().numpy()
    settings, params = import_params(theirs.state_dict(), config.to_dict(), dtype=dtype)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(LanguageModel(settings).apply)(params, jnp.asarray(tokens))
    assert relative_error(found, expected) < tolerance
