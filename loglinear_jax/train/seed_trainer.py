"""Training one seed: pure functions of its state and its batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.lam import LAM_PARAMS
from loglinear_jax.mixers import DECAY_PARAMS
from loglinear_jax.modules.positions import Positions, first_true
from loglinear_jax.tasks import SOLVED_ACCURACY, BaseTask
from loglinear_jax.train.meshes import Part, in_pieces
from loglinear_jax.train.settings import TrainSettings

Batch = tuple[Int[Array, "B T"], ...]  # tokens, targets and, of packed documents, segment_ids
Sequences = tuple[Int[Array, "... _ _"], ...]
Parts = tuple[Sequences, ...]  # of a task's mixture


# Each purpose draws from its own stream of the seed.
_INIT, _TRAIN_DATA, _VALIDATION_DATA, _BATCHES, _TEST_DATA, _FIRST_POSITIONS = range(6)


class SeedState(flax.struct.PyTreeNode):
    """One seed's training so far: parameters, optimiser, best evaluation. With many seeds every leaf has a leading seed axis.

    loss_sum is over the steps since the last evaluation, nan once the seed stopped. best_step is the evaluated step with the
    best metric, best_accuracy and best_loss what was measured there; before it they are -1 and the largest float. solved_step
    is the first evaluated step with accuracy ≥ SOLVED_ACCURACY; diverged_step the step whose loss or gradient was not finite,
    which was not taken. These three steps are -1 until that happens. A seed that stopped or diverged no longer changes its
    parameters.
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
    def active(self) -> Bool[Array, "*seeds"]:
        return ~self.stopped & (self.diverged_step < 0)


def scored_sums(
    model: nn.Module, params: Any, batch: Batch, scored: slice | int = slice(None)
) -> tuple[Array, Array, Array]:
    """(summed cross-entropy in nats, number of right argmaxes, number of targets ≥ 0). scored: where all of them are, or how
    many there are in each sequence."""
    tokens, targets, *_ = batch
    at = _positions(targets, scored)
    found: Any = model.apply(params, tokens, targets, at, **_segments(batch), method="token_losses")
    losses, right = found
    return jnp.sum(losses), jnp.sum(right), jnp.sum(targets >= 0)


def means(loss: Any, right: Any, scored: Any) -> tuple[Any, Any]:
    """(mean loss in nats, accuracy), of sums as `scored_sums` has them; arrays of JAX's or NumPy's, of any shape."""
    return loss / scored, right / scored


def mean_loss(
    model: nn.Module,
    params: Any,
    batch: Batch,
    scored: slice | int = slice(None),
    z_loss: float = 0.0,
    position_key: jax.Array | None = None,
) -> Float[Array, ""]:
    """What training minimises: the mean cross-entropy over the targets ≥ 0 of a batch, in nats; 0 if there are none.

    scored: as in `scored_sums`. z_loss: weight of (log Σ exp logits)², which is added for each of these targets.
    position_key: of the first positions that a model draws which has a random_first_position; None: all are 0.
    """
    tokens, targets, *_ = batch
    at = _positions(targets, scored)
    more = _segments(batch) | ({"z_loss": z_loss} if z_loss else {})
    more |= {} if position_key is None else {"rngs": {"first_position": position_key}}
    total: Any = model.apply(params, tokens, targets, at, **more, method="summed_loss")
    return total / jnp.maximum(_num_scored(batch), 1)


def _segments(batch: Batch) -> dict[str, Any]:
    return {"segment_ids": batch[2]} if len(batch) > 2 else {}


def _num_scored(batch: Batch) -> Int[Array, ""]:
    return jnp.sum(batch[1] >= 0)


def _positions(targets: Int[Array, "B T"], scored: slice | int) -> Positions:
    return scored if isinstance(scored, slice) else first_true(targets >= 0, scored)


def _scored(task: BaseTask) -> slice | int:
    return task.scored if task.num_scored is None else task.num_scored


