"""From a config to what it stands for: task, model, training."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

from loglinear_jax.config.defaults import SECTIONS, default_config, with_none
from loglinear_jax.config.errors import ConfigError
from loglinear_jax.config.sizes import check_memory, rates_at_once
from loglinear_jax.config.variants import variant_config, variant_names
from loglinear_jax.lam import find_lam
from loglinear_jax.models import LanguageModel, OwnModel, OwnSettings, RecallModel, find_kind
from loglinear_jax.models.settings import MixerSettings
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import BaseTask, find_task, load_task
from loglinear_jax.train import TrainSettings


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What one variant of a config stands for; `config` has the variant's own settings applied."""

    config: ConfigDict
    task: BaseTask
    model: RecallModel | LanguageModel | OwnModel
    train: TrainSettings

    @property
    def seeds(self) -> list[int]:
        return self.train.seeds

    def rates_at_once(self, rates: int) -> int:
        """How many of so many learning rates and weight decays one program trains."""
        return rates_at_once(type(self.model), self.model.settings, self.task, self.train, rates)


class CheckedSettings(NamedTuple):
    """The settings of one variant, of which nothing is opened yet: a text's vocabulary counts as one token.

    config: with the variant's own settings applied."""

    config: ConfigDict
    task: BaseTask
    model: MixerSettings
    train: TrainSettings

    def build(self, vocab_size: int | None = None) -> Experiment:
        """What the settings stand for. vocab_size: see `build`."""
        try:
            if vocab_size is None:
                self.task.open(self.train.batch_size, self.train.seeds)
                vocab_size = self.task.vocab_size
        except SettingError as error:
            raise ConfigError(str(error)) from error
        model = find_kind(self.config.model.kind).model(dataclasses.replace(self.model, vocab_size=vocab_size))
        return Experiment(self.config, self.task, model, self.train)


def build(config: ConfigDict, variant: str, vocab_size: int | None = None) -> Experiment:
    """The task, model and training settings of one variant.

    vocab_size: of a text that need not be opened; None opens what the task reads from, after all settings are checked.
    Raises ConfigError naming an impossible setting, or what is wrong with the corpus.
    """
    check_sections(config)
    return checked_settings(config, variant).build(vocab_size)


def build_all(config: ConfigDict) -> dict[str, Experiment]:
    """`build` of every variant; all settings are checked before anything is opened. Raises what `check_config` raises."""
    return {name: settings.build() for name, settings in check_config(config).items()}


def check_config(config: ConfigDict) -> dict[str, CheckedSettings]:
    """Makes every check of a config that opens and allocates nothing; returns the settings of each variant.

    Raises ConfigError for a section that was replaced as a whole, an impossible setting of any variant, and sizes for which
    this machine has too little memory.
    """
    variants = check_variants(config)
    programs = [(task, model, train.but_for_rates) for _, task, model, train in variants.values()]
    for name, (_, task, model, train) in variants.items():
        alike = programs.count((task, model, train.but_for_rates))
        sizes = find_kind(config.model.kind).model, model, task, train
        check_memory(name, *sizes, rates_at_once(*sizes, alike))
    return variants


def check_variants(config: ConfigDict) -> dict[str, CheckedSettings]:
    """The settings of each variant. Raises ConfigError for invalid sections and settings."""
    check_sections(config)
    try:
        find_lam(config.model.get("lam", "fixed"))
    except SettingError as error:
        raise ConfigError(f"model.{error}") from error
    return {name: checked_settings(config, name) for name in variant_names(config)}


def check_sections(config: ConfigDict) -> None:
    """Raises ConfigError unless every section is there, with the settings that belong to it."""
    for section in SECTIONS:
        if not isinstance(config.get(section), ConfigDict):
            raise ConfigError(
                f"{section} must be a section of the config, as in default_config(), got {config.get(section)!r}"
            )
    try:
        expected = default_config(config.model.get("kind", "recall"), config.task.get("name"))
    except SettingError as error:
        raise ConfigError(str(error)) from error
    if "variants" not in config:
        raise ConfigError("variants is missing: start from default_config()")
    for section in SECTIONS:
        if unknown := sorted(set(config[section]) - set(expected[section])):
            if section == "model":
                raise ConfigError(
                    f"model.kind={config.model.get('kind')} does not go with this config, whose model has {unknown[0]}"
                )
            raise ConfigError(f"there is no setting {section}.{unknown[0]}")
        if missing := sorted(set(expected[section]) - set(config[section])):
            raise ConfigError(
                f"{section}.{missing[0]} is missing: set single fields, such as --config.{section}.{missing[0]}=..., not "
                f"{section} as a whole"
            )


def checked_settings(config: ConfigDict, variant: str) -> CheckedSettings:
    """The settings of one variant. Raises ConfigError naming an impossible setting."""
    config = variant_config(config, variant)
    try:
        train = TrainSettings(**with_none(config.train.to_dict(), TrainSettings))
        train.check()
        task = task_of(config)
        _check_parts(task, train)
        settings = _model_settings(
            config.model, task.max_seq_len, "bfloat16" if train.precision == "bfloat16" else "float32"
        )
        if not task.STREAMED:
            settings = dataclasses.replace(settings, vocab_size=task.vocab_size)
        settings.check()
        if settings.max_length < task.max_seq_len:
            longest = f"task.seq_len={task.seq_len}"
            if task.max_seq_len > task.seq_len:
                longest = f"the longest sequences of the task, which have {task.max_seq_len} tokens"
            raise ConfigError(f"model.max_length={settings.max_length} is shorter than {longest}")
    except SettingError as error:
        raise ConfigError(str(error)) from error
    return CheckedSettings(config, task, settings, train)


def _check_parts(task: BaseTask, train: TrainSettings) -> None:
    """Raises SettingError if a set of sequences is too small for one of each part that the task has there."""
    for name, mixture in (
        ("num_train", task.trained_on),
        ("num_validation", task.evaluated_on),
        ("num_test", task.evaluated_on),
    ):
        if 0 < getattr(train, name) < len(mixture.parts):
            raise SettingError(f"train.{name} must be at least {len(mixture.parts)}, one of each {mixture.names}")


def task_of(config: ConfigDict) -> BaseTask:
    """The task of a config. Raises SettingError for one that does not exist, and for settings that it can't have."""
    settings = config.task.to_dict()
    return load_task(**with_none(settings, find_task(settings["name"])))


def _model_settings(model: ConfigDict, max_seq_len: int, dtype: str) -> MixerSettings | OwnSettings:
    """The model's settings with a vocabulary of one, as it may not be known yet."""
    settings = model.to_dict()
    settings_class = find_kind(settings["kind"]).settings
    if settings_class is not OwnSettings:
        del settings["kind"]
    settings = with_none(settings, settings_class)
    settings["max_length"] = settings["max_length"] or max_seq_len
    return settings_class(vocab_size=1, dtype=dtype, **settings)
