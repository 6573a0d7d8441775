"""The loop around training: schedule, log, save, resume. Everything that is computed is in loglinear_jax.train."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tensorboardX import SummaryWriter

from loglinear_jax.analysis.figures import draw_learning_curves
from loglinear_jax.runs.checkpoints import Checkpoints
from loglinear_jax.config import ConfigError, Experiment, build, check_config, variant_names
from loglinear_jax.train.data import Data, is_text, open_data, place_windows
from loglinear_jax.train.distributed import any_process, is_main, to_host
from loglinear_jax.progress import StopOnSignal, progress_bar
from loglinear_jax.runs.outcome import describe_model, summarize
from loglinear_jax.tasks import check_sample
from loglinear_jax.tasks.text import TARGETS
from loglinear_jax.train import ManySeeds, SeedState, SeedTrainer, device_mesh
from loglinear_jax.runs.workdir import Workdir, write_json
from pallas_kernels import UnsupportedError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to: its summary.json, or the place where it was interrupted."""

    summary: dict[str, Any] | None
    interrupted_at: Path | None = None


def run(config: ConfigDict, workdir: str | Path, command: Sequence[str] | None = None) -> Outcome:
    """Trains every variant of the config with the same seeds and data; goes on from where an earlier call stopped.

    command: the command line that asked for it, for summary.json.

    Raises ConfigError before anything is written if a setting can't be, and if the workdir can't be used.
    """
    check_config(config)
    experiments = {variant: build(config, variant) for variant in variant_names(config)}
    task = next(iter(experiments.values())).task  # the same for all variants
    if not is_text(task):
        try:
            check_sample(task)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"task {config.task.name}: {error}") from error
    try:
        sizes = {variant: describe_model(x.model, x.task.seq_len) for variant, x in experiments.items()}
    except UnsupportedError as error:
        raise ConfigError(f"model.implementation={config.model.implementation}: {error}") from error
    directory = Workdir(workdir, writes=is_main())
    resumed = directory.prepare(config)
    if is_text(task):
        directory.keep_corpus(task.data)
    log.info("%s %s", "Going on in" if resumed else "Writing to", directory.path)
    for variant, size in sizes.items():
        log.info("%s: %s", variant, size)

    started = time.monotonic()
    summaries: dict[str, Any] = {}
    finished = json.loads(directory.summary_file.read_text()) if directory.summary_file.exists() else None
    loop = None
    with StopOnSignal() as stop:
        for variant, experiment in experiments.items():
            loop = VariantLoop(directory, variant, experiment, stop, None if loop is None else loop.many)
            state = loop.run()
            if loop.stopping:
                return Outcome(summary=None, interrupted_at=directory.checkpoints(variant))
            if finished is not None and not loop.trained:  # before, maybe on another machine
                summaries[variant] = finished["variants"][variant]
            else:
                summaries[variant] = summarize(state, experiment.train.metric) | loop.throughput() | loop.test(state)
    if finished is not None and summaries == finished["variants"]:
        return Outcome(summary=finished)
    summary = {
        "command": None if command is None else shlex.join(command),
        **versions(),
        "seconds_in_this_process": time.monotonic() - started,
        "variants": summaries,
    }
    if is_main():
        write_json(directory.summary_file, summary)
        draw_learning_curves(directory.path, directory.curves_file)
    return Outcome(summary=summary)


