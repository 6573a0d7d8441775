"""Configs, presets and variants: what they set, and one clear line for what cannot be."""

import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from loglinear_jax.config import (
    ConfigError,
    build,
    check_config,
    check_effects,
    config_differences,
    describe_settings,
    read_config,
    variant_config,
    variant_names,
)
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.mixers import TokenMixer
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import Task

CONFIGS = Path(__file__).parents[2] / "configs"
RECALL = ("mqar", "selective_copy", "interleaved", "power_law", "forgetting", "state_tracking", "zoology_mqar")
MAD = {"recall": (), "fuzzy": (), "noisy": ("noise=40",), "copying": ("tokens=32",), "memorisation": ()}


def load(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def get_config(name, preset=None) -> ConfigDict:
    module = load(name)
    assert "python run.py --config=configs/" in module.__doc__
    return module.get_config(preset)


def presets_of(name):
    """None, each preset of a config file alone, with a number where it takes one, and one with another."""
    sizes = {"kv=": 4, "seq=": 1024, "hidden=": 128, "pairs=": 6, "updates=": 3, "state=": 8, "width=": 16}
    presets = [f"{preset}{sizes.get(preset, '')}" for preset in load(name).PRESETS]
    return [None, *presets, f"{presets[0]},{presets[-1]}"]


@pytest.mark.parametrize(
    ("name", "preset"), [(n, p) for n in (*RECALL, "wikitext2", "wikitext103", "books") for p in presets_of(n)]
)
def test_every_preset_builds(name, preset):
    config = get_config(name, preset)
    check_config(config)
    for variant in variant_names(config):
        experiment = build(config, variant, vocab_size=100)
        assert experiment.model.settings.max_length == (config.model.max_length or experiment.task.max_seq_len)
        assert len(experiment.train.seeds) == config.train.num_seeds


@pytest.mark.parametrize("name", [*RECALL, "wikitext2", "books"])
def test_every_setting_has_a_meaning(name):
    config = get_config(name)
    described = describe_settings(config)
    assert [setting.name for setting in described if not setting.meaning] == []
    names = {f"{section}.{name}" for section in ("task", "model", "train") for name in config[section]}
    assert {setting.name for setting in described} == names | {"variants"}


def test_presets_hold_in_any_order():
    for name, presets in (
        ("mqar", "smoke,seq=64,kv=6"), ("zoology_mqar", "smoke,rates,mixture"), ("mad", "recall,rates,smoke")
    ):  # fmt: skip
        backwards = ",".join(reversed(presets.split(",")))
        assert get_config(name, presets).to_dict() == get_config(name, backwards).to_dict()
    config = get_config("mqar", "kv=6,smoke,seq=64")
    assert (config.task.seq_len, config.task.num_pairs, config.train.num_steps) == (64, 6, 900)
    config = get_config("books", "seq=512,hidden=128,smoke")
    assert (config.task.seq_len, config.model.hidden, config.model.layers) == (512, 128, 2)
    assert get_config("wikitext2", "released,smoke").model.max_length == 16_384


@pytest.mark.parametrize("name", MAD)
def test_mad_s_presets_build(name):
    for presets in ("", "smoke,seq=64", "vocab=64", "train=800", *MAD[name]):
        config = get_config("mad", f"{name},{presets}")
        check_config(config)
        build(config, "fixed")


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ("mqar", "task.vocab_size=128 train.num_steps=5000 model.heads=2 model.head_dim=32 model.key_dim=32"),
        ("mqar", "model.hidden=64 model.layers=2 train.batch_size=64 train.num_train=10000 train.num_validation=1000"),
        ("mqar:kv=32", "task.num_pairs=32 train.learning_rate=0.001 train.stop_at=0.99 train.eval_every=100"),
        ("selective_copy", "task.vocab_size=64 train.num_steps=30000"),
        ("selective_copy:released,seq=1024", "task.vocab_size=128 task.seq_len=1024 model.heads=1 model.head_dim=64"),
        ("selective_copy:released", "model.key_dim=64 model.init_scheme=released"),
        ("interleaved", "model.heads=1 model.key_dim=16 train.num_steps=4000 task.seq_len=128 task.num_pairs=24"),
        ("forgetting:updates=0", "task.vocab_size=8192 task.num_pairs=8 task.num_updates=0 train.num_train=100000"),
        ("mad:seq=256,noise=60,noisy", "train.num_train=12800 train.num_steps=20000 task.frac_noise=0.6"),
        ("mad:recall,train=800", "train.num_train=800 train.num_steps=1400 train.batch_size=128"),
        ("mad:memorisation", "train.num_train=256 train.num_steps=400"),
    ],
)
def test_the_settings_of_experiments(config, values):
    name, _, presets = config.partition(":")
    experiment = build(get_config(name, presets or None), "mlp_softplus")
    for path, _, value in (item.partition("=") for item in values.split()):
        section, field = path.split(".")
        of = experiment.model.settings if section == "model" else getattr(experiment, section)
        assert str(getattr(of, field)) == value, path


