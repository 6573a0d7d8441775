"""Parameters of flash-linear-attention's model in and out; and, on a GPU that has fla, the same logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.hub.fla import export_fla, import_fla
from loglinear_jax.models import LanguageModel, LanguageSettings, RecallModel, RecallSettings
from tests.ops.inputs import relative_error

SETTINGS = LanguageSettings(
    vocab_size=19, max_length=64, lam="linear", hidden=32, layers=2, heads=4, head_dim=8, key_dim=16, key_groups=2,
    dtype="float32",
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(0), (1, 5), 0, 19)


@functools.cache
def random_params(settings=SETTINGS):
    params = LanguageModel(settings).init(jax.random.key(1), TOKENS)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def test_there_and_back():
    params = random_params()
    exported = export_fla(SETTINGS, params)
    assert exported["backbone.layers.1.mixer.in_proj.weight"].shape == (2 * 32 + 2 * 32 + 4 + 4 * 7, 32)
    assert exported["backbone.layers.0.mixer.conv1d.weight"].shape == (32 + 2 * 32, 1, 4)
    assert exported["lm_head.weight"].shape == (19, 32)
    settings, again = import_fla(exported, config=CONFIG)
    assert settings == SETTINGS
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(params))
    np.testing.assert_array_equal(
        LanguageModel(settings).apply(again, TOKENS), LanguageModel(SETTINGS).apply(params, TOKENS)
    )


FIRST, SECOND = "backbone.layers.0.", "backbone.layers.1."
CONFIG = {
    "model_type": "log_linear_mamba2", "vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
    "head_dim": 8, "expand": 1, "state_size": 16, "n_groups": 2, "conv_kernel": 4, "use_conv_bias": True, "norm_eps": 1e-5,
    "hidden_act": "silu", "use_bias": False, "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False,
    "residual_in_fp32": False, "tie_word_embeddings": False, "dt_limit": [0.0, float("inf")], "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def state_dict():
    return export_fla(SETTINGS, random_params())


def replaced(name, change):
    return lambda d: d.update({name: change(d[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("lm_head.weight"), "has no lm_head.weight"),
        (lambda d: d.pop(f"{SECOND}mixer.D"), "has no backbone.layers.1.mixer.D"),
        (lambda d: d.update({f"{FIRST}mixer.in_proj.bias": np.zeros(3)}), "in_proj.bias, for which"),
        (lambda d: d.update({"backbone.layers.one.D": np.zeros(3)}), "backbone.layers.one.D, for which"),
        (lambda d: [d.pop(k) for k in list(d) if ".layers.0." in k], "has no backbone.layers.0"),
        (replaced(f"{FIRST}mixer.D", lambda x: np.repeat(x, 8)), r"0.mixer.D has shape \(32,\): expected \(4,\)"),
        (
            replaced(f"{FIRST}mlp.gate_proj.weight", lambda x: x[:8]),
            r"0.mlp.gate_proj.weight has shape \(8, 32\): expected \(256, 32\)",
        ),
        (replaced(f"{SECOND}mixer.L", lambda x: x[:, :5]), r"1.mixer.L has shape \(4, 5\): expected \(4, 7\)"),
        (replaced(f"{SECOND}mixer.A_log", lambda x: x[:, None]), r"1.mixer.A_log has shape \(4, 1\): expected \(4,\)"),
        (replaced(f"{SECOND}mixer.in_proj.weight", np.transpose), r"1.mixer.in_proj.weight has shape \(32, 160\)"),
        (
            replaced(f"{SECOND}mixer.conv1d.weight", lambda x: np.repeat(x, 2, 1)),
            r"1.mixer.conv1d.weight has shape \(96, 2, 4\): expected \(96, 1, 4\)",
        ),
        (lambda d: d.pop(f"{SECOND}mixer.conv1d.bias"), "has no backbone.layers.1.mixer.conv1d.bias"),
        (lambda d: d.pop(f"{FIRST}mixer.conv1d.bias"), "has backbone.layers.1.mixer.conv1d.bias, for which"),
        (
            replaced("backbone.embeddings.weight", lambda x: x[:18]),
            r"embeddings.weight has shape \(18, 32\): expected \(19, 32\)",
        ),
        (replaced("backbone.norm_f.weight", lambda x: x[:31]), r"norm_f.weight has shape \(31,\): expected \(32,\)"),
        (replaced(f"{FIRST}mixer.L", lambda x: x[:3]), r"0.mixer.out_proj.weight has shape .* multiple of the 3 heads|divisor"),
        (replaced(f"{FIRST}mixer.L", lambda x: x[0]), r"0.mixer.L has shape \(7,\): expected \[heads, levels\]"),
        (replaced(f"{FIRST}mixer.L", lambda x: x[:, :0]), r"0.mixer.L has shape \(4, 0\): expected"),
        (replaced(f"{FIRST}mixer.L", lambda x: np.zeros((4, 40))), "expected at most 32 levels"),
        (replaced(f"{FIRST}mixer.conv1d.weight", lambda x: x[:94]), r"\(94, 1, 4\): expected 32 channels and"),
        (replaced(f"{SECOND}mixer.D", lambda x: x.astype(int)), r"1.mixer.D has dtype int\d+: expected a floating dtype"),
        (replaced(f"{SECOND}mixer.D", lambda x: x > 0), "1.mixer.D has dtype bool: expected a floating dtype"),
        (replaced(f"{SECOND}mixer.D", lambda x: None), "1.mixer.D has dtype object: expected a floating dtype"),
        (replaced(f"{SECOND}mixer.D", lambda x: x * np.nan), "1.mixer.D has 4 of 4 values that are not finite"),
        (replaced("lm_head.weight", lambda x: np.full(x.shape, 1e39)), "lm_head.weight has 608 of 608 values that"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(state_dict, change, message):
    changed = dict(state_dict)
    change(changed)
    with pytest.raises(ValueError, match=message):
        import_fla(changed, key_groups=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(key_groups=3), "key_groups is 3: expected a divisor of the 4 heads"),
        (dict(key_groups=0), "key_groups is 0: expected a divisor"),
        (dict(key_groups=True), "key_groups is True: expected a divisor"),
        (dict(key_groups=2, norm_epsilon=0), "norm_epsilon is 0: expected a finite number above 0"),
        (dict(key_groups=2, norm_epsilon=float("nan")), "norm_epsilon is nan: expected a finite number above 0"),
        (dict(key_groups=2, norm_epsilon="1e-5"), "norm_epsilon is '1e-5': expected a finite number above 0"),
        (dict(key_groups=2, dtype="int8"), "dtype is 'int8': expected float32, bfloat16"),
        (dict(config=[]), "config is of type list: expected a mapping"),
        (dict(config={}), "config has no n_groups: expected it, or the argument key_groups"),
        (dict(config=CONFIG, key_groups=1), "config has n_groups=2: expected 1, by state_dict and the arguments"),
        (dict(config=CONFIG, norm_epsilon=1e-6), "config has norm_eps=1e-05: expected 1e-06, by"),
        *(
            (dict(config=CONFIG | {field: value}), rf"config has {field}={value!r}: (LanguageModel has only|expected)")
            for field, value in {
                "model_type": "mamba2", "vocab_size": 20, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 2,
                "head_dim": 16, "expand": 2, "state_size": 8, "conv_kernel": 3, "use_conv_bias": False, "hidden_act": "gelu",
                "use_bias": True, "rmsnorm": False, "norm_before_gate": True, "D_has_hdim": True, "residual_in_fp32": True,
                "tie_word_embeddings": True, "attnres_block_size": 4,
            }.items()
        ),
        (dict(config=CONFIG | {"dt_limit": [0.0, 1.0]}), r"config has dt_limit=\[0.0, 1.0\]: LanguageModel has only"),
    ],
)  # fmt: skip
def test_arguments_and_configs_that_do_not_fit_are_named(state_dict, arguments, message):
    with pytest.raises(ValueError, match=message):
        import_fla(state_dict, **arguments)


def test_a_config_says_what_the_arrays_do_not(state_dict):
    settings, _ = import_fla(state_dict, config=CONFIG | {"norm_eps": 1e-6})
    assert (settings.key_groups, settings.norm_epsilon) == (2, 1e-6)


def test_lower_precisions_are_taken_and_other_objects_refused(state_dict):
    low = {name: jnp.asarray(x, jnp.bfloat16) for name, x in state_dict.items()}
    for dtype in (np.float16, np.float64):
        _, params = import_fla({n: np.asarray(x, np.float32).astype(dtype) for n, x in low.items()}, key_groups=2)
        close = functools.partial(np.testing.assert_allclose, atol=1e-7)
        jax.tree.map(close, params, import_fla(low, key_groups=2)[1])
    with pytest.raises(ValueError, match="state_dict is of type list: expected a mapping"):
        import_fla(list(state_dict.items()))


def without(tree, *path):
    first, *rest = path
    others = {key: x for key, x in tree.items() if key != first}
    return others | {first: without(tree[first], *rest)} if rest else others


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        (
            SETTINGS,
            lambda p: jax.tree.map(lambda x: jnp.stack([x] * 3), p),
            r"embed/embedding has shape \(3, 19, 32\): expected \(19, 32\), the params of one seed, not of several",
        ),
        (RecallSettings(19, 64), lambda p: p, "settings is of type RecallSettings: expected the LanguageSettings"),
        (
            SETTINGS,
            lambda p: jax.eval_shape(RecallModel(RecallSettings(19, 64)).init, jax.random.key(0), TOKENS),
            "params has no head: expected the parameters of a LanguageModel",
        ),
        (SETTINGS, lambda p: p["params"], 'params has no mapping "params"'),
        (SETTINGS, lambda p: None, 'params has no mapping "params"'),
        (SETTINGS, lambda p: without(p, "params", "layer_1", "mixer", "skip"), "params has no layer_1/mixer/skip"),
        (SETTINGS, lambda p: {"params": p["params"] | {"more": np.zeros(3)}}, "params has more, for which"),
        (dataclasses.replace(SETTINGS, layers=1), lambda p: p, "params has layer_1/.*, for which"),
        (
            dataclasses.replace(SETTINGS, vocab_size=20),
            lambda p: p,
            r"embed/embedding has shape \(19, 32\): expected \(20, 32\)$",
        ),
        (SETTINGS, lambda p: jax.tree.map(lambda x: x.astype(int), p), r"has dtype int32: expected a floating dtype"),
        (SETTINGS, lambda p: jax.tree.map(lambda x: x * jnp.nan, p), r"embed/embedding has 608 of 608 values that are not"),
        (
            LanguageSettings(vocab_size=19, max_length=64),
            lambda p: p,
            "only the log_linear mixer with linear λ, got .* lam='mlp_softplus'",
        ),
        (dataclasses.replace(SETTINGS, mixer="linear"), lambda p: p, "only the log_linear mixer with .* mixer='linear'"),
        (dataclasses.replace(SETTINGS, heads=3), lambda p: p, "model.heads must be a multiple of key_groups"),
    ],
)  # fmt: skip
def test_what_fla_has_no_place_for_is_named(settings, change, message):
    with pytest.raises(ValueError, match=message):
        export_fla(settings, change(random_params()))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float32", 1e-3)])
def test_the_same_logits_as_fla(dtype, tolerance):
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("fla.models")
    config = models.LogLinearMamba2Config(
        hidden_size=256, num_heads=4, head_dim=64, expand=1, num_hidden_layers=3, vocab_size=500, state_size=128
    )
    torch.manual_seed(0)
    theirs = models.LogLinearMamba2ForCausalLM(config).cuda().to(getattr(torch, dtype)).eval()
    tokens = np.random.default_rng(0).integers(0, 500, (2, 320))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).cuda()).logits.float().cpu().numpy()
    settings, params = import_fla(theirs.state_dict(), dtype=dtype)
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(LanguageModel(settings).apply)(params, jnp.asarray(tokens))
    assert relative_error(logits, expected) < tolerance
