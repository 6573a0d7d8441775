"""MQAR whose distances from key to query follow a power law: as many answers stand at each Fenwick level.

    python run.py --config=configs/power_law.py:pairs=16,state=32 --config.variants=fixed,linear,mlp_softplus

A task of this project, not in the paper: interleaved MQAR, but for the distances. With `task.alpha=1` a distance of d slots has
a probability in proportion to 1/d, with 0 all distances have the same. The default model is that of `interleaved`.

Presets, joined by commas: pairs=N, seq=N tokens, state=N (keys and values of one head so wide), robust (the model that nearly
every seed learns MQAR with), smoke (a small instance that learns in under a minute on two CPU cores).
"""

from loglinear_jax.config import INTERLEAVED_PRESETS, interleaved_config


def get_config(preset=None):
    return interleaved_config("power_law", preset)


PRESETS = INTERLEAVED_PRESETS
