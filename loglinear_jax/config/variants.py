"""Settings changed by arguments such as --config.train.num_seeds=3, and variants: settings that are trained side by side.

ml_collections' config_flags reads the arguments. What it can't read is done here: None, whole numbers written as 1e5, yes
and no, and errors of one line with the nearest setting of any section. See docs/development/config.md.
"""

from __future__ import annotations

import copy
import difflib
import numbers
import re
from typing import Any

from absl import flags
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import FieldReference
from ml_collections.config_flags import config_path

from loglinear_jax.components import split_outside
from loglinear_jax.config.defaults import PAPERS_VARIANTS, SWEPT, ConfigError, has_several, naming
from loglinear_jax.lam import LAMS, find_lam
from loglinear_jax.models import find_kind, is_own
from loglinear_jax.settings import in_words

TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def override(config: ConfigDict, argument: str) -> str:
    """Changes a locked config by one argument; returns the dotted name of the setting.

    "--config.train.stream" alone sets it to true, "--noconfig.train.stream" to false.
    Raises ConfigError for a setting that does not exist, and for a value of another type.
    """
    given, equals, text = argument.partition("=")
    name = re.sub(r"^--?(no)?config\.?", "", given)
    try:
        kind = config_path.get_type(name, config)
        old = config_path.get_value(name, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        close = difflib.get_close_matches(name, flatten_dict(config.to_dict(), sep="."), n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        shown = name if name.replace(".", "").isidentifier() else repr(name)
        raise ConfigError(f"there is no setting {shown}{hint}") from error
    if re.fullmatch(r"\d+(\.\d+)?e\d+", text) and float(text).is_integer() and float(text) <= 2**53:
        argument = f"{given}={int(float(text))}"
    elif kind is bool and text.lower() in TRUTH:
        argument = f"{given}={TRUTH[text.lower()]}"
    try:
        if text == "None" or (equals and not text and kind is not str):
            value = None
        else:
            value = _read(name, FieldReference(old, field_type=kind), argument)
        if kind is object and isinstance(value, tuple):
            value = list(value)  # as it is in a run's config.json
        config.update_from_flattened_dict({name: value})
    except (flags.Error, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: expected {in_words(kind)}, got {text!r}") from error
    return name


def _read(name: str, setting: FieldReference, argument: str) -> Any:
    """The value that an argument gives to a setting, alone in a config, as the flags of a whole one take long to define."""
    config = ConfigDict(unflatten_dict({name: setting}, sep="."))
    values, argv = flags.FlagValues(), ["", argument]
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    values(argv)
    return config_path.get_value(name, config)


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
    """The variant itself if its setting has one value already, else one for each value. Raises ConfigError for bad values."""
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