def versions() -> dict[str, Any]:
    """What this process measures with."""
    devices = jax.devices()
    packages = ("loglinear_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    return {
        "device": f"{len(devices)} × {devices[0].device_kind}",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout in PYTHONPATH, not installed
        return "not installed"


def steps_worth_compiling() -> int:
    """So many steps of one seed take about as long as compiling steps for fewer seeds; not measured, so that all runs do
    alike."""
    return 2_000 if jax.default_backend() == "cpu" else 16_000


class VariantLoop:
    """Trains one variant to its end, or until a stop is asked for. other: the seeds of another variant."""

    def __init__(
        self, directory: Workdir, variant: str, experiment: Experiment, stop: StopOnSignal, other: ManySeeds | None
    ):
        self.directory, self.variant, self.stop = directory, variant, stop
        train = experiment.config.train
        self.steps_per_dispatch, self.checkpoint_every = train.steps_per_dispatch, train.checkpoint_every
        self.settings, self.task = experiment.train, experiment.task
        self.trained = self.stopping = False
        # A seed's batches of a synthetic task are drawn on one device; those of a text are shared out over several.
        shared = self.settings.batch_size // self.settings.grad_accumulation if is_text(self.task) else 1
        mesh = device_mesh(len(experiment.seeds), shared)
        working = {device.process_index for device in mesh.devices.flat}
        if len(working) < jax.process_count():
            raise ConfigError(
                f"{variant}: {len(experiment.seeds)} seeds{f' of batch {shared}' if shared > 1 else ''} leave processes "
                f"without work: make train.num_seeds a multiple of {len(jax.devices())}, or start fewer processes"
            )
        trainer = SeedTrainer(experiment.model, experiment.task, experiment.train)
        self.many = ManySeeds(trainer, experiment.seeds, mesh, other)

    def run(self) -> SeedState:
        """The last state, which is also the newest checkpoint."""
        checkpoints = Checkpoints(self.directory.checkpoints(self.variant))
        state = checkpoints.restore_latest(self.many.abstract_state())
        saved = None if state is None else _step(state)
        if state is None:
            state = self._despite_signal(self.many.init, self.many.seeds)
        step = _step(state)
        self.directory.drop_metrics_after(self.variant, step)
        self._restore_rows(step)
        self._reported = set()
        self._report_diverged(state)

        if not self._finished(state):
            if saved is not None:
                log.info("%s: going on from step %d", self.variant, saved)
            mesh = self.many.mesh
            log.info("%s: %d seed(s) on %d device(s)", self.variant, len(self.many.seeds), mesh.size)
            if idle := len(jax.devices()) - mesh.size:
                also = " or train.batch_size" if is_text(self.task) else ""
                log.warning(
                    "%d devices stay idle: train.num_seeds%s should be a multiple of %d", idle, also, len(jax.devices())
                )
            self.trained = True
            data = self._despite_signal(open_data, self.many, step)
            dispatches = data.dispatches(self._dispatch_sizes(step))
            writer = (
                SummaryWriter(str(self.directory.tensorboard(self.variant)), purge_step=step + 1) if is_main() else None
            )
            with (
                contextlib.closing(data),
                contextlib.closing(dispatches),
                progress_bar(self.variant, self.settings.num_steps, step, shown=is_main()) as bar,
            ):
                while not self._finished(state) and not self.stopping:
                    state = self._to_next_evaluation(state, data, dispatches, writer, bar)
                    step = _step(state)
                    if step % self.checkpoint_every == 0:
                        checkpoints.save(step, state)
                        saved = step
            if writer is not None:
                writer.close()
            if self.stopping:
                log.info("%s: stopping at step %d", self.variant, step)
        if saved != step:
            checkpoints.save(step, state)
        checkpoints.close()
        return state

    def _finished(self, state: SeedState) -> bool:
        """At the last step, or at an evaluation after which no seed is active (so that its last state was scored)."""
        step = _step(state)
        idle = step % self.settings.eval_every == 0 and not to_host(state.active).any()
        return step >= self.settings.num_steps or idle

    def _dispatch_sizes(self, step: int) -> Iterator[int]:
        """Steps of each dispatch from a step on; no dispatch goes past an evaluation."""
        while step < self.settings.num_steps:
            evaluation = (step // self.settings.eval_every + 1) * self.settings.eval_every
            size = min(self.steps_per_dispatch, evaluation - step, self.settings.num_steps - step)
            yield size
            step += size

    def _to_next_evaluation(
        self, state: SeedState, data: Data, dispatches: Iterator, writer: SummaryWriter | None, bar: Any
    ) -> SeedState:
        """Steps up to the next evaluation, and that evaluation; fewer steps and none if a stop is asked for meanwhile."""
        start, every = _step(state), self.settings.eval_every
        last_evaluation = start // every * every
        end = min(last_evaluation + every, self.settings.num_steps)
        began = time.perf_counter()
        computed = self._num_computed()
        while _step(state) < end:
            self.stopping = any_process(self.stop.requested)
            if self.stopping:
                return state
            num_steps, batches = next(dispatches)
            state = self._despite_signal(self.many.train_steps, state, batches, num_steps, self._rows)
            jax.block_until_ready(state.step)
            bar.update(num_steps)
        train_loss = to_host(state.loss_sum).astype(np.float64) / (end - last_evaluation)
        state, val_loss, val_accuracy = self._despite_signal(self.many.evaluate_and_record, state, data.validation)
        loss, accuracy = (to_host(x).astype(np.float64) for x in (val_loss, val_accuracy))
        seconds = time.perf_counter() - began
        rate = (end - start) * computed / seconds

        record = {
            "variant": self.variant,
            "step": end,
            "train_loss": train_loss.tolist(),
            "val_loss": loss.tolist(),
            "val_accuracy": accuracy.tolist(),
            "active": to_host(state.active).tolist(),
            "seconds": seconds,
            "seed_steps_per_second": rate,
            "tokens_per_second": rate * self.settings.batch_size * self.task.seq_len,
        }
        self.directory.append_metrics(record)
        self._count_idle(record)
        self._report_diverged(state)
        shown, what = (np.exp(loss), "perplexity") if self.settings.metric == "loss" else (accuracy, "accuracy")
        digits = 1 if self.settings.metric == "loss" else 3
        bar.set_postfix_str(
            f"{what} {shown.mean():.{digits}f} ({shown.min():.{digits}f} to {shown.max():.{digits}f})", refresh=False
        )
        for name, value in {
            "val_accuracy/mean": accuracy.mean(),
            "val_accuracy/min": accuracy.min(),
            "val_accuracy/max": accuracy.max(),
            "val_loss/mean": _finite_mean(record["val_loss"]),
            "train_loss/mean": _finite_mean(record["train_loss"]),
            "active_seeds": np.sum(record["active"]),
            "seed_steps_per_second": rate,
            "tokens_per_second": record["tokens_per_second"],
        }.items():
            if value is not None and writer is not None:
                writer.add_scalar(name, value, end)
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

    def _restore_rows(self, step: int) -> None:
        """From the evaluations up to this step, so that a run that goes on computes what it would have without a stop."""
        self._active = np.ones(len(self.many.numbers), bool)
        self._rows, self._idle_seed_steps = None, 0  # the rows that steps are computed for, None for all
        for record in self._records():
            if record["step"] <= step:  # another process may not have dropped the others yet
                self._count_idle(record)

    def _num_computed(self) -> int:
        """Seeds that steps are computed for, some that stopped included."""
        return len(self._active) if self._rows is None else self._rows.size

    def _count_idle(self, record: Mapping[str, Any]) -> None:
        """After an evaluation: leaves stopped seeds out once steps worth compiling were spent on them, and as many are
        ahead."""
        self._idle_seed_steps += self.settings.eval_every * (self._num_computed() - self._active.sum())
        self._active = np.asarray(record["active"])
        ahead = (self.settings.num_steps - record["step"]) * (self._num_computed() - self._active.sum())
        if min(self._idle_seed_steps, ahead) >= steps_worth_compiling():
            self._rows, self._idle_seed_steps = self.many.rows_to_train(self._active), 0

    def _records(self) -> list[dict[str, Any]]:
        """This variant's evaluations so far."""
        return [r for r in self.directory.read_metrics() if r["variant"] == self.variant]

    def _report_diverged(self, state: SeedState) -> None:
        for seed, step in zip(self.many.numbers, to_host(state.diverged_step), strict=True):
            if step >= 0 and seed not in self._reported:
                self._reported.add(seed)
                log.warning(
                    "%s: seed %d: loss or gradient not finite at step %d; frozen there, the others go on",
                    self.variant, seed, step,
                )  # fmt: skip

    def test(self, state: SeedState) -> dict[str, Any]:
        """For a text: what was predicted; the best parameters' loss over all of the test split, for each seed; and that by
        position in the window, over positions 0, 1, 2-3, 4-7 and so on."""
        if not is_text(self.task):
            return {}
        windows = place_windows(self.many, self.task.windows("test"))
        loss, scored = (x.astype(np.float64) for x in to_host(self.many.sums_by_position(state.best_params, windows)))
        by_position = loss / scored
        starts = [0, *(1 << np.arange((by_position.shape[1] - 1).bit_length()))]
        parts = np.split(by_position, starts[1:], axis=1)
        return {
            "predicts": TARGETS[self.task.target_offset],
            "test_loss": (loss.sum(axis=1) / scored.sum(axis=1)).tolist(),
            "test_loss_from_position": {
                str(start): np.nanmean(part, axis=1).tolist() for start, part in zip(starts, parts, strict=True)
            },
        }

    def throughput(self) -> dict[str, float | None]:
        """Seconds of training and evaluating, in this and earlier processes; median rates over the evaluations so far.

        Steps after the last evaluation before an interruption are not in the seconds. Compilation is, and in the first rate
        of each process. A rate is of all seeds that steps were computed for, also of those among them that had stopped.
        """
        records = self._records()
        return {"seconds": sum(r["seconds"] for r in records)} | {
            name: float(np.median([r[name] for r in records])) if records else None
            for name in ("seed_steps_per_second", "tokens_per_second")
        }


def _finite_mean(values: list[float]) -> float | None:
    """The mean over the seeds that have not diverged."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _step(state: SeedState) -> int:
    return int(to_host(state.step)[0])
