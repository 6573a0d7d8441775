"""Settings changed by arguments such as --config.train.num_seeds=3, and variants: settings that are trained side by side.

Values are Python literals, read as the setting's type says; see docs/development/config.md.
"""

from __future__ import annotations

import ast
import copy
import re
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from loglinear_jax.components import split_outside
from loglinear_jax.config.defaults import PAPERS_VARIANTS, SWEPT, ConfigError, has_several, naming
from loglinear_jax.lam import LAMS, find_lam
from loglinear_jax.models import find_kind, is_own
from loglinear_jax.settings import did_you_mean, in_words, is_of

TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def override(config: ConfigDict, argument: str) -> str:
    """Changes a locked config by one argument; returns the dotted name of the setting.

    "--config.train.stream" alone sets it to true, "--noconfig.train.stream" to false.
    Raises ConfigError for a setting that does not exist, and for a value of another type.
    """
    given, equals, text = argument.partition("=")
    name = re.sub(r"^--?(no)?config\.?", "", given)
    known = flatten_dict(config.to_dict(), sep=".")
    if name not in known:
        shown = name if name.replace(".", "").isidentifier() else repr(name)
        raise ConfigError(f"there is no setting {shown}{did_you_mean(name, known)}")
    section, _, field = name.rpartition(".")
    kind = (config[section] if section else config).get_type(field)
    if not equals and kind is bool:
        text = str("noconfig" not in given)
    try:
        value = None if text == "None" or (equals and not text and kind is not str) else read_value(text, kind)
        config.update_from_flattened_dict({name: value})
    except (KeyError, MemoryError, OverflowError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: expected {in_words(kind)}, got {text!r}") from error
    return name


def read_value(text: str, kind: type) -> Any:
    """The value that a text gives to a setting of this type; 1e5 is a whole number, too. Raises what Python raises."""
    if kind is str:
        return text
    if kind is bool:
        return TRUTH[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        if kind is object:  # of a setting that takes whatever is given
            return text
        raise
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, int):
        return float(value)
    return list(value) if kind is object and isinstance(value, tuple) else value  # as it is in a run's config.json


def variant_names(config: ConfigDict) -> list[str]:
    """The names in config.variants; if it is None, those of *Adaptive Memory Decay*, or only model.lam if that is not
    its default.

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
    """The variant itself if its setting has one value already, else one for each value. Raises ConfigError for bad values."""
    if not has_several(value) or any(part.startswith(f"{path}=") for part in split_outside(name, "+")):
        return [name]
    if not value or not all(is_of(x, float) for x in value) or len(set(value)) < len(value):
        raise ConfigError(f"{path} must be a number, or several different ones, got {value!r}")
    return [f"{name}+{path}={float(x)!r}".replace("e+", "e") for x in value]


def variant_config(config: ConfigDict, variant: str) -> ConfigDict:
    """A copy of the config with the variant's settings. Raises ConfigError for settings that don't exist or don't
    fit."""
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
