"""Zoology's multi-query associative recall, at one length: pairs first, then queries, most of them early, among random tokens.

    python run.py --config=configs/zoology_mqar.py:pairs=32,width=32 --config.variants=linear,fixed,mixer=gated_linear

Not in the paper: a task of HazyResearch/zoology (zoology/data/multiquery_ar.py), whose definition is followed;
loglinear_jax/tasks/zoology_mqar.py has it. A run has one length and one number of pairs, 256 with 16 unless said otherwise.
With the preset mixture it is trained as in Zoology, on sequences of length 64 with 4 pairs (100,000), 128 with 8, 256 with 16,
with 32 and with 64 (20,000 each), a batch of one kind at a time, and evaluated on 64 with 4, 8 and 16 pairs, 128 with 32, 256
with 64, 512 with 128 and 1,024 with 256 (1,000 each in the test); accuracy is the mean over these seven. In the last two every
answer is at Fenwick level 9 or 10, which no training sequence reaches: a λ that is indexed by level has initial values there.

As in Zoology: vocabulary 8,192, batch 256, 32 epochs, a cosine schedule, a stop at 99 %. Zoology tries the learning rates
0.001, 0.0032, 0.01 and 0.032; the second is the default here. Chosen here: 100,000 training sequences where they are of one
kind; sequences drawn with replacement and kinds in random order, where Zoology takes each once an epoch, one kind after the
other; gradients clipped at norm 1, where it does not; Adam without weight decay; validation on 100 sequences of each test of
the mixture; and the model of the preset robust of configs/mqar.py, with two heads of 32 at every width; with state=N one of N.

Guo et al. 2025 (Log-linear attention, arXiv:2506.04761), Table 2, at length 256, as quoted by others: mean (standard deviation)
of the accuracy in % over five seeds, for models of width 16, 32 and 64; pairs from 4 to 64:

    width                       16            32            64
    Mamba-2                     46.9 (2.3)    75.1 (4.9)    89.6 (6.1)
    log-linear Mamba-2          55.9 (9.1)    76.5 (4.8)    92.9 (2.7)
    Gated DeltaNet              38.4 (1.0)    79.0 (2.1)    99 or more
    log-linear Gated DeltaNet   40.0 (1.4)    84.4 (1.2)    99 or more

The preset table2 has the closest here: the mixers `linear`, `log_linear`, `gated_delta` and `log_linear_delta`, with the λ
`linear`, at each width. Those who quote the table do not say how many heads Guo et al. take, nor whether they train one model
for each number of pairs. Chosen here: two heads of 32 at every width, so that the states have one size; and each model is
trained on all five numbers of pairs in equal parts, and tested on each. Ours: results/zoology and results/table2.
16 seeds of a variant at six learning rates took 164 s (λ fixed) to 284 s (softmax attention) of one H200 in TF32 at width 32,
165 to 290 s (λ content with the delta rule) at width 64, with 4,000 steps of 64 sequences; start and test not counted. 8 seeds
of the mixture at its four rates took 476 s (λ linear) to 598 s (softmax attention), with states of 16, all counted. With
states of 32 or 64 two variants shared a GPU, H100 or H200, and each took: 2 seeds at four rates 455 to 550 s, by the delta
rule with states of 64 674 to 761 s; 12 seeds at one rate 367 to 763 s.

Presets, joined by commas: mixture (in place of seq= and pairs=), pairs=N, seq=N tokens, width=N of the model, state=N (keys
and values of one head so wide), table2, rates (Zoology's four learning rates, beside the seeds), smoke (a small instance that
learns in under a minute on two CPU cores).
"""

from loglinear_jax.config import (
    ConfigError,
    apply_presets,
    default_config,
    robust_config,
    set_hidden,
    set_pairs,
    set_seq_len,
    set_state,
    smoke_config,
)


def get_config(preset=None):
    config = default_config(task="zoology_mqar")
    robust_config(config)
    config.train.update(
        num_train=100_000,
        batch_size=256,
        num_steps=12_500,
        learning_rate=3.2e-3,
        schedule="cosine",
    )
    return apply_presets(config, preset, PRESETS, one_of=("mixture", "table2"))


def mixture(config):
    """Zoology's mixture of lengths and numbers of pairs, 32 epochs of it, and its seven tests."""
    config.task.update(
        mixture="64/4*5,128/8,256/16,256/32,256/64",
        tests="64/4,64/8,64/16,128/32,256/64,512/128,1024/256",
    )
    config.train.update(num_train=180_000, num_steps=22_500, num_validation=700, num_test=7_000, eval_batch_size=50)


def table2(config):
    """The mixers and widths of Guo et al.'s Table 2, five seeds, sequences of 256 tokens with 4 to 64 pairs."""
    mixers = "mixer=gated_linear", "linear", "mixer=gated_delta", "mixer=log_linear_delta+lam=linear"
    config.variants = ",".join(f"{mixer}+hidden={width}" for width in (16, 32, 64) for mixer in mixers)
    pairs = ",".join(f"256/{count}" for count in (4, 8, 16, 32, 64))
    config.task.update(mixture=pairs, tests=pairs)
    config.train.num_seeds = 5


def smoke(config):
    """A small instance that two CPU cores learn in under a minute."""
    smoke_config(config)
    config.task.vocab_size = 32
    if config.task.mixture:
        config.task.update(mixture="16/2*2,32/4", tests="32/4")
    else:
        config.task.update(seq_len=32, num_pairs=4)
    config.variants = "fixed"
    config.train.update(num_seeds=2, num_train=10_000, num_steps=400)


def rates(config):
    """Zoology's learning rates."""
    config.train.learning_rate = [1e-3, 3.2e-3, 1e-2, 3.2e-2]


def set_width(config, width):
    """Model width N; with table2, only this width."""
    set_hidden(config, width)
    if config.variants:
        config.variants = ",".join(dict.fromkeys(name.partition("+hidden=")[0] for name in config.variants.split(",")))


def of_one_kind(preset):
    """The preset, refused where a mixture says what the sequences are."""

    def checked(config, value):
        if config.task.mixture:
            raise ConfigError(
                f"seq= and pairs= do not go with mixture or table2, whose sequences are {config.task.mixture}: set "
                "task.mixture and task.tests"
            )
        preset(config, value)

    checked.__doc__ = preset.__doc__
    return checked


PRESETS = {
    "mixture": mixture,
    "table2": table2,
    "smoke": smoke,
    "rates": rates,
    "pairs=": of_one_kind(set_pairs),
    "seq=": of_one_kind(set_seq_len),
    "width=": set_width,
    "state=": set_state,
}
