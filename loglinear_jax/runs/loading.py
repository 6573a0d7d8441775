"""Reading a finished (or running) run back: its settings, models, parameters and curves. Works on any machine.

`read_run` reads what a run wrote besides checkpoints; `load_run` restores the parameters of one variant of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, build, read_config, some_of, task_of, variant_config, variant_names
from loglinear_jax.models import LanguageModel, RecallModel
from loglinear_jax.runs.checkpoints import Checkpoints, on_this_machine, to_numpy
from loglinear_jax.runs.lines import CURVES, missing_evaluations
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome
from loglinear_jax.runs.own_modules import changed_modules, own_modules
from loglinear_jax.runs.workdir import Metrics, Workdir
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import BaseTask
from loglinear_jax.tasks.draws import standard_settings
from loglinear_jax.train import SeedTrainer
from pallas_kernels import runs_on_gpu

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run wrote besides checkpoints: enough for its tables and curves. config: every field of its task filled in.
    summary: of the variants that are finished, None while there is none. label: tells it from other runs of the same task, in
    titles. curves_in: the workdirs that hold its curves, where its variants were trained apart; its own if empty."""

    workdir: Path
    config: ConfigDict
    task: BaseTask
    summary: RunSummary | None
    label: str = ""
    curves_in: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The workdir's own name."""
        return self.workdir.name

    @property
    def variants(self) -> list[str]:
        return variant_names(self.config)

    @property
    def outcomes(self) -> dict[str, VariantOutcome]:
        """By variant; of those that are finished."""
        return {} if self.summary is None else self.summary.variants

    @property
    def problems(self) -> list[str]:
        """What is wrong with its curves, a line each: damaged records, and missing evaluations of finished variants."""
        found = []
        for folder, recorded in self._recorded.items():
            metrics_file = Workdir(folder).metrics_file
            if not metrics_file.exists():
                continue
            found += [f"{metrics_file}, line {number}: not a record of a run" for number in recorded.damaged[:1]]
            for variant, outcome in self.outcomes.items():
                if self.curves_in and variant not in recorded.by_variant:
                    continue  # trained in another workdir
                train = variant_config(self.config, variant).train
                if missing := missing_evaluations(recorded.by_variant.get(variant, []), train, outcome.last_step):
                    found.append(f"{folder}: {variant}: {missing}")
        return found

    def metrics(self, variant: str) -> dict[str, np.ndarray]:
        """The curves of one variant: "step" [evaluations], "train_loss", "val_loss", "val_accuracy" [evaluations, seeds].

        Raises ConfigError if the run has no such variant."""
        if variant not in self.variants:
            raise ConfigError(f"{self.workdir} holds no variant {variant!r}: there are {some_of(self.variants)}")
        folders = self._recorded
        holding = (folder for folder, recorded in folders.items() if variant in recorded.by_variant)
        folder = next(holding, next(iter(folders)))
        return _curves(Workdir(folder), folders[folder], variant, self.config.train.num_seeds)

    @functools.cached_property
    def _recorded(self) -> dict[Path, Metrics]:
        """What each workdir with its curves held when it was first asked for."""
        return {folder: Workdir(folder).read_all_metrics() for folder in self.curves_in or (self.workdir,)}


def read_run(workdir: str | os.PathLike) -> Run:
    """What a run wrote besides checkpoints. Raises ConfigError if there is none, or a file of it can't be read."""
    directory = Workdir(workdir)
    config = read_config(_config_file(directory))
    variant_names(config)
    summary = directory.read_summary()
    try:
        task = task_of(config)
    except SettingError as error:
        raise ConfigError(f"{directory.path} can't be read: {error}") from error
    config.task = ConfigDict({"name": config.task.name} | dataclasses.asdict(task))
    return Run(directory.path, config, task, summary)


def _config_file(directory: Workdir) -> Path:
    if not directory.config_file.exists():
        raise ConfigError(f"{directory.path} holds no run: there is no config.json")
    return directory.config_file


