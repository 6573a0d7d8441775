"""State tracking: the running product of elements of a group, for which a state must turn, not only fade.

    python run.py --config=configs/state_tracking.py:s3 --config.variants=mixer=gated_delta,mixer=gated_delta+beta_max=2

Not in the paper. Parity and the word problems of permutations, as in Grazzi et al. 2025 (arXiv:2411.12537) and Siems et al.
2025 (DeltaProduct, arXiv:2502.10297): sequences of up to 40 tokens in training, of up to 256 in tests. Chosen here: all
sequences have 40 tokens, and every position is scored, which asks for all shorter ones too; the model is that of the preset
robust of configs/mqar.py, with λ for 256 tokens. Published: linear recurrences whose eigenvalues are all positive cannot solve
parity in finite precision; Mamba and DeltaNet with eigenvalues from -1 to 1 do (Grazzi et al.).

Ours: results/tracking, of parity and s3. 32 seeds of a variant took 41 to 85 s of one H200 in TF32 for 4,000 steps with their
compilation, while two runs shared it; 11 to 15 s where parity is learned, as a seed that has learned it stops.

Presets, joined by commas: parity (the default), s3, s4, s5 (which group), lengths (validation and test on 40, 64, 128 and 256
tokens, each counting the same, where otherwise they have the length of training), seq=N tokens, state=N (keys and values of one
head so wide), smoke (a small instance that two CPU cores train in under a minute).
"""

import math

from loglinear_jax.config import apply_presets, default_config, robust_config, set_seq_len, set_state, smoke_config
from loglinear_jax.tasks.state_tracking import OBJECTS

LONGEST_TEST = 256


def get_config(preset=None):
    config = default_config(task="state_tracking")
    robust_config(config)
    config.model.max_length = LONGEST_TEST
    config.train.num_steps = 4_000
    return apply_presets(config, preset, PRESETS, one_of=OBJECTS)


def set_group(name):
    def preset(config):
        config.task.update(group=name, vocab_size=math.factorial(OBJECTS[name]))

    preset.__doc__ = (
        "Sums of bits modulo 2." if name == "parity" else f"Products of permutations of {name[1:]} objects."
    )
    return preset


def set_length(config, length):
    """Sequences of N tokens."""
    set_seq_len(config, length)
    config.model.max_length = max(length, LONGEST_TEST)


def lengths(config):
    """Validation and test on 40 tokens and on longer sequences, all lengths with the same weight."""
    config.task.tests = "40,64,128,256"


def smoke(config):
    """A small instance that takes two CPU cores under a minute and learns parity, and s3 in part."""
    smoke_config(config)
    config.model.max_length = 32
    config.task.seq_len = 16
    if config.task.tests:
        config.task.tests = "16,32"
    config.variants = "mixer=gated_delta+beta_max=2"
    config.train.update(num_seeds=2, num_steps=600)


PRESETS = {
    **{name: set_group(name) for name in OBJECTS},
    "lengths": lengths,
    "smoke": smoke,
    "seq=": set_length,
    "state=": set_state,
}
