"""Training a run: its checks, what is missing of it one program after the other, and its summary."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, Experiment, build_all, named_variants, naming, some_of, variants_at_rates
from loglinear_jax.distributed import any_process, is_main
from loglinear_jax.lam import count_lam_params
from loglinear_jax.provenance import device, provenance, versions
from loglinear_jax.runs.folders import RunFolder, is_finished
from loglinear_jax.runs.live import check_wandb
from loglinear_jax.runs.loop import Member, Program, mesh_for
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome
from loglinear_jax.runs.writing import OutOfMemory, only_process
from loglinear_jax.settings import first_line
from loglinear_jax.signals import StopOnSignal
from pallas_kernels import UnsupportedError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a call of `run` ended with: the summary of all that is finished, or the folder that the same call goes on from.

    trained: whether this call trained anything.
    """

    summary: RunSummary | None
    interrupted_at: Path | None = None
    trained: bool = True


def run(
    config: ConfigDict,
    workdir: str | Path,
    command: Sequence[str] | None = None,
    only: Collection[str] = (),
    wandb: str = "",
) -> RunResult:
    """Train what is missing of a configuration's variants, all with the same seeds and data; resume where an earlier
    call stopped.

    command: the command line, to be recorded. only: names in config.variants; no others are trained. wandb: the project
    in which Weights & Biases shows the curves, if any; it needs the extra `wandb`.

    Raises ConfigError before anything is written if a setting is invalid, or the workdir can't be used; NoReadableCheckpoint;
    RunFailed if the machine does not let the run go on: CannotWrite, OutOfMemory.
    """
    if wandb:
        check_wandb()
    chosen = _chosen(config, only)
    experiments, sizes = checked_experiments(config, chosen if only else None)
    corpus = next(iter(experiments.values())).task.corpus_read  # the same for all variants
    run_folder = RunFolder(workdir, writes=is_main())
    resumed = run_folder.prepare(config, corpus)
    any_process(False)  # the others go on when it is done
    log.info("%s %s", "Going on in" if resumed else "Writing to", run_folder.path)
    missing = _missing(run_folder, {name: experiments[name] for name in chosen})
    trained = bool(missing)
    process = {  # what processes.jsonl records of this one
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": None if command is None else shlex.join(command),
        "provenance": provenance(config.to_dict()),
        "device": device(),
        "versions": versions(),
    }
    for variant, size in sizes.items():
        log.info("%s: %s", variant, size)
    at_once = len(missing)  # rates that memory has room for
    with StopOnSignal() as stop:
        while missing:
            together = trained_together(missing)[:at_once]
            for member in together:
                member.folder.make()
            program = Program(together, stop, wandb)
            try:
                with reporting_memory(program), contextlib.ExitStack() as held:
                    for member in together:
                        held.enter_context(only_process(member.folder.lock_file, tries=member.folder.writes))
                    program.run(process)
                    if program.stopped:
                        return RunResult(None, interrupted_at=together[0].folder.path)
                    for member, outcome in program.outcomes():
                        _finish(member, outcome, process)
                        log.info("%s: finished", member.variant)
            except OutOfMemory:
                if len(program.members) == 1:
                    raise
                at_once = -(-len(program.members) // 2)
                log.warning("%s: memory is too little for all rates: %d are trained at a time", program.name, at_once)
                continue
            missing = [one for one in missing if one not in program.members]
    any_process(False)  # the outcomes are written
    run_folder.write_summary({name: experiment.train for name, experiment in experiments.items()})
    return RunResult(run_folder.read_summary(), trained=trained)


def _chosen(config: ConfigDict, only: Collection[str]) -> list[str]:
    """The variants that are to be trained, at all their rates. Raises ConfigError for a name that there is not."""
    by_name = dict(zip(named_variants(config), variants_at_rates(config), strict=True))
    if unknown := [name for name in only if name not in by_name]:
        raise ConfigError(f"only={unknown[0]}: there is no such variant, but {some_of(by_name)}")
    return [variant for name, at_rates in by_name.items() if not only or name in only for variant in at_rates]


def _missing(run_folder: RunFolder, experiments: dict[str, Experiment]) -> list[Member]:
    """What lacks an outcome, in the order of the variants."""
    finished = run_folder.finished_variants({name: experiment.train for name, experiment in experiments.items()})
    found = []
    for variant, experiment in experiments.items():
        if variant in finished:
            continue
        for folder, train in run_folder.parts(variant, experiment.train).items():
            summary = folder.read_outcome()
            if summary is None or not is_finished(summary.variants[variant], train):
                found.append(Member(variant, dataclasses.replace(experiment, train=train), folder))
    return found


def trained_together(missing: Sequence[Member]) -> list[Member]:
    """The first, and those that one program can train with it: they differ in their rates only."""
    first = missing[0]
    if jax.process_count() > 1:  # each has a part of every seed's state
        return [first]

    def but_for_rates(one: Member) -> Any:
        return one.experiment.model, one.experiment.task, one.experiment.train.but_for_rates

    alike = [one for one in missing if but_for_rates(one) == but_for_rates(first)]
    return alike[: first.experiment.train.rates_at_once]


def _finish(member: Member, outcome: VariantOutcome, process: dict[str, Any]) -> None:
    """Writes a variant's outcome; what earlier processes it was trained by, processes.jsonl says."""
    origin = {name: process[name] for name in ("command", "provenance", "device", "versions")}
    member.folder.write_outcome(RunSummary({member.variant: outcome}, **origin))


@contextlib.contextmanager
def reporting_memory(program: Program) -> Iterator[None]:
    """Raises OutOfMemory, naming the settings that take the memory, where JAX says that a device has no more."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        train, task = program.settings, program.task
        raise OutOfMemory(
            f"{program.first}: {jax.devices()[0].device_kind} has too little memory: reduce "
            f"train.num_seeds={train.num_seeds}, train.batch_size={train.batch_size} (or raise "
            f"train.grad_accumulation={train.grad_accumulation}), "
            f"train.eval_batch_size={train.eval_batch_size}, task.seq_len={task.seq_len} or the model; what was saved before "
            f"is kept ({first_line(error)[:200]})"
        ) from error


def checked_experiments(
    config: ConfigDict, chosen: Collection[str] | None = None
) -> tuple[dict[str, Experiment], dict[str, str]]:
    """(what each variant stands for, and the size in words of each model), by variant, after every check that can be made
    before training and writing. Of variants of one model, which differ in training alone, the first has its size.

    chosen: whose models are made, so that a bug in that of another variant stops only its own training; None is all.

    Raises ConfigError naming the first invalid setting.
    """
    experiments = build_all(config)
    task = next(iter(experiments.values())).task
    with naming(f"task {config.task.name}: "):
        task.check_sequences()
    for variant, experiment in experiments.items():
        mesh_for(variant, experiment)
    first_of_model = {
        experiment.model: variant
        for variant, experiment in reversed(experiments.items())
        if chosen is None or variant in chosen
    }
    sizes = {}
    for variant in sorted(first_of_model.values(), key=list(experiments).index):
        experiment = experiments[variant]
        try:
            sizes[variant] = describe_size(experiment.model, experiment.task.trained_on.longest)
        except UnsupportedError as error:
            implementation = experiment.config.model.get("implementation")
            raise ConfigError(f"{variant}: model.implementation={implementation}: {error}") from error
    return experiments, sizes


def describe_size(model: nn.Module, seq_len: int) -> str:
    """The size of a model in words, and what λ adds to it."""
    tokens = jax.ShapeDtypeStruct((1, seq_len), np.int32)
    lam, other = count_lam_params(jax.eval_shape(model.init, jax.random.key(0), tokens))
    return f"{lam + other:,} parameters, of which {lam:,} ({100 * lam / other:.4f} %) are λ's"