def test_the_variants_of_presets():
    variants = variant_names(get_config("zoology_mqar", "table2,width=32"))
    assert variants == ["mixer=gated_linear", "linear", "mixer=gated_delta", "mixer=log_linear_delta+lam=linear"]
    assert len(variant_names(get_config("zoology_mqar", "table2"))) == 3 * len(variants)
    config = get_config("mqar", "kv=32,d_h")
    widths = [build(config, variant).model.settings.lam_hidden for variant in variant_names(config)]
    assert widths == [32, 64, 128]


@pytest.mark.parametrize(
    ("name", "preset", "message"),
    [
        ("mqar", "smoek", "no preset 'smoek': there are smoke, released, robust, d_h, kv=N, seq=N"),
        ("mqar", "smoke,", "no preset ''"),
        ("mqar", "kv=many", "preset 'kv=many': expected a whole number that is not negative"),
        ("task", None, "name the task's module"),
        ("mad", None, "name one of MAD's tasks, .*: there are recall, fuzzy, noisy, copying, memorisation$"),
        ("mad", "recall,noisy", "name one of MAD's tasks, .* memorisation, got recall, noisy"),
        ("mad", "recall,noise=40", "preset 'noise=40' goes with [a-z]+ alone, got recall"),
        ("mad", "noisy,noise=100", "preset 'noise=100': expected a percentage from 1 to 99"),
        ("state_tracking", "s3,smoke,parity", "presets 's3' and 'parity' exclude each other"),
        ("zoology_mqar", "table2,pairs=8", "seq= and pairs= do not go with mixture or table2, whose sequences are"),
    ],
)
def test_bad_presets(name, preset, message):
    with pytest.raises(ConfigError, match=message):
        get_config(name, preset)


def test_any_task_by_its_module():
    config = get_config("task", "mqar")
    assert config.task.to_dict() == {"name": "mqar", "seq_len": 128, "vocab_size": 128, "num_pairs": 8}
    with pytest.raises(ValueError, match="no task 'nowhere.mine': .* put the folder that holds it in PYTHONPATH"):
        get_config("task", "nowhere.mine")


