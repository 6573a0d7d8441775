"""Language modelling on WikiText-103 (raw): the paper's section 4.4.

    python run.py --config=configs/wikitext103.py
    python run.py --config=configs/wikitext103.py --config.task.corpus=folder/of/wiki.train.raw/and/so/on

The paper, validation perplexity, 40,000 steps of 8 x 512 tokens (its baseline is `linear`):

    hidden              512        256 (3 seeds)
    linear              224.71     257.02 ± 0.29
    mlp_softmax         226.06     257.31 ± 0.25
    mlp_softplus        218.57     256.82 ± 0.20

These are perplexities of the token after the next: the paper's released code shifts its labels twice. The default here is
the next token; the preset `released` is the released-code one: two ahead, λ for 16,384 positions, weight decay on everything.

Presets, joined by commas: hidden=N, released.
"""

from loglinear_jax.config import apply_presets, language_config, released_language_config, set_hidden


def get_config(preset=None):
    return apply_presets(language_config(), preset, PRESETS)


PRESETS = {"hidden=": set_hidden, "released": released_language_config}
