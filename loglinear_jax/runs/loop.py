"""The loop around training: when to evaluate, save and log; and going on where an earlier call stopped.

Everything that is computed is in loglinear_jax.train, everything on disk in loglinear_jax.runs.workdir and .checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, Experiment, build, check_config, variant_names
from loglinear_jax.distributed import any_process, is_main, to_host
from loglinear_jax.lam import count_lam_params
from loglinear_jax.runs.checkpoints import Checkpoints
from loglinear_jax.runs.errors import NoReadableCheckpoint, OutOfMemory
from loglinear_jax.runs.idle_seeds import IdleSeeds
from loglinear_jax.runs.lines import missing_evaluations
from loglinear_jax.runs.live import DivergedSeeds, Live
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome, outcome_of
from loglinear_jax.runs.provenance import device, provenance, versions
from loglinear_jax.runs.workdir import Workdir
from loglinear_jax.settings import SettingError
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.train import ManySeeds, SeedState, SeedTrainer, TrainSettings, device_mesh
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
    corpus = next(iter(experiments.values())).task.corpus_read
    if corpus is not None:
        process["text"] = {name: corpus.manifest[name] for name in ("splits", "tokenizer_sha256")}
    summary = directory.read_summary()
    finished = finished_variants(directory, experiments, summary, retrain)
    if summary is not None and finished.keys() == experiments.keys():
        return RunResult(summary=summary, trained=False)
    if retrain:
        directory.keep_copies()
    loop = None
    for variant, experiment in experiments.items():
        if variant in finished:
            continue
        loop = VariantLoop(directory, variant, experiment, stop, process, None if loop is None else loop.many)
        with reporting_memory(variant, experiment):
            state = loop.run(retrain)
            if loop.stopping:
                return RunResult(summary=None, interrupted_at=directory.checkpoints(variant))
            finished[variant] = loop.outcome(state)
        commits = dict.fromkeys(earlier["provenance"]["commit"] for earlier in directory.read_processes())
        several = {"commits_of_all_processes": ", ".join(commits)} if len(commits) > 1 else {}
        summary = RunSummary(
            variants={name: finished[name] for name in experiments if name in finished},
            command=process["command"],
            provenance=process["provenance"] | several,
            device=process["device"],
            versions=process["versions"],
            seconds_in_this_process=time.monotonic() - started,
        )
        directory.write_summary(summary)
    return RunResult(summary=summary)


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
def reporting_memory(variant: str, experiment: Experiment) -> Iterator[None]:
    """Raises OutOfMemory, naming the settings that take the memory, where JAX says that a device has no more."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        train, task = experiment.train, experiment.task
        raise OutOfMemory(
            f"{variant}: {jax.devices()[0].device_kind} has too little memory: reduce train.num_seeds={train.num_seeds}, "
            f"train.batch_size={train.batch_size} (or raise train.grad_accumulation={train.grad_accumulation}), "
            f"train.eval_batch_size={train.eval_batch_size}, task.seq_len={task.seq_len} or the model; what was saved before "
            f"is kept ({(str(error).strip().splitlines() or ['MemoryError'])[0][:200]})"
        ) from error


def checked_experiments(config: ConfigDict) -> tuple[dict[str, Experiment], dict[str, str]]:
    """(what each variant stands for, its size in words), by its name, after every check that can be made before training and
    writing.

    Raises ConfigError naming the first setting that can't be.
    """
    check_config(config)
    experiments = {variant: build(config, variant) for variant in variant_names(config)}
    task = next(iter(experiments.values())).task
    try:
        task.check_sequences()
    except SettingError as error:
        raise ConfigError(f"task {config.task.name}: {error}") from error
    sizes = {}
    for variant, experiment in experiments.items():
        try:
            sizes[variant] = describe_size(experiment.model, experiment.task.seq_len)
        except UnsupportedError as error:
            implementation = experiment.config.model.implementation
            raise ConfigError(f"{variant}: model.implementation={implementation}: {error}") from error
    return experiments, sizes


def describe_size(model: nn.Module, seq_len: int) -> str:
    """The size of a model in words, and what λ adds to it."""
    tokens = jax.ShapeDtypeStruct((1, seq_len), np.int32)
    lam, other = count_lam_params(jax.eval_shape(model.init, jax.random.key(0), tokens))
    return f"{lam + other:,} parameters, of which {lam:,} ({100 * lam / other:.4f} %) are λ's"


