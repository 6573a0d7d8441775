"""Configs: every setting with its default, presets by argument, checks, and what is built from them."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.lam import LAMS
from loglinear_jax.models import LanguageModel, LanguageSettings, RecallModel, RecallSettings
from loglinear_jax.tasks import Task, load_task
from loglinear_jax.tasks.text import Text
from loglinear_jax.train import METRICS, PRECISIONS, SCHEDULES, TrainSettings


class ConfigError(ValueError):
    """A setting that does not exist or cannot be; the message is one line that names it."""


def default_config() -> ConfigDict:
    """Every setting of an experiment, in the paper's setting for recall; a file in configs/ adds its task.

    Where 0 or '' stands for "choose for me", the comment says so.
    """
    config = ConfigDict()
    # What to train side by side with the same seeds and data, comma-separated. Each is a λ by name, or settings joined
    # by '+': 'mixer=softmax', 'lam=mlp_softplus+lam_hidden=32', 'linear+train.learning_rate=0.003'.
    config.variants = "linear,mlp_softmax,mlp_softplus"

    config.task = ConfigDict()

    model = config.model = ConfigDict()
    model.kind = "recall"  # or language: see loglinear_jax.models
    model.mixer = "log_linear"  # or linear (gated linear attention, one state), softmax
    model.lam = "mlp_softplus"  # of variants that name no λ, such as lam_hidden=32; see loglinear_jax.lam
    model.lam_hidden = 64  # width d_h of the λ MLP; 0: twice the number of levels
    model.lam_activation = "gelu"  # or identity, as in the paper's equation 3
    model.hidden = 64
    model.layers = 2
    model.heads = 2
    model.head_dim = 32
    model.key_dim = 32
    model.key_groups = 0  # heads share keys in this many groups; 0: one per head
    model.max_length = 0  # longest sequence that λ has levels for; 0: the task's seq_len
    model.init_scheme = "paper"  # or released
    # What the paper's recall model does not have, or does otherwise; see loglinear_jax.models.recall.
    model.weight_std = 0.02
    model.embed_std = 0.02
    model.norm = "post"  # or pre
    model.conv_width = 0
    model.qk_norm = False
    model.lam_head_slope = 0.0
    model.dt_min = 1e-3  # what the step sizes start between: a small one is a slow decay
    model.dt_max = 0.1
    model.chunk_size = 0  # 0: chosen from the shapes
    model.implementation = ""  # of log_linear_attention; '': the best that works here

    train = config.train = ConfigDict()
    train.num_seeds = 5
    train.first_seed = 0
    train.num_steps = 5_000
    train.batch_size = 64
    train.learning_rate = 1e-3
    train.warmup_steps = 0
    train.schedule = "constant"  # or cosine, to 0 at num_steps
    train.weight_decay = 0.0  # AdamW's
    train.decay_all = False  # True: also of norms, biases, decays and λ's vectors, not of matrices only
    train.grad_clip = 1.0  # global norm; 0: none. The paper does not say, the released code clips at 1
    train.grad_accumulation = 1  # parts of a batch, one after another
    train.stream = False  # True: fresh sequences for ever, instead of num_train fixed ones
    train.num_train = 10_000
    train.num_validation = 1_000
    train.eval_batch_size = 250  # sequences per seed evaluated at once: memory, not results
    train.eval_every = 100
    train.stop_at = 0.99  # validation accuracy at which a seed stops; 0: never
    train.metric = "accuracy"  # which validation value is best: or loss
    train.patience = 0  # evaluations in a row without a better one, after which a seed stops; 0: never
    train.precision = "float32"  # or tf32, bfloat16
    train.steps_per_dispatch = 50  # steps in one call of the device; signals are heard in between
    train.checkpoint_every = 500  # a multiple of eval_every
    return config


def language_config() -> ConfigDict:
    """Every setting of a language-model experiment in the paper's setting, on the next token.

    Heads are hidden / 64, as in the released code; the paper's text says 4 of 64 at either width.
    """
    config = default_config()

    task = config.task
    task.name = "text"
    task.corpus = "wikitext-103-raw"  # a name of loglinear_jax.text, a text file, or a folder of train, valid, test
    task.source = ""  # folder of WikiText's files, if they are here already; '': download them
    task.tokenizer = "gpt2"  # a folder of tokenizer.json, or of vocab.json and merges.txt; or a name on the hub
    task.cache = "~/.cache/loglinear_jax"  # where tokenised corpora are kept
    task.seq_len = 512
    task.validation_windows = 0  # of the validation split, evaluated while training; 0: all of it
    task.target_offset = 1  # 2: the token after the next, as the paper's released code trains and measures

    model = config.model
    for name in ("weight_std", "embed_std", "norm", "qk_norm", "lam_head_slope", "dt_min", "dt_max"):  # of recall only
        del model[name]
    model.kind = "language"
    model.lam_hidden = 0
    model.hidden = 512
    model.layers = 6
    model.heads = 0  # 0: hidden / head_dim
    model.head_dim = 64
    model.key_dim = 128
    model.key_groups = 1
    model.conv_width = 4
    model.conv_bias = True
    model.norm_epsilon = 1e-5
    model.remat = "none"  # or block: activations computed again in the backward pass

    train = config.train
    train.num_seeds = 1
    train.num_steps = 40_000
    train.batch_size = 8
    train.learning_rate = 3e-4
    train.warmup_steps = 500
    train.schedule = "cosine"
    train.weight_decay = 0.1
    train.eval_every = 500
    train.eval_batch_size = 64
    train.checkpoint_every = 2_000
    train.stop_at = 0.0
    train.metric = "loss"
    train.precision = "bfloat16"
    train.steps_per_dispatch = 50
    for name in ("stream", "num_train", "num_validation"):  # of drawn sequences only
        del train[name]
    return config


def smoke_config(config: ConfigDict) -> None:
    """Shrinks training to what two CPU cores do in under three minutes; the task must be shrunk to match."""
    config.train.update(
        num_seeds=4,
        num_steps=800,
        batch_size=32,
        learning_rate=2e-3,
        num_validation=250,
        eval_every=50,
        checkpoint_every=200,
        steps_per_dispatch=25,
    )


def apply_presets(config: ConfigDict, argument: str | None, presets: Mapping[str, Any]) -> ConfigDict:
    """Applies "smoke", "seq=1024" or several joined by commas, as given after the config file's name: those with a value
    last, in whatever order they are given, so that smoke keeps none of them from its effect.

    presets: name -> function of the config, or, for a preset with a value, "name=" -> function of (config, value).
    Raises ConfigError for an unknown name or a value that is not an integer.
    """
    for item in sorted(filter(None, (argument or "").split(",")), key=lambda item: "=" in item):
        name, equals, value = item.partition("=")
        if name + equals not in presets:
            known = ", ".join(key + ("N" if key.endswith("=") else "") for key in presets)
            raise ConfigError(f"no preset {item!r}: there are {known}")
        if not equals:
            presets[name](config)
            continue
        if not value.isdecimal():
            raise ConfigError(f"preset {item!r}: expected a whole number after '{name}='")
        presets[name + equals](config, int(value))
    return config


def released_config(config: ConfigDict) -> None:
    """The released code's model where it differs from the paper's text."""
    config.model.update(heads=1, head_dim=64, key_dim=64, init_scheme="released")


def robust_config(config: ConfigDict) -> None:
    """With what 64 seeds reach 99 % in MQAR in 1,022 of 1,024 runs (results/README.md): a short convolution, q and k of unit
    length, pre-norm, decays that start slow (else a tenth fails at 4 pairs, those with the fastest decays), and larger initial
    weights and embeddings (else a quarter stops short of 99 % at 8 pairs, 44 % at 16)."""
    config.model.update(conv_width=4, norm="pre", qk_norm=True, dt_max=0.01, weight_std=0.125, embed_std=1.0)


def released_language_config(config: ConfigDict) -> None:
    """The language model's setting in the released code: two tokens ahead, λ for 16,384, weight decay on everything."""
    config.task.target_offset = 2
    config.model.max_length = 16_384
    config.train.decay_all = True


