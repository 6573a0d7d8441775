"""Configs: every setting, presets, reading and checking, and what is built from them."""

from loglinear_jax.config.building import Experiment, build
from loglinear_jax.config.defaults import default_config, language_config
from loglinear_jax.config.errors import ConfigError
from loglinear_jax.config.presets import (
    apply_presets,
    released_config,
    released_language_config,
    robust_config,
    set_hidden,
    smoke_config,
)
from loglinear_jax.config.reading import (
    check_config,
    config_differences,
    differing_names,
    flat_settings,
    read_config,
)
from loglinear_jax.config.variants import variant_config, variant_names

__all__ = [
    "ConfigError",
    "Experiment",
    "apply_presets",
    "build",
    "check_config",
    "config_differences",
    "default_config",
    "differing_names",
    "flat_settings",
    "language_config",
    "read_config",
    "released_config",
    "released_language_config",
    "robust_config",
    "set_hidden",
    "smoke_config",
    "variant_config",
    "variant_names",
]
