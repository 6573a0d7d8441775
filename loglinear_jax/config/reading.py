"""Configs on disk and beside each other: reading, checking, comparing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.config.defaults import MODEL_KINDS, default_config, with_none
from loglinear_jax.config.errors import ConfigError
from loglinear_jax.config.variants import variant_config, variant_names
from loglinear_jax.lam import find_lam
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import BaseTask, Task, find_task
from loglinear_jax.train import TrainSettings


def check_config(config: ConfigDict) -> None:
    """Raises ConfigError for a section that was replaced as a whole, and for a model.lam that is none, or that no variant
    would use. Settings that a variant can change are checked by `build`."""
    try:
        of_training = set(default_config(task=config.task.get("name")).train)
    except SettingError as error:
        raise ConfigError(str(error)) from error
    needed = {
        "task": {"name"},
        "model": set.intersection(*(set(default_config(kind).model) for kind in MODEL_KINDS)),
        "train": of_training,
    }
    for section, names in needed.items():
        if missing := sorted(names - set(config[section])):
            raise ConfigError(
                f"{section}.{missing[0]} is missing: set single fields, such as --config.{section}.{missing[0]}=..., not "
                f"{section} as a whole"
            )
    if config.model.kind not in MODEL_KINDS:
        raise ConfigError(f"model.kind must be one of {', '.join(MODEL_KINDS)}, got {config.model.kind!r}")
    try:
        find_lam(config.model.lam)
    except SettingError as error:
        raise ConfigError(f"model.{error}") from error
    names = variant_names(config)
    if config.model.lam != MODEL_KINDS[config.model.kind].settings.lam and all(
        variant_config(config, n).model.lam != config.model.lam for n in names
    ):
        raise ConfigError(
            f"model.lam={config.model.lam} has no effect, as every variant ({', '.join(names)}) names its own λ: "
            f"set variants={config.model.lam}"
        )


# Values that have another name today.
RENAMED = {"model": {"init_scheme": {"paper": "text"}}}


def read_config(path: Path) -> ConfigDict:
    """The config that a run was started with; a setting that is newer than the run has its default.

    Raises ConfigError if the file can't be read, or is not a config of this project.
    """
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as a config: {error}") from error
    sections = ("task", "model", "train")
    if not isinstance(given, dict) or any(not isinstance(given.get(name), dict) for name in sections):
        raise ConfigError(f"{path} is not a config of a run: expected task, model and train in it")
    kind, task = given["model"].get("kind", "recall"), given["task"].get("name")
    if kind not in MODEL_KINDS:
        raise ConfigError(f"{path} is not a config of this version: model.kind is {kind!r}")
    try:
        task_class = BaseTask if task is None else find_task(task)
        known = default_config(kind, task)
    except SettingError as error:
        raise ConfigError(f"{path} can't be read as a config: {error}") from error
    classes = {"model": MODEL_KINDS[kind].settings, "train": TrainSettings}
    for section, settings_class in classes.items():
        values = dict(given[section])
        if section == "train" and values.get("metric") == task_class.score.metric:  # once a setting, now the task's
            del values["metric"]
        for name, names_today in RENAMED.get(section, {}).items():
            if name in values:
                values[name] = names_today.get(values[name], values[name])
        if unknown := sorted(set(values) - set(known[section])):
            raise ConfigError(f"{path} is not a config of this version: there is no setting {section}.{unknown[0]}")
        try:
            known[section].update(with_none(values, settings_class))
        except TypeError as error:
            raise ConfigError(f"{path} is not a config of this version: {section}: {error}") from error
    if not isinstance(given.get("variants") or "", str):
        raise ConfigError(f"{path} is not a config of a run: variants is {given['variants']!r}, expected a text")
    known.task = ConfigDict(given["task"])
    known.variants = given.get("variants")
    return known


def flat_settings(config: ConfigDict) -> dict[str, Any]:
    """Every setting by its dotted name, as it is meant: variants spelled out, None for what 0 or '' stands for.

    Where the data of a task is kept is left out."""
    task_class = find_task(config.task.name) if config.task.get("name") else Task
    classes = {"task": task_class, "model": MODEL_KINDS[config.model.kind].settings, "train": TrainSettings}
    flat: dict[str, Any] = {"variants": ",".join(variant_names(config))}
    for section, settings_class in classes.items():
        for name, value in with_none(config[section].to_dict(), settings_class).items():
            if (section, name) not in (("task", "cache"), ("task", "source")):
                flat[f"{section}.{name}"] = value
    return flat


ABSENT = "(absent)"


def differing_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of `flat_settings` that do not have the same value in all of these, or that some lack; as they come."""
    names = dict.fromkeys(name for of_one in settings for name in of_one)
    return [n for n in names if any(of_one.get(n, ABSENT) != settings[0].get(n, ABSENT) for of_one in settings)]


def config_differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """One "field: old → new" for each field in which two configs differ; where data is kept does not count."""
    a, b = flat_settings(old), flat_settings(new)
    return [f"{name}: {a.get(name, ABSENT)} → {b.get(name, ABSENT)}" for name in sorted(differing_names([a, b]))]