def test_a_task_of_ones_own_may_leave_out_its_check(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Delays(Task):
        delays: tuple = (1, 2)

    @dataclasses.dataclass(frozen=True)
    class Listed(Task):
        delays: list = dataclasses.field(default_factory=list)

    module = types.SimpleNamespace(TASK=Delays, __spec__=importlib.machinery.ModuleSpec("delays", None))
    monkeypatch.setitem(sys.modules, "delays", module)
    assert build(get_config("task", "delays"), "linear").task.delays == (1, 2)
    module.TASK = Listed
    with pytest.raises(SettingError, match="Listed: its field delays has no default value"):
        get_config("task", "delays")


def test_variants():
    config = get_config("mqar")
    config.variants = "linear, mixer=softmax,lam=mlp_softplus+lam_hidden=32+train.learning_rate=3e-3,train.grad_clip=2"
    names = variant_names(config)
    assert names[:2] == ["linear", "mixer=softmax"]
    a, b, c, d = (variant_config(config, name) for name in names)
    assert a.model.lam == "linear" and b.model.mixer == "softmax" and d.train.grad_clip == 2.0
    assert (c.model.lam, c.model.lam_hidden, c.train.learning_rate) == ("mlp_softplus", 32, 0.003)
    assert config.model.lam_hidden == 64


def test_several_rates_make_a_variant_each():
    given = "--config.train.learning_rate=0.001,4e-3", "--config.variants=linear,fixed+train.learning_rate=1e-5"
    config = read_config_arguments(["--config=mqar", *given]).config
    rates = {name: variant_config(config, name).train.learning_rate for name in variant_names(config)}
    assert list(rates) == [f"linear+train.learning_rate={rate}" for rate in (0.001, 0.004)] + [
        "fixed+train.learning_rate=1e-5"
    ]
    assert list(rates.values()) == [0.001, 0.004, 1e-5]
    check_effects(config)
    config = get_config("mqar")
    config.variants = "linear"
    config.train.weight_decay = (0, 0.1)  # as a config file would
    assert variant_names(config) == ["linear+train.weight_decay=0.0", "linear+train.weight_decay=0.1"]
    for values in ([], [0.1, 0.1], [0.1, "0.2"], [True]):
        config.train.weight_decay = values
        with pytest.raises(ConfigError, match="train.weight_decay must be a number, or several different ones, got"):
            variant_names(config)


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (",", "variants=',' names none"),
        ("linear+", "variants: 'linear\\+' has an empty part"),
        ("linear,linear", "variants names 'linear' twice"),
        ("mlp", "variants: 'mlp' is not a λ"),
        ("lam_width=3", "'lam_width=3': there is no setting model.lam_width"),
        ("train.num_seeds=3", "all variants are trained with the same seeds"),
        ("task.num_pairs=3", "there is no setting task.num_pairs of the model or of training"),
        ("linear+fixed", "'linear\\+fixed' sets model.lam twice"),
        ("kind=language", "all variants are of one kind of model"),
        ("lam=moved:Lam", "there is no module moved here: put the folder that holds it in PYTHONPATH"),
        ("lam=math:Lam", "the module math has no class Lam"),
        ("lam=my lams:B", "lam must be one of .*or my_module:MyLam, got 'my lams:B'"),
        ("lam=math:floor", "expected the class of a Linen module, got a builtin_function_or_method"),
    ],
)
def test_bad_variants(variants, message):
    config = get_config("mqar")
    config.variants = variants
    with pytest.raises(ConfigError, match=message):
        for name in variant_names(config):
            variant_config(config, name)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("task.seq_len", 16, "task.seq_len=16 is too short"),
        ("model.key_groups", 3, "model.heads must be a multiple of key_groups, got heads=2, key_groups=3"),
        ("model.max_length", 64, "model.max_length=64 is shorter than task.seq_len=128"),
        ("train.learning_rate", 0.0, "train.learning_rate must be finite and positive"),
        ("train.first_seed", 2**31 - 1, "train.first_seed must leave all seeds within"),
        ("train.stop_at", 99.0, "train.stop_at is an accuracy"),
        ("train.checkpoint_every", 150, "checkpoint_every=150 must be a multiple of train.eval_every=100"),
        ("model.implementation", "cuda", r"model.implementation must be one of 'parallel', .* or None, got 'cuda'$"),
        ("model.lam_hidden", -4, "model.lam_hidden must be a whole number from 1 on, or None .* got -4"),
        ("model", ConfigDict(), "model.beta_max is missing: set single fields, .*not model as a whole"),
        ("model.hidden", 2**31 - 1, "task.vocab_size=128 × model.hidden=2147483647 is a matrix of 274,877,906,816"),
    ],
)
def test_impossible_settings(field, value, message):
    with pytest.raises(ConfigError, match=message):
        build(changed({field: value}), "mlp_softplus")


def test_without_variants_lam_alone_is_trained_and_one_that_no_variant_uses_is_refused():
    config = get_config("mqar")
    check_effects(config)
    assert variant_names(config) == ["linear", "mlp_softmax", "mlp_softplus"]
    config.model.lam = "rope"
    assert variant_names(config) == ["rope"]
    config.variants = "linear,fixed"
    config.model.lam = "rope"
    with pytest.raises(ConfigError, match="model.lam=rope has no effect.*set variants=rope"):
        check_effects(config)
    config.variants = "linear,layers=1"
    check_effects(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variants": "linear,fixed", "lam_hidden": 32}, "model.lam_hidden=32 has no effect: every variant .linear, fixed."),
        ({"variants": "linear+train.learning_rate=0.1", "train.learning_rate": [0.1, 0.2]}, "rate=0.2 has no effect: every"),
        ({"variants": "mixer=delta", "implementation": "recurrent", "chunk_size": 16}, "model.chunk_size=16 has no effect"),
        ({"variants": "lam_hidden=32,lam_hidden=64", "lam_hidden": 16}, "model.lam_hidden=16 has no effect"),
        ({"variants": "fixed,linear+lam_hidden=32"}, "'linear\\+lam_hidden=32' sets model.lam_hidden, which has no effect"),
        ({"variants": "linear,mixer=delta+lam=rope"}, "'mixer=delta\\+lam=rope' sets model.lam, which has no effect there"),
        ({"train.warmup_steps": 5001}, "train.warmup_steps=5001 must not be more than train.num_steps=5000"),
        ({"train.stream": True, "train.num_train": 500}, "train.num_train=500 has no effect"),
    ],
)  # fmt: skip
def test_a_setting_that_no_variant_reads_is_refused(settings, message):
    config = changed(settings)
    check_config(config)  # a run that was started with it goes on
    with pytest.raises(ConfigError, match=message):
        check_effects(config)


