"""How far back each seed's heads remember before training."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.analysis.lam_values import mixer_params
from loglinear_jax.config import ConfigError, build
from loglinear_jax.runs.loading import Run
from loglinear_jax.tasks import BaseTask
from loglinear_jax.tasks.draws import standard_settings
from loglinear_jax.train import SeedTrainer, TrainSettings


def initial_memory(run: Run, variant: str) -> Float[np.ndarray, "seeds layers heads"]:
    """Tokens after which a head's state has decayed to 1/e at the start, 1 / (exp(A_log) · softplus(dt_bias)).

    From every seed's initial parameters, drawn again: they follow from its number, so neither a checkpoint nor a GPU is needed.
    A token's own part of the step size is left out. It is small with weight_std = 0.02 (within about 5 %), but not with 0.125.
    Raises ConfigError for softmax attention, which has no decays.
    """
    # The draws of decays depend neither on the vocabulary, for which a text would have to be opened, nor on λ: one program
    # serves the variants of several λ.
    experiment = build(run.config, variant, vocab_size=1)
    settings = experiment.model.settings
    if not settings.has_decays:
        raise ConfigError(f"{run.name}: {variant} has no decays")
    model = type(experiment.model)(dataclasses.replace(settings, lam="fixed"))
    return _initial_memory(model, experiment.task, experiment.train, tuple(experiment.seeds))


@functools.cache
@standard_settings()
def _initial_memory(model: nn.Module, task: BaseTask, settings: TrainSettings, seeds: tuple[int, ...]) -> np.ndarray:
    trainer = SeedTrainer(model, task, settings)

    def rates(seed: Array) -> Array:
        params = trainer.init(seed).params["params"]
        mixers = [mixer_params(params[f"layer_{index}"]) for index in range(model.settings.layers)]
        return jnp.stack([jnp.exp(m["a_log"]) * nn.softplus(m["dt_bias"]) for m in mixers])

    return 1 / np.asarray(jax.jit(jax.vmap(rates))(np.asarray(seeds, np.int32)), np.float64)
