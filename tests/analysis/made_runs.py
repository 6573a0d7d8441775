"""Finished runs that nobody trained."""

import numpy as np

from loglinear_jax.config import build, default_config, language_config
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome
from loglinear_jax.tasks import find_task, load_task


def made_run(folder, pairs=4, accuracies=None, solved=None, test=None, task="mqar", **train):
    """A finished run in the setting text, by default of MQAR with three seeds; nothing of it is on disk.

    accuracies, test: by variant, in validation and on the test set; None: no test. pairs: of tasks that have some."""
    config = language_config() if task == "text" else default_config(task=task)
    if "num_pairs" in config.task:
        config.task.num_pairs = pairs
    config.train.update(train)
    accuracies = accuracies or {"linear": [0.99, 0.5, 0.3], "mlp_softplus": [0.99, 0.95, 0.2]}
    config.variants = ",".join(accuracies)
    variants, metric = {}, find_task(task).score.metric
    for name, best in accuracies.items():
        variants[name] = VariantOutcome(
            metric=metric, seeds=list(range(len(best))), best_accuracy=best, best_loss=best, best_step=[1] * len(best),
            params=10, lam_params=1, seconds=1.0, last_step=2, diverged_step=[None] * len(best),
            solved_step=(solved or {}).get(name, [None] * len(best)), test_accuracy=(test or {}).get(name),
        )  # fmt: skip
    made = load_task(**config.task.to_dict())
    return Run(folder / (f"kv{pairs}" if task == "mqar" else f"{task}-kv{pairs}"), config, made, RunSummary(variants))


def made_variant(run, variant):
    """A variant of a made run as if it were loaded, without parameters."""
    built, outcome = build(run.config, variant), run.outcomes[variant]
    accuracy = np.array(outcome.best_accuracy)
    return TrainedVariant(
        workdir=run.workdir, variant=variant, config=built.config, model=built.model, task=built.task, seeds=outcome.seeds,
        step=outcome.last_step, metrics={"step": np.zeros(0)}, best=None, last=None, best_accuracy=accuracy,
        best_loss=accuracy, diverged_step=np.full(len(accuracy), -1),
    )  # fmt: skip


def swept(accuracies):
    """By variant at a rate, from those by variant and rate."""
    return {f"{name}+train.learning_rate={rate}": list(x) for name, of in accuracies.items() for rate, x in of.items()}
