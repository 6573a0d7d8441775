"""Training many seeds at once: pure functions of one seed, vmapped, sharded over devices, and jitted.

Everything of a seed follows from its number: initial parameters, data set, batch order, validation set. So seed i of
a run of many is the same experiment as seed i alone. Seeds that stopped need not cost anything: steps can be
computed for half of the seeds, a quarter or an eighth alone.

Devices form a mesh with two axes: "seed", whose parts never talk to each other, and "batch", over which the sequences of a
streamed batch are shared out (data parallelism).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.tasks import Task

METRICS = ("accuracy", "loss")
SCHEDULES = ("constant", "cosine")
PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "tensorfloat32"}
Batch = tuple[Int[Array, "B T"], Int[Array, "B T"]]

# Each purpose draws from its own stream of the seed.
_INIT, _TRAIN_DATA, _VALIDATION_DATA, _BATCHES = range(4)


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How to train one variant.

    num_steps, batch_size, learning_rate: of Adam, or AdamW with a weight_decay.
    warmup_steps, schedule: the learning rate rises linearly, then stays ("constant") or falls to 0 at num_steps ("cosine").
    weight_decay, decay_all: on matrices only, or on every parameter.
    grad_clip: global norm to clip gradients to, or None.
    grad_accumulation: parts of a batch whose gradients are computed one after another, to save memory. Each part counts the
      same, so where sequences have different numbers of targets the loss is another mean.
    num_train: size of each seed's fixed training set; None for an endless stream of fresh sequences. (A text has its own.)
    num_validation, eval_batch_size: size of each seed's validation set; sequences per seed evaluated at once.
    eval_every: steps between evaluations. stop_at: validation accuracy at which a seed stops, or None.
    metric: which validation value is best, the highest "accuracy" or the lowest "loss".
    patience: evaluations in a row without a better one, after which a seed stops; or None.
    precision: "float32", "tf32", or "bfloat16" (bfloat16 activations, float32 parameters).
    """

    num_steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    schedule: str = "constant"
    weight_decay: float = 0.0
    decay_all: bool = False
    grad_clip: float | None = 1.0
    grad_accumulation: int = 1
    num_train: int | None = 10_000
    num_validation: int = 1_000
    eval_batch_size: int = 250
    eval_every: int = 100
    stop_at: float | None = 0.99
    metric: str = "accuracy"
    patience: int | None = None
    precision: str = "float32"


@flax.struct.dataclass
class SeedState:
    """All that one seed's training has come to. With many seeds every leaf has a leading seed axis.

    loss_sum is over the steps since the last evaluation, nan once the seed stopped. best_step is the evaluated step with the
    best metric, best_accuracy and best_loss what was measured there. solved_step is the first evaluated step with accuracy
    ≥ SOLVED_ACCURACY; diverged_step the step whose loss or gradient was not finite, which was not taken; all -1 while that
    has not happened. A seed that stopped or diverged no longer changes its parameters.
    """

    seed: Int[Array, ""]
    step: Int[Array, ""]
    params: Any
    opt_state: Any
    best_params: Any
    best_accuracy: Float[Array, ""]
    best_loss: Float[Array, ""]
    best_step: Int[Array, ""]
    solved_step: Int[Array, ""]
    diverged_step: Int[Array, ""]
    stopped: Bool[Array, ""]
    loss_sum: Float[Array, ""]

    @property
    def active(self) -> Bool[Array, ""]:
        return ~self.stopped & (self.diverged_step < 0)


SOLVED_ACCURACY = 0.99  # validation accuracy at which solved_step is set


def scored_sums(model: nn.Module, params: Any, batch: Batch, scored: slice = slice(None)) -> tuple[Array, Array, Array]:
    """(summed cross-entropy in nats, number of right argmaxes, number of targets ≥ 0). scored: where all of them are."""
    tokens, targets = batch
    losses, right = model.apply(params, tokens, targets, scored, method="token_losses")
    return jnp.sum(losses), jnp.sum(right), jnp.sum(targets >= 0)


