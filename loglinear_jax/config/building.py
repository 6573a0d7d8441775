"""From a config to what it stands for: task, model, training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.config.errors import ConfigError
from loglinear_jax.config.variants import variant_config
from loglinear_jax.models import LanguageModel, LanguageSettings, RecallModel, RecallSettings
from loglinear_jax.tasks import Task, load_task
from loglinear_jax.tasks.text import Text
from loglinear_jax.train import METRICS, PRECISIONS, SCHEDULES, TrainSettings

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
