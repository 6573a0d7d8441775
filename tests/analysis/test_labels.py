"""Names and colours."""

from loglinear_jax.analysis.labels import colors_of, describe_run, describe_variant, sentence, setting_of
from loglinear_jax.config import released_config
from tests.analysis.made_runs import made_run


def test_a_sentence_leaves_lam_small():
    assert sentence("λ over tokens") == "λ over tokens"
    assert sentence("learning curves") == "Learning curves"


def test_settings_are_called_text_and_released(tmp_path):
    run = made_run(tmp_path)
    assert setting_of(run.config) == "text" and "setting" not in describe_run(run)
    released_config(run.config)
    assert describe_run(run).endswith(", released setting")


def test_every_variant_has_its_own_colour():
    variants = ["lam_hidden=32", "linear", "mlp_softplus", "a=1", "b=2"]
    assert len(set(colors_of(variants).values())) == len(variants)


def test_variants_in_words():
    assert describe_variant("linear") == "λ: linear" and describe_variant("lam_hidden=32") == "lam_hidden=32"
    assert describe_variant("mixer=linear") == "linear attention, λ ≡ 1"