class VariantLoop:
    """Trains one variant to its end, or until a stop is asked for.

    process: what processes.jsonl says of this process, if it trains. other: the seeds of another variant.
    """

    def __init__(
        self,
        directory: Workdir,
        variant: str,
        experiment: Experiment,
        stop: StopOnSignal,
        process: dict[str, Any],
        other: ManySeeds | None,
    ):
        self.directory, self.variant, self.stop = directory, variant, stop
        self.process = process
        self.settings, self.task = experiment.train, experiment.task
        self.trained = self.stopping = False
        mesh = mesh_for(variant, experiment)
        self.many = ManySeeds(SeedTrainer(experiment.model, self.task, self.settings), experiment.seeds, mesh, other)

    def run(self, retrain: bool = False) -> SeedState:
        """The last state, which is also the newest checkpoint.

        retrain: begin with the first step if there are checkpoints, but none can be read.
        """
        self.directory.make_folders(self.variant)
        with Checkpoints(self.directory.checkpoints(self.variant)) as checkpoints:
            try:
                state = checkpoints.restore_latest(self.many.abstract_state())
            except NoReadableCheckpoint:
                if not retrain:
                    raise
                checkpoints.set_aside(checkpoints.steps())
                state = None
            saved = None if state is None else step_of(state)
            if state is None:
                state = self._despite_signal(self.many.init, self.many.seeds)
            self._begin(state, copied=retrain)
            if not self._finished(state):
                if saved is not None:
                    log.info("%s: going on from step %d", self.variant, saved)
                log.info("%s: %d seed(s) on %d device(s)", self.variant, len(self.many.seeds), self.many.mesh.size)
                self._warn_of_idle_devices()
                with contextlib.closing(self._train(state)) as states:
                    for state in states:
                        if step_of(state) % self.settings.checkpoint_every == 0:
                            checkpoints.save(saved := step_of(state), state)
                if self.stopping:
                    log.info("%s: stopping at step %d", self.variant, step_of(state))
            if saved != step_of(state):
                checkpoints.save(step_of(state), state)
        return state

    def _begin(self, state: SeedState, copied: bool) -> None:
        """Reads what is recorded up to where the state is. What is recorded past it stays until it is replaced.

        copied: whether copies of all that is recorded are kept already.
        """
        step, records = step_of(state), self._records()
        self.replaces_after: int | None = step
        ahead = [record["step"] for record in records if record["step"] > step]
        if ahead and max(ahead) - step > 2 * self.settings.checkpoint_every:  # more than a kill can lose
            log.warning(
                "%s: recorded up to step %d, but there is no checkpoint after step %d: trained again from there",
                self.variant, max(ahead), step,
            )  # fmt: skip
            if not copied:
                self.directory.keep_copies()
        records = [record for record in records if record["step"] <= step]
        if missing := missing_evaluations(records, self.settings, step):
            log.warning("%s: %s", self.variant, missing)
        self.idle = IdleSeeds(self.many, self.settings.num_steps, self.settings.eval_every, records)
        self.diverged = DivergedSeeds(self.variant, self.many.numbers)
        self.diverged.report(state)

    def _train(self, state: SeedState) -> Iterator[SeedState]:
        """The state after each evaluation, to the end or to where a stop was asked for."""
        self.trained = True
        step, settings = step_of(state), self.settings
        self.directory.append_process(self.process | {"variant": self.variant, "from_step": step})
        data = self._despite_signal(self.task.open_data, self.many, step)
        dispatches = data.dispatches(self._dispatch_sizes(step))
        tensorboard = self.directory.tensorboard(self.variant)
        with (
            contextlib.closing(data),
            contextlib.closing(dispatches),
            Live(self.variant, self.task.score, settings.num_steps, step, tensorboard) as live,
        ):
            while not self._finished(state) and not self.stopping:
                began, start, computed = time.perf_counter(), step_of(state), self.idle.num_computed
                state = self._to_next_evaluation(state, dispatches, live)
                if not self.stopping:
                    state = self._evaluate(state, data.validation, start, computed, began, live)
                yield state

    def _finished(self, state: SeedState) -> bool:
        """At the last step, or at an evaluation after which no seed is active (so that its last state was scored)."""
        step = step_of(state)
        idle = step % self.settings.eval_every == 0 and not to_host(state.active).any()
        return step >= self.settings.num_steps or idle

    def _dispatch_sizes(self, step: int) -> Iterator[int]:
        """Steps of each dispatch from a step on; no dispatch goes past an evaluation."""
        while step < self.settings.num_steps:
            size = min(self.settings.steps_per_dispatch, self._next_evaluation(step) - step)
            yield size
            step += size

    def _next_evaluation(self, step: int) -> int:
        return min((step // self.settings.eval_every + 1) * self.settings.eval_every, self.settings.num_steps)

    def _to_next_evaluation(self, state: SeedState, dispatches: Iterator, live: Live) -> SeedState:
        """Steps up to the next evaluation; fewer if a stop is asked for meanwhile."""
        end = self._next_evaluation(step_of(state))
        while step_of(state) < end:
            self.stopping = any_process(self.stop.requested)
            if self.stopping:
                return state
            num_steps, batches = next(dispatches)
            state = self._despite_signal(self.many.train_steps, state, batches, num_steps, self.idle.rows)
            jax.block_until_ready(state.step)
            live.steps(num_steps)
        return state

    def _evaluate(self, state: SeedState, validation, start: int, computed: int, began: float, live: Live) -> SeedState:
        """One evaluation, recorded and shown. start, computed, began: the step and the time since which so many seeds were
        trained."""
        step, every = step_of(state), self.settings.eval_every
        train_loss = to_host(state.loss_sum).astype(np.float64) / (step - (step - 1) // every * every)
        state, loss, accuracy = self._despite_signal(self.many.evaluate_and_record, state, validation)
        loss, accuracy = (to_host(x).astype(np.float64) for x in (loss, accuracy))
        seconds = time.perf_counter() - began
        rate = (step - start) * computed / seconds
        record = {
            "variant": self.variant,
            "step": step,
            "train_loss": train_loss.tolist(),
            "val_loss": loss.tolist(),
            "val_accuracy": accuracy.tolist(),
            "active": to_host(state.active).tolist(),
            "seconds": seconds,
            "seed_steps_per_second": rate,
            "tokens_per_second": rate * self.settings.batch_size * self.task.seq_len,
        }
        self.directory.append_metrics(record, self.replaces_after)
        self.replaces_after = None
        self.idle.count(record)
        self.diverged.report(state)
        live.evaluation(record)
        return state

    def _despite_signal(self, compute: Callable, *arguments: Any) -> Any:
        """compute(*arguments), tried again if it fails once a stop is asked for: Ctrl-C in a terminal and `timeout` also signal
        the assembler that XLA starts for a GPU, and compilation then fails, before any argument is used up."""
        try:
            return compute(*arguments)
        except jax.errors.JaxRuntimeError as error:
            if not self.stop.requested:
                raise
            log.info(
                "%s: compiling again what the signal cut short (%s)", self.variant, str(error).splitlines()[0][:100]
            )
            return compute(*arguments)

    def _warn_of_idle_devices(self) -> None:
        devices = len(jax.devices())
        if idle := devices - self.many.mesh.size:
            also = " or train.batch_size" if self.task.STREAMED else ""
            log.warning("%d devices stay idle: train.num_seeds%s should be a multiple of %d", idle, also, devices)

    def _records(self) -> list[dict[str, Any]]:
        """This variant's evaluations so far."""
        return self.directory.read_metrics(self.variant)

    def outcome(self, state: SeedState) -> VariantOutcome:
        """The outcome of the trained variant.

        Its seconds are those of training and evaluating, in this and earlier processes; steps after the last evaluation before
        an interruption are not in them, compilation is, also in the first rate of each process. A rate is of all seeds that
        steps were computed for, also of those among them that had stopped.
        """
        records = self._records()
        rates = {
            name: float(np.median([r[name] for r in records])) if records else None
            for name in ("seed_steps_per_second", "tokens_per_second")
        }
        whole = missing_evaluations(records, self.settings, step_of(state)) is None
        seconds = sum(record["seconds"] for record in records) if whole else None
        tested = self._despite_signal(self.task.test, self.many, state.best_params)
        return outcome_of(state, self.task.score.metric, seconds=seconds, **rates, **tested)


def mesh_for(variant: str, experiment: Experiment) -> jax.sharding.Mesh:
    """The devices that share out the seeds and, of a text, each batch.

    Raises ConfigError if a process would have nothing to do.
    """
    train, seeds = experiment.train, len(experiment.seeds)
    # A seed's batches are drawn on one device; those that come from the host are shared out over several.
    shared = train.batch_size // train.grad_accumulation if experiment.task.STREAMED else 1
    mesh = device_mesh(seeds, shared)
    working = {device.process_index for device in mesh.devices.flat}
    if len(working) < jax.process_count():
        raise ConfigError(
            f"{variant}: {seeds} seeds{f' of batch {shared}' if shared > 1 else ''} leave processes "
            f"without work: make train.num_seeds a multiple of {len(jax.devices())}, or start fewer processes"
        )
    return mesh


def step_of(state: SeedState) -> int:
    return int(to_host(state.step)[0])