def test_settings_of_a_task_that_its_mixture_takes_the_place_of():
    config = get_config("zoology_mqar", "mixture")
    check_effects(config)
    config.train.num_test = 6
    with pytest.raises(ConfigError, match="train.num_test must be at least 7, one of each .'64/4', '64/8', "):
        check_config(config)
    config.train.num_test = 7
    config.task.num_pairs = 8
    with pytest.raises(ConfigError, match="task.num_pairs=8 has no effect: every variant"):
        check_effects(config)
    config.task.tests = ""  # then they are those of the tests
    check_effects(config)


def test_what_some_variant_reads_or_presets_set_is_none_of_those():
    check_effects(changed({"variants": "linear,mlp_softmax", "lam_hidden": 32}))
    check_effects(changed({"variants": "mixer=softmax,mixer=gated_linear", "chunk_size": 16}))
    config = changed({"variants": "mixer=softmax", "dt_max": 0.01, "lam_hidden": 16})
    check_effects(config, given=["variants"])
    with pytest.raises(ConfigError, match="model.lam_hidden=16 has no effect"):
        check_effects(config, given=["variants", "model.lam_hidden"])


def changed(settings, name="mqar"):
    """The config with these settings, of the model where they name no section."""
    config = get_config(name)
    for path, value in settings.items():
        section, _, field = path.rpartition(".")
        if path in config:
            config[path] = value
        else:
            config[section or "model"][field] = value
    return config


class Mean(TokenMixer):
    """The mean of all values so far, to a power."""

    power: int = 1

    @nn.compact
    def __call__(self, q, k, v):
        return (jnp.cumsum(v, axis=1) / jnp.arange(1, v.shape[1] + 1)[:, None, None]) ** self.power


class BoundedLam(nn.Module):
    """λ = 2 sigmoid(d + b), as in the documentation."""

    hidden: int = 3

    @nn.compact
    def __call__(self, d):
        return 2 * nn.sigmoid(d + self.param("bias", nn.initializers.zeros, d.shape[-2:]))


