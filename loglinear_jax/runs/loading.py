"""Reading a finished (or running) run back: its settings, models, parameters and curves. Works on any machine.

`read_run` reads what a run wrote besides checkpoints; `load_run` restores the parameters of one variant of it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, build, naming, read_config, some_of, task_of, variant_names
from loglinear_jax.distributed import to_host
from loglinear_jax.models import LanguageModel, RecallModel
from loglinear_jax.runs.checkpoints import Checkpoints, on_this_machine
from loglinear_jax.runs.folders import RunFolder, VariantFolder, train_settings
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome
from loglinear_jax.tasks import BaseTask
from loglinear_jax.tasks.draws import standard_settings
from loglinear_jax.train import SeedState, SeedTrainer, TrainSettings
from pallas_kernels import runs_on_gpu

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run wrote besides checkpoints: enough for its tables and curves. config: with every field of its task
    filled in. summary: of the finished variants, None while there is none. label: distinguishes it from other runs
    of the same task in titles."""

    workdir: Path
    config: ConfigDict
    task: BaseTask
    summary: RunSummary | None
    label: str = ""

    @property
    def name(self) -> str:
        """The workdir's own name, or the record's."""
        return self.workdir.name.removesuffix(".json")

    @property
    def variants(self) -> list[str]:
        return variant_names(self.config)

    @property
    def outcomes(self) -> dict[str, VariantOutcome]:
        """Outcomes of the finished variants, by variant."""
        return {} if self.summary is None else self.summary.variants

    def metrics(self, variant: str) -> dict[str, np.ndarray]:
        """The curves of one variant: "step" [evaluations], "train_loss", "val_loss", "val_accuracy" [evaluations, seeds].

        Raises ConfigError if the run has no such variant, or its metrics can't be read."""
        if variant not in self.variants:
            raise ConfigError(f"{self.workdir} holds no variant {variant!r}: there are {some_of(self.variants)}")
        return read_curves(RunFolder(self.workdir), variant, train_settings(self.config, variant))


def read_run(workdir: str | os.PathLike) -> Run:
    """Read what a run wrote besides checkpoints, from its workdir or its record. Raises ConfigError if there is
    none, or if one of its files can't be read."""
    folder = RunFolder(workdir, writes=False)
    config = _read_config(folder)
    variant_names(config)
    summary = folder.read_summary()
    with naming(f"{folder.path} can't be read: "):
        task = task_of(config)
    config.task = ConfigDict({"name": config.task.name} | dataclasses.asdict(task))
    return Run(folder.path, config, task, summary)


def _read_config(folder: RunFolder) -> ConfigDict:
    if not folder.config_file.exists():
        raise ConfigError(f"{folder.path} holds no run: there is no config.json")
    return read_config(folder.config_file)


CURVES = ("train_loss", "val_loss", "val_accuracy")


def read_curves(
    folder: RunFolder, variant: str, train: TrainSettings, until: int | None = None
) -> dict[str, np.ndarray]:
    """The curves of one variant as arrays: "step" [evaluations], and CURVES [evaluations, seeds], up to a step.

    Seeds that were added later may have been evaluated at other steps: what they lack is nan. After the end of seeds that all
    had stopped, their validation stays as it was.
    """
    of_parts = []
    for part, own in folder.parts(variant, train).items():
        records = part.read_metrics(until)
        values = {
            name: np.array([record[name] for record in records], np.float64).reshape(len(records), own.num_seeds)
            for name in CURVES
        }
        of_parts.append((np.array([r["step"] for r in records], int), values, part.outcome_file.exists()))
    if len(of_parts) == 1:
        steps, values, _ = of_parts[0]
        return {"step": steps.astype(np.float64)} | values
    steps = np.unique(np.concatenate([own for own, *_ in of_parts]))
    curves = {name: [] for name in CURVES}
    for own, values, is_finished in of_parts:
        for name in CURVES:
            column = np.full((len(steps), values[name].shape[1]), np.nan)
            column[np.searchsorted(steps, own)] = values[name]
            if is_finished and name != "train_loss" and len(own):
                column[steps > own[-1]] = values[name][-1]
            curves[name].append(column)
    return {"step": steps.astype(np.float64)} | {name: np.concatenate(of, axis=1) for name, of in curves.items()}


