"""Language modelling on WikiText-2, or on any text: a fiftieth of WikiText-103's tokens, so early stopping matters.

    python run.py --config=configs/wikitext2.py
    python run.py --config=configs/wikitext2.py --config.task.corpus=my.txt --config.task.tokenizer=folder/of/gpt2

Recipe and model of configs/wikitext103.py; a seed stops after six evaluations without a better validation loss. Presets,
joined by commas: hidden=N, released (see there), words (the word-level WikiText-2 with its <unk>, instead of the raw one),
smoke (a small model that two CPU cores train in under three minutes).
"""

from loglinear_jax.config import apply_presets, language_config, released_language_config, set_hidden


def get_config(preset=None):
    config = language_config()
    config.task.corpus = "wikitext-2-raw"
    config.train.num_steps = 8_000
    config.train.eval_every = 250
    config.train.checkpoint_every = 1_000
    config.train.patience = 6
    return apply_presets(config, preset, PRESETS)


def words(config):
    """The word-level WikiText-2 with its <unk>, instead of the raw one."""
    config.task.corpus = "wikitext-2"


def smoke(config):
    """A small model that two CPU cores train in under three minutes."""
    config.variants = "mlp_softplus"
    config.task.update(seq_len=64, validation_windows=100)
    config.model.update(hidden=64, layers=2, head_dim=32, key_dim=32, max_length=512)  # to generate more than 64 tokens
    config.train.update(
        num_steps=120, learning_rate=3e-3, warmup_steps=20, eval_every=30, checkpoint_every=60, precision="float32",
        steps_per_dispatch=10, eval_batch_size=16,
    )  # fmt: skip


PRESETS = {"smoke": smoke, "hidden=": set_hidden, "released": released_language_config, "words": words}
