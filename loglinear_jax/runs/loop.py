"""The loop around training: when to evaluate, save and record, for the variants that one program trains.

Everything that is computed is in loglinear_jax.train, everything on disk in loglinear_jax.runs.folders and .checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from loglinear_jax.config import ConfigError, Experiment
from loglinear_jax.distributed import any_process, is_main, to_host
from loglinear_jax.runs.checkpoints import Checkpoints
from loglinear_jax.runs.errors import NoReadableCheckpoint
from loglinear_jax.runs.folders import VariantFolder
from loglinear_jax.runs.idle_seeds import IdleSeeds
from loglinear_jax.runs.live import Live
from loglinear_jax.runs.outcome import VariantOutcome, outcome_of
from loglinear_jax.runs.utilisation import utilisation
from loglinear_jax.runs.wandb_runs import open_run
from loglinear_jax.settings import SettingError
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.train import ManySeeds, SeedState, SeedTrainer, TrainSettings, device_mesh, measure_test, open_data

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a program evaluates and saves, by the number of steps done."""

    settings: TrainSettings

    def evaluations(self, step: int) -> Iterator[int]:
        """The steps of the evaluations to come: every `eval_every`, and the last step."""
        every, last = self.settings.eval_every, self.settings.num_steps
        while step < last:
            step = min((step // every + 1) * every, last)
            yield step

    def dispatches(self, step: int) -> Iterator[int]:
        """How many steps each call of the device takes; none goes past an evaluation."""
        for evaluation in self.evaluations(step):
            while step < evaluation:
                size = min(self.settings.steps_per_dispatch, evaluation - step)
                yield size
                step += size

    def is_end(self, step: int, active: Bool[np.ndarray, " seeds"]) -> bool:
        """At the last step, or at an evaluation after which no seed is active, so that its last state was scored."""
        return step >= self.settings.num_steps or (step % self.settings.eval_every == 0 and not active.any())

    def saves(self, step: int) -> bool:
        return step % self.settings.checkpoint_every == 0


@dataclasses.dataclass
class Trained:
    """A variant in a program, or some seeds of it.

    rows: of its seeds in the state of all. saved: the step of its newest checkpoint. end: its last state, once it has come to
    its end.
    """

    variant: str
    experiment: Experiment
    folder: VariantFolder
    checkpoints: Checkpoints
    rows: slice
    saved: int | None
    end: SeedState | None = None

    def part(self, state: SeedState) -> SeedState:
        """Its seeds' part of the state of all."""
        return state if self.rows == slice(None) else jax.tree.map(lambda x: x[self.rows], state)

    def save(self, state: SeedState, data: Any) -> None:
        """Saves its part of the state of all, and where the data stands, unless its newest checkpoint is of that step."""
        if self.saved != step_of(state):
            self.saved = step_of(state)
            self.checkpoints.save(self.saved, self.part(state), data)


class Program:
    """Trains variants that differ in their rates only, each to its end, or until a stop is asked for.

    experiments, folders: by variant. Variants whose newest readable checkpoint is of another step than the first one's are left
    out of `members`. other: the seeds of an earlier program, whose compiled drawing of data is used again. wandb: the
    project in which W&B shows them, if any.
    """

    def __init__(
        self,
        experiments: dict[str, Experiment],
        folders: dict[str, VariantFolder],
        stop: StopOnSignal,
        other: ManySeeds | None,
        wandb: str = "",
    ):
        self.wandb = wandb
        self.experiments, self.folders, self.stop, self.other = experiments, folders, stop, other
        self.first, experiment = next(iter(experiments.items()))
        self.settings, self.task, self.seeds = experiment.train, experiment.task, experiment.seeds
        self.schedule = Schedule(self.settings)
        self.trainer = SeedTrainer(experiment.model, self.task, self.settings)
        self.many = ManySeeds(self.trainer, self.seeds, mesh_for(self.first, experiment), other)
        self.members: list[Trained] = []
        self.stopped = False
        self._reported: set[tuple[str, int]] = set()  # variants and seeds that diverged

    def run(self, process: dict[str, Any]) -> None:
        """Trains from the newest checkpoints on. process: what processes.jsonl records of this process, if it trains."""
        with contextlib.ExitStack() as stack:
            state = self._restore(stack)
            if self._training():
                self._announce(state)
                for member in self._training():
                    member.folder.cut_metrics(step_of(state))
                    member.folder.append_process(process | {"from_step": step_of(state)})
                self._train(state)

    def _train(self, state: SeedState) -> None:
        """The loop: steps up to the next evaluation, the evaluation, and a checkpoint where one is due."""
        step, schedule = step_of(state), self.schedule
        tensorboards = {member.variant: member.folder.tensorboard for member in self._training()}
        with (
            contextlib.closing(self._despite_signal(open_data, self.many, step, self._data_state(step))) as data,
            contextlib.closing(data.dispatches(schedule.dispatches(step))) as dispatches,
            Live(self.task.score, self.settings.num_steps, step, tensorboards, self._wandb_runs()) as live,
        ):
            for evaluation in schedule.evaluations(step):
                start, began = step, time.perf_counter()
                while step < evaluation:
                    if any_process(self.stop.requested):
                        return self._stop(state, data.state)
                    num_steps, batches = next(dispatches)
                    state = self._despite_signal(self.many.train_steps, state, batches, num_steps, self.idle.rows)
                    jax.block_until_ready(state.step)
                    live.steps(num_steps)
                    step += num_steps
                stepped = time.perf_counter()
                live.evaluating()
                state, values = self._evaluate(state, data.validation)
                seconds = stepped - began, time.perf_counter() - began
                live.evaluation(self._record(values, step, step - start, *seconds))
                self._end_finished(state, data.state)
                for member in self.members:
                    if member.end is None and schedule.saves(step):
                        member.save(state, data.state)
                if not self._training():
                    return

    def _training(self) -> list[Trained]:
        return [member for member in self.members if member.end is None]

    def _wandb_runs(self) -> dict[str, Any]:
        """By variant, what W&B shows of the members that train."""
        return {
            member.variant: open_run(self.wandb, member.folder, member.experiment.config.to_dict())
            for member in (self._training() if self.wandb and is_main() else ())
        }

    def _data_state(self, step: int) -> Any:
        """Where the data stood at the checkpoints that training goes on from; None for a new run."""
        first = self._training()[0]
        return None if first.saved is None else first.checkpoints.data_state(step)

    def _end_finished(self, state: SeedState, data: Any = None) -> None:
        """Ends the members that have come to their end, and saves them."""
        active = to_host(state.active)
        for member in self._training():
            if self.schedule.is_end(step_of(state), active[member.rows]):
                member.save(state, data)
                member.end = member.part(state)

    def _stop(self, state: SeedState, data: Any) -> None:
        log.info("%s: stopping at step %d", self.name, step_of(state))
        self.stopped = True
        for member in self._training():
            member.save(state, data)

    # --- The beginning ------------------------------------------------------------------------------------------------

    def _restore(self, stack: contextlib.ExitStack) -> SeedState:
        """The members, and the state of all of them: from their newest checkpoints, or new."""
        restored = {}
        for variant, folder in self.folders.items():
            checkpoints = stack.enter_context(Checkpoints(folder.checkpoints))
            state = checkpoints.restore_latest(self.many.abstract_state())
            if state is None and folder.outcome_file.exists():
                raise NoReadableCheckpoint(
                    f"{folder.path} is finished, but has no checkpoint to go on from; to train it anew, move the folder away"
                )
            restored[variant] = checkpoints, state, None if state is None else step_of(state)
        first_step = restored[self.first][2]
        chosen = [variant for variant, (_, _, step) in restored.items() if step == first_step]
        if len(chosen) > 1:
            self.many = self._of_several_rates(chosen)
        for index, variant in enumerate(chosen):
            rows = slice(index * len(self.seeds), (index + 1) * len(self.seeds)) if len(chosen) > 1 else slice(None)
            checkpoints = restored[variant][0]
            self.members.append(
                Trained(variant, self.experiments[variant], self.folders[variant], checkpoints, rows, first_step)
            )
        state = self._joined([restored[variant][1] for variant in chosen])
        self._report_diverged(state)
        self._end_finished(state)
        records = self._joint_records(step_of(state))
        self.idle = IdleSeeds(self.many, self.settings.num_steps, self.settings.eval_every, records)
        return state

    def _of_several_rates(self, variants: Sequence[str]) -> ManySeeds:
        """The seeds once for each variant, at its rates."""
        settings = [self.experiments[variant].train for variant in variants]
        rates = [(own.learning_rate, own.weight_decay) for own in settings for _ in self.seeds]
        mesh = mesh_for(self.first, self.experiments[self.first], len(variants))
        return ManySeeds(self.trainer, self.seeds * len(variants), mesh, self.other, rates)

    def _joined(self, states: Sequence[SeedState | None]) -> SeedState:
        """The state of all members, from the state of each; the initial one if they have none."""
        if states[0] is None:
            return self._despite_signal(self.many.init, self.many.seeds)
        if len(states) == 1:
            return states[0]
        joined = jax.tree.map(lambda *parts: np.concatenate([np.asarray(x) for x in parts]), *states)
        return jax.device_put(joined, self.many.state_sharding)

    def _joint_records(self, last: int) -> list[dict[str, Any]]:
        """Which seeds of all were active at each evaluation up to a step."""
        none = [False] * len(self.seeds)
        active = [{r["step"]: r["active"] for r in member.folder.read_metrics(last)} for member in self.members]
        steps = sorted({step for of_one in active for step in of_one})
        return [{"step": step, "active": [x for of_one in active for x in of_one.get(step, none)]} for step in steps]

    @property
    def name(self) -> str:
        """What messages call it."""
        also = len(self.members) - 1
        return self.first + (f" and {also} of other rates" if also else "")

    def _announce(self, state: SeedState) -> None:
        if self.members[0].saved is not None:
            log.info("%s: going on from step %d", self.name, step_of(state))
        rates = f" at each of {len(self.members)} rates" if len(self.members) > 1 else ""
        log.info("%s: %d seed(s)%s on %d device(s)", self.name, len(self.seeds), rates, self.many.mesh.size)
        devices = len(jax.devices())
        if idle := devices - self.many.mesh.size:
            also = " or train.batch_size" if self.task.STREAMED else ""
            log.warning("%d devices stay idle: train.num_seeds%s should be a multiple of %d", idle, also, devices)
        log.info("%s: compiling; the first steps and the first validation take longest", self.name)

    # --- Evaluations --------------------------------------------------------------------------------------------------

    def _evaluate(self, state: SeedState, validation: dict[str, Any]) -> tuple[SeedState, dict[str, np.ndarray]]:
        """The state after an evaluation, and its values [seeds of all members]."""
        step, every = step_of(state), self.settings.eval_every
        train_loss = to_host(state.loss_sum).astype(np.float64) / (step - (step - 1) // every * every)
        state, loss, accuracy = self._despite_signal(self.many.evaluate_and_record, state, validation)
        self._report_diverged(state)
        return state, {
            "train_loss": train_loss,
            "val_loss": to_host(loss).astype(np.float64),
            "val_accuracy": to_host(accuracy).astype(np.float64),
            "active": to_host(state.active),
        }

    def _record(
        self, values: dict[str, np.ndarray], step: int, num_steps: int, stepping: float, seconds: float
    ) -> list[dict[str, Any]]:
        """Records an evaluation of the members that train; returns the records. stepping: seconds of the steps since the last
        one. seconds: with those of the evaluation, which the members share evenly. A rate is of steps alone, and of all seeds
        that they were computed for."""
        training, records = self._training(), []
        rate = num_steps * self.idle.num_computed / stepping
        tokens = rate * self.settings.batch_size * self.task.trained_on.mean_length
        share = self._utilisation(tokens)
        used = {} if share is None else {"utilisation": share}
        for member in training:
            records.append(
                {"variant": member.variant, "step": step}
                | {name: of_all[member.rows].tolist() for name, of_all in values.items()}
                | {
                    "seconds": seconds / len(training),
                    "seed_steps_per_second": rate,
                    "tokens_per_second": tokens,
                }
                | used
            )
            member.folder.append_metrics(records[-1])
        self.idle.count({"step": step, "active": values["active"]})
        return records

    def _utilisation(self, tokens_per_second: float) -> float | None:
        """Of a text; elsewhere too few positions have logits for it to be known."""
        if not self.task.STREAMED:
            return None
        of_all = self.many.abstract_state().params
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), of_all)
        return utilisation(params, tokens_per_second, self.many.mesh.size)

    def _report_diverged(self, state: SeedState) -> None:
        """Warns once of each seed that diverged."""
        diverged = to_host(state.diverged_step)
        for member in self._training():
            for seed, step in zip(self.seeds, diverged[member.rows], strict=True):
                if step >= 0 and (member.variant, seed) not in self._reported:
                    self._reported.add((member.variant, seed))
                    log.warning(
                        "%s: seed %d: loss or gradient not finite at step %d; frozen there, the others go on",
                        member.variant, seed, step,
                    )  # fmt: skip

    def _despite_signal(self, compute: Callable, *arguments: Any) -> Any:
        """compute(*arguments), tried again if it fails once a stop is asked for: Ctrl-C in a terminal and `timeout` also signal
        the assembler that XLA starts for a GPU, and compilation then fails, before any argument is used up."""
        try:
            return compute(*arguments)
        except jax.errors.JaxRuntimeError as error:
            if not self.stop.requested:
                raise
            log.info("%s: compiling again what the signal cut short (%s)", self.first, str(error).splitlines()[0][:100])
            return compute(*arguments)

    # --- The end ------------------------------------------------------------------------------------------------------

    def outcomes(self) -> dict[str, VariantOutcome]:
        """The outcomes of the members, which have all come to their end, with the test of their best parameters."""
        log.info("%s: measuring on the test set", self.name)
        best = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(member.end.best_params for member in self.members))
        tested = self._despite_signal(measure_test, self.many, jax.device_put(best, self.many.params_sharding))
        return {member.variant: self._outcome(member, of_rows(tested, member.rows)) for member in self.members}

    def _outcome(self, member: Trained, tested: dict[str, Any]) -> VariantOutcome:
        """tested: what the test measured of it. Its seconds are those of training and evaluating in this and earlier processes,
        compilation included; None if the records of some evaluations are gone."""
        last_step = step_of(member.end)
        records = member.folder.read_metrics(last_step)
        rates = {
            name: float(np.median([r[name] for r in records])) if records else None
            for name in ("seed_steps_per_second", "tokens_per_second")
        }
        are_all = len(records) == -(-last_step // self.settings.eval_every)
        seconds = sum(record["seconds"] for record in records) if are_all else None
        return outcome_of(
            member.end, self.task.score.metric, num_steps=self.settings.num_steps, seconds=seconds, **rates, **tested
        )


def of_rows(tested: Any, rows: slice) -> Any:
    """The rows in every list of what a test measured, also in its dicts, whose order stays."""
    if isinstance(tested, dict):  # JAX's tree.map sorts their names
        return {name: of_rows(value, rows) for name, value in tested.items()}
    return tested[rows] if isinstance(tested, list) else tested


def mesh_for(variant: str, experiment: Experiment, replicas: int = 1) -> jax.sharding.Mesh:
    """The devices that share out the seeds, so many replicas of each, and, of a text, each batch.

    Raises ConfigError if there are too few devices, or a process would have nothing to do.
    """
    train, seeds = experiment.train, len(experiment.seeds) * replicas
    # A seed's batches are drawn on one device; those that come from the host are shared out over several.
    shared = train.batch_size // train.grad_accumulation if experiment.task.STREAMED else 1
    try:
        mesh = device_mesh(seeds, shared, fsdp=train.fsdp_devices, sequence=train.sequence_devices)
    except SettingError as error:
        raise ConfigError(f"{variant}: {error}") from error
    working = {device.process_index for device in mesh.devices.flat}
    if len(working) < jax.process_count():
        raise ConfigError(
            f"{variant}: {seeds} seeds{f' of batch {shared}' if shared > 1 else ''} leave processes "
            f"without work: make train.num_seeds a multiple of {len(jax.devices())}, or start fewer processes"
        )
    return mesh


def step_of(state: SeedState) -> int:
    return int(to_host(state.step)[0])
