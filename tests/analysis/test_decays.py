"""What seeds remember at the start, against the parameters that training starts from."""

import jax
import numpy as np
import pytest

from loglinear_jax.analysis.decays import initial_memory, message_of
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.config import ConfigError, build
from loglinear_jax.runs.loading import read_run
from loglinear_jax.train import SeedTrainer


@pytest.mark.slow
def test_initial_memory_is_that_of_the_parameters_that_training_starts_from(workdir):
    run = read_run(workdir)
    memory = initial_memory(run, "mlp_softplus")
    built = build(run.config, "mlp_softplus")
    trainer = SeedTrainer(built.model, built.task, built.train)
    for seed, tokens in zip(built.seeds, memory, strict=True):
        params = jax.jit(trainer.init)(seed).params["params"]
        for index, of_layer in enumerate(tokens):
            mixer = params[f"layer_{index}"]["mixer"]
            step_size = np.log1p(np.exp(np.float64(mixer["dt_bias"])))
            np.testing.assert_allclose(of_layer, 1 / (np.array([1, 2]) * step_size), rtol=1e-4)
    assert memory.shape == (2, 2, 2) and len(np.unique(memory)) == 8
    with pytest.raises(ConfigError, match="mixer=softmax has no decays"):
        initial_memory(run, "mixer=softmax")


@pytest.mark.parametrize(
    "converged, chance, title",
    [
        ([4, 4], np.nan, "Every seed converges, however far back it remembers at the start"),
        ([0, 0], np.nan, "No seed converges, however far back it remembers at the start"),
        (
            [0, 4],
            np.nan,
            "Variants of which every seed converges: 1; of which none does, whatever the initial memory: 1",
        ),
        ([2, 2], 0.9, "Seeds that remember further back at the start converge more often (p < 0.05): 2 of 2 variants"),
    ],
)
def test_the_title_says_whose_seeds_converge(converged, chance, title):
    numbers = [{"num_converged": n, "num_seeds": 4, "all: probability": chance, "all: p": 0.01} for n in converged]
    assert message_of(Table("", [{"": Cell("", **of_one)} for of_one in numbers])) == title
