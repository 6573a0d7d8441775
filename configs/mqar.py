"""Multi-query associative recall: the paper's section 4.2, Table 2 and appendix A.5.

    python run.py --config=configs/mqar.py:kv=32 --config.train.num_seeds=64

The paper, sequence length 128, mean (peak) accuracy in % of 5 seeds (its baseline is `linear`):

    kv                  4             8             16            32
    linear              35.1 (99.4)   35.8 (99.5)   34.8 (99.3)   2.9 (99.3)
    mlp_softmax         2.7 (3.8)     66.8 (99.3)   67.0 (99.6)   35.2 (99.0)
    mlp_softplus        67.0 (99.7)   66.7 (99.2)   66.7 (99.2)   57.9 (99.6)

Time, measured: one H200 with 32 seeds takes 0.19 ms a seed and step (0.13 with --config.train.precision=tf32), so about 60
s for each λ with 64 seeds. Two CPU cores take 0.39 s a step for 5 seeds, half an hour for each λ: smoke is for them.

The width d_h of the λ MLP (appendix, 11 seeds: 9 converge with each of 32, 64 and 128) is the preset d_h, which trains all
three. Length generalisation (trained at 128, tested at 256: linear 3.3, mlp_softplus 33.2) wants
--config.model.max_length=256, so that λ has levels for it; loglinear_jax analyze then tests it.

Presets, joined by commas: kv=N pairs, seq=N tokens, d_h, released (the released code's model and
initial values), robust (a tuned recipe: 63 or 64 of 64 reach 99 % at each kv), smoke (a small
instance that learns in a few minutes on two CPU cores).
"""

from loglinear_jax.config import (
    apply_presets,
    default_config,
    released_config,
    robust_config,
    set_pairs,
    set_seq_len,
    smoke_config,
)


def get_config(preset=None):
    config = default_config(task="mqar")
    return apply_presets(config, preset, PRESETS)


def d_h(config):
    """Three widths of the λ MLP instead of three λ."""
    config.variants = "lam_hidden=32,lam_hidden=64,lam_hidden=128"


def smoke(config):
    """A small instance that two CPU cores learn in a few minutes."""
    smoke_config(config)
    # Few pairs make a small task, but a longer wait on the plateau before it is learned; this learns soonest.
    config.task.update(seq_len=32, vocab_size=16, num_pairs=7)
    config.train.update(num_seeds=4, num_steps=900, batch_size=64, learning_rate=4e-3)


PRESETS = {
    "smoke": smoke,
    "released": released_config,
    "robust": robust_config,
    "d_h": d_h,
    "kv=": set_pairs,
    "seq=": set_seq_len,
}
