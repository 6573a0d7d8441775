"""From a config to what it stands for: task, model, training."""

from __future__ import annotations

import dataclasses
import inspect

from ml_collections import ConfigDict

from loglinear_jax.config.defaults import SECTIONS, ConfigError, default_config, naming, with_none
from loglinear_jax.config.variants import variant_config, variant_names
from loglinear_jax.lam import find_lam
from loglinear_jax.models import LanguageModel, OwnModel, OwnSettings, RecallModel, find_kind
from loglinear_jax.models.settings import MixerSettings
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import BaseTask, find_task, load_task
from loglinear_jax.train import TrainSettings, check_pieces


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What one variant of a config stands for; `config` has the variant's own settings applied."""

    config: ConfigDict
    task: BaseTask
    model: RecallModel | LanguageModel | OwnModel
    train: TrainSettings

    def opened(self, vocab_size: int | None = None) -> Experiment:
        """The same with the vocabulary of its text; None opens what the task reads from. Raises ConfigError."""
        if vocab_size is None:
            with naming():
                self.task.open(self.train.batch_size, self.train.seeds)
                vocab_size = self.task.vocab_size
        settings = dataclasses.replace(self.model.settings, vocab_size=vocab_size)
        return dataclasses.replace(self, model=type(self.model)(settings))


def build(config: ConfigDict, variant: str, vocab_size: int | None = None) -> Experiment:
    """Build the task, model and training settings of one variant.

    vocab_size: of a text that need not be opened; None opens the text after all settings are checked. Raises
    ConfigError naming an impossible setting, or what is wrong with the corpus.
    """
    check_sections(config)
    return checked_experiment(config, variant).opened(vocab_size)


def build_all(config: ConfigDict) -> dict[str, Experiment]:
    """`build` of every variant; all settings are checked before anything is opened. Raises what `check_config` raises."""
    return {name: experiment.opened() for name, experiment in check_config(config).items()}


def check_config(config: ConfigDict) -> dict[str, Experiment]:
    """Makes every check of a config that opens and allocates nothing; returns what each variant stands for, a text's vocabulary
    counted as one token.

    Raises ConfigError for a section that was replaced as a whole, and for an impossible setting of any variant.
    """
    check_sections(config)
    with naming("model."):
        find_lam(config.model.get("lam", "fixed"))
    return {name: checked_experiment(config, name) for name in variant_names(config)}


def check_sections(config: ConfigDict) -> None:
    """Raises ConfigError unless every section is there, with the settings that belong to it."""
    for section in SECTIONS:
        if not isinstance(config.get(section), ConfigDict):
            raise ConfigError(f"{section} must be a section of the config, as in default_config()")
    if "variants" not in config or not config.task.get("name"):
        raise ConfigError("task.name or variants is missing: start from default_config(task=...)")
    kind = config.model.get("kind", "recall")
    with naming():
        expected = default_config(kind, config.task.name)
    for section in SECTIONS:
        known = expected[section]
        for name in sorted(set(config[section]) ^ set(known), key=lambda name, known=known: (name in known, name)):
            path = f"{section}.{name}"
            if name in known:
                instead = f"set single fields, such as --config.{path}=..., not {section} as a whole"
                raise ConfigError(f"{path} is missing: {instead}")
            if section == "model":
                raise ConfigError(f"model.kind={kind} does not go with this config, whose model has {name}")
            raise ConfigError(f"there is no setting {path}")


def checked_experiment(config: ConfigDict, variant: str) -> Experiment:
    """One variant, of which nothing is opened yet. Raises ConfigError naming an impossible setting."""
    config = variant_config(config, variant)
    with naming():
        train = TrainSettings(**with_none(config.train.to_dict(), TrainSettings))
        train.check()
        task = task_of(config)
        for name, mixture in (
            ("num_train", task.trained_on), ("num_validation", task.evaluated_on), ("num_test", task.evaluated_on)
        ):  # fmt: skip
            if 0 < getattr(train, name) < len(mixture.parts):
                raise SettingError(f"train.{name} must be at least {len(mixture.parts)}, one of each {mixture.names}")
        model = _model_settings(config.model, task, "bfloat16" if train.precision == "bfloat16" else "float32")
        model.check()
        check_pieces(train, task, model)
        if model.max_length < task.max_seq_len + model.random_first_position:
            longest = f"task.seq_len={task.seq_len}"
            if task.max_seq_len > task.seq_len:
                longest = f"the longest sequences of the task, which have {task.max_seq_len} tokens"
            if model.random_first_position:
                longest += f", from model.random_first_position={model.random_first_position}"
            raise SettingError(f"model.max_length={model.max_length} is shorter than {longest}")
        module = type(model.make()) if isinstance(model, OwnSettings) else find_kind(config.model.kind).model
        if task.has_segments and "segment_ids" not in inspect.signature(module.__call__).parameters:
            raise SettingError(
                f"task.cross_documents=False: model.kind={config.model.kind} takes no segment_ids, and can't keep the "
                "documents of a window apart: expected task.cross_documents=True"
            )
    return Experiment(config, task, find_kind(config.model.kind).model(model), train)


def task_of(config: ConfigDict) -> BaseTask:
    """The task of a config. Raises SettingError for one that does not exist, and for settings that it can't have."""
    settings = config.task.to_dict()
    return load_task(**with_none(settings, find_task(settings["name"])))


def _model_settings(model: ConfigDict, task: BaseTask, dtype: str) -> MixerSettings | OwnSettings:
    """The model's settings; of a text with a vocabulary of one, as it may not be known yet."""
    settings_class = find_kind(model.kind).settings
    settings = with_none(model.to_dict(), settings_class)
    if settings_class is not OwnSettings:
        del settings["kind"]
    settings["max_length"] = settings["max_length"] or task.max_seq_len + (settings.get("random_first_position") or 0)
    return settings_class(vocab_size=1 if task.STREAMED else task.vocab_size, dtype=dtype, **settings)
