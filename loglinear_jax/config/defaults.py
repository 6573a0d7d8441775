"""Every setting with its default."""

from __future__ import annotations

from ml_collections import ConfigDict


def default_config() -> ConfigDict:
    """Every setting of an experiment, in the paper's setting for recall; a file in configs/ adds its task.

    Where 0 or '' stands for "choose for me", the comment says so.
    """
    config = ConfigDict()
    # What to train side by side with the same seeds and data, comma-separated. Each is a λ by name, or settings joined
    # by '+': 'mixer=softmax', 'lam=mlp_softplus+lam_hidden=32', 'linear+train.learning_rate=0.003'.
    config.variants = "linear,mlp_softmax,mlp_softplus"

    config.task = ConfigDict()

    model = config.model = ConfigDict()
    model.kind = "recall"  # or language: see loglinear_jax.models
    model.mixer = "log_linear"  # or linear (gated linear attention, one state), softmax
    model.lam = "mlp_softplus"  # of variants that name no λ, such as lam_hidden=32; see loglinear_jax.lam
    model.lam_hidden = 64  # width d_h of the λ MLP; 0: twice the number of levels
    model.lam_activation = "gelu"  # or identity, as in the paper's equation 3
    model.hidden = 64
    model.layers = 2
    model.heads = 2
    model.head_dim = 32
    model.key_dim = 32
    model.key_groups = 0  # heads share keys in this many groups; 0: one per head
    model.max_length = 0  # longest sequence that λ has levels for; 0: the task's seq_len
    model.init_scheme = "paper"  # or released
    # What the paper's recall model does not have, or does otherwise; see loglinear_jax.models.recall.
    model.weight_std = 0.02
    model.embed_std = 0.02
    model.norm = "post"  # or pre
    model.conv_width = 0
    model.qk_norm = False
    model.lam_head_slope = 0.0
    model.dt_min = 1e-3  # what the step sizes start between: a small one is a slow decay
    model.dt_max = 0.1
    model.chunk_size = 0  # 0: chosen from the shapes
    model.implementation = ""  # of log_linear_attention; '': the best that works here

    train = config.train = ConfigDict()
    train.num_seeds = 5
    train.first_seed = 0
    train.num_steps = 5_000
    train.batch_size = 64
    train.learning_rate = 1e-3
    train.warmup_steps = 0
    train.schedule = "constant"  # or cosine, to 0 at num_steps
    train.weight_decay = 0.0  # AdamW's
    train.decay_all = False  # True: also of norms, biases, decays and λ's vectors, not of matrices only
    train.grad_clip = 1.0  # global norm; 0: none. The paper does not say, the released code clips at 1
    train.grad_accumulation = 1  # parts of a batch, one after another
    train.stream = False  # True: fresh sequences for ever, instead of num_train fixed ones
    train.num_train = 10_000
    train.num_validation = 1_000
    train.eval_batch_size = 250  # sequences per seed evaluated at once: memory, not results
    train.eval_every = 100
    train.stop_at = 0.99  # validation accuracy at which a seed stops; 0: never
    train.metric = "accuracy"  # which validation value is best: or loss
    train.patience = 0  # evaluations in a row without a better one, after which a seed stops; 0: never
    train.precision = "float32"  # or tf32, bfloat16
    train.steps_per_dispatch = 50  # steps in one call of the device; signals are heard in between
    train.checkpoint_every = 500  # a multiple of eval_every
    return config


def language_config() -> ConfigDict:
    """Every setting of a language-model experiment in the paper's setting, on the next token.

    Heads are hidden / 64, as in the released code; the paper's text says 4 of 64 at either width.
    """
    config = default_config()

    task = config.task
    task.name = "text"
    task.corpus = "wikitext-103-raw"  # a name of loglinear_jax.text, a text file, or a folder of train, valid, test
    task.source = ""  # folder of WikiText's files, if they are here already; '': download them
    task.tokenizer = "gpt2"  # a folder of tokenizer.json, or of vocab.json and merges.txt; or a name on the hub
    task.cache = "~/.cache/loglinear_jax"  # where tokenised corpora are kept
    task.seq_len = 512
    task.validation_windows = 0  # of the validation split, evaluated while training; 0: all of it
    task.target_offset = 1  # 2: the token after the next, as the paper's released code trains and measures

    model = config.model
    for name in ("weight_std", "embed_std", "norm", "qk_norm", "lam_head_slope", "dt_min", "dt_max"):  # of recall only
        del model[name]
    model.kind = "language"
    model.lam_hidden = 0
    model.hidden = 512
    model.layers = 6
    model.heads = 0  # 0: hidden / head_dim
    model.head_dim = 64
    model.key_dim = 128
    model.key_groups = 1
    model.conv_width = 4
    model.conv_bias = True
    model.norm_epsilon = 1e-5
    model.remat = "none"  # or block: activations computed again in the backward pass

    train = config.train
    train.num_seeds = 1
    train.num_steps = 40_000
    train.batch_size = 8
    train.learning_rate = 3e-4
    train.warmup_steps = 500
    train.schedule = "cosine"
    train.weight_decay = 0.1
    train.eval_every = 500
    train.eval_batch_size = 64
    train.checkpoint_every = 2_000
    train.stop_at = 0.0
    train.metric = "loss"
    train.precision = "bfloat16"
    train.steps_per_dispatch = 50
    for name in ("stream", "num_train", "num_validation"):  # of drawn sequences only
        del train[name]
    return config


# --- Variants -------------------------------------------------------------------------------------------------------


# --- From config to objects -----------------------------------------------------------------------------------------


# --- On disk --------------------------------------------------------------------------------------------------------
