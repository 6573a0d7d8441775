"""What `best_of` in a grid file stands for: the variants of a run, each at the rates that were best for it there."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from loglinear_jax.config import SWEPT, ConfigError, has_several, variants_at_rates
from loglinear_jax.runs.outcome import VariantOutcome


def best_variants(config: ConfigDict, outcomes: Mapping[str, VariantOutcome]) -> list[str]:
    """Each variant of a run at the rates with the best mean over its seeds in validation; of equal ones the first.

    outcomes: of all `variant_names(config)`. Raises ConfigError for a variant that has no such mean at any rate.
    """
    chosen = []
    for at_rates in variants_at_rates(config):
        best = max(at_rates, key=lambda name: _goodness(outcomes[name]))
        if _goodness(outcomes[best]) == -math.inf:
            raise ConfigError(
                f"{best} and its other rates have no value in validation for all seeds: expected one that has"
            )
        chosen.append(best)
    return chosen


def swept_settings(config: ConfigDict) -> list[str]:
    """Those with several rates, such as "train.learning_rate". Raises ConfigError if there are none."""
    swept = [f"train.{name}" for name in SWEPT if has_several(config.train[name])]
    if not swept:
        alone = " and ".join(f"train.{name}={config.train[name]}" for name in SWEPT)
        raise ConfigError(f"that run has {alone} alone: expected several of one of them")
    return swept


def check_reports(config: ConfigDict, choosing: ConfigDict) -> None:
    """Raises ConfigError if a config has another task than the run that chooses its rates, or seeds of it, or other rates where
    nothing is chosen."""
    if config.task.name != choosing.task.name:
        raise ConfigError(
            f"task {config.task.name} here, and {choosing.task.name} where rates are chosen: expected one task"
        )
    ours, theirs = (range(c.train.first_seed, c.train.first_seed + c.train.num_seeds) for c in (config, choosing))
    if common := sorted(set(ours) & set(theirs)):
        raise ConfigError(
            f"seed {common[0]} chooses the rates that it is trained at: expected other seeds than {theirs[0]} to {theirs[-1]}, "
            f"such as train.first_seed={theirs[-1] + 1}"
        )
    for name in SWEPT:
        if not has_several(choosing.train[name]) and config.train[name] != choosing.train[name]:
            raise ConfigError(
                f"train.{name}={config.train[name]} here, and {choosing.train[name]} where rates are chosen: expected one value"
            )


def _goodness(outcome: VariantOutcome) -> float:
    """The mean in validation, higher where it is better; -inf if a seed has none."""
    mean = float(np.mean(outcome.best))
    if math.isnan(mean):
        return -math.inf
    return mean if outcome.score.higher_is_better else -mean