def mean_loss(model: nn.Module, params: Any, batch: Batch, scored: slice = slice(None)) -> Float[Array, ""]:
    """What training minimises: the mean cross-entropy over the targets ≥ 0 of a batch, in nats. scored: where they all are."""
    tokens, targets = batch
    return model.apply(params, tokens, targets, scored, method="summed_loss") / jnp.sum(targets >= 0)


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Clipping, then Adam or AdamW, with the learning rate's schedule."""
    rate = settings.learning_rate
    if settings.schedule == "cosine":
        rate = optax.warmup_cosine_decay_schedule(
            0.0 if settings.warmup_steps else rate, rate, settings.warmup_steps, settings.num_steps
        )
    elif settings.warmup_steps:
        rate = optax.linear_schedule(0.0, rate, settings.warmup_steps)
    clip = optax.identity() if settings.grad_clip is None else optax.clip_by_global_norm(settings.grad_clip)
    if not settings.weight_decay:
        return optax.chain(clip, optax.adam(rate))
    mask = None if settings.decay_all else lambda params: jax.tree.map(lambda x: x.ndim >= 2, params)
    return optax.chain(clip, optax.adamw(rate, weight_decay=settings.weight_decay, mask=mask))


class SeedTrainer:
    """The pure functions of one seed. loss: (model, params, batch) -> scalar, if not `mean_loss` where the task scores.

    With a batch_axis they run under shard_map with that axis, each device with its share of the sequences.
    """

    batch_axis: str | None = None

    def __init__(self, model: nn.Module, task: Task, settings: TrainSettings, loss: Callable[..., Array] | None = None):
        self.model, self.task, self.settings = model, task, settings
        self.loss = loss or functools.partial(mean_loss, scored=task.scored)
        self.optimizer = make_optimizer(settings)

    def over(self, batch_axis: str) -> SeedTrainer:
        """The same with sequences shared out over a mesh axis."""
        trainer = copy.copy(self)
        trainer.batch_axis = batch_axis
        return trainer

    def _key(self, seed, purpose: int):
        return jax.random.fold_in(jax.random.key(seed), purpose)

    def init(self, seed: Int[Array, ""]) -> SeedState:
        """The state before the first step."""
        tokens = jnp.zeros((1, self.task.seq_len), jnp.int32)
        params = self.model.init(self._key(seed, _INIT), tokens)
        params = {"params": params["params"]}
        return SeedState(
            seed=seed,
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(params),
            best_params=params,
            best_accuracy=jnp.full((), -1, jnp.float32),
            best_loss=jnp.full((), jnp.inf, jnp.float32),
            best_step=jnp.full((), -1, jnp.int32),
            solved_step=jnp.full((), -1, jnp.int32),
            diverged_step=jnp.full((), -1, jnp.int32),
            stopped=jnp.zeros((), bool),
            loss_sum=jnp.zeros((), jnp.float32),
        )

    def data(self, seed: Int[Array, ""]) -> dict[str, Batch]:
        """The seed's own sequences: "validation", and "train" if the training set is fixed."""
        data = {"validation": self.task.sample(self._key(seed, _VALIDATION_DATA), self.settings.num_validation)}
        if self.settings.num_train is not None:
            data["train"] = self.task.sample(self._key(seed, _TRAIN_DATA), self.settings.num_train)
        return data

    def draws_as(self, other: SeedTrainer) -> bool:
        """Whether the other's data is the same."""
        sizes = [(trainer.settings.num_train, trainer.settings.num_validation) for trainer in (self, other)]
        return self.task == other.task and sizes[0] == sizes[1]

    def _batch(self, state: SeedState, data: dict[str, Batch]) -> Batch:
        key = jax.random.fold_in(self._key(state.seed, _BATCHES), state.step)
        if "train" not in data:
            return self.task.sample(key, self.settings.batch_size)
        rows = jax.random.randint(key, (self.settings.batch_size,), 0, self.settings.num_train)
        return jax.tree.map(lambda x: x[rows], data["train"])

    def train_step(self, state: SeedState, batch: Batch) -> SeedState:
        """One optimiser step; a no-op on parameters for a seed that stopped, diverged, or diverges right now."""
        loss, grads = self._loss_and_gradients(state.params, batch)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
        take = state.active & finite
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)

        return state.replace(
            step=state.step + 1,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            diverged_step=jnp.where(state.active & ~finite, state.step, state.diverged_step),
            loss_sum=state.loss_sum + jnp.where(state.active, loss, jnp.nan),
        )

    def _loss_and_gradients(self, params: Any, batch: Batch) -> tuple[Array, Any]:
        def of(batch):
            return jax.value_and_grad(lambda params: self.loss(self.model, params, batch))(params)

        parts = self.settings.grad_accumulation
        if parts == 1:
            result = of(batch)
        else:
            split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
            zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
            add = lambda sums, part: (jax.tree.map(jnp.add, sums, of(part)), None)  # noqa: E731
            sums, _ = jax.lax.scan(add, zeros, split)
            result = jax.tree.map(lambda x: x / parts, sums)
        return result if self.batch_axis is None else jax.lax.pmean(result, self.batch_axis)

    def train_steps(self, state: SeedState, data: dict[str, Batch], num_steps: int) -> SeedState:
        """`num_steps` steps in one scan, over data["batches"] [num_steps, batch, T] if given, else over batches it draws."""

        def body(state, batch):
            return self.train_step(state, self._batch(state, data) if batch is None else batch), None

        return jax.lax.scan(body, state, data.get("batches"), length=num_steps)[0]

    def evaluate(self, params: Any, data: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(mean loss in nats, accuracy) over the scored positions of `data`."""
        loss, right, scored = self._sum_over(
            data, lambda batch: scored_sums(self.model, params, batch, self.task.scored)
        )
        return loss / scored, right / scored

    def sums_by_position(self, params: Any, data: Batch) -> tuple[Float[Array, " T"], Int[Array, " T"]]:
        """(summed loss in nats, number of scored sequences) at each position of `data`: whether more context helps."""

        def sums(batch):
            losses, _ = self.model.apply(params, *batch, method="token_losses")
            return jnp.sum(losses, axis=0), jnp.sum(batch[1] >= 0, axis=0)

        return self._sum_over(data, sums)

    def _sum_over(self, data: Batch, function: Callable[[Batch], Any]) -> Any:
        """The sum of function(batch) over all of data, in batches of eval_batch_size, on all devices of the batch axis."""
        size = min(self.settings.eval_batch_size, data[0].shape[0])
        num = -(-data[0].shape[0] // size)
        pad = num * size - data[0].shape[0]
        batches = tuple(
            jnp.pad(x, [(0, pad), (0, 0)], constant_values=fill).reshape(num, size, -1)
            for x, fill in zip(data, (0, -1), strict=True)
        )
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(function, batches))
        return sums if self.batch_axis is None else jax.lax.psum(sums, self.batch_axis)

    def evaluate_and_record(self, state: SeedState, data: dict[str, Batch]) -> tuple[SeedState, Array, Array]:
        """Validation loss and accuracy, with the best parameters, convergence and early stopping brought up to date."""
        loss, accuracy = self.evaluate(state.params, data["validation"])
        # Also of a seed that diverged since: its last finite state counts.
        better = loss < state.best_loss if self.settings.metric == "loss" else accuracy > state.best_accuracy
        stop_at, patience = self.settings.stop_at, self.settings.patience
        best_step = jnp.where(better, state.step, state.best_step)
        stops = jnp.zeros((), bool) if stop_at is None else accuracy >= stop_at
        if patience is not None:
            stops |= state.step - jnp.maximum(best_step, 0) >= patience * self.settings.eval_every
        state = state.replace(
            best_params=jax.tree.map(lambda a, b: jnp.where(better, a, b), state.params, state.best_params),
            best_accuracy=jnp.where(better, accuracy, state.best_accuracy),
            best_loss=jnp.where(better, loss, state.best_loss),
            best_step=best_step,
            solved_step=jnp.where(
                state.active & (accuracy >= SOLVED_ACCURACY) & (state.solved_step < 0),
                state.step,
                state.solved_step,
            ),
            stopped=state.stopped | (state.active & stops),
            loss_sum=jnp.zeros_like(state.loss_sum),
        )
        return state, loss, accuracy


def device_mesh(num_seeds: int, batch_size: int = 1, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh ("seed", "batch") over as many devices as can share out seeds and batch evenly, the seeds first."""
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    ways = [
        (s, b) for s in range(1, count + 1) for b in range(1, count // s + 1) if num_seeds % s == batch_size % b == 0
    ]
    over_seeds, over_batch = max(ways, key=lambda way: (way[0] * way[1], way[0]))
    devices = np.array(devices[: over_seeds * over_batch]).reshape(over_seeds, over_batch)
    return jax.sharding.Mesh(devices, ("seed", "batch"))


_SEED = PartitionSpec("seed")
# How data is laid out over the mesh: every leaf has a leading seed axis.
DATA_SPECS = {
    "train": _SEED,
    "validation": PartitionSpec("seed", "batch"),
    "batches": PartitionSpec("seed", None, "batch"),
}


class ManySeeds:
    """A SeedTrainer's functions over a leading seed axis, sharded over a mesh.

    Each takes and returns trees whose leaves have a leading seed axis; states are donated. Data is a dict with keys of
    DATA_SPECS. other: for another model, say; what draws the same data is not compiled again.
    """

    def __init__(
        self,
        trainer: SeedTrainer,
        seeds: list[int],
        mesh: jax.sharding.Mesh | None = None,
        other: ManySeeds | None = None,
    ):
        self.mesh = device_mesh(len(seeds)) if mesh is None else mesh
        self.trainer = trainer if self.mesh.shape["batch"] == 1 else trainer.over("batch")
        self.sharding = NamedSharding(self.mesh, _SEED)
        self.numbers = list(seeds)
        self.seeds = jax.device_put(np.asarray(seeds, np.int32), self.sharding)
        names = ("validation",) if trainer.settings.num_train is None else ("validation", "train")
        windows = DATA_SPECS["validation"]
        self.init = self._jit(jax.vmap(trainer.init), _SEED)
        if other is not None and other.mesh == self.mesh and other.trainer.draws_as(trainer):
            self.data = other.data
        else:
            self.data = self._jit(jax.vmap(trainer.data), _SEED, returns={name: DATA_SPECS[name] for name in names})
        self.sums_by_position = self._jit(jax.vmap(self.trainer.sums_by_position), _SEED, windows)
        self._evaluate_and_record = self._jit(
            jax.vmap(self.trainer.evaluate_and_record), _SEED, {"validation": windows}, donate=True
        )
        self._train_steps: dict[Any, Callable] = {}

    def train_steps(
        self, state: SeedState, data: dict[str, Any], num_steps: int, rows: Int[Array, " R"] | None = None
    ) -> SeedState:
        """`SeedTrainer.train_steps` for every seed, or for the `rows_to_train` alone: of the others only `step` changes, and
        loss_sum becomes nan."""
        data = {name: value for name, value in data.items() if name != "validation"}
        key = num_steps, rows is None, *sorted(data)
        if key not in self._train_steps:
            steps = jax.vmap(functools.partial(self.trainer.train_steps, num_steps=num_steps))

            def steps_of_rows(state, data, rows):
                trained = steps(*jax.tree.map(lambda x: x[rows], (state, data)))
                state = state.replace(step=state.step + num_steps, loss_sum=jnp.full_like(state.loss_sum, jnp.nan))
                return jax.tree.map(lambda old, new: old.at[rows].set(new), state, trained)

            specs = {name: DATA_SPECS[name] for name in data}
            function, takes = (steps, (_SEED, specs)) if rows is None else (steps_of_rows, (_SEED, specs, _SEED))
            self._train_steps[key] = self._jit(function, *takes, donate=True)
        return self._train_steps[key](state, data, *(() if rows is None else (rows,)))

    def rows_to_train(self, active: Bool[np.ndarray, " S"]) -> Int[Array, " R"] | None:
        """Rows of the state, counted on each device, that hold all active seeds: an eighth of all, a quarter or half (each
        size is compiled), as many on every device; None if it takes more."""
        active = active.reshape(self.mesh.shape["seed"], -1)
        seeds = active.shape[1]
        sizes = sorted({-(-seeds // part) for part in (8, 4, 2)})
        size = next((size for size in sizes if size >= active.sum(1).max()), seeds)
        if size == seeds:
            return None
        rows = np.sort(np.argsort(~active, axis=1, kind="stable")[:, :size], axis=1).astype(np.int32).reshape(-1)
        return jax.make_array_from_callback(rows.shape, self.sharding, lambda at: rows[at])

    def evaluate_and_record(self, state: SeedState, data: dict[str, Any]) -> tuple[SeedState, Array, Array]:
        """`SeedTrainer.evaluate_and_record` for every seed."""
        return self._evaluate_and_record(state, {"validation": data["validation"]})

    def abstract_state(self) -> SeedState:
        """Shapes, dtypes and shardings of the state, for a checkpoint to be restored into."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding),
            jax.eval_shape(self.init, self.seeds),
        )

    def place(self, name: str, value: Any) -> Any:
        """Host arrays, the same on every process, as data[name] of all devices together."""
        sharding = NamedSharding(self.mesh, DATA_SPECS[name])
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at]), value)

    def _jit(self, function: Callable, *takes: Any, returns: Any = _SEED, donate: bool = False) -> Callable:
        """function: of the seeds that a device has."""
        sharded = jax.shard_map(function, mesh=self.mesh, in_specs=takes, out_specs=returns, check_vma=False)
        jitted = jax.jit(sharded, donate_argnums=(0,) if donate else ())

        def call(*args):
            with jax.default_matmul_precision(PRECISIONS[self.trainer.settings.precision]):
                return jitted(*args)

        return call
