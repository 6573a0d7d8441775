"""The variants of a config: settings that are trained side by side."""

from __future__ import annotations

import copy
import numbers
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.components import split_outside
from loglinear_jax.config.defaults import PAPERS_VARIANTS, SWEPT, has_several
from loglinear_jax.config.errors import ConfigError, naming
from loglinear_jax.config.overrides import override
from loglinear_jax.lam import LAMS, find_lam
from loglinear_jax.models import find_kind, is_own


def variant_names(config: ConfigDict) -> list[str]:
    """The names in config.variants; if it is None, those of the paper, or model.lam alone if that is not its default.

    Where a setting of SWEPT has several values, each variant that does not set it itself becomes one for each value.

    Raises ConfigError if there are none, or one appears twice.
    """
    names = [name for at_rates in variants_at_rates(config) for name in at_rates]
    if names == [""]:
        raise ConfigError(f"variants={config.variants!r} names none: expected at least one, such as 'mlp_softplus'")
    if "" in names:
        raise ConfigError(f"variants={config.variants!r} has nothing between two commas: expected a variant")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"variants names {repeated[0]!r} twice")
    return names


def variants_at_rates(config: ConfigDict) -> list[list[str]]:
    """`variant_names` of each variant, one for each of its learning rates and weight decays. The variants are not checked.

    Raises ConfigError if learning rates or weight decays are no numbers, or none, or one of them is there twice."""
    found = [[name] for name in named_variants(config)]
    for swept in SWEPT:
        path, value = f"train.{swept}", config.train[swept]
        found = [[each for name in names for each in _at_every_value(name, path, value)] for names in found]
    return found


def named_variants(config: ConfigDict) -> list[str]:
    """`variant_names` as they are named, each once for all values of a setting of SWEPT. Not checked."""
    variants = config.variants
    if variants is None and is_own(config.model.kind):
        return [f"kind={config.model.kind}"]
    if variants is None:
        lam = config.model.lam
        variants = PAPERS_VARIANTS if lam == find_kind(config.model.kind).settings.lam else lam
    return [name.strip() for name in split_outside(variants.removesuffix(","), ",")]


def _at_every_value(name: str, path: str, value: Any) -> list[str]:
    """The variant itself if its setting has one value already, else one for each value.

    Raises ConfigError for values that are no numbers, or none at all, or one of which appears twice."""
    if not has_several(value) or any(part.startswith(f"{path}=") for part in split_outside(name, "+")):
        return [name]
    are_numbers = all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in value)
    if not value or not are_numbers or len(set(value)) < len(value):
        raise ConfigError(f"{path} must be a number, or several different ones, got {value!r}")
    return [f"{name}+{path}={float(x)!r}".replace("e+", "e") for x in value]


def variant_config(config: ConfigDict, variant: str) -> ConfigDict:
    """A copy of the config with the variant's settings. Raises ConfigError for settings that don't exist or fit."""
    return _with_settings(config, variant)[0]


def variant_settings(config: ConfigDict, variant: str) -> dict[str, Any]:
    """What a variant sets: "model.lam" and the like, with their values. Raises ConfigError for what is none."""
    return _with_settings(config, variant)[1]


def _with_settings(config: ConfigDict, variant: str) -> tuple[ConfigDict, dict[str, Any]]:
    settings: dict[str, Any] = {}
    changed = copy.deepcopy(config).lock()
    for setting in split_outside(variant, "+"):
        path, *rest = split_outside(setting, "=")
        text = "=".join(rest)
        if not setting:
            raise ConfigError(f"variants: {variant!r} has an empty part: expected a λ, or settings, joined by '+'")
        if not rest:
            if setting.partition("(")[0] not in LAMS and ":" not in setting:
                known = f"({', '.join(LAMS)}, or my_module:MyLam)"
                raise ConfigError(f"variants: {setting!r} is not a λ {known}, nor a setting such as mixer=softmax")
            path, text = "lam", setting
        if not path or not text:
            raise ConfigError(f"variants: {setting!r} has no {'value' if path else 'name'}: expected name=value")
        path = path if "." in path else f"model.{path}"
        section, _, field = path.partition(".")
        if section not in ("model", "train") or field not in config[section]:
            raise ConfigError(f"variants: {setting!r}: there is no setting {path} of the model or of training")
        if field in ("num_seeds", "first_seed"):
            raise ConfigError(f"variants: {setting!r}: all variants are trained with the same seeds")
        if path == "model.kind" and not (is_own(text) and is_own(config.model.kind)):
            raise ConfigError(f"variants: {setting!r}: all variants are of one kind of model, that of the config")
        if path in settings:
            raise ConfigError(f"variants: {variant!r} sets {path} twice")
        with naming(f"variants: {setting!r}: "):
            override(changed, f"--config.{path}={text}")
            if path == "model.lam":
                find_lam(text)
        settings[path] = changed[section][field]
    return (changed if config.is_locked else changed.unlock()), settings
