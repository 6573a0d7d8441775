"""The config of an experiment: every setting with its default, taken from the classes that it sets."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from ml_collections import ConfigDict, config_dict

from loglinear_jax.models import find_kind
from loglinear_jax.settings import SettingError, kind_of, setting_fields, takes_none
from loglinear_jax.tasks import Task, find_task
from loglinear_jax.train import TrainSettings


class ConfigError(SettingError):
    """An invalid config or run; the message is one line that names what is wrong."""


@contextlib.contextmanager
def naming(where: str = "") -> Iterator[None]:
    """Raises ConfigError, with `where` before its message, for a SettingError inside."""
    try:
        yield
    except SettingError as error:
        raise ConfigError(f"{where}{error}") from error


MOST_NAMED = 8


def some_of(names: Iterable[str]) -> str:
    """Names with commas between them, the first ones alone where there are many, so that an error stays one short line."""
    names = list(names)
    return ", ".join(names[:MOST_NAMED]) + (f", ... ({len(names)})" if len(names) > MOST_NAMED else "")


PAPERS_VARIANTS = "linear,mlp_softmax,mlp_softplus"
SECTIONS = ("task", "model", "train")
# Settings of training that take several values, each of which makes a variant of every variant: see `variant_names`.
SWEPT = ("learning_rate", "weight_decay")
# Of models: from the task, and from train.precision; and one for evaluation alone.
NOT_IN_CONFIGS = ("vocab_size", "max_length", "dtype", "lam_levels", "axis_name", "kind")
VARIANTS_MEANING = (
    "what is trained side by side with the same seeds and data, comma-separated: each a λ, or settings joined by `+`, such as "
    "`mixer=softmax`, `lam=mlp_softplus+lam_hidden=32`, `linear+train.learning_rate=0.003`; None: the paper's "
    f"`{PAPERS_VARIANTS}`, or model.lam alone if it is not the default"
)


def default_config(kind: str = "recall", task: str | None = None) -> ConfigDict:
    """Configuration with every setting of an experiment at its default; a file in configs/ changes some of them.

    kind: of model, "recall", "language" or a class by import path. task: a name for `find_task`, whose settings are
    added. A setting whose default is None is chosen automatically.
    """
    config = ConfigDict()
    config.variants = config_dict.placeholder(str)
    config.task = ConfigDict()
    if task is not None:
        config.task.name = task
        add_settings(config.task, find_task(task))
    config.model = ConfigDict()
    config.model.kind = kind
    add_settings(config.model, find_kind(kind).settings)
    config.model.max_length = config_dict.placeholder(int)
    config.train = ConfigDict()
    add_settings(config.train, TrainSettings)
    for name in () if task is None else find_task(task).UNUSED_TRAIN_SETTINGS:
        del config.train[name]
    return config


def language_config() -> ConfigDict:
    """Configuration of the language model of *Adaptive Memory Decay*, trained on the next token of WikiText-103.

    Heads are hidden / 64, as in the released code; the text of the paper says 4 of 64 at either width.
    """
    config = default_config("language", "text")
    config.train.update(
        num_seeds=1, num_steps=40_000, batch_size=8, learning_rate=3e-4, warmup_steps=500, schedule="cosine",
        weight_decay=0.1, eval_every=500, eval_batch_size=64, checkpoint_every=2_000, precision="bfloat16", stop_at=None,
    )  # fmt: skip
    return config


def add_settings(section: ConfigDict, settings_class: type) -> None:
    """Adds a class's settings with their defaults. Raises SettingError for a field without one."""
    types = typing.get_type_hints(settings_class)
    for field in dataclasses.fields(settings_class):
        if field.name in NOT_IN_CONFIGS and "meaning" not in field.metadata:
            continue
        if field.default is dataclasses.MISSING:
            raise SettingError(f"{settings_class.__name__}: its field {field.name} has no default value")
        kind = kind_of(types[field.name])
        if settings_class is TrainSettings and field.name in SWEPT:
            kind = object  # a number or several
        elif kind not in (int, float, bool, str):
            kind = type(field.default) if field.default is not None else object
        section[field.name] = config_dict.FieldReference(field.default, field_type=kind)


def has_several(value: Any) -> bool:
    """Whether that is the value of a setting of SWEPT that has several."""
    return isinstance(value, (list, tuple))


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a config: its dotted name, its value there, and what it means."""

    name: str
    default: Any
    meaning: str


def settings_classes(config: ConfigDict) -> dict[str, type]:
    """The class of each section's settings. Raises SettingError for a task or a kind of model that does not exist."""
    task = find_task(config.task.name) if config.task.get("name") else Task
    return {"task": task, "model": find_kind(config.model.kind).settings, "train": TrainSettings}


def describe_settings(config: ConfigDict) -> list[Setting]:
    """Every setting of a config with its meaning, as given in the class that declares it."""
    extra = {
        "task.name": "a file of loglinear_jax/tasks/, or any importable module that names its Task subclass TASK",
        "model.kind": "`recall`, `language`, or a class of your own, as `my_module:MyModel(width=64)`",
        "model.max_length": "longest sequence that λ has levels for; None: the task's seq_len, and random_first_position",
    }
    found = [Setting("variants", config.variants, VARIANTS_MEANING)]
    for name, settings_class in settings_classes(config).items():
        meanings = {key: field.metadata["meaning"] for key, field in setting_fields(settings_class).items()}
        order = ["name", "kind", *meanings]
        for key in sorted(config[name], key=lambda key: order.index(key) if key in order else len(order)):
            path = f"{name}.{key}"
            found.append(Setting(path, config[name][key], extra.get(path) or meanings.get(key, "")))
    return found


def with_none(settings: dict[str, Any], settings_class: type) -> dict[str, Any]:
    """The settings with None for 0 and '' where the class takes None, as other programs' command lines say it."""
    types = typing.get_type_hints(settings_class)
    of_none = {name for name, hint in types.items() if takes_none(hint)} | {"max_length"}
    return {name: None if name in of_none and value in (0, "") else value for name, value in settings.items()}
