"""MAD, synthetic tasks that tell token mixers apart (Poli et al. 2024, arXiv:2403.17844, athms/mad-lab): five of its six.

    python run.py --config=configs/mad.py:noisy,noise=40 --config.variants=fixed,content,mixer=gated_delta

One task must be named: recall (in-context recall), fuzzy (fuzzy recall), noisy (noisy recall), copying (selective copying) or
memorisation. MAD's sixth, compression, is left out: it wants an autoencoder. The files mad_*.py in loglinear_jax/tasks/ have
the definitions. MAD varies one setting at a time from its baseline, our default:

                    baseline                              varied
    recall          vocab=16, seq=128, train=12800        vocab 32, 64, 128; seq 256, 512, 1024; train 6400, 3200, 1600, 800
    fuzzy           the same                              the same
    noisy           vocab=32, noise=20, the others same   vocab 48, 80, 144; noise 40, 60, 80; the others the same
    copying         vocab=16, seq=256, tokens=16,         vocab 32, 64, 128; seq 512, 1024; tokens 32, 64, 96; train as
                    train=12800                           above
    memorisation    vocab=256, seq=32, train=256          vocab 512, 1024, 2048, 4096, 8192

MAD's score of a task is the mean of the accuracies at the baseline and at all that is varied. Each is the best, on the test
set, of learning rates 0.0001, 0.0005, 0.001 with weight decay 0 and 0.1. Scores in %, as third parties quote them:

                   recall    fuzzy    noisy    copying    memorisation
    Transformer    94.1      29.8     86.8     99.6       85.2
    Mamba          90.4      6.7      90.1     86.3       89.5
    DeltaNet       100       35.7     100      100        52.8
    RWKV-7         100       43.2     100      98.8       89.1

As in MAD: batch 128, 200 epochs, AdamW with a cosine schedule, width 128, two mixers, 1,280 test sequences, a stop at 99.9 %.
The default is one of its six rates: 0.0005 without weight decay, which is Adam.
Chosen here, and different:

- MAD trains recall, noisy and fuzzy on every next token; here only what is scored is trained. As there, fuzzy is trained on
  keys of 1 to 3 tokens and evaluated on keys of 3.
- MAD has a SwiGLU MLP behind each mixer; our recall model has none. It has 4 heads with keys and values of 32, and is otherwise
  that of the preset robust of configs/mqar.py.
- The schedule ends at 0, MAD's at 1e-6. Gradients are clipped at norm 1, batches drawn with replacement, numbers float32
  (where MAD trains in bfloat16; our results are in TF32).
- Accuracy is averaged over all that is scored; MAD averages it for each token id, and then over these. Validation sequences,
  other than the test's, choose the parameters.

So our accuracies compare mixers with each other. Do not compare them with the scores above.
Ours, of these five at the baseline: results/mad.

Time, measured: one H200 with 32 seeds takes 0.40 ms a seed and step of recall with λ linear in bfloat16, 0.55 with
--config.train.precision=tf32; with λ content 0.45 and 0.68. So 20,000 steps of a seed take 8 to 14 s. At the baseline, recall
is at 99 % after 100 to 200 steps at learning rates of 0.0005 and 0.001.

In memorisation with vocab=8192, 37 % of the keys stand in none of 256 training sequences: nobody can know their values.

Presets, joined by commas after the task: vocab=N token ids, seq=N tokens, train=N training sequences (200 epochs of them),
noise=N percent of the pairs (noisy), tokens=N to copy (copying), rates (MAD's three learning rates with both weight decays,
beside the seeds), smoke (a small instance that learns in under a minute on two CPU cores).
"""

import math

from loglinear_jax.config import ConfigError, apply_presets, default_config, robust_config, set_seq_len, smoke_config

EPOCHS = 200
# By the name here, the task, and what is not its default.
TASKS = {
    "recall": ("mad_recall", {}),
    "fuzzy": ("mad_fuzzy", {}),
    "noisy": ("mad_recall", {"vocab_size": 32, "noise_vocab_size": 16, "frac_noise": 0.2}),
    "copying": ("mad_copying", {}),
    "memorisation": ("mad_memorisation", {}),
}


def get_config(argument=None):
    items = [item for item in (argument or "").split(",") if item]
    names = [item for item in items if item in TASKS]
    if len(names) != 1:
        raise ConfigError(
            f"name one of MAD's tasks, as in --config=mad:recall: there are {', '.join(TASKS)}"
            + (f", got {', '.join(names or items)}" if items else "")
        )
    module, settings = TASKS[names[0]]
    config = default_config(task=module)
    config.task.update(settings)
    robust_config(config)
    config.model.update(hidden=128, heads=4)
    config.train.update(
        batch_size=128,
        learning_rate=5e-4,
        schedule="cosine",
        stop_at=0.999,
        decay_all=True,
        num_validation=1_280,
        num_test=1_280,
        eval_batch_size=256,
        checkpoint_every=1_000,
    )
    set_num_train(config, 12_800)
    if names == ["memorisation"]:
        set_num_train(config, 256)
        config.train.update(eval_every=20, checkpoint_every=100)
    items.remove(names[0])
    for item in items:
        own = FOR_ONE.get(item.partition("=")[0], names[0])
        if own != names[0]:
            raise ConfigError(f"preset {item!r} goes with {own} alone, got {names[0]}")
    return apply_presets(config, ",".join(items), PRESETS)


def set_vocab(config, size):
    """N token ids, including those of noise."""
    config.task.vocab_size = size


def set_num_train(config, sequences):
    """N training sequences, for 200 epochs."""
    if sequences < 1:
        raise ConfigError(f"preset 'train={sequences}': expected at least 1 sequence")
    config.train.update(num_train=sequences, num_steps=EPOCHS * math.ceil(sequences / config.train.batch_size))


def set_noise(config, percent):
    """Task noisy only: N percent of the pairs are noise."""
    if not 1 <= percent <= 99:
        raise ConfigError(f"preset 'noise={percent}': expected a percentage from 1 to 99")
    config.task.frac_noise = percent / 100


def set_tokens(config, count):
    """Task copying only: N tokens to copy."""
    config.task.num_tokens = count


def rates(config):
    """MAD's learning rates, each with both weight decays."""
    config.train.update(learning_rate=[1e-4, 5e-4, 1e-3], weight_decay=[0.0, 0.1])


def smoke(config):
    """A small instance that two CPU cores learn in under a minute."""
    smoke_config(config)
    small = {
        "mad_recall": {"seq_len": 32},
        "mad_fuzzy": {"seq_len": 32, "vocab_size": 8, "key_motif": 2, "value_motif": 2},
        "mad_copying": {"seq_len": 32, "num_tokens": 4},
        "mad_memorisation": {"seq_len": 16, "vocab_size": 64},
    }
    config.task.update(small[config.task.name])
    config.model.update(hidden=64, heads=2)
    config.variants = "fixed"
    config.train.update(num_seeds=2, num_train=3_200, num_steps=300, stop_at=0.99)


PRESETS = {
    "smoke": smoke,
    "rates": rates,
    "vocab=": set_vocab,
    "seq=": set_seq_len,
    "train=": set_num_train,
    "noise=": set_noise,
    "tokens=": set_tokens,
}
FOR_ONE = {"noise": "noisy", "tokens": "copying"}  # presets of one task alone