@dataclasses.dataclass(frozen=True)
class TrainedVariant:
    """One variant of a run.

    config: its settings, the variant's own applied. model, task: built from them. seeds: in the order of every seed axis.
    step: of the checkpoint that was read; a damaged newest one leaves an earlier one.
    metrics: up to that step, "step" [evaluations], "train_loss", "val_loss", "val_accuracy" [evaluations, seeds] (nan where not
    finite).
    checkpoint: what tells the checkpoint that was read from any other.
    best, last: parameters with a leading seed axis, as NumPy arrays: at each seed's best evaluation, and at the end.
    """

    workdir: Path
    variant: str
    config: ConfigDict
    model: RecallModel | LanguageModel
    task: BaseTask
    seeds: list[int]
    step: int
    metrics: dict[str, np.ndarray]
    checkpoint: str
    best: Any
    last: Any
    best_accuracy: np.ndarray
    best_loss: np.ndarray
    diverged_step: np.ndarray

    def scores(self, which: Literal["best", "last"] = "best") -> tuple[np.ndarray, np.ndarray]:
        """(validation accuracy, loss in nats) of every seed, at its best evaluation or at the last."""
        if which == "best" or not len(self.metrics["step"]):
            return self.best_accuracy, self.best_loss
        return self.metrics["val_accuracy"][-1], self.metrics["val_loss"][-1]

    def inspection_sequences(self, num: int, seq_len: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """`BaseTask.inspection_sequences` of its task. Raises ConfigError if a text is not the one that the run was started
        with."""
        if self.workdir is not None and self.task.corpus_read is not None:
            Workdir(self.workdir, writes=False).keep_corpus(self.task.corpus_read)
        return self.task.inspection_sequences(num, seq_len)

    def params(self, seed: int, which: Literal["best", "last"] = "best") -> Any:
        """Parameters of one seed, ready for model.apply(params, tokens). Raises KeyError for a seed that was not run."""
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed not in self.seeds:
            raise KeyError(f"seed {seed!r} is not in this run: it has {self.seeds}")
        if which not in ("best", "last"):
            raise ValueError(f"which must be 'best' or 'last', got {which!r}")
        index = self.seeds.index(seed)
        return jax.tree.map(lambda x: x[index], self.best if which == "best" else self.last)


def load_run(workdir: str | os.PathLike, variant: str | None = None) -> TrainedVariant:
    """One variant of a run from its workdir, on whatever devices this machine has.

    variant: its name in config.variants; may be left out if there is only one.

    Raises ConfigError if the directory holds no run, no such variant, or no checkpoint of it; NoReadableCheckpoint if its
    checkpoints are damaged.
    """
    directory = Workdir(workdir)
    config = read_config(_config_file(directory))
    names = variant_names(config)
    if variant is None and len(names) > 1:
        raise ConfigError(f"{directory.path} holds several variants ({some_of(names)}): name one")
    variant = names[0] if variant is None else variant
    if variant not in names:
        raise ConfigError(f"{directory.path} holds no variant {variant!r}: there are {some_of(names)}")
    folder = directory.checkpoints(variant)
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"{directory.path}: {folder} is a file, expected a folder")
        missing = folder.relative_to(directory.path)
        raise ConfigError(f"{directory.path}: variant {variant!r} has no checkpoint: the folder {missing} is missing")

    corpus = directory.read_corpus()
    experiment = build(config, variant, vocab_size=None if corpus is None else corpus["vocab_size"])
    for change in changed_modules(own_modules(experiment), directory.read_processes()):
        log.warning("%s: %s: %s", directory.path, variant, change)
    model = experiment.model
    if model.settings.implementation == "pallas" and not runs_on_gpu():  # what computes the same on this machine
        model = type(model)(dataclasses.replace(model.settings, implementation=None))
    trainer = SeedTrainer(model, experiment.task, experiment.train)
    with standard_settings():
        abstract = jax.eval_shape(jax.vmap(trainer.init), np.asarray(experiment.seeds, np.int32))
    state = Checkpoints(directory.checkpoints(variant), read_only=True).restore_latest(on_this_machine(abstract))
    if state is None:
        raise ConfigError(f"{directory.path}: variant {variant!r} has no checkpoint yet")
    state = to_numpy(state)
    step = int(state.step[0])
    with contextlib.suppress(ConfigError):  # a summary that can't be read is not needed here
        summary = directory.read_summary()
        outcome = None if summary is None else summary.variants.get(variant)
        if outcome is not None and step < outcome.last_step:
            log.warning(
                "%s: %s: parameters of step %d, as those of the last, %d, can't be read",
                directory.path, variant, step, outcome.last_step,
            )  # fmt: skip
    metrics = _curves(directory, directory.read_all_metrics(), variant, len(experiment.seeds))
    until_saved = metrics["step"] <= step  # a run that goes on is ahead of its checkpoints
    saved = directory.checkpoints(variant) / str(step) / "_CHECKPOINT_METADATA"  # has the time of saving
    identity = hashlib.sha256(experiment.config.to_json(sort_keys=True).encode())
    for part in (state.best_loss, state.best_accuracy, state.loss_sum):
        identity.update(np.asarray(part).tobytes())
    if saved.is_file():
        identity.update(saved.read_bytes())
    return TrainedVariant(
        workdir=directory.path,
        variant=variant,
        config=experiment.config,
        model=model,
        task=experiment.task,
        seeds=experiment.seeds,
        step=step,
        metrics={name: values[until_saved] for name, values in metrics.items()},
        checkpoint=identity.hexdigest()[:16],
        best=state.best_params,
        last=state.params,
        best_accuracy=state.best_accuracy,
        best_loss=state.best_loss,
        diverged_step=state.diverged_step,
    )


def _curves(directory: Workdir, recorded: Metrics, variant: str, num_seeds: int) -> dict[str, np.ndarray]:
    """The curves of one variant as arrays: "step" [evaluations], and the others [evaluations, seeds]; records of another number
    of seeds are left out."""
    if recorded.damaged:
        log.warning("%s: line %d is not a record of a run: left out", directory.metrics_file, recorded.damaged[0])
    records = [record for record in recorded.by_variant.get(variant, []) if len(record["active"]) == num_seeds]
    shapes = dict.fromkeys(CURVES, (len(records), num_seeds)) | {"step": (len(records),)}
    return {
        name: np.array([record[name] for record in records], np.float64).reshape(shape)
        for name, shape in shapes.items()
    }
