"""Training a run: its checks, its variants one program after the other, and going on where an earlier call stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, Experiment, build_all
from loglinear_jax.distributed import any_process, is_main
from loglinear_jax.lam import count_lam_params
from loglinear_jax.provenance import device, provenance, versions
from loglinear_jax.runs.checkpoints import Checkpoints, check_can_be_read
from loglinear_jax.runs.errors import NoReadableCheckpoint, OutOfMemory
from loglinear_jax.runs.lines import missing_evaluations
from loglinear_jax.runs.loop import TrainingLoop
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome, versions_of_all, with_commits
from loglinear_jax.runs.own_modules import changed_modules, own_modules
from loglinear_jax.runs.workdir import Workdir
from loglinear_jax.settings import SettingError
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.train import TrainSettings
from pallas_kernels import UnsupportedError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a call of `run` ended with: the summary, or the folder of checkpoints that the same call goes on from.

    trained: whether this call did anything; not if the run was finished before.
    """

    summary: RunSummary | None
    interrupted_at: Path | None = None
    trained: bool = True


def run(
    config: ConfigDict, workdir: str | Path, command: Sequence[str] | None = None, retrain: bool = False
) -> RunResult:
    """Trains every variant of the config with the same seeds and data; goes on from where an earlier call stopped.

    A variant whose outcome is recorded in summary.json is finished, whether its checkpoints are still there or not.

    command: the command line that asked for it, for summary.json. retrain: train finished variants again whose newest
    checkpoint is gone or damaged; what was recorded of them is kept in copies, *.earlier.

    Raises ConfigError before anything is written if a setting is invalid, or the workdir can't be used; NoReadableCheckpoint;
    RunFailed if the machine does not let the run go on: CannotWrite, OutOfMemory.
    """
    experiments, sizes = checked_experiments(config)
    task = next(iter(experiments.values())).task  # the same for all variants
    directory = Workdir(workdir, writes=is_main())
    with directory.hold(), StopOnSignal() as stop:
        resumed = directory.prepare(config)
        directory.repair()
        any_process(False)  # the others go on when it is done
        check_can_be_read(directory.path)
        if task.corpus_read is not None:
            directory.keep_corpus(task.corpus_read, config)
        log.info("%s %s", "Going on in" if resumed else "Writing to", directory.path)
        for variant, size in sizes.items():
            log.info("%s: %s", variant, size)
        return _train_variants(directory, experiments, config, command, retrain, stop)


def _train_variants(
    directory: Workdir,
    experiments: dict[str, Experiment],
    config: ConfigDict,
    command: Sequence[str] | None,
    retrain: bool,
    stop: StopOnSignal,
) -> RunResult:
    started = time.monotonic()
    process = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": None if command is None else shlex.join(command),
        "provenance": provenance(directory.written_config() if is_main() else config.to_dict()),
        "device": device(),
        "versions": versions(),
    }
    if modules := own_modules(*experiments.values()):
        process["modules"] = modules
        for change in changed_modules(modules, directory.read_processes()):
            log.warning("%s", change)
    corpus = next(iter(experiments.values())).task.corpus_read
    if corpus is not None:
        process["text"] = {name: corpus.manifest[name] for name in ("splits", "tokenizer_sha256")}
    summary = directory.read_summary()
    finished = finished_variants(directory, experiments, summary, retrain)
    if summary is not None and finished.keys() == experiments.keys():
        return RunResult(summary=summary, trained=False)
    if retrain:
        directory.keep_copies()
    many = None
    while waiting := [variant for variant in experiments if variant not in finished]:
        variants = trained_together(waiting[0], {name: experiments[name] for name in waiting})
        loop = TrainingLoop(directory, {name: experiments[name] for name in variants}, stop, process, many)
        with reporting_memory(variants[0], experiments[variants[0]], len(variants)):
            states = loop.run(retrain)
            if loop.stopping:
                return RunResult(summary=None, interrupted_at=directory.checkpoints(variants[0]))
            finished |= loop.outcomes(states)
        many = loop.many
        commits, versions_used = _of_all_processes(directory, summary)
        summary = RunSummary(
            variants={name: finished[name] for name in experiments if name in finished},
            command=process["command"],
            provenance=with_commits(process["provenance"], commits),
            device=process["device"],
            versions=versions_used,
            seconds_in_this_process=time.monotonic() - started,
        )
        directory.write_summary(summary)
    return RunResult(summary=summary)


def _of_all_processes(directory: Workdir, summary: RunSummary | None) -> tuple[list[str], dict[str, str]]:
    """(commits, versions) of all processes that trained the run, the first one first. summary: what the last one wrote, maybe
    elsewhere."""
    before, processes = summary or RunSummary(variants={}), directory.read_processes()
    commits = before.commits + [process["provenance"]["commit"] for process in processes]
    return commits, versions_of_all([before.versions, *(process.get("versions", {}) for process in processes)])


