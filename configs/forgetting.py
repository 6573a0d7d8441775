"""Forgetting multi-query associative recall: some keys get a second value, and the last one counts.

    python run.py --config=configs/forgetting.py:pairs=16,updates=8,seq=256

Not in the paper: a task of HazyResearch/zoology (zoology/data/forgetting_mqar.py), whose definition and defaults are followed;
loglinear_jax/tasks/forgetting.py says where. Zoology trains on a mixture of lengths (64 with 4 pairs, 128 with 9, 256 with 16,
25 and 36; 100,000 sequences of the first, 20,000 of each other) and tests up to 2,048; here a run has one length. As there,
the vocabulary is 8,192 and 100,000 sequences are trained on; model, batch and learning rate are those of configs/mqar.py.
updates=0 is Zoology's MQAR without updates.

Ours: results/forgetting, at 128 tokens, 16 pairs, 8 updates, vocabulary 128, with 10,000 training
sequences, preset robust and 4,000 steps. With state=16, 64 seeds of a variant took 37 to 85 s of one H200 in TF32 with their
compilation (results/forgetting/runs); those with the delta rule 62 to 91 s, while two runs shared the GPU
(results/forgetting/runs).

Presets, joined by commas: pairs=N, updates=N, seq=N tokens, state=N (keys and values of one head so wide), robust (the model
that nearly every seed learns MQAR with), smoke (a small instance that learns in under a minute on two CPU cores).
"""

from loglinear_jax.config import (
    apply_presets,
    default_config,
    robust_config,
    set_pairs,
    set_seq_len,
    set_state,
    smoke_config,
)


def get_config(preset=None):
    config = default_config(task="forgetting")
    config.train.num_train = 100_000
    return apply_presets(config, preset, PRESETS)


def updates(config, keys):
    """N keys get a second value."""
    config.task.num_updates = keys


def smoke(config):
    """A small instance that two CPU cores learn in under a minute."""
    smoke_config(config)
    robust_config(config)
    config.task.update(seq_len=32, vocab_size=16, num_pairs=4, num_updates=2, filler="zero")
    config.variants = "mlp_softplus"
    config.train.update(num_seeds=2, num_train=10_000, num_steps=500)


PRESETS = {
    "smoke": smoke,
    "robust": robust_config,
    "pairs=": set_pairs,
    "updates=": updates,
    "seq=": set_seq_len,
    "state=": set_state,
}