@dataclasses.dataclass(frozen=True)
class TrainedVariant:
    """Trained variant of a run: its task, model, parameters and metrics.

    config: its settings, with the variant's own applied. model, task: built from them. seeds: in the order of every
    seed axis. step: of the newest checkpoint that could be read.
    metrics: up to that step, "step" [evaluations], "train_loss", "val_loss", "val_accuracy" [evaluations, seeds] (nan where not
    finite).
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
    best: Any
    last: Any
    best_accuracy: np.ndarray
    best_loss: np.ndarray
    diverged_step: np.ndarray

    def scores(self, which: Literal["best", "last"] = "best") -> tuple[np.ndarray, np.ndarray]:
        """(validation accuracy, loss in nats) of every seed, at its best or last evaluation."""
        if which == "best" or not len(self.metrics["step"]):
            return self.best_accuracy, self.best_loss
        return self.metrics["val_accuracy"][-1], self.metrics["val_loss"][-1]

    def inspection_sequences(self, num: int, seq_len: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Draws (tokens, targets) [num, T] of its task that no seed was trained on; a target is -1 where nothing is scored.

        seq_len: T; None is the length of the longest trained sequences. Raises ConfigError if a text is not the one that the
        run was started with.
        """
        if self.workdir is not None and self.task.corpus_read is not None:
            RunFolder(self.workdir, writes=False).check_corpus(self.task.corpus_read)
        return self.task.inspection_sequences(num, seq_len)

    def params(self, seed: int, which: Literal["best", "last"] = "best") -> Any:
        """Parameters of one seed, ready for model.apply(params, tokens). Raises KeyError for a seed that was not run."""
        if seed not in self.seeds:
            raise KeyError(f"seed {seed!r} is not in this run: it has {self.seeds}")
        if which not in ("best", "last"):
            raise ValueError(f"which must be 'best' or 'last', got {which!r}")
        index = self.seeds.index(seed)
        return jax.tree.map(lambda x: x[index], self.best if which == "best" else self.last)


def load_run(workdir: str | os.PathLike, variant: str | None = None) -> TrainedVariant:
    """Load one variant of a run, with its parameters, on whatever devices this machine has.

    variant: its name in config.variants; may be left out if there is only one. Seeds that have no checkpoint yet are left out.

    Raises ConfigError if the directory holds no run, no such variant, or no checkpoint of it; NoReadableCheckpoint if its
    checkpoints are damaged.
    """
    folder = RunFolder(workdir, writes=False)
    config = _read_config(folder)
    names = variant_names(config)
    if variant is None and len(names) > 1:
        raise ConfigError(f"{folder.path} holds several variants ({some_of(names)}): name one as variant (--variant)")
    variant = names[0] if variant is None else variant
    if variant not in names:
        raise ConfigError(f"{folder.path} holds no variant {variant!r}: there are {some_of(names)}")
    corpus = folder.read_corpus()
    experiment = build(config, variant, vocab_size=None if corpus is None else corpus["vocab_size"])
    model = experiment.model
    if model.settings.implementation == "pallas" and not runs_on_gpu():  # what computes the same on this machine
        model = type(model)(dataclasses.replace(model.settings, implementation=None))
    of_parts = {}
    for part, train in folder.parts(variant, experiment.train).items():
        if (state := _newest_state(part, SeedTrainer(model, experiment.task, train), train.seeds)) is not None:
            of_parts[part] = state
    if not of_parts:
        missing = folder.variant(variant).checkpoints.relative_to(folder.path)
        raise ConfigError(f"{folder.path}: variant {variant!r} has no checkpoint in the folder {missing}")
    state = jax.tree.map(lambda *of_seeds: np.concatenate(of_seeds), *of_parts.values())
    step = int(state.step.max())
    seeds = state.seed.tolist()
    curves = read_curves(
        folder, variant, experiment.train, until=step
    )  # a run that goes on is ahead of its checkpoints
    return TrainedVariant(
        workdir=folder.path,
        variant=variant,
        config=experiment.config,
        model=model,
        task=experiment.task,
        seeds=seeds,
        step=step,
        metrics={name: values if name == "step" else values[:, : len(seeds)] for name, values in curves.items()},
        best=state.best_params,
        last=state.params,
        best_accuracy=state.best_accuracy,
        best_loss=np.where(state.best_step >= 0, state.best_loss, np.nan),
        diverged_step=state.diverged_step,
    )


def _newest_state(part: VariantFolder, trainer: SeedTrainer, seeds: list[int]) -> SeedState | None:
    """The newest readable checkpoint of some seeds, as NumPy arrays. Warns if it is not that of their end."""
    with standard_settings():
        abstract = jax.eval_shape(jax.vmap(trainer.init), np.asarray(seeds, np.int32))
    state = Checkpoints(part.checkpoints, read_only=True).restore_latest(on_this_machine(abstract))
    if state is None:
        return None
    outcome, step = part.read_outcome(), int(state.step[0])
    last_step = step if outcome is None else next(iter(outcome.variants.values())).last_step
    if step < last_step:
        log.warning("%s: parameters of step %d, as those of the last, %d, can't be read", part.path, step, last_step)
    return to_host(state)
