"""Names and colours."""

from loglinear_jax.analysis.experiments import describe_run, setting_of
from loglinear_jax.analysis.style import LAM_LOOKS, MIXERS, describe_variant, looks_of
from loglinear_jax.config import released_config
from tests.analysis.made_runs import made_run


def test_settings_are_called_text_and_released(tmp_path):
    run = made_run(tmp_path)
    assert setting_of(run.config) == "text" and "setting" not in describe_run(run)
    run.config.model.max_length = 256  # for evaluation at other lengths, and no other model
    assert setting_of(run.config) == "text"
    released_config(run.config)
    assert setting_of(run.config) == "released" and describe_run(run).endswith(", released-code configuration")
    run.config.model.dt_max = 0.01
    assert setting_of(run.config) == ""


def test_every_mixer_and_lam_has_one_look_in_every_figure():
    known = [
        *LAM_LOOKS,
        *(f"mixer={name}" for name in MIXERS),
        *(f"mixer=log_linear_delta+lam={lam}" for lam in LAM_LOOKS),
    ]
    looks = looks_of(known)
    assert len(known) >= 14 and len(set(looks.values())) == len({look.color for look in looks.values()}) == len(known)
    assert all(looks_of([variant]) == {variant: look} for variant, look in looks.items())
    assert looks_of(["mixer=linear"]) == {"mixer=linear": looks["mixer=gated_linear"]}
    others = looks_of([*(f"lam_hidden={n}" for n in range(16)), *known])
    assert len(set(others.values())) == 16 + len(known) and looks.items() <= others.items()


def test_variants_in_words():
    assert describe_variant("linear") == "λ: linear" and describe_variant("lam_hidden=32") == "lam_hidden=32"
    assert describe_variant("mixer=linear") == "gated linear attention (single state)"
    delta = describe_variant("mixer=log_linear_delta+lam=content+beta_max=2")
    assert delta == "log-linear Gated DeltaNet, λ: content, beta_max=2"