def finished_variants(
    directory: Workdir, experiments: dict[str, Experiment], summary: RunSummary | None, retrain: bool
) -> dict[str, VariantOutcome]:
    """The outcomes that stand, by variant. Warns of those whose newest checkpoint is gone or damaged, and with `retrain` leaves
    them out.

    Raises NoReadableCheckpoint for a variant that is finished, as its metrics say, and of which nothing else is left.
    """
    finished = {}
    for variant, experiment in experiments.items():
        outcome = None if summary is None else summary.variants.get(variant)
        if outcome is not None and outcome.seeds != experiment.seeds:
            log.warning("%s: %s: its seeds are not those of the config; derived again", directory.summary_file, variant)
            outcome = None
        checkpoints = Checkpoints(directory.checkpoints(variant), read_only=True)
        steps, records = checkpoints.steps(), directory.read_metrics(variant)
        if outcome is None:
            was_damaged = summary is None and directory.has_damaged_summary()
            if was_damaged and not retrain and not steps and records and _is_last(records[-1], experiment.train):
                raise NoReadableCheckpoint(
                    f"{directory.path}: {variant} is finished, as its metrics say, but its checkpoints are gone, and "
                    "summary.json was damaged: --retrain trains it again"
                )
            continue
        problem = "is gone"
        if outcome.last_step in steps:
            problem = checkpoints.damage(outcome.last_step)
            problem = problem and f"is damaged ({problem})"
        if problem:
            log.warning(
                "%s: its checkpoint of step %d, the last, %s. Its outcome stands%s",
                variant, outcome.last_step, problem,
                " till it is trained again." if retrain else "; --retrain trains it again.",
            )  # fmt: skip
        if not (problem and retrain):
            finished[variant] = outcome
            if missing := missing_evaluations(records, experiment.train, outcome.last_step):
                log.warning("%s: %s", variant, missing)
    return finished


def _is_last(record: dict[str, Any], train: TrainSettings) -> bool:
    return record["step"] >= train.num_steps or not any(record["active"])


@contextlib.contextmanager
def reporting_memory(variant: str, experiment: Experiment, together: int) -> Iterator[None]:
    """Raises OutOfMemory, naming the settings that take the memory, where JAX says that a device has no more.

    together: so many variants are trained in one program.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        train, task = experiment.train, experiment.task
        rates = f"train.rates_at_once={together}, " if together > 1 else ""
        raise OutOfMemory(
            f"{variant}: {jax.devices()[0].device_kind} has too little memory: reduce {rates}"
            f"train.num_seeds={train.num_seeds}, train.batch_size={train.batch_size} (or raise "
            f"train.grad_accumulation={train.grad_accumulation}), "
            f"train.eval_batch_size={train.eval_batch_size}, task.seq_len={task.seq_len} or the model; what was saved before "
            f"is kept ({(str(error).strip().splitlines() or ['MemoryError'])[0][:200]})"
        ) from error


def checked_experiments(config: ConfigDict) -> tuple[dict[str, Experiment], dict[str, str]]:
    """(what each variant stands for, and the size in words of each model), by variant, after every check that can be made
    before training and writing. Of variants of one model, which differ in training alone, the first has its size.

    Raises ConfigError naming the first invalid setting.
    """
    experiments = build_all(config)
    task = next(iter(experiments.values())).task
    try:
        task.check_sequences()
    except SettingError as error:
        raise ConfigError(f"task {config.task.name}: {error}") from error
    first_of_model = {experiment.model: variant for variant, experiment in reversed(experiments.items())}
    sizes = {}
    for variant in sorted(first_of_model.values(), key=list(experiments).index):
        experiment = experiments[variant]
        try:
            sizes[variant] = describe_size(experiment.model, experiment.task.trained_on.longest)
        except UnsupportedError as error:
            implementation = experiment.config.model.implementation
            raise ConfigError(f"{variant}: model.implementation={implementation}: {error}") from error
    return experiments, sizes


def describe_size(model: nn.Module, seq_len: int) -> str:
    """The size of a model in words, and what λ adds to it."""
    tokens = jax.ShapeDtypeStruct((1, seq_len), np.int32)
    lam, other = count_lam_params(jax.eval_shape(model.init, jax.random.key(0), tokens))
    return f"{lam + other:,} parameters, of which {lam:,} ({100 * lam / other:.4f} %) are λ's"


def trained_together(variant: str, experiments: dict[str, Experiment]) -> list[str]:
    """The variant, and those of the experiments that one program can train with it: they differ in their rates alone."""
    if jax.process_count() > 1:  # each has a part of every seed's state
        return [variant]

    def but_for_rates(experiment: Experiment) -> Any:
        return experiment.model, experiment.task, experiment.train.but_for_rates

    alike = [name for name, other in experiments.items() if but_for_rates(other) == but_for_rates(experiments[variant])]
    return alike[: experiments[variant].rates_at_once(len(alike))]
