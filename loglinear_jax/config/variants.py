"""The variants of a config: settings that are trained side by side."""

from __future__ import annotations

import ast

from ml_collections import ConfigDict

from loglinear_jax.config.errors import ConfigError
from loglinear_jax.lam import LAMS


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
