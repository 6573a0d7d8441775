"""Training: one seed's pure functions, many seeds of them at once, their data, and their test."""

from loglinear_jax.train.data import measure_test, open_data
from loglinear_jax.train.many_seeds import ManySeeds
from loglinear_jax.train.meshes import can_be_cut, check_pieces, device_mesh
from loglinear_jax.train.seed_trainer import SeedState, SeedTrainer, make_optimizer, mean_loss, scored_sums
from loglinear_jax.train.settings import PRECISIONS, TrainSettings

__all__ = [
    "PRECISIONS",
    "ManySeeds",
    "SeedState",
    "SeedTrainer",
    "TrainSettings",
    "can_be_cut",
    "check_pieces",
    "device_mesh",
    "make_optimizer",
    "mean_loss",
    "measure_test",
    "open_data",
    "scored_sums",
]
