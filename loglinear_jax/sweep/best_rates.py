"""What `best_of` in a grid file stands for: the variants of a run, each at the rates that were best for it there."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, named_variants, variant_names
from loglinear_jax.runs.outcome import VariantOutcome


def best_variants(config: ConfigDict, outcomes: Mapping[str, VariantOutcome]) -> list[str]:
    """Each variant of a run with the learning rate and weight decay at which the mean over its seeds was best in validation;
    of equal ones the first.

    outcomes: of all `variant_names(config)`.
    """
    return [max(at_rates, key=lambda name: _goodness(outcomes[name])) for at_rates in _of_variants(config)]


def check_has_rates(config: ConfigDict) -> None:
    """Raises ConfigError if no variant of a run has several rates."""
    if all(len(at_rates) == 1 for at_rates in _of_variants(config)):
        raise ConfigError(
            f"that run has train.learning_rate={config.train.learning_rate} and train.weight_decay={config.train.weight_decay} "
            "alone: expected several of one of them"
        )


def check_other_seeds(config: ConfigDict, choosing: ConfigDict) -> None:
    """Raises ConfigError if seeds of a config also choose its rates."""
    ours, theirs = (range(c.train.first_seed, c.train.first_seed + c.train.num_seeds) for c in (config, choosing))
    if common := sorted(set(ours) & set(theirs)):
        raise ConfigError(
            f"seed {common[0]} chooses the rates that it is trained at: expected other seeds than {theirs[0]} to {theirs[-1]}, "
            f"such as train.first_seed={theirs[-1] + 1}"
        )


def _of_variants(config: ConfigDict) -> list[list[str]]:
    """The names of each variant at its rates."""
    found = []
    for name in named_variants(config):
        one = ConfigDict(config.to_dict())
        one.variants = name
        found.append(variant_names(one))
    return found


def _goodness(outcome: VariantOutcome) -> float:
    """The mean in validation, higher where it is better; -inf if a seed has none."""
    mean = float(np.mean(outcome.best))
    if math.isnan(mean):
        return -math.inf
    return mean if outcome.score.higher_is_better else -mean
