"""The loop around training: when to evaluate, save and record, for the variants that one program trains.

Everything that is computed is in loglinear_jax.train, everything on disk in loglinear_jax.runs.folders and .checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from loglinear_jax.config import ConfigError, Experiment, naming
from loglinear_jax.distributed import any_process, is_main, to_host
from loglinear_jax.runs.checkpoints import Checkpoints
from loglinear_jax.runs.folders import VariantFolder
from loglinear_jax.runs.live import Live, open_wandb
from loglinear_jax.runs.outcome import VariantOutcome, outcome_of
from loglinear_jax.runs.utilisation import utilisation
from loglinear_jax.runs.writing import NoReadableCheckpoint
from loglinear_jax.signals import StopOnSignal
from loglinear_jax.train import ManySeeds, SeedState, SeedTrainer, TrainSettings, device_mesh, measure_test, open_data

log = logging.getLogger(__name__)


def evaluations(settings: TrainSettings, step: int) -> Iterator[int]:
    """The steps of the evaluations after this one: every `eval_every`, and the last step."""
    while step < settings.num_steps:
        step = min((step // settings.eval_every + 1) * settings.eval_every, settings.num_steps)
        yield step


def dispatches(settings: TrainSettings, step: int) -> Iterator[int]:
    """How many steps each call of the device takes from this one on; none goes past an evaluation."""
    for evaluation in evaluations(settings, step):
        while step < evaluation:
            size = min(settings.steps_per_dispatch, evaluation - step)
            yield size
            step += size


@dataclasses.dataclass(eq=False)
class Member:
    """A variant in a program, or some seeds of it, and the folder of theirs.

    rows: of its seeds in the state of all. saved: the step of its newest checkpoint. end: its last state, once it has come to
    its end.
    """

    variant: str
    experiment: Experiment
    folder: VariantFolder
    rows: slice = dataclasses.field(default_factory=lambda: slice(None))
    checkpoints: Checkpoints | None = None
    saved: int | None = None
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

    When it runs, members are left out whose newest readable checkpoint is of another step than that of the first one that has
    not ended, unless they had ended before. wandb: the project in which W&B shows them, if any.
    """

    def __init__(self, members: Sequence[Member], stop: StopOnSignal, wandb: str = ""):
        self.members, self.stop, self.wandb = list(members), stop, wandb
        experiment = members[0].experiment
        self.settings, self.task, self.seeds = experiment.train, experiment.task, experiment.train.seeds
        self.trainer = SeedTrainer(experiment.model, self.task, self.settings)
        self.many = ManySeeds(self.trainer, self.seeds, mesh_for(self.first, experiment))
        self.stopped = False
        self._reported: set[tuple[str, int]] = set()  # variants and seeds that diverged

    def run(self, process: dict[str, Any]) -> None:
        """Trains from the newest checkpoints on. process: what processes.jsonl records of this process, if it trains."""
        with contextlib.ExitStack() as stack:
            state = self._restore(stack)
            if training := self._training():
                self._announce(state)
                for member in training:
                    member.folder.cut_metrics(step_of(state))
                    member.folder.append(member.folder.processes_file, process | {"from_step": step_of(state)})
                self._train(state)

    def _train(self, state: SeedState) -> None:
        """The loop: steps up to the next evaluation, the evaluation, and a checkpoint where one is due."""
        step, training = step_of(state), self._training()
        at = training[0].checkpoints.data_state(step) if training[0].saved is not None else None
        folders = {member.variant: member.folder for member in training}
        wandb_runs = {
            member.variant: open_wandb(self.wandb, member.folder, member.experiment.config.to_dict())
            for member in (training if self.wandb and is_main() else ())
        }
        with (
            contextlib.closing(open_data(self.many, step, at)) as data,
            contextlib.closing(data.dispatches(dispatches(self.settings, step))) as batches_to_come,
            Live(self.name, self.task.score, self.settings.num_steps, step, folders, wandb_runs) as live,
        ):
            for evaluation in evaluations(self.settings, step):
                start, began = step, time.perf_counter()
                while step < evaluation:
                    if any_process(self.stop.requested):
                        log.info("%s: stopping at step %d", self.name, step)
                        self.stopped = True
                        for member in self._training():
                            member.save(state, data.state)
                        return
                    num_steps, batches = next(batches_to_come)
                    state = self.many.train_steps(state, batches, num_steps, self.idle.rows)
                    jax.block_until_ready(state.step)
                    live.steps(num_steps)
                    step += num_steps
                stepped = time.perf_counter()
                live.evaluating()
                state, values = self._evaluate(state, data.validation)
                rate = (step - start) * self.idle.num_computed / (stepped - began)
                live.evaluation(self._record(values, step, rate, time.perf_counter() - began))
                self._end_finished(state, data.state)
                for member in self._training():
                    if step % self.settings.checkpoint_every == 0:
                        member.save(state, data.state)
                if not self._training():
                    return

    def _training(self) -> list[Member]:
        return [member for member in self.members if member.end is None]

    def _end_finished(self, state: SeedState, data: Any) -> None:
        """Saves and ends the members that have come to their end."""
        active = to_host(state.active)
        for member in self._training():
            if self._is_end(step_of(state), active[member.rows]):
                member.save(state, data)
                member.end = member.part(state)

    def _is_end(self, step: int, active: np.ndarray) -> bool:
        """Whether it is the last step, or an evaluation that scored the last state of all seeds."""
        return step >= self.settings.num_steps or (step % self.settings.eval_every == 0 and not active.any())

    # --- The beginning ------------------------------------------------------------------------------------------------

    def _restore(self, stack: contextlib.ExitStack) -> SeedState:
        """The state of all members, from their newest checkpoints or new.

        The seeds of a member that has ended stay as they are, and are computed along: a program of fewer members has arrays of
        other shapes, and so rounds differently.
        """
        states: list[Any] = []
        for member in self.members:
            member.checkpoints = stack.enter_context(Checkpoints(member.folder.checkpoints))
            state = member.checkpoints.restore_latest(self.many.abstract_state())
            if state is None and member.folder.outcome_file.exists():
                raise NoReadableCheckpoint(
                    f"{member.folder.path} is finished, but has no checkpoint to go on from; to train it anew, move the folder "
                    "away"
                )
            member.saved = None if state is None else step_of(state)
            member.end = state if state is not None and self._is_end(member.saved, to_host(state.active)) else None
            states.append(state)
        training = self._training()
        step = training[0].saved if training else max(member.saved for member in self.members)
        together = []
        for member, state in zip(self.members, states, strict=True):
            if member.saved == step:
                together.append((member, state))
            elif member.end is not None and step is not None and member.saved < step:
                together.append((member, state.replace(step=np.full_like(state.step, step))))
        self.members, states = map(list, zip(*together, strict=True))
        several = len(self.members) > 1
        if several:
            self.many = self._of_several_rates()
        for index, member in enumerate(self.members):
            member.rows = slice(index * len(self.seeds), (index + 1) * len(self.seeds)) if several else slice(None)
        state = self.many.init(self.many.seeds) if step is None else joined(states, self.many.state_sharding)
        self._report_diverged(state)
        self.idle = IdleSeeds(self.many, self.settings, self._joint_records(step_of(state)))
        return state

    def _of_several_rates(self) -> ManySeeds:
        """The seeds once for each member, at its rates."""
        settings = [member.experiment.train for member in self.members]
        rates = [(own.learning_rate, own.weight_decay) for own in settings for _ in self.seeds]
        mesh = mesh_for(self.first, self.members[0].experiment, len(settings))
        return ManySeeds(self.trainer, self.seeds * len(settings), mesh, rates)

    def _joint_records(self, last: int) -> list[dict[str, Any]]:
        """Which seeds of all were active at each evaluation up to a step."""
        none = [False] * len(self.seeds)
        active = [{r["step"]: r["active"] for r in member.folder.read_metrics(last)} for member in self.members]
        steps = sorted({step for of_one in active for step in of_one})
        return [{"step": step, "active": [x for of_one in active for x in of_one.get(step, none)]} for step in steps]

    @property
    def first(self) -> str:
        """The first variant."""
        return self.members[0].variant

    @property
    def name(self) -> str:
        """What messages call it."""
        also = len(self.members) - 1
        return self.first + (f" and {also} of other rates" if also else "")

    def _announce(self, state: SeedState) -> None:
        if self._training()[0].saved is not None:
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
        state, loss, accuracy = self.many.evaluate_and_record(state, validation)
        self._report_diverged(state)
        return state, {
            "train_loss": train_loss,
            "val_loss": to_host(loss).astype(np.float64),
            "val_accuracy": to_host(accuracy).astype(np.float64),
            "active": to_host(state.active),
        }

    def _record(self, values: dict[str, np.ndarray], step: int, rate: float, seconds: float) -> list[dict[str, Any]]:
        """The records of an evaluation, written. rate: seed-steps a second. seconds: which the members share evenly."""
        training = self._training()
        tokens = rate * self.settings.batch_size * self.task.trained_on.mean_length
        rates = {
            "seconds": seconds / len(training),
            "seed_steps_per_second": rate,
            "tokens_per_second": tokens,
        }
        if self.task.STREAMED:  # elsewhere too few positions have logits for it to be known
            of_one = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.many.abstract_state().params
            )
            share = utilisation(of_one, tokens, self.many.mesh.size)
            rates |= {} if share is None else {"utilisation": share}
        records = []
        for member in training:
            own = {name: of_all[member.rows].tolist() for name, of_all in values.items()}
            records.append({"variant": member.variant, "step": step} | own | rates)
            member.folder.append(member.folder.metrics_file, records[-1])
        self.idle.count({"step": step, "active": values["active"]})
        return records

    def _report_diverged(self, state: SeedState) -> None:
        """Warns once of each seed that diverged."""
        diverged = to_host(state.diverged_step)
        for member in self.members:
            for seed, step in zip(self.seeds, diverged[member.rows], strict=True):
                if step >= 0 and (member.variant, seed) not in self._reported:
                    self._reported.add((member.variant, seed))
                    log.warning(
                        "%s: seed %d: loss or gradient not finite at step %d; frozen there, the others go on",
                        member.variant, seed, step,
                    )  # fmt: skip

    def outcomes(self) -> Iterator[tuple[Member, VariantOutcome]]:
        """The outcomes of the members, which have all come to their end, with the test of their best parameters."""
        log.info("%s: measuring on the test set", self.name)
        best = joined([member.end.best_params for member in self.members], self.many.params_sharding)
        tested = measure_test(self.many, best)
        for member in self.members:
            yield member, self._outcome(member, of_rows(tested, member.rows))

    def _outcome(self, member: Member, tested: dict[str, Any]) -> VariantOutcome:
        """Its seconds are of this and earlier processes; None if the records of some evaluations are gone."""
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