def _at(data: Any, index: Int[Array, "*B"], row: Int[Array, ""] | None) -> Any:
    """data[index] of a seed. row: the seed's, in data of many; used with the index, so that no data is copied as a whole."""
    return jax.tree.map(lambda x: x[index] if row is None else x[row, index], data)


@flax.struct.dataclass
class Rates:
    """What replicas of a seed may differ in, in one program."""

    learning_rate: Float[Array, "*R"]
    weight_decay: Float[Array, "*R"]


def make_optimizer(
    settings: TrainSettings, rates: Rates | None = None, norm: Callable[[Any], Array] = optax.tree.norm
) -> optax.GradientTransformation:
    """Clipping to a global norm, then Adam or AdamW, with the learning rate's schedule.

    rates: of one replica, maybe traced, in place of those of the settings. Whether there is a weight decay at all, the settings
    say. norm: of gradients.
    """
    of = settings if rates is None else rates
    peak: Any = of.learning_rate
    share = schedule_of(settings)
    rate: Any = peak if share is None else lambda step: peak * share(step)
    clip = optax.identity() if not settings.grad_clip else _clip(settings.grad_clip, norm)
    dtype = settings.moment_dtype
    if not settings.weight_decay:
        return optax.chain(clip, optax.adam(rate, mu_dtype=dtype))
    mask = None if settings.decay_all else decayed_matrices
    return optax.chain(clip, optax.adamw(rate, mu_dtype=dtype, weight_decay=of.weight_decay, mask=mask))


