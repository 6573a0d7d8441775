"""The variants of a config: settings that are trained side by side."""

from __future__ import annotations

import ast
import typing
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.config.defaults import MODEL_KINDS, PAPERS_VARIANTS
from loglinear_jax.config.errors import ConfigError
from loglinear_jax.lam import LAMS
from loglinear_jax.train import TrainSettings


def variant_names(config: ConfigDict) -> list[str]:
    """The names in config.variants; if it is None, those of the paper, or model.lam alone if that is not its default.

    Raises ConfigError if there are none, or one appears twice.
    """
    variants = config.variants
    if variants is None:
        lam = config.model.lam
        variants = PAPERS_VARIANTS if lam == MODEL_KINDS[config.model.kind].settings.lam else lam
    names = [name.strip() for name in variants.split(",") if name.strip()]
    if not names:
        raise ConfigError("variants is empty: expected at least one, such as 'mlp_softplus'")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"variants names {repeated[0]!r} twice")
    return names


def variant_config(config: ConfigDict, variant: str) -> ConfigDict:
    """A copy of the config with the variant's settings. Raises ConfigError for settings that don't exist or fit."""
    config = ConfigDict(config.to_dict())
    classes = {"model": MODEL_KINDS[config.model.kind].settings, "train": TrainSettings}
    paths = set()
    for setting in variant.split("+"):
        path, equals, text = setting.partition("=")
        if not equals:
            if setting not in LAMS and ":" not in setting:
                raise ConfigError(
                    f"variants: {setting!r} is not a λ ({', '.join(LAMS)}, or my_module:MyLam), nor a setting such as "
                    "mixer=softmax"
                )
            path, text = "lam", setting
        path = path if "." in path else f"model.{path}"
        section, _, field = path.partition(".")
        if section not in classes or field not in config[section]:
            raise ConfigError(f"variants: {setting!r}: there is no setting {path} of the model or of training")
        if field in ("num_seeds", "first_seed"):
            raise ConfigError(f"variants: {setting!r}: all variants are trained with the same seeds")
        if path == "model.kind":
            raise ConfigError(f"variants: {setting!r}: all variants are of one kind of model, that of the config")
        if path in paths:
            raise ConfigError(f"variants: {variant!r} sets {path} twice")
        paths.add(path)
        try:
            config[section][field] = _read(text, typing.get_type_hints(classes[section])[field])
        except ValueError as error:
            raise ConfigError(f"variants: {setting!r}: {error}") from error
    return config


def _read(text: str, hint: Any) -> Any:
    """text as a value of this type, such as `int | None`. Raises ValueError if it is none."""
    types = typing.get_args(hint) or (hint,)
    if text == "None" and type(None) in types:
        return None
    if str in types:
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if float in types and type(value) is int:
        value = float(value)
    if value is None or type(value) not in types:
        names = [kind.__name__ for kind in types if kind is not type(None)]
        raise ValueError(f"expected {' or '.join(names)}, got {text!r}")
    return value
