"""Experiments as readers know them: what a run is called, which of the paper's settings it has, what the paper (Amin, Li,
Zhang, Ayhan) prints of it, and in what several runs differ."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.config import (
    default_config,
    differing_names,
    flat_settings,
    has_several,
    language_config,
    released_config,
    released_language_config,
    robust_config,
)
from loglinear_jax.runs.loading import Run

# Table 2: MQAR, length 128, by pairs: mean and peak accuracy in %.
MQAR = {
    4: {"linear": (35.1, 99.4), "mlp_softmax": (2.7, 3.8), "mlp_softplus": (67.0, 99.7)},
    8: {"linear": (35.8, 99.5), "mlp_softmax": (66.8, 99.3), "mlp_softplus": (66.7, 99.2)},
    16: {"linear": (34.8, 99.3), "mlp_softmax": (67.0, 99.6), "mlp_softplus": (66.7, 99.2)},
    32: {"linear": (2.9, 99.3), "mlp_softmax": (35.2, 99.0), "mlp_softplus": (57.9, 99.6)},
}
# Section 4.2, a separate run at 32 pairs: mean and std of accuracy in %.
MQAR_32_AGAIN = {"linear": "60.9 ± 46.7", "mlp_softplus": "99.6 ± 0.1"}
# Section 4.2: trained at length 128, tested at 256; accuracy in %. The number of pairs is not given.
MQAR_FROM_128_TO_256 = {"linear": 3.3, "mlp_softplus": 33.2}
# Appendix A.5: width d_h of the λ MLP, MQAR; neither pairs nor length are given.
HIDDEN = {f"lam_hidden={width}": "9 of 11 seeds converge (pairs not given)" for width in (32, 64, 128)}
# Table 3: selective copying, 16 tokens, by length: mean and std of accuracy in %; 3 seeds at 1024.
SELECTIVE_COPY = {
    256: {"linear": (52.6, 3.5), "mlp_softplus": (53.1, 2.2), "mlp_softmax": (54.3, 5.8)},
    512: {"linear": (54.6, 3.4), "mlp_softplus": (51.9, 0.8), "mlp_softmax": (50.3, 0.8)},
    1024: {"linear": (40.6, 19.8), "mlp_softplus": (54.8, 2.3), "mlp_softmax": (52.6, 2.5)},
}
# Table 4: WikiText-103, by width: validation perplexity, of the token after the next (see configs/wikitext103.py).
LANGUAGE = {
    512: {"linear": "224.71", "mlp_softmax": "226.06", "mlp_softplus": "218.57"},
    256: {"linear": "257.02 ± 0.29", "mlp_softmax": "257.31 ± 0.25", "mlp_softplus": "256.82 ± 0.20"},
}
# Section 4.5: the baseline's λ in MQAR.
BASELINE_LAM_RANGE = (0.688, 0.698)
# By the kind of model, how the paper-text configuration is made, and how the released-code one is made from it.
SETTINGS = {"recall": (default_config, released_config), "language": (language_config, released_language_config)}
# What a model of either setting may have as it likes: λ and how it is computed; a language model also its width.
NOT_OF_A_SETTING = {
    "recall": {"model.lam", "model.implementation", "model.chunk_size", "model.max_length"},
    "language": {"model.lam", "model.implementation", "model.chunk_size", "model.remat", "model.hidden"},
}
# The training that a published number is of.
OF_A_PUBLISHED_NUMBER = (
    "train.num_steps", "train.batch_size", "train.learning_rate", "train.warmup_steps", "train.schedule", "train.weight_decay",
    "train.grad_clip", "train.stream", "train.num_train", "train.eval_every", "train.stop_at", "train.patience",
)  # fmt: skip
# In which runs may differ that stand in one table as the same experiment.
NOT_OF_AN_EXPERIMENT = {
    "variants", "model.lam", "train.num_seeds", "train.first_seed", "train.checkpoint_every", "train.steps_per_dispatch",
    "train.num_test",
}  # fmt: skip
RELEASED = "released-code configuration"
PRESETS = {RELEASED: released_config, "robust": robust_config}  # by what they are called among changes


def describe_run(run: Run) -> str:
    """Names a run by its task, its setting if that is the released one, and its label if there is one."""
    shown = f", {RELEASED}" if setting_of(run.config) == "released" else ""
    return run.task.describe() + shown + (f" ({run.label})" if run.label else "")


def setting_of(config: ConfigDict) -> str:
    """Name the paper's setting that a config has exactly.

    Returns:
        "text" for the model of the paper's text, "released" for that of its released code, else "".
    """
    given = flat_settings(config).items()
    return next((name for name, setting in _settings(config.model.kind).items() if setting.items() <= given), "")


def is_published(config: ConfigDict, kind: str, **train: Any) -> bool:
    """Tell whether model and training are those of a number that the paper publishes, in either setting.

    Args:
        config: of a run; for how many positions λ has levels does not count.
        kind: of the model, "recall" or "language".
        train: settings of training that this experiment of the paper does not have as usual.
    """
    if config.model.kind != kind:
        return False
    given = flat_settings(config)
    published = flat_settings(SETTINGS[kind][0]()) | {f"train.{name}": value for name, value in train.items()}
    models = [
        {name: value for name, value in setting.items() if name.startswith("model.") and name != "model.max_length"}
        for setting in _settings(kind).values()
    ]
    same_train = all(given.get(name) == published.get(name) for name in OF_A_PUBLISHED_NUMBER)
    return same_train and any(model.items() <= given.items() for model in models)


def result(config: ConfigDict, variant: str) -> str | None:
    """Look up what the paper prints for a variant of an experiment.

    Returns:
        The number as printed; None if the paper has no such experiment, or ran it with another model or training.
    """
    task, model = config.task, config.model
    if task.name == "mqar" and (task.seq_len, task.vocab_size) == (128, 128) and is_published(config, "recall"):
        if variant in HIDDEN and model.lam == "mlp_softplus":
            return HIDDEN[variant]
        mean, peak = MQAR.get(task.num_pairs, {}).get(variant, (None, None))
        return None if mean is None else f"{mean} ({peak})"
    if task.name == "selective_copy" and task.num_tokens == 16 and task.vocab_size in (64, 128):
        mean, std = SELECTIVE_COPY.get(task.seq_len, {}).get(variant, (None, None))
        same = is_published(config, "recall", num_steps=30_000)
        return f"{mean} ± {std}" if mean is not None and same else None
    if task.name == "text" and (task.corpus, task.seq_len, task.target_offset) == ("wikitext-103-raw", 512, 2):
        return LANGUAGE.get(model.hidden, {}).get(variant) if is_published(config, "language") else None
    return None


@functools.cache
def _settings(kind: str) -> dict[str, dict[str, Any]]:
    """What makes the settings text and released: the model, and whatever else the preset `released` changes. A kind of model
    that the paper does not have has neither."""
    if kind not in SETTINGS:
        return {}
    make, release = SETTINGS[kind]
    released = make()
    release(released)
    flat = {"text": flat_settings(make()), "released": flat_settings(released)}
    changed = differing_names(list(flat.values()))
    names = [n for n in flat["text"] if n in changed or (n.startswith("model.") and n not in NOT_OF_A_SETTING[kind])]
    return {setting: {name: of_one[name] for name in names} for setting, of_one in flat.items()}


def experiment_of(run: Run) -> dict[str, Any]:
    """Lists the settings that make a run another experiment, by their dotted names."""
    return {name: value for name, value in flat_settings(run.config).items() if name not in NOT_OF_AN_EXPERIMENT}


def changed_settings(runs: Sequence[Run], unnamed: Collection[str] = ()) -> list[str]:
    """List the settings of model and training in which runs differ, where they are not the default.

    Args:
        runs: of one task.
        unnamed: settings that are left out, by their dotted names.

    Returns:
        For each run a text such as "norm=pre, conv_width=4", in which a preset of `PRESETS` is one word.
    """
    settings, default = [experiment_of(run) for run in runs], flat_settings(default_config())
    differing = [name for name in differing_names(settings) if not name.startswith("task.") and name not in unnamed]
    return [_changes({name: setting[name] for name in differing if name in setting}, default) for setting in settings]


def _changes(setting: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    changed = {name: value for name, value in setting.items() if value != default.get(name)}
    words = []
    for word, preset in _presets().items():
        if preset.items() <= changed.items():
            words.append(word)
            changed = {name: value for name, value in changed.items() if name not in preset}
    for path, value in changed.items():
        name = path.partition(".")[2]
        words.append(f"{name} {min(value)} to {max(value)}" if has_several(value) else f"{name}={value}")
    return ", ".join(words)


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    """By the words for each of `PRESETS` the default settings that it changes, as it sets them."""
    default, changes = flat_settings(default_config()), {}
    for word, apply in PRESETS.items():
        config = default_config()
        apply(config)
        flat = flat_settings(config)
        changes[word] = {name: flat[name] for name in differing_names([default, flat])}
    return changes