def _clip(most: float, norm: Callable[[Any], Array]) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm`, with a norm of one's own."""

    def update(grads, state, params=None):
        of_all = norm(grads)
        clipped = lambda x: jnp.where(of_all < most, x, x / of_all.astype(x.dtype) * most)  # noqa: E731
        return jax.tree.map(clipped, grads), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def schedule_of(settings: TrainSettings) -> optax.Schedule | None:
    """The learning rate at each step as a share of the settings' one; None if it is always all of it."""
    warmup, last = settings.warmup_steps, settings.num_steps
    if settings.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0 if warmup else 1.0, 1.0, warmup, last)
    rise = optax.linear_schedule(0.0, 1.0, warmup) if warmup else optax.constant_schedule(1.0)
    if settings.schedule == "wsd":  # Hu et al., "MiniCPM", 2024
        fall = optax.linear_schedule(1.0, 0.0, settings.steps_of_decay)
        return optax.join_schedules([rise, fall], [last - settings.steps_of_decay])
    return rise if warmup else None


def decayed_matrices(params: Any) -> Any:
    """The rule by which weight decay reaches a parameter, True or False for each: it has two axes or more, and is neither of λ
    nor of the decays. Shrinking Λ [H, L] towards 0 would pull each λ towards a value of its own."""

    def is_decayed(path, x):
        names = {getattr(key, "key", None) for key in path}
        return x.ndim >= 2 and names.isdisjoint(LAM_PARAMS + DECAY_PARAMS)

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _padded(data: Sequences, count: int) -> Sequences:
    """So many sequences, by further ones in which nothing is scored."""
    fill = count - data[0].shape[-2]
    pads = *((0, 0) for _ in data[0].shape[:-2]), (0, fill), (0, 0)
    tokens, targets, *segments = data
    return (
        jnp.pad(tokens, pads),
        jnp.pad(targets, pads, constant_values=-1),
        *(jnp.pad(x, pads) for x in segments),
    )


class SeedTrainer:
    """Pure functions that train and evaluate one seed. loss: (model, params, batch) -> scalar; by default `mean_loss`
    where the task scores.

    Where they take a row, the data has a leading seed axis, and row is this seed's place on it; None: the data is this
    seed's own.

    token_axes: mesh axes over which the tokens of a batch are shared out, where the functions run under `jax.shard_map`. cut:
    along which axis each parameter is cut over "fsdp", as `meshes.cut_axes`; None if none is.
    """

    token_axes: tuple[str, ...] = ()
    cut: Any = None

    def __init__(
        self, model: nn.Module, task: BaseTask, settings: TrainSettings, loss: Callable[..., Array] | None = None
    ):
        self.model, self.task, self.settings = model, task, settings
        self.losses = [
            loss or functools.partial(mean_loss, scored=_scored(part), z_loss=settings.z_loss)
            for part in task.trained_on.parts
        ]
        self.optimizer = self._optimizer()

    def over(self, token_axes: tuple[str, ...], cut: Any = None) -> SeedTrainer:
        """The same with the tokens of a batch shared out over mesh axes, and parameters that are cut."""
        trainer = copy.copy(self)
        trainer.token_axes, trainer.cut = token_axes, cut
        trainer.optimizer = trainer._optimizer()
        if "sequence" in token_axes:
            trainer.model = in_pieces(self.model)
        return trainer

    def _optimizer(self, rates: Rates | None = None) -> optax.GradientTransformation:
        return make_optimizer(self.settings, rates, self._norm)

    def _norm(self, grads: Any) -> Float[Array, ""]:
        """The global norm, also of gradients that the devices have in parts."""
        if self.cut is None:
            return optax.tree.norm(grads)
        cut = jax.tree.map(lambda x, axis: jnp.zeros(()) if axis < 0 else x, grads, self.cut)
        whole = jax.tree.map(lambda x, axis: x if axis < 0 else jnp.zeros(()), grads, self.cut)
        return jnp.sqrt(jax.lax.psum(optax.tree.norm(cut, squared=True), "fsdp") + optax.tree.norm(whole, squared=True))

    def _boxed(self, params: Any) -> Any:
        """The parameters for a model to read."""
        if self.cut is None:
            return params
        rounded = getattr(self.model, "ROUNDED", None)

        def boxed(path, x, axis):
            if axis < 0:
                return x
            name = jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("params/")
            dtype = self.model.settings.dtype if rounded and rounded.fullmatch(name) else None
            return Part(x, axis, dtype)

        return jax.tree_util.tree_map_with_path(boxed, params, self.cut)

    def _key(self, seed, purpose: int):
        return jax.random.fold_in(jax.random.key(seed), purpose)

    def init(self, seed: Int[Array, ""]) -> SeedState:
        """The state before the first step."""
        tokens = jnp.zeros((1, self.task.trained_on.longest), jnp.int32)
        params = self.model.init(self._key(seed, _INIT), tokens)
        params = {"params": params["params"]}
        return SeedState(
            seed=seed,
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(params),
            best_params=params,
            best_accuracy=jnp.full((), -1, jnp.float32),
            best_loss=jnp.full((), jnp.finfo(jnp.float32).max, jnp.float32),
            best_step=jnp.full((), -1, jnp.int32),
            solved_step=jnp.full((), -1, jnp.int32),
            diverged_step=jnp.full((), -1, jnp.int32),
            stopped=jnp.zeros((), bool),
            loss_sum=jnp.zeros((), jnp.float32),
        )

    def data(self, seed: Int[Array, ""]) -> dict[str, Parts]:
        """The seed's own sequences: "validation", and "train" if the training set is fixed."""
        data = {"validation": self._draw_evaluation(seed, _VALIDATION_DATA, self.settings.num_validation)}
        if not self.settings.stream:
            data["train"] = self.task.trained_on.draw(self._key(seed, _TRAIN_DATA), self.settings.num_train)
        return data

    def _draw_evaluation(self, seed: Int[Array, ""], purpose: int, num: int) -> Parts:
        return self.task.evaluated_on.draw(self._key(seed, purpose), num, "sample_evaluation")

    def test_data(self, seed: Int[Array, ""]) -> list[Parts]:
        """The seed's num_test test sequences, which neither training nor validation draws, in pieces like the
        validation data, unless there would be too many: the same compiled program then serves both. Nothing is
        scored in what fills up the last piece."""
        drawn = self._draw_evaluation(seed, _TEST_DATA, self.settings.num_test)
        count, size = self.task.evaluated_on.pieces(self.settings.num_test, self.settings.num_validation)
        sizes = self.task.evaluated_on.split(size)
        padded = [_padded(part, count * size) for part, size in zip(drawn, sizes, strict=True)]

        def piece(index: int) -> Parts:
            ends = [slice(index * size, (index + 1) * size) for size in sizes]
            return tuple((tokens[at], targets[at]) for (tokens, targets), at in zip(padded, ends, strict=True))

        return [piece(index) for index in range(count)]

    def _batch(self, state: SeedState, data: dict[str, Parts], part: int, row: Int[Array, ""] | None) -> Batch:
        key = jax.random.fold_in(self._key(state.seed, _BATCHES), state.step)
        if "train" not in data:
            drawn: Any = self.task.trained_on.parts[part]
            return drawn.sample(key, self.settings.batch_size)
        sequences = data["train"][part]
        drawn = jax.random.randint(key, (self.settings.batch_size,), 0, sequences[0].shape[-2])
        return _at(sequences, drawn, row)

    def _step(self, state: SeedState, loss: Float[Array, ""], grads: Any, rates: Rates | None) -> SeedState:
        """One optimiser step; a no-op on parameters for a seed that stopped, diverged, or diverges right now."""
        optimizer = self.optimizer if rates is None else self._optimizer(rates)
        finite = jnp.isfinite(loss) & jnp.isfinite(self._norm(grads))
        take = state.active & finite
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
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

    def _position_key(self, state: SeedState) -> jax.Array | None:
        """That of `mean_loss` in this step, on each device its own; None where nothing is drawn."""
        if not getattr(getattr(self.model, "settings", None), "random_first_position", 0):
            return None
        key = jax.random.fold_in(self._key(state.seed, _FIRST_POSITIONS), state.step)
        return jax.random.fold_in(key, jax.lax.axis_index(self.token_axes)) if self.token_axes else key

    def _loss_and_gradients(
        self, params: Any, batch: Batch, part: int = 0, key: jax.Array | None = None
    ) -> tuple[Array, Any]:
        """part: of the task's mixture, of which the batch is. key: of `_position_key`."""

        def of(batch, key, share=None):
            drawn = {} if key is None else {"position_key": key}

            def loss(params):
                found = self.losses[part](self.model, self._boxed(params), batch, **drawn)
                return found if share is None else share * found

            return jax.value_and_grad(loss)(params)

        parts = self.settings.grad_accumulation
        if parts == 1 and not self.token_axes:
            return of(batch, key)
        total = jax.lax.psum(_num_scored(batch), self.token_axes)

        def add(sums, batch_and_key):
            batch, key = batch_and_key
            # Inside of what is differentiated, as devices exchange gradients there.
            share = _num_scored(batch) / jnp.maximum(total, 1)
            return jax.tree.map(jnp.add, sums, of(batch, key, share)), None

        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        (loss, grads), _ = jax.lax.scan(add, zeros, (split, None if key is None else jax.random.split(key, parts)))
        if self.cut is None:
            return jax.lax.psum((loss, grads), self.token_axes)
        # Gradients of parts are summed over "fsdp" already.
        others = tuple(axis for axis in self.token_axes if axis != "fsdp")
        summed = lambda x, axis: jax.lax.psum(x, self.token_axes if axis < 0 else others)  # noqa: E731
        return jax.lax.psum(loss, self.token_axes), jax.tree.map(summed, grads, self.cut)

    def train_steps(
        self,
        state: SeedState,
        data: dict[str, Any],
        step: Int[Array, ""] | None = None,
        rates: Rates | None = None,
        row: Int[Array, ""] | None = None,
        *,
        num_steps: int,
    ) -> SeedState:
        """`num_steps` steps in one scan, over `data["batches"]` [num_steps, batch, T] if given, else over batches that
        it draws.

        step: the state's own if None. Under vmap, one number for all seeds: then a step computes only the part of the
        task's mixture that it trains on. rates: this replica's own, instead of those in the settings.
        """
        parts = range(len(self.task.trained_on.parts))

        def loss_and_gradients(part, state):
            batch = self._batch(state, data, part, row)
            return self._loss_and_gradients(state.params, batch, part, self._position_key(state))

        def body(state, index_and_part):
            index, part = index_and_part
            if "batches" in data:
                batch = _at(data["batches"], index, row)
                found = self._loss_and_gradients(state.params, batch, key=self._position_key(state))
            elif len(parts) == 1:
                found = loss_and_gradients(0, state)
            else:
                found = jax.lax.switch(part, [functools.partial(loss_and_gradients, part) for part in parts], state)
            return self._step(state, *found, rates), None

        if "batches" in data and (given := data["batches"][0].shape[-3]) != num_steps:
            raise ValueError(f"data has batches of {given} steps: expected num_steps={num_steps}")
        indices = jnp.arange(num_steps)
        steps = (state.step if step is None else step) + indices
        return jax.lax.scan(body, state, (indices, self.task.trained_on.at(steps)))[0]

    def sums_of_parts(
        self, params: Any, data: Parts, row: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, " parts"], Int[Array, " parts"], Int[Array, " parts"]]:
        """`scored_sums` of each part of `data`, of which `means` are its loss and accuracy."""
        loss, right, scored = zip(
            *(
                self._sum_over(
                    batch, row, functools.partial(scored_sums, self.model, self._boxed(params), scored=_scored(part))
                )
                for part, batch in zip(self.task.evaluated_on.parts, data, strict=True)
            ),
            strict=True,
        )
        return jnp.stack(loss), jnp.stack(right), jnp.stack(scored)

    def sums_by_position(
        self, params: Any, data: Sequences, row: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, " T"], Int[Array, " T"]]:
        """(summed loss in nats, number of scored sequences) at each position of `data`: whether more context helps."""

        def sums(batch):
            losses, _ = self.model.apply(self._boxed(params), *batch[:2], **_segments(batch), method="token_losses")
            return jnp.sum(losses, axis=0), jnp.sum(batch[1] >= 0, axis=0)

        axes = tuple(axis for axis in self.token_axes if axis != "sequence")
        return self._sum_over(data, row, sums, axes)

    def _sum_over(
        self,
        data: Sequences,
        row: Int[Array, ""] | None,
        function: Callable[[Batch], Any],
        axes: tuple[str, ...] | None = None,
    ) -> Any:
        """The sum of function(batch) over all of data, in batches of eval_batch_size; axes: of devices, None for token_axes."""
        *seeds, count, length = data[0].shape
        size = min(self.settings.eval_batch_size, count)
        num = -(-count // size)
        batches = tuple(x.reshape(*seeds, num, size, length) for x in _padded(data, num * size))
        of_batches = jax.lax.map(lambda index: function(_at(batches, index, row)), jnp.arange(num))
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), of_batches)
        return jax.lax.psum(sums, self.token_axes if axes is None else axes)

    def record(
        self, state: SeedState, sums: tuple[Float[Array, " parts"], Int[Array, " parts"], Int[Array, " parts"]]
    ) -> tuple[SeedState, Array, Array]:
        """The state with the best parameters, convergence and early stopping brought up to date, and validation loss and
        accuracy. sums: `sums_of_parts` of its parameters and the validation data."""
        loss, accuracy = map(jnp.mean, means(*sums))
        # Also of a seed that diverged since: its last finite state counts.
        better = loss < state.best_loss if self.task.score.metric == "loss" else accuracy > state.best_accuracy
        stop_at, patience = self.settings.stop_at or None, self.settings.patience or None
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