def steps_worth_compiling() -> int:
    """So many steps of one seed take about as long as compiling steps for fewer seeds, of each part of a task's mixture. Not
    measured, so that all runs do alike."""
    return 2_000 if jax.default_backend() == "cpu" else 16_000


class IdleSeeds:
    """Which seeds steps are computed for: seeds that stopped are left out once that is worth compiling for fewer.

    The steps that stopped seeds cost are counted from the records of the evaluations: a run that goes on after a stop computes
    what it would have without one. rows: `ManySeeds.rows_to_train`, None for all seeds.
    """

    def __init__(self, many: ManySeeds, settings: TrainSettings, records: Iterable[Mapping[str, Any]]):
        self._many, self._settings = many, settings
        self._active = np.ones(len(many.numbers), bool)
        self._idle_seed_steps = 0
        self.rows: jax.Array | None = None
        for record in records:
            self.count(record)

    @property
    def num_computed(self) -> int:
        """Seeds that steps are computed for, some that stopped included."""
        return len(self._active) if self.rows is None else self.rows.size

    def count(self, record: Mapping[str, Any]) -> None:
        """After an evaluation: leaves stopped seeds out once steps worth compiling were spent on them, and as many are
        ahead."""
        self._idle_seed_steps += self._settings.eval_every * (self.num_computed - self._active.sum())
        self._active = np.asarray(record["active"])
        ahead = (self._settings.num_steps - record["step"]) * (self.num_computed - self._active.sum())
        parts = len(self._many.trainer.task.trained_on.parts)
        if min(self._idle_seed_steps, ahead) >= steps_worth_compiling() * parts:
            self.rows, self._idle_seed_steps = self._many.rows_to_train(self._active), 0