def test_a_lam_of_ones_own_is_any_importable_class(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_lams", types.SimpleNamespace(BoundedLam=BoundedLam))
    config = get_config("mqar")
    config.model.lam = "my_lams:BoundedLam"
    config.model.lam_hidden = 7
    check_config(config)
    assert variant_names(config) == ["my_lams:BoundedLam"]
    settings = build(config, "my_lams:BoundedLam").model.settings
    lam = settings.mixers[0].lam_module(parent=None)
    assert isinstance(lam, BoundedLam) and lam.hidden == 7
    own = "my_lams:BoundedLam+train.learning_rate=0.01,my_lams:BoundedLam(hidden=9)"
    config.variants = f"linear,{own},lam=mlp_softplus(hidden=4)"
    names = variant_names(config)
    assert variant_config(config, names[1]).model.lam == "my_lams:BoundedLam"
    lams = [build(config, name).model.settings.mixers[0].lam_module(parent=None) for name in names]
    assert [getattr(lam, "hidden", None) for lam in lams] == [None, 7, 9, 4]
    config.variants = "mlp_softplus(hidden=4)+lam_hidden=8"
    with pytest.raises(ConfigError, match="sets model.lam_hidden, which has no effect there"):
        check_effects(config)


def test_a_mixer_of_ones_own_and_patterns_of_mixers(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_mixers", types.SimpleNamespace(Mean=Mean))
    config = get_config("mqar")
    config.variants = "mixer=my_mixers:Mean(power=2),mixer=(log_linear,softmax),mixer=gated_delta(beta_max=2)"
    check_config(config)
    own, pattern, delta = (build(config, name).model.settings for name in variant_names(config))
    assert own.mixers[0].power == 2 and "lam" in own.unread
    assert pattern.pattern == ["log_linear", "softmax"] and not pattern.has_lam and "lam" not in pattern.unread
    assert delta.mixers[0].beta_max == 2 and "beta_max" in delta.unread
    config.variants = "mixer=gated_delta(beta_max=3)"
    with pytest.raises(ConfigError, match=r"model.mixer=gated_delta\(beta_max=3\): beta_max must be at most 2, got 3"):
        check_config(config)


class TinyModel(nn.Module):
    vocab_size: int
    width: int = 32

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(self.vocab_size)(nn.Embed(self.vocab_size, self.width)(tokens))


def test_a_model_of_ones_own(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "my_models", types.SimpleNamespace(TinyModel=TinyModel))
    kind = "my_models:TinyModel(width=8)"
    arguments = ["--config=mqar", f"--config.model.kind={kind}"]
    config = read_config_arguments(arguments).config
    check_effects(config)
    assert config.model.to_dict() == {"kind": kind, "max_length": None} and variant_names(config) == [f"kind={kind}"]
    model = build(config, f"kind={kind}").model
    params = model.init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    assert params["Embed_0"]["embedding"].shape == (128, 8)
    (tmp_path / "config.json").write_text(config.to_json())
    assert read_config(tmp_path / "config.json").to_dict() == config.to_dict()
    for more, message in (
        ("--config.model.hidden=8", "does not go with this config, whose model has hidden"),
        ("--config.variants=kind=my_models:TinyModel(depth=2)", "has no argument depth: did you mean width"),
        ("--config.variants=kind=my_models:Large", "the module my_models has no class Large"),
        ("--config.variants=kind=recall", "all variants are of one kind of model"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_effects(read_config_arguments([*arguments, more]).config)


def test_the_former_name_of_a_mixer_is_taken_with_one_warning():
    config = get_config("mqar")
    config.variants = "mixer=linear,mixer=(linear,softmax),linear"
    with pytest.warns(FutureWarning, match="the mixer linear is called gated_linear now") as warned:
        check_effects(config)
    assert len(warned) == 1
    assert build(config, "mixer=linear").model.settings.mixer == "gated_linear"


def test_a_bug_in_a_lam_or_task_of_ones_own_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_here.py").write_text("int('a bug')\n", encoding="utf-8")
    config = get_config("mqar")
    config.model.lam = "broken_here:Lam"
    for wrong in (
        lambda: check_config(config),
        lambda: build(config, "broken_here:Lam"),
        lambda: get_config("task", "broken_here"),
    ):
        with pytest.raises(ValueError, match="a bug") as caught:
            wrong()
        assert not isinstance(caught.value, SettingError)


def test_zero_and_false_stand_for_none():
    config = changed({"train.stop_at": 0.0, "train.grad_clip": 0.0, "lam_hidden": 0})
    experiment = build(config, "mlp_softplus")
    assert experiment.train.stop_at is experiment.train.grad_clip is experiment.model.settings.lam_hidden is None


def test_differences_name_each_field_and_variant():
    a, b = get_config("mqar"), get_config("mqar", "kv=4")
    b.train.learning_rate = 0.01
    b.train.update(rates_at_once=2, eval_batch_size=10)  # as the message says where memory runs out: these do not count
    assert config_differences(a, a) == []
    assert config_differences(a, b) == ["task.num_pairs: 8 → 4", "train.learning_rate: 0.001 → 0.01"]
    assert "task.num_tokens: (absent) → 16" in config_differences(a, get_config("selective_copy"))
    b = a.copy_and_resolve_references()
    for ours, theirs, found in (
        ("linear,fixed", "fixed,linear", "in another order"),
        ("linear,fixed,content", "content,fixed,rope", "without linear and with rope"),
    ):
        a.variants, b.variants = ours, theirs
        assert config_differences(a, b) == [f"variants: {found}"]


def test_a_config_may_grow_by_variants_and_rates():
    a, b = get_config("mqar"), get_config("mqar")
    a.variants, b.variants = "linear,fixed", "content,fixed,linear"
    assert config_differences(a, b, grown=True) == []
    assert config_differences(b, a, grown=True) == ["variants: without content"]
    a.train.learning_rate, b.train.learning_rate = [0.01, 0.1], [0.1, 1.0, 0.01]
    assert config_differences(a, b, grown=True) == []
    a.variants, b.variants = "linear,content+train.learning_rate=0.5", "content+train.learning_rate=0.5,linear"
    a.train.learning_rate, b.train.learning_rate = 0.01, 0.1  # of linear, which is not named by it
    assert config_differences(a, b, grown=True) == ["train.learning_rate: 0.01 → 0.1"]
