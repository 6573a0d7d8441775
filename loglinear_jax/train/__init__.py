"""Training: one seed's pure functions, many seeds of them at once, their data, and their test."""

from loglinear_jax.train.data import Data, measure_test, open_data
from loglinear_jax.train.many_seeds import ManySeeds
from loglinear_jax.train.meshes import DATA_SPECS, check_pieces, device_mesh
from loglinear_jax.train.seed_trainer import (
    Rates,
    SeedState,
    SeedTrainer,
    decayed_matrices,
    make_optimizer,
    mean_loss,
    scored_sums,
)
from loglinear_jax.train.settings import PRECISIONS, SCHEDULES, TrainSettings

__all__ = [
    "DATA_SPECS",
    "PRECISIONS",
    "SCHEDULES",
    "Data",
    "ManySeeds",
    "Rates",
    "SeedState",
    "SeedTrainer",
    "TrainSettings",
    "check_pieces",
    "decayed_matrices",
    "device_mesh",
    "make_optimizer",
    "mean_loss",
    "measure_test",
    "open_data",
    "scored_sums",
]