def set_hidden(config: ConfigDict, width: int) -> None:
    """The preset hidden=N."""
    config.model.hidden = width


# --- Variants -------------------------------------------------------------------------------------------------------


def variant_names(config: ConfigDict) -> list[str]:
    """The names in config.variants. Raises ConfigError if there are none, or one appears twice."""
    names = [name.strip() for name in config.variants.split(",") if name.strip()]
    if not names:
        raise ConfigError("variants is empty: expected at least one, such as 'mlp_softplus'")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"variants names {repeated[0]!r} twice")
    return names


def variant_config(config: ConfigDict, variant: str) -> ConfigDict:
    """A copy of the config with the variant's settings. Raises ConfigError for settings that don't exist or fit."""
    config = ConfigDict(config.to_dict())
    paths = set()
    for setting in variant.split("+"):
        path, equals, text = setting.partition("=")
        if not equals:
            if setting not in LAMS:
                raise ConfigError(
                    f"variants: {setting!r} is no λ ({', '.join(LAMS)}) and no setting such as mixer=softmax"
                )
            path, text = "lam", setting
        path = path if "." in path else f"model.{path}"
        section, _, field = path.partition(".")
        if section not in ("model", "train") or field not in config[section]:
            raise ConfigError(f"variants: {setting!r}: there is no setting {path} of the model or of training")
        if field in ("num_seeds", "first_seed"):
            raise ConfigError(f"variants: {setting!r}: all variants are trained with the same seeds")
        if path == "model.kind":
            raise ConfigError(f"variants: {setting!r}: all variants are of one kind of model, that of the config")
        if path in paths:
            raise ConfigError(f"variants: {variant!r} sets {path} twice")
        paths.add(path)
        current = config[section][field]
        try:
            value = text if isinstance(current, str) else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = None
        if isinstance(current, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(current):
            raise ConfigError(f"variants: {setting!r}: expected {type(current).__name__}, got {text!r}")
        config[section][field] = value
    return config


def check_config(config: ConfigDict) -> None:
    """Raises ConfigError for a section that was replaced as a whole, and for a model.lam that is none, or that no variant
    would use. Settings that a variant can change are checked by `build`."""
    recall, language = default_config(), language_config()
    needed = {"task": {"name"}} | {name: set(recall[name]) & set(language[name]) for name in ("model", "train")}
    for section, names in needed.items():
        if missing := sorted(names - set(config[section])):
            raise ConfigError(
                f"{section}.{missing[0]} is missing: set single fields, such as --config.{section}.{missing[0]}=..., not "
                f"{section} as a whole"
            )
    if config.model.lam not in LAMS:
        raise ConfigError(f"model.lam must be one of {', '.join(LAMS)}, got {config.model.lam!r}")
    names = variant_names(config)
    if config.model.lam != recall.model.lam and all(
        variant_config(config, n).model.lam != config.model.lam for n in names
    ):
        raise ConfigError(
            f"model.lam={config.model.lam} has no effect, as every variant ({', '.join(names)}) names its own λ: "
            f"set variants={config.model.lam}"
        )


# --- From config to objects -----------------------------------------------------------------------------------------


MODELS = {"recall": (RecallModel, RecallSettings), "language": (LanguageModel, LanguageSettings)}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What one variant of a config stands for; `config` has the variant's own settings applied."""

    config: ConfigDict
    task: Task | Text
    model: RecallModel | LanguageModel
    train: TrainSettings
    seeds: list[int]


def build(config: ConfigDict, variant: str, vocab_size: int | None = None) -> Experiment:
    """The task, model and training settings of one variant.

    vocab_size: of a text that need not be read again; None opens the corpus, after all settings are checked.
    Raises ConfigError naming an impossible setting, or what is wrong with the corpus.
    """
    config = variant_config(config, variant)
    train, seeds = _train_settings(config.train), _seeds(config.train)
    try:
        task = load_task(**config.task)
        settings_class, given = _model_settings(config.model, task.seq_len)
        dtype = "bfloat16" if train.precision == "bfloat16" else "float32"
        text = isinstance(task, Text)
        settings = settings_class(vocab_size=vocab_size or (1 if text else task.vocab_size), dtype=dtype, **given)
        settings.check()
        if settings.max_length < task.seq_len:
            raise ConfigError(f"model.max_length={settings.max_length} is shorter than task.seq_len={task.seq_len}")
        if text and vocab_size is None:
            task.check_data(train.batch_size, seeds)
            settings = dataclasses.replace(settings, vocab_size=task.vocab_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Experiment(config, task, MODELS[config.model.kind][0](settings), train, seeds)


def _model_settings(model: ConfigDict, seq_len: int) -> tuple[type, dict[str, Any]]:
    """The class of the model's settings and its arguments, with what is chosen for the user filled in."""
    settings = dict(model)
    kind = settings.pop("kind")
    if kind not in MODELS:
        raise ConfigError(f"model.kind must be one of {', '.join(MODELS)}, got {kind!r}")
    known = {field.name for field in dataclasses.fields(MODELS[kind][1])} - {"vocab_size", "dtype"}
    if differing := sorted(known ^ set(settings)):
        raise ConfigError(
            f"model.kind={kind} does not go with this config, whose model has other settings, such as {differing[0]}"
        )
    for name in ("lam_hidden", "key_groups", "chunk_size", "implementation"):
        settings[name] = settings[name] or None
    settings["max_length"] = settings["max_length"] or seq_len
    if kind == "language" and not settings["heads"]:
        width, head_dim = settings["hidden"], settings["head_dim"]
        if head_dim < 1 or width % head_dim:
            raise ConfigError(
                f"model.hidden must be a multiple of head_dim where heads=0, got hidden={width}, head_dim={head_dim}"
            )
        settings["heads"] = width // head_dim
    return MODELS[kind][1], settings


def _seeds(train: ConfigDict) -> list[int]:
    return list(range(train.first_seed, train.first_seed + train.num_seeds))


def _train_settings(train: ConfigDict) -> TrainSettings:
    positive = (
        "num_seeds", "num_steps", "batch_size", "grad_accumulation", "num_train", "num_validation", "eval_batch_size",
        "eval_every", "steps_per_dispatch", "checkpoint_every",
    )  # fmt: skip
    for name in positive:
        if name in train and train[name] < 1:
            raise ConfigError(f"train.{name} must be at least 1, got {train[name]}")
    if train.first_seed < 0 or train.first_seed + train.num_seeds > 2**31:
        raise ConfigError(f"train.first_seed must leave all seeds within 0 .. 2**31 - 1, got {train.first_seed}")
    if not 0 <= train.grad_clip < math.inf:
        raise ConfigError(f"train.grad_clip must be finite and not negative, got {train.grad_clip}")
    if not 0 < train.learning_rate < math.inf:
        raise ConfigError(f"train.learning_rate must be finite and positive, got {train.learning_rate}")
    if not 0 <= train.weight_decay < math.inf:
        raise ConfigError(f"train.weight_decay must be finite and not negative, got {train.weight_decay}")
    for name in ("warmup_steps", "patience"):
        if train[name] < 0:
            raise ConfigError(f"train.{name} must not be negative, got {train[name]}")
    if train.schedule == "cosine" and train.warmup_steps >= train.num_steps:
        raise ConfigError(
            f"train.warmup_steps={train.warmup_steps} must be less than train.num_steps={train.num_steps}"
        )
    if train.batch_size % train.grad_accumulation:
        raise ConfigError(
            f"train.batch_size={train.batch_size} must be a multiple of train.grad_accumulation={train.grad_accumulation}"
        )
    if not 0 <= train.stop_at <= 1:
        raise ConfigError(f"train.stop_at is an accuracy from 0 (never) to 1, got {train.stop_at}")
    for name, known in (("precision", PRECISIONS), ("schedule", SCHEDULES), ("metric", METRICS)):
        if train[name] not in known:
            raise ConfigError(f"train.{name} must be one of {', '.join(known)}, got {train[name]!r}")
    if train.checkpoint_every % train.eval_every:
        raise ConfigError(
            f"train.checkpoint_every={train.checkpoint_every} must be a multiple of train.eval_every={train.eval_every}"
        )
    fields = {field.name for field in dataclasses.fields(TrainSettings)}
    settings = {name: value for name, value in train.items() if name in fields}
    settings["num_train"] = None if train.get("stream") else train.get("num_train")
    for name in ("grad_clip", "stop_at", "patience"):
        settings[name] = train[name] or None
    return TrainSettings(**settings)


# --- On disk --------------------------------------------------------------------------------------------------------


def read_config(path: Path) -> ConfigDict:
    """The config that a run was started with; a setting that is newer than the run has its default.

    Raises ConfigError if the file can't be read, or is no config of this project.
    """
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as a config: {error}") from error
    sections = ("task", "model", "train")
    if not isinstance(given, dict) or any(not isinstance(given.get(name), dict) for name in sections):
        raise ConfigError(f"{path} is no config of a run: expected task, model and train in it")
    known = language_config() if given["model"].get("kind") == "language" else default_config()
    for section in ("model", "train"):
        if unknown := sorted(set(given[section]) - set(known[section])):
            raise ConfigError(f"{path} is no config of this version: there is no setting {section}.{unknown[0]}")
        try:
            known[section].update(given[section])
        except TypeError as error:
            raise ConfigError(f"{path} is no config of this version: {section}: {error}") from error
    if not isinstance(given.get("variants", ""), str):
        raise ConfigError(f"{path} is no config of a run: variants is {given['variants']!r}, expected a text")
    known.task = ConfigDict(given["task"])
    known.variants = given.get("variants", "")
    return known


def flat_settings(config: ConfigDict) -> dict[str, Any]:
    """Every setting by its dotted name; of a task, where its data is kept is left out."""
    return {
        f"{section}.{name}" if isinstance(value, Mapping) else section: leaf
        for section, value in config.to_dict().items()
        for name, leaf in (value.items() if isinstance(value, Mapping) else [("", value)])
        if (section, name) not in (("task", "cache"), ("task", "source"))
    }


ABSENT = "(absent)"


def differing_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of `flat_settings` that do not have the same value in all of these, or that some lack; as they come."""
    names = dict.fromkeys(name for of_one in settings for name in of_one)
    return [n for n in names if any(of_one.get(n, ABSENT) != settings[0].get(n, ABSENT) for of_one in settings)]


def config_differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """One "field: old → new" for each field in which two configs differ; where data is kept is no difference."""
    a, b = flat_settings(old), flat_settings(new)
    return [f"{name}: {a.get(name, ABSENT)} → {b.get(name, ABSENT)}" for name in sorted(differing_names([a, b]))]
