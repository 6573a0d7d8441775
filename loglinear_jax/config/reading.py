"""Configs on disk and beside each other: reading, checking, comparing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.components import split_outside
from loglinear_jax.config.building import check_config
from loglinear_jax.config.defaults import (
    SECTIONS,
    SWEPT,
    ConfigError,
    default_config,
    has_several,
    settings_classes,
    some_of,
    with_none,
)
from loglinear_jax.config.variants import variant_names, variant_settings
from loglinear_jax.mixers import FORMER_NAMES, former_names
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import find_task


def check_effects(config: ConfigDict, given: Collection[str] | None = None) -> None:
    """Raises ConfigError for a setting that would change nothing: one that a variant sets but does not read, one that every
    variant sets otherwise or does not read, and a warm-up that training never leaves.

    given: the names of the settings to look at, such as "model.lam_hidden"; None: all that are not the default. To be asked of
    a config that a user makes, not of one that a run was started with. Raises ConfigError for impossible settings, too.
    """
    variants = check_config(config)
    own = {name: variant_settings(config, name) for name in variants}
    _warn_of_former_names(config, own)
    unread = {}
    for name, one in variants.items():
        sections = {"task": one.task, "model": one.model.settings, "train": one.train}
        unread[name] = {f"{section}.{field}" for section, read in sections.items() for field in read.unread}
        if one.train.warmup_steps > one.train.num_steps:
            steps = f"train.num_steps={one.train.num_steps}"
            raise ConfigError(f"train.warmup_steps={one.train.warmup_steps} must not be more than {steps}")
        if vain := sorted(set(own[name]) & unread[name]):
            raise ConfigError(f"variants: {name!r} sets {vain[0]}, which has no effect there")
    usual = _values(default_config(config.model.kind, config.task.name))
    for path, value in _values(config).items():
        if value == usual.get(path, value) or (given is not None and path not in given):
            continue
        for one in value if has_several(value) else [value]:
            if any(own[name].get(path, one) == one and path not in unread[name] for name in variants):
                continue
            instead = f": set variants={value}" if path == "model.lam" else ""
            raise ConfigError(
                f"{path}={one} has no effect: every variant ({', '.join(variants)}) has its own or reads none{instead}"
            )


def _warn_of_former_names(config: ConfigDict, own: Mapping[str, Mapping[str, Any]]) -> None:
    """One warning for all mixers that the config calls by a name that they had once."""
    texts = [config.model.get("mixer", "")] + [settings.get("model.mixer", "") for settings in own.values()]
    if names := sorted({name for text in texts for name in former_names(text)}):
        now = ", ".join(f"{name} is called {FORMER_NAMES[name]}" for name in names)
        warnings.warn(f"the mixer {now} now; the old name is still accepted", FutureWarning, stacklevel=3)


def read_config(path: Path) -> ConfigDict:
    """The config that a run was started with, from its config.json or from its record, which also has the outcomes; a setting
    that is newer than the run has its default.

    Raises ConfigError if the file can't be read, or is not a config of this project.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as a config: {error}") from error
    if isinstance(given, dict):
        given = given.get("config", given)
    if not isinstance(given, dict) or any(not isinstance(given.get(name), dict) for name in SECTIONS):
        raise ConfigError(f"{path} is not a config of a run: expected task, model and train in it")
    try:
        known = default_config(given["model"].get("kind", "recall"), given["task"].get("name"))
        classes = settings_classes(known)
        for section in ("model", "train"):
            if unknown := sorted(set(given[section]) - set(known[section])):
                raise ConfigError(f"there is no setting {section}.{unknown[0]}")
            known[section].update(with_none(given[section], classes[section]))
    except (SettingError, TypeError) as error:
        raise ConfigError(f"{path} is not a config of this version: {error}") from error
    if not isinstance(given.get("variants") or "", str):
        raise ConfigError(f"{path} is not a config of a run: variants is {given['variants']!r}, expected a text")
    gone = {"source"} - set(known.task)  # where earlier versions read WikiText from
    known.task = ConfigDict(known.task.to_dict() | {k: v for k, v in given["task"].items() if k not in gone})
    known.variants = given.get("variants")
    return known


# Where data is kept, and what is computed at the same time: of these no result depends but by rounding.
NOT_COMPARED = (
    "task.cache", "train.eval_batch_size", "train.rates_at_once", "train.fsdp_devices", "train.sequence_devices",
)  # fmt: skip


def flat_settings(config: ConfigDict) -> dict[str, Any]:
    """Every setting by its dotted name but NOT_COMPARED, as it is meant: variants spelled out, None for what 0 or '' stands
    for."""
    values = {path: value for path, value in _values(config).items() if path not in NOT_COMPARED}
    return {"variants": ",".join(variant_names(config))} | values


def _values(config: ConfigDict) -> dict[str, Any]:
    """Every setting of the sections by its dotted name, with None for what 0 or '' stands for."""
    return {
        f"{section}.{name}": value
        for section, settings_class in settings_classes(config).items()
        for name, value in with_none(config[section].to_dict(), settings_class).items()
    }


ABSENT = "(absent)"


def differing_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of `flat_settings` that do not have the same value in all of these, or that some lack; as they come."""
    names = dict.fromkeys(name for of_one in settings for name in of_one)
    return [n for n in names if any(of_one.get(n, ABSENT) != settings[0].get(n, ABSENT) for of_one in settings)]


def config_differences(old: ConfigDict, new: ConfigDict, moved: bool = False, grown: bool = False) -> list[str]:
    """One "field: old → new" for each field in which two configs differ, of variants those that only one has; NOT_COMPARED do
    not count.

    moved: nor does where it came from (the task's LOCATIONS), as what it holds is compared otherwise. grown: nor do variants
    and the values of several rates, if the new config has all variants of the old one.
    """
    a, b = flat_settings(old), flat_settings(new)
    rates = [f"train.{name}" for name in SWEPT]
    locations = find_task(new.task.name).LOCATIONS if moved and new.task.get("name") else ()
    names = set(differing_names([a, b])) - {f"task.{name}" for name in locations}
    if grown and set(split_outside(a["variants"], ",")) <= set(split_outside(b["variants"], ",")):
        names -= {"variants", *(rate for rate in rates if has_several(a[rate]) and has_several(b[rate]))}
    return [_difference(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in sorted(names)]


def _difference(name: str, old: Any, new: Any) -> str:
    if name != "variants":
        return f"{name}: {old} → {new}"
    variants = split_outside(old, ","), split_outside(new, ",")
    gone, added = ([v for v in these if v not in others] for these, others in (variants, variants[::-1]))
    changes = (f"{words} {some_of(some)}" for words, some in (("without", gone), ("with", added)) if some)
    return f"variants: {' and '.join(changes) or 'in another order'}"