def joined(parts: Sequence[Any], sharding: Any) -> Any:
    """Trees of several members as one, with their rows one after the other."""
    if len(parts) == 1:  # perhaps cut over several processes
        return jax.device_put(parts[0], sharding)
    return jax.device_put(jax.tree.map(lambda *rows: np.concatenate([np.asarray(x) for x in rows]), *parts), sharding)


def of_rows(tested: Any, rows: slice) -> Any:
    """The rows in every list of what a test measured, also in its dicts, whose order stays."""
    if isinstance(tested, dict):  # JAX's tree.map sorts their names
        return {name: of_rows(value, rows) for name, value in tested.items()}
    return tested[rows] if isinstance(tested, list) else tested


def mesh_for(variant: str, experiment: Experiment, replicas: int = 1) -> jax.sharding.Mesh:
    """The devices that share out the seeds, so many replicas of each, and, of a text, each batch.

    Raises ConfigError if there are too few devices, or a process would have nothing to do.
    """
    train = experiment.train
    seeds = len(train.seeds) * replicas
    # A seed's batches are drawn on one device; those that come from the host are shared out over several.
    shared = train.batch_size // train.grad_accumulation if experiment.task.STREAMED else 1
    with naming(f"{variant}: "):
        mesh = device_mesh(seeds, shared, fsdp=train.fsdp_devices, sequence=train.sequence_devices)
    working = {device.process_index for device in mesh.devices.flat}
    if len(working) < jax.process_count():
        raise ConfigError(
            f"{variant}: {seeds} seeds{f' of batch {shared}' if shared > 1 else ''} leave processes "
            f"without work: make train.num_seeds a multiple of {len(jax.devices())}, or start fewer processes"
        )
    return mesh


def step_of(state: SeedState) -> int:
    return int(to_host(state.step)[0])
