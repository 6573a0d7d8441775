"""Interleaved multi-query associative recall: answers stand near and far, at Fenwick levels that no query tells.

    python run.py --config=configs/interleaved.py:pairs=16,state=32 --config.variants=fixed,linear,mlp_softplus

A task of this project, not in the paper: in the paper's MQAR every answer is at one level, which a λ can weigh without
looking at its input. Here, with 24 pairs in 128 tokens, 51 % of the answers are at level 7, 25 % at 6, 13 % at 5, and so on.
The default model has one head with keys and values of 16: fewer dimensions than there are pairs.

Ours: results/interleaved. With 24 pairs, state=16, preset robust and 4,000 steps, 64 seeds of a variant
took 35 to 62 s of one H200 in TF32 with their compilation; those with the delta rule 66 to 73 s, while two runs shared the GPU
(results/interleaved/runs).

Presets, joined by commas: pairs=N, seq=N tokens, state=N (keys and values of one head so wide), robust (the model that nearly
every seed learns MQAR with), smoke (a small instance that learns in under a minute on two CPU cores).
"""

from loglinear_jax.config import INTERLEAVED_PRESETS, interleaved_config


def get_config(preset=None):
    return interleaved_config("interleaved", preset)


PRESETS = INTERLEAVED_PRESETS
