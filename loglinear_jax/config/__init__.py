"""Configs: every setting, presets, reading and checking, and what is built from them."""

# ruff: noqa: F401 - what is imported here is this package's interface

from loglinear_jax.command_line import needs_extra

with needs_extra("train"):
    import ml_collections

from loglinear_jax.config.building import Experiment, build, build_all, check_config, task_of
from loglinear_jax.config.defaults import (
    SWEPT,
    ConfigError,
    Setting,
    default_config,
    describe_settings,
    has_several,
    language_config,
    naming,
    some_of,
    with_none,
)
from loglinear_jax.config.presets import (
    INTERLEAVED_PRESETS,
    apply_presets,
    interleaved_config,
    released_config,
    released_language_config,
    robust_config,
    set_hidden,
    set_pairs,
    set_seq_len,
    set_state,
    smoke_config,
)
from loglinear_jax.config.reading import check_effects, config_differences, differing_names, flat_settings, read_config
from loglinear_jax.config.variants import named_variants, variant_config, variant_names, variants_at_rates
