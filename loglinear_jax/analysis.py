"""Reading a finished (or running) run back: its settings, models, parameters and curves. Works on any machine."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from loglinear_jax.checkpoints import Checkpoints, on_this_machine, to_numpy
from loglinear_jax.config import ConfigError, build, read_config, variant_names
from loglinear_jax.models import LanguageModel, RecallModel
from loglinear_jax.tasks import Task
from loglinear_jax.tasks.text import TARGETS, Text
from loglinear_jax.train import CONVERGED, SeedTrainer
from loglinear_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Run:
    """One variant of a run.

    config: its settings, the variant's own applied. model, task: built from them. seeds: in the order of every seed axis.
    metrics: "step" [evaluations], "train_loss", "val_loss", "val_accuracy" [evaluations, seeds] (nan where not finite).
    best, last: parameters with a leading seed axis, as NumPy arrays: at each seed's best evaluation, and at the end.
    """

    workdir: Path
    variant: str
    config: ConfigDict
    model: RecallModel | LanguageModel
    task: Task | Text
    seeds: list[int]
    metrics: dict[str, np.ndarray]
    best: Any
    last: Any
    best_accuracy: np.ndarray
    best_loss: np.ndarray
    best_step: np.ndarray

    def params(self, seed: int, which: Literal["best", "last"] = "best") -> Any:
        """Parameters of one seed, ready for model.apply(params, tokens). Raises KeyError for a seed that was not run."""
        if seed not in self.seeds:
            raise KeyError(f"seed {seed} is not in this run: it has {self.seeds}")
        if which not in ("best", "last"):
            raise ValueError(f"which must be 'best' or 'last', got {which!r}")
        index = self.seeds.index(seed)
        return jax.tree.map(lambda x: x[index], self.best if which == "best" else self.last)


def load_run(workdir: str | os.PathLike, variant: str | None = None) -> Run:
    """One variant of a run from its workdir, on whatever devices this machine has.

    variant: its name in config.variants; may be left out if there is only one.

    Raises ConfigError if the directory holds no run, no such variant, or no checkpoint of it; NoReadableCheckpoint if its
    checkpoints are damaged.
    """
    directory = Workdir(workdir)
    if not directory.config_file.exists():
        raise ConfigError(f"{directory.path} holds no run: there is no config.json")
    config = read_config(directory.config_file)
    names = variant_names(config)
    if variant is None and len(names) > 1:
        raise ConfigError(f"{directory.path} holds several variants ({', '.join(names)}): name one")
    variant = names[0] if variant is None else variant
    if variant not in names:
        raise ConfigError(f"{directory.path} holds no variant {variant!r}: there are {', '.join(names)}")
    if not directory.checkpoints(variant).is_dir():
        raise ConfigError(f"{directory.path}: variant {variant!r} has no checkpoint yet")

    corpus = directory.read_corpus()
    experiment = build(config, variant, vocab_size=None if corpus is None else corpus["vocab_size"])
    trainer = SeedTrainer(experiment.model, experiment.task, experiment.train)
    abstract = jax.eval_shape(jax.vmap(trainer.init), np.asarray(experiment.seeds, np.int32))
    checkpoints = Checkpoints(directory.checkpoints(variant), read_only=True)
    state = checkpoints.restore_latest(on_this_machine(abstract))
    checkpoints.close()
    if state is None:
        raise ConfigError(f"{directory.path}: variant {variant!r} has no checkpoint yet")
    state = to_numpy(state)
    return Run(
        workdir=directory.path,
        variant=variant,
        config=experiment.config,
        model=experiment.model,
        task=experiment.task,
        seeds=experiment.seeds,
        metrics=load_metrics(directory, variant),
        best=state.best_params,
        last=state.params,
        best_accuracy=state.best_accuracy,
        best_loss=state.best_loss,
        best_step=state.best_step,
    )


def load_metrics(directory: Workdir, variant: str) -> dict[str, np.ndarray]:
    """The curves of one variant as arrays: "step" [evaluations], and the others [evaluations, seeds]."""
    records = [record for record in directory.read_metrics() if record["variant"] == variant]
    names = ("step", "train_loss", "val_loss", "val_accuracy")
    return {name: np.array([record[name] for record in records], np.float64) for name in names}


def draw_learning_curves(workdir: str | os.PathLike, path: str | os.PathLike) -> Figure:
    """Validation accuracy, or perplexity, against step for each variant of a run: every seed thin, the median thick.

    Saved to `path`.
    """
    directory = Workdir(workdir)
    config = read_config(directory.config_file)
    names = variant_names(config)
    language = config.train.metric == "loss"
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    axes = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    colors = matplotlib.colormaps["tab10"].colors
    for axis, name, color in zip(axes, names, (colors * len(names))[: len(names)], strict=True):
        metrics = load_metrics(directory, name)
        if len(metrics["step"]):
            values = np.exp(metrics["val_loss"]) if language else 100 * metrics["val_accuracy"]
            axis.plot(metrics["step"], values, color=color, alpha=0.35, linewidth=1)
            axis.plot(
                metrics["step"], np.nanmedian(values, axis=1), color=color, linewidth=2.5, label="median of seeds"
            )
            axis.legend(loc="upper right" if language else "lower right", frameon=False)
        axis.set(title=name if "=" in name else f"λ: {name}", xlabel="step")
        if language:
            axis.set_yscale("log")
        else:
            axis.axhline(100 * CONVERGED, color="0.6", linewidth=0.8, linestyle="--")
            axis.set_ylim(0, 102)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("validation perplexity" if language else "validation accuracy, %")
    figure.suptitle(f"{describe_task(config.task)}, {config.train.num_seeds} seeds")
    figure.savefig(path, dpi=120)
    return figure


def describe_task(task: ConfigDict) -> str:
    """The task's settings in a few words, for titles."""
    if task.name == "text":
        return f"{Path(task.corpus).stem}, windows of {task.seq_len}, {TARGETS[task.target_offset]}"
    described = ", ".join(f"{key} {value}" for key, value in task.items() if key != "name")
    return f"{task.name} ({described})"
