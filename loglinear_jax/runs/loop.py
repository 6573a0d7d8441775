"""The loop around training: when to evaluate, save and log, of variants that one program trains.

Everything that is computed is in loglinear_jax.train, everything on disk in loglinear_jax.runs.workdir and .checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from loglinear_jax.config import ConfigError, Experiment
from loglinear_jax.distributed import any_process, to_host
from loglinear_jax.runs.checkpoints import Checkpoints
from loglinear_jax.runs.errors import NoReadableCheckpoint
from loglinear_jax.runs.idle_seeds import IdleSeeds
from loglinear_jax.runs.lines import missing_evaluations
from loglinear_jax.runs.live import DivergedSeeds, Live
from loglinear_jax.runs.outcome import VariantOutcome, outcome_of
from loglinear_jax.runs.workdir import Workdir
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.train import ManySeeds, SeedState, SeedTrainer, device_mesh, measure_test, open_data

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Member:
    """A variant in a TrainingLoop. rows: of its seeds in the state of all. saved: step of its newest checkpoint.
    replaces_after: what is recorded past this step is replaced by the next evaluation. end: its last state, once it has come to
    its end."""

    variant: str
    rows: slice
    checkpoints: Checkpoints
    diverged: DivergedSeeds
    saved: int | None
    replaces_after: int | None
    end: SeedState | None = None

    def part(self, state: SeedState) -> SeedState:
        """Of the state of all."""
        return state if self.rows == slice(None) else jax.tree.map(lambda x: x[self.rows], state)

    def save(self, state: SeedState) -> None:
        """state: of all."""
        if self.saved != step_of(state):
            self.saved = step_of(state)
            self.checkpoints.save(self.saved, self.part(state))


class TrainingLoop:
    """Trains variants that differ in their rates alone in one program, each to its end, or until a stop is asked for.

    Those whose newest readable checkpoint is of another step than the first one's are left out: see the states that `run`
    returns. process: what processes.jsonl says of this process, if it trains. other: the seeds of other variants.
    """

    def __init__(
        self,
        directory: Workdir,
        experiments: dict[str, Experiment],
        stop: StopOnSignal,
        process: dict[str, Any],
        other: ManySeeds | None,
    ):
        self.directory, self.experiments, self.stop = directory, experiments, stop
        self.process, self.other = process, other
        self.first, experiment = next(iter(experiments.items()))
        self.settings, self.task, self.seeds = experiment.train, experiment.task, experiment.seeds
        self.trainer = SeedTrainer(experiment.model, self.task, self.settings)
        self.stopping = False
        self.many = self._of_one = ManySeeds(self.trainer, self.seeds, mesh_for(self.first, experiment), other)

    def run(self, retrain: bool = False) -> dict[str, SeedState]:
        """The last state of each variant, which is also its newest checkpoint.

        retrain: begin with the first step if there are checkpoints, but none can be read.
        """
        with contextlib.ExitStack() as stack:
            restored = {}
            for variant in self.experiments:
                self.directory.make_folders(variant)
                checkpoints = stack.enter_context(Checkpoints(self.directory.checkpoints(variant)))
                restored[variant] = checkpoints, self._restore(checkpoints, retrain)
            state = self._begin(restored, retrain)
            if self._training():
                if (saved := self.members[0].saved) is not None:
                    log.info("%s: going on from step %d", self.name, saved)
                rates = f" at each of {len(self.members)} rates" if len(self.members) > 1 else ""
                log.info("%s: %d seed(s)%s on %d device(s)", self.name, len(self.seeds), rates, self.many.mesh.size)
                self._warn_of_idle_devices()
                log.info("%s: compiling; the first steps and the first validation take longest", self.name)
                with contextlib.closing(self._train(state)) as states:
                    for state in states:
                        self._after_evaluation(state)
                if self.stopping:
                    log.info("%s: stopping at step %d", self.name, step_of(state))
                    for member in self._training():
                        member.save(state)
        return {member.variant: member.end for member in self.members}

    def _restore(self, checkpoints: Checkpoints, retrain: bool) -> SeedState | None:
        try:
            return checkpoints.restore_latest(self._of_one.abstract_state())
        except NoReadableCheckpoint:
            if not retrain:
                raise
            checkpoints.set_aside(checkpoints.steps())
            return None

    def _begin(self, restored: dict[str, tuple[Checkpoints, SeedState | None]], copied: bool) -> SeedState:
        """The members, and the state of all of them, from what was restored of each variant.

        copied: whether copies of all that is recorded are kept already.
        """
        steps = {variant: None if state is None else step_of(state) for variant, (_, state) in restored.items()}
        chosen = [variant for variant in restored if steps[variant] == steps[self.first]]
        if len(chosen) > 1:
            rates = [(x.train.learning_rate, x.train.weight_decay) for x in map(self.experiments.get, chosen)]
            self.many = ManySeeds(
                self.trainer,
                self.seeds * len(chosen),
                mesh_for(self.first, self.experiments[self.first], len(chosen)),
                self.other,
                [own for own in rates for _ in self.seeds],
            )
        self.members = []
        for index, variant in enumerate(chosen):
            seeds = len(self.seeds)
            rows = slice(index * seeds, (index + 1) * seeds) if len(chosen) > 1 else slice(None)
            self.members.append(
                Member(
                    variant, rows, restored[variant][0], DivergedSeeds(variant, self.seeds), steps[variant],
                    steps[variant] or 0,
                )
            )  # fmt: skip
        states = [restored[variant][1] for variant in chosen]
        if states[0] is None:
            state = self._despite_signal(self.many.init, self.many.seeds)
        elif len(states) == 1:
            (state,) = states
        else:
            joined = jax.tree.map(lambda *parts: np.concatenate([np.asarray(x) for x in parts]), *states)
            state = jax.device_put(joined, self.many.sharding)
        diverged = to_host(state.diverged_step)
        for member in self.members:
            self._report_lost(member, copied)
            member.diverged.report(diverged[member.rows])
            self._end_if_finished(member, state)
        self.idle = IdleSeeds(
            self.many, self.settings.num_steps, self.settings.eval_every, self._joint_records(step_of(state))
        )
        return state

    @property
    def name(self) -> str:
        """In messages."""
        also = len(self.members) - 1
        return self.first + (f" and {also} of other rates" if also else "")

    def _training(self) -> list[Member]:
        return [member for member in self.members if member.end is None]

    def _report_lost(self, member: Member, copied: bool) -> None:
        """Reads what is recorded up to where the state is. What is recorded past it stays until it is replaced."""
        step, records = member.replaces_after, self._records(member.variant)
        ahead = [record["step"] for record in records if record["step"] > step]
        if ahead and max(ahead) - step > 2 * self.settings.checkpoint_every:  # more than a kill can lose
            log.warning(
                "%s: recorded up to step %d, but there is no checkpoint after step %d: trained again from there",
                member.variant, max(ahead), step,
            )  # fmt: skip
            if not copied:
                self.directory.keep_copies()
        records = [record for record in records if record["step"] <= step]
        if missing := missing_evaluations(records, self.settings, step):
            log.warning("%s: %s", member.variant, missing)

    def _joint_records(self, last: int) -> list[dict[str, Any]]:
        """Which seeds of all were active at each evaluation up to a step."""
        none = [False] * len(self.seeds)
        active = [{r["step"]: r["active"] for r in self._records(member.variant)} for member in self.members]
        steps = sorted({step for of_one in active for step in of_one if step <= last})
        return [{"step": step, "active": [x for of_one in active for x in of_one.get(step, none)]} for step in steps]

    def _after_evaluation(self, state: SeedState) -> None:
        """Saves what is due, and what has come to its end. Also called where a stop was asked for before an evaluation."""
        for member in self._training():
            if not self.stopping:
                self._end_if_finished(member, state)
            if member.end is not None or step_of(state) % self.settings.checkpoint_every == 0:
                member.save(state)

    def _end_if_finished(self, member: Member, state: SeedState) -> None:
        if self._finished(step_of(state), to_host(state.active)[member.rows]):
            member.end = member.part(state)

    def _train(self, state: SeedState) -> Iterator[SeedState]:
        """The state after each evaluation, until all have come to their end or a stop was asked for."""
        step, settings = step_of(state), self.settings
        for member in self._training():
            self.directory.append_process(self.process | {"variant": member.variant, "from_step": step})
        data = self._despite_signal(open_data, self.many, step)
        dispatches = data.dispatches(self._dispatch_sizes(step))
        tensorboards = {member.variant: self.directory.tensorboard(member.variant) for member in self._training()}
        with (
            contextlib.closing(data),
            contextlib.closing(dispatches),
            Live(self.task.score, settings.num_steps, step, tensorboards) as live,
        ):
            while self._training() and not self.stopping:
                began, start, computed = time.perf_counter(), step_of(state), self.idle.num_computed
                state = self._to_next_evaluation(state, dispatches, live)
                if not self.stopping:
                    live.evaluating()
                    state = self._evaluate(state, data.validation, start, computed, began, live)
                yield state

    def _finished(self, step: int, active: Bool[np.ndarray, " seeds"]) -> bool:
        """At the last step, or at an evaluation after which no seed is active (so that its last state was scored)."""
        return step >= self.settings.num_steps or (step % self.settings.eval_every == 0 and not active.any())

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
        step, every, training = step_of(state), self.settings.eval_every, self._training()
        train_loss = to_host(state.loss_sum).astype(np.float64) / (step - (step - 1) // every * every)
        state, loss, accuracy = self._despite_signal(self.many.evaluate_and_record, state, validation)
        of_seeds = {
            "train_loss": train_loss,
            "val_loss": to_host(loss).astype(np.float64),
            "val_accuracy": to_host(accuracy).astype(np.float64),
            "active": to_host(state.active),
        }
        seconds = time.perf_counter() - began
        rate = (step - start) * computed / seconds
        diverged, records = to_host(state.diverged_step), []
        for member in training:
            records.append(
                {"variant": member.variant, "step": step}
                | {name: values[member.rows].tolist() for name, values in of_seeds.items()}
                | {
                    "seconds": seconds / len(training),
                    "seed_steps_per_second": rate,
                    "tokens_per_second": rate * self.settings.batch_size * self.task.trained_on.mean_length,
                }
            )
            self.directory.append_metrics(records[-1], member.replaces_after)
            member.replaces_after = None
            member.diverged.report(diverged[member.rows])
        self.idle.count({"step": step, "active": of_seeds["active"]})
        live.evaluation(records)
        return state

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

    def _warn_of_idle_devices(self) -> None:
        devices = len(jax.devices())
        if idle := devices - self.many.mesh.size:
            also = " or train.batch_size" if self.task.STREAMED else ""
            log.warning("%d devices stay idle: train.num_seeds%s should be a multiple of %d", idle, also, devices)

    def _records(self, variant: str) -> list[dict[str, Any]]:
        """A variant's evaluations so far."""
        return self.directory.read_metrics(variant)

    def outcomes(self, states: dict[str, SeedState]) -> dict[str, VariantOutcome]:
        """The outcomes of the trained variants, from what `run` returned."""
        log.info("%s: measuring on the test set", self.name)
        best = [states[member.variant].best_params for member in self.members]
        tested = self._despite_signal(self._test, best)
        return {
            member.variant: self._outcome(member.variant, states[member.variant], of_rows(tested, member.rows))
            for member in self.members
        }

    def _test(self, best: list[Any]) -> dict[str, Any]:
        """What the test measures of all members together. best: the parameters of each."""
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *best)
        return measure_test(self.many, jax.device_put(joined, self.many.sharding))

    def _outcome(self, variant: str, state: SeedState, tested: dict[str, Any]) -> VariantOutcome:
        """tested: what the task's test measured of it.

        Its seconds are those of training and evaluating, in this and earlier processes; steps after the last evaluation
        before an interruption are not in them, compilation is, also in the first rate of each process. A rate is of all seeds
        that steps were computed for, also of those among them that had stopped, and of all variants in the same program; these
        share the seconds evenly.
        """
        records = self._records(variant)
        rates = {
            name: float(np.median([r[name] for r in records])) if records else None
            for name in ("seed_steps_per_second", "tokens_per_second")
        }
        whole = missing_evaluations(records, self.settings, step_of(state)) is None
        seconds = sum(record["seconds"] for record in records) if whole else None
        return outcome_of(state, self.task.score.metric, seconds=seconds, **rates, **tested)


def of_rows(tested: Any, rows: slice) -> Any:
    """Of what a task's test measured, the rows in every list, also in its dicts, whose order stays."""
    if isinstance(tested, dict):  # JAX's tree.map sorts their names
        return {name: of_rows(value, rows) for name, value in tested.items()}
    return tested[rows] if isinstance(tested, list) else tested


def mesh_for(variant: str, experiment: Experiment, replicas: int = 1) -> jax.sharding.Mesh:
    """The devices that share out the seeds, so many replicas of each, and, of a text, each batch.

    Raises ConfigError if a process would have nothing to do.
    """
    train, seeds = experiment.train, len(experiment.seeds) * replicas
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
