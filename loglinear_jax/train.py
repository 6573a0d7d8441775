"""Training many seeds at once: pure functions of one seed, vmapped, sharded over devices, and jitted.

Everything of a seed follows from its number: initial parameters, data set, batch order, validation set. So seed i of
a run of many is the same experiment as seed i alone.
"""

from __future__ import annotations

import dataclasses
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

PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "tensorfloat32"}
Batch = tuple[Int[Array, "B T"], Int[Array, "B T"]]

# Each purpose draws from its own stream of the seed.
_INIT, _TRAIN_DATA, _VALIDATION_DATA, _BATCHES = range(4)


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How to train one variant.

    num_steps, batch_size, learning_rate: Adam without a schedule, as in the paper.
    grad_clip: global norm to clip gradients to, or None.
    num_train: size of each seed's fixed training set; None for an endless stream of fresh sequences.
    num_validation, eval_batch_size: size of each seed's validation set; sequences per seed evaluated at once.
    eval_every: steps between evaluations. stop_at: validation accuracy at which a seed stops, or None.
    precision: "float32", "tf32", or "bfloat16" (bfloat16 activations, float32 parameters).
    """

    num_steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    grad_clip: float | None = 1.0
    num_train: int | None = 10_000
    num_validation: int = 1_000
    eval_batch_size: int = 250
    eval_every: int = 100
    stop_at: float | None = 0.99
    precision: str = "float32"


@flax.struct.dataclass
class SeedState:
    """All that one seed's training has come to. With many seeds every leaf has a leading seed axis.

    loss_sum is over the steps since the last evaluation. converged_step is the first evaluated step with accuracy ≥ CONVERGED; diverged_step the step whose loss or gradient
    was not finite, which was not taken; both -1 while that has not happened. A seed that stopped or diverged no longer
    changes its parameters.
    """

    seed: Int[Array, ""]
    step: Int[Array, ""]
    params: Any
    opt_state: Any
    best_params: Any
    best_accuracy: Float[Array, ""]
    best_step: Int[Array, ""]
    converged_step: Int[Array, ""]
    diverged_step: Int[Array, ""]
    stopped: Bool[Array, ""]
    loss_sum: Float[Array, ""]

    @property
    def active(self) -> Bool[Array, ""]:
        return ~self.stopped & (self.diverged_step < 0)


CONVERGED = 0.99


def scored_loss(logits: Float[Array, "B T vocab"], targets: Int[Array, "B T"]) -> tuple[Array, Array, Array]:
    """(summed cross-entropy in nats, number of correct argmax, number of scored positions); targets < 0 do not count."""
    scored = targets >= 0
    labels = jnp.where(scored, targets, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    return jnp.sum(losses * scored), jnp.sum(correct & scored), jnp.sum(scored)


def mean_loss(model: nn.Module, params: Any, batch: Batch) -> Float[Array, ""]:
    """Mean cross-entropy over the scored positions of a batch, in nats."""
    tokens, targets = batch
    loss, _, scored = scored_loss(model.apply(params, tokens), targets)
    return loss / scored


class SeedTrainer:
    """The pure functions of one seed. `loss` (model, params, batch) -> scalar may be replaced."""

    def __init__(self, model: nn.Module, task: Task, settings: TrainSettings, loss: Callable[..., Array] = mean_loss):
        self.model, self.task, self.settings, self.loss = model, task, settings, loss
        clip = optax.identity() if settings.grad_clip is None else optax.clip_by_global_norm(settings.grad_clip)
        self.optimizer = optax.chain(clip, optax.adam(settings.learning_rate))

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
            best_step=jnp.full((), -1, jnp.int32),
            converged_step=jnp.full((), -1, jnp.int32),
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

    def _batch(self, state: SeedState, data: dict[str, Batch]) -> Batch:
        key = jax.random.fold_in(self._key(state.seed, _BATCHES), state.step)
        if "train" not in data:
            return self.task.sample(key, self.settings.batch_size)
        rows = jax.random.randint(key, (self.settings.batch_size,), 0, self.settings.num_train)
        return jax.tree.map(lambda x: x[rows], data["train"])

    def train_step(self, state: SeedState, batch: Batch) -> SeedState:
        """One optimiser step; a no-op on parameters for a seed that stopped, diverged, or diverges right now."""
        loss, grads = jax.value_and_grad(lambda params: self.loss(self.model, params, batch))(state.params)
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
            loss_sum=state.loss_sum + loss,
        )

    def train_steps(self, state: SeedState, data: dict[str, Batch], num_steps: int) -> SeedState:
        """`num_steps` steps in one scan."""

        def body(state, _):
            return self.train_step(state, self._batch(state, data)), None

        return jax.lax.scan(body, state, length=num_steps)[0]

    def evaluate(self, params: Any, data: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(mean loss in nats, accuracy) over the scored positions of `data`."""
        size = min(self.settings.eval_batch_size, data[0].shape[0])
        num = -(-data[0].shape[0] // size)
        pad = num * size - data[0].shape[0]
        tokens, targets = (
            jnp.pad(x, [(0, pad), (0, 0)], constant_values=fill).reshape(num, size, -1)
            for x, fill in zip(data, (0, -1), strict=True)
        )
        sums = jax.lax.map(lambda b: scored_loss(self.model.apply(params, b[0]), b[1]), (tokens, targets))
        loss, correct, scored = (jnp.sum(x) for x in sums)
        return loss / scored, correct / scored

    def evaluate_and_record(self, state: SeedState, data: dict[str, Batch]) -> tuple[SeedState, Array, Array]:
        """Validation loss and accuracy, with the best parameters, convergence and early stopping brought up to date."""
        loss, accuracy = self.evaluate(state.params, data["validation"])
        better = accuracy > state.best_accuracy  # also of a seed that diverged since: its last finite state counts
        stop_at = self.settings.stop_at
        state = state.replace(
            best_params=jax.tree.map(lambda a, b: jnp.where(better, a, b), state.params, state.best_params),
            best_accuracy=jnp.where(better, accuracy, state.best_accuracy),
            best_step=jnp.where(better, state.step, state.best_step),
            converged_step=jnp.where(
                state.active & (accuracy >= CONVERGED) & (state.converged_step < 0), state.step, state.converged_step
            ),
            stopped=state.stopped | (state.active & (accuracy >= stop_at)) if stop_at is not None else state.stopped,
            loss_sum=jnp.zeros_like(state.loss_sum),
        )
        return state, loss, accuracy


def seed_mesh(num_seeds: int, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh with the one axis "seed" over as many devices as divide the seeds evenly."""
    devices = jax.devices() if devices is None else devices
    count = max(n for n in range(1, len(devices) + 1) if num_seeds % n == 0)
    return jax.sharding.Mesh(np.array(devices[:count]), ("seed",))


class ManySeeds:
    """A SeedTrainer's functions over a leading seed axis, sharded over a mesh. No device talks to another.

    Each takes and returns trees whose leaves have a leading seed axis; states are donated.
    """

    def __init__(self, trainer: SeedTrainer, seeds: list[int], mesh: jax.sharding.Mesh | None = None):
        self.trainer = trainer
        self.mesh = seed_mesh(len(seeds)) if mesh is None else mesh
        self.sharding = NamedSharding(self.mesh, PartitionSpec("seed"))
        self.seeds = jax.device_put(np.asarray(seeds, np.int32), self.sharding)
        self.init = self._jit(trainer.init)
        self.data = self._jit(trainer.data)
        self.evaluate_and_record = self._jit(trainer.evaluate_and_record, donate=True)
        self._train_steps: dict[int, Callable] = {}

    def train_steps(self, state: SeedState, data: Any, num_steps: int) -> SeedState:
        """`SeedTrainer.train_steps` for every seed."""
        if num_steps not in self._train_steps:
            steps = lambda state, data: self.trainer.train_steps(state, data, num_steps)  # noqa: E731
            self._train_steps[num_steps] = self._jit(steps, donate=True)
        return self._train_steps[num_steps](state, data)

    def abstract_state(self) -> SeedState:
        """Shapes, dtypes and shardings of the state, for a checkpoint to be restored into."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding),
            jax.eval_shape(self.init, self.seeds),
        )

    def _jit(self, function: Callable, donate: bool = False) -> Callable:
        spec = PartitionSpec("seed")
        sharded = jax.shard_map(jax.vmap(function), mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        jitted = jax.jit(sharded, donate_argnums=(0,) if donate else ())

        def call(*args):
            with jax.default_matmul_precision(PRECISIONS[self.trainer.settings.precision]):
                return jitted(*args)

        return call
