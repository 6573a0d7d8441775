"""Parameters of flash-linear-attention's model in and out; and, on a GPU that has fla, the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.hub.fla import export_fla, import_fla
from loglinear_jax.models import LanguageModel, LanguageSettings
from tests.ops.inputs import relative_error

SETTINGS = LanguageSettings(
    vocab_size=19, max_length=64, lam="linear", hidden=32, layers=2, heads=4, head_dim=8, key_dim=16, key_groups=2,
    dtype="float32",
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(0), (1, 5), 0, 19)


def random_params(settings=SETTINGS):
    params = LanguageModel(settings).init(jax.random.key(1), TOKENS)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def test_there_and_back():
    params = random_params()
    exported = export_fla(SETTINGS, params)
    assert exported["backbone.layers.1.mixer.in_proj.weight"].shape == (2 * 32 + 2 * 32 + 4 + 4 * 7, 32)
    assert exported["backbone.layers.0.mixer.conv1d.weight"].shape == (32 + 2 * 32, 1, 4)
    assert exported["lm_head.weight"].shape == (19, 32)
    settings, again = import_fla(exported, key_groups=2)
    assert settings == SETTINGS
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(params))
    np.testing.assert_array_equal(
        LanguageModel(settings).apply(again, TOKENS), LanguageModel(SETTINGS).apply(params, TOKENS)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("lm_head.weight"), "has no lm_head.weight"),
        (lambda d: d.update({"backbone.layers.0.mixer.in_proj.bias": np.zeros(3)}), "in_proj.bias, for which"),
        (lambda d: [d.pop(k) for k in list(d) if ".layers.0." in k], "has no backbone.layers.0"),
        (
            lambda d: d.update({"backbone.layers.0.mixer.D": np.zeros(32)}),
            r"mixer.D has shape \(32,\): expected one for",
        ),
        (
            lambda d: d.update({"backbone.layers.0.mlp.gate_proj.weight": np.zeros((8, 32))}),
            r"\(8, 32\): expected \(256",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    exported = export_fla(SETTINGS, random_params())
    change(exported)
    with pytest.raises(ValueError, match=message):
        import_fla(exported, key_groups=2)


def test_another_lambda_has_no_place_in_fla():
    with pytest.raises(ValueError, match="only the log_linear mixer with linear λ, got .* lam='mlp_softplus'"):
        export_fla(LanguageSettings(vocab_size=19, max_length=64), {})


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
