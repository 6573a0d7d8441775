"""Training many seeds at once: pure functions of one seed, vmapped, sharded over devices, and jitted.

Everything of a seed follows from its number: initial parameters, batch order, the sequences of training, validation and test.
So seed i of a run of many is the same experiment as seed i alone. Seeds that stopped need not cost anything: steps can be
computed for half of the seeds, a quarter or an eighth alone.

How seeds, batches, parameters and sequences lie on the devices, `train.meshes` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.distributed import to_host
from loglinear_jax.tasks.draws import standard_settings
from loglinear_jax.train.meshes import DATA_SPECS, OF_TOKENS, SEED, cut_axes, device_mesh, own_parts, specs_of
from loglinear_jax.train.seed_trainer import Rates, SeedState, SeedTrainer, means
from loglinear_jax.train.settings import PRECISIONS


def _over_seeds(function: Callable) -> Callable:
    """function(state, data, row) of one seed, over the leading axis of each; with rows, all seeds are given all of the data."""

    def over(own, data, rows):
        return jax.vmap(function, in_axes=(0, 0 if rows is None else None, 0))(own, data, rows)

    return over


class ManySeeds:
    """A SeedTrainer's functions over a leading seed axis, sharded over a mesh.

    Each function takes and returns trees whose leaves have a leading seed axis; states are donated. Data is a dict with
    the keys of DATA_SPECS.

    rates: (learning rate, weight decay) of each seed, for replicas of a seed that differ in nothing else; None: those of the
    trainer's settings.

    Replicas share their seed's training, validation and test data, unless the mesh spreads the replicas over several
    devices. seeds_of_data: the seeds along the leading axis of data. rows_of_data: which of these each replica uses;
    None if each has its own data.
    """

    def __init__(
        self,
        trainer: SeedTrainer,
        seeds: list[int],
        mesh: jax.sharding.Mesh | None = None,
        rates: Sequence[tuple[float, float]] | None = None,
    ):
        self.mesh = device_mesh(len(seeds)) if mesh is None else mesh
        self.sharding = NamedSharding(self.mesh, SEED)
        self.numbers = list(seeds)
        self.seeds = jax.device_put(np.asarray(seeds, np.int32), self.sharding)
        self._rates = None
        if rates is not None:
            self._rates = jax.device_put(Rates(*np.asarray(rates, np.float32).T), self.sharding)
        self.seeds_of_data, self.rows_of_data, self._drawn = self.numbers, None, self.seeds
        if self.mesh.shape["seed"] == 1 and len(set(seeds)) < len(seeds):
            self.seeds_of_data = list(dict.fromkeys(seeds))
            rows = [self.seeds_of_data.index(seed) for seed in seeds]
            self.rows_of_data = jax.device_put(np.asarray(rows, np.int32), self.sharding)
            self._drawn = jax.device_put(np.asarray(self.seeds_of_data, np.int32), self.sharding)
        init = jax.vmap(trainer.init)
        self._specs: Any = SEED
        if self.mesh.shape["fsdp"] > 1:
            with standard_settings():
                self._specs = specs_of(jax.eval_shape(init, self.seeds), self.mesh)
        of_params = self._specs if self._specs is SEED else self._specs.params
        self.params_sharding, self.state_sharding = map(self._shardings, (of_params, self._specs))
        axes = tuple(axis for axis in OF_TOKENS if self.mesh.shape[axis] > 1)
        self.trainer = trainer.over(axes, None if of_params is SEED else cut_axes(of_params)) if axes else trainer
        names = ("validation",) if trainer.settings.stream else ("validation", "train")
        windows = DATA_SPECS["validation"]
        self.init = self._jit(lambda seeds: own_parts(init(seeds), self._specs), SEED, returns=self._specs)
        self._draw = self._jit(jax.vmap(trainer.data), SEED, returns={name: DATA_SPECS[name] for name in names})
        self._draw_test = self._jit(jax.vmap(trainer.test_data), SEED, returns=windows)
        self._sums_by_position = self._jit(
            _over_seeds(self.trainer.sums_by_position),
            of_params,
            windows,
            SEED,
            returns=PartitionSpec("seed", "sequence"),
        )
        self._sums_of_parts = self._jit(_over_seeds(self.trainer.sums_of_parts), of_params, windows, SEED)
        self._record = self._jit(
            jax.vmap(self.trainer.record), self._specs, SEED, returns=(self._specs, SEED, SEED), donate=True
        )
        self._train_steps: dict[Any, Callable] = {}

    def data(self) -> dict[str, Any]:
        """`SeedTrainer.data` of each of `seeds_of_data`."""
        return self._draw(self._drawn)

    def train_steps(
        self, state: SeedState, data: dict[str, Any], num_steps: int, rows: Int[Array, " R"] | None = None
    ) -> SeedState:
        """`SeedTrainer.train_steps` for every seed, or for the `rows_to_train` alone: for the others only `step`
        changes, and loss_sum becomes nan."""
        data = {name: value for name, value in data.items() if name != "validation"}
        key = num_steps, rows is None, *sorted(data)
        if key not in self._train_steps:
            of_seed = functools.partial(self.trainer.train_steps, num_steps=num_steps)

            def steps(state, data, rates, rows_of_data):
                step = state.step[0]  # the same for all seeds
                of_row = _over_seeds(lambda own, data, row: of_seed(own[0], data, step, own[1], row))
                return of_row((state, rates), data, rows_of_data)

            def steps_of_rows(state, data, rates, rows_of_data, rows):
                some, rates = jax.tree.map(lambda x: x[rows], (state, rates))
                trained = steps(some, data, rates, rows if rows_of_data is None else rows_of_data[rows])
                state = state.replace(step=state.step + num_steps, loss_sum=jnp.full_like(state.loss_sum, jnp.nan))
                return jax.tree.map(lambda old, new: old.at[rows].set(new), state, trained)

            takes = [self._specs, {name: DATA_SPECS[name] for name in data}, SEED, SEED]
            if rows is None:
                self._train_steps[key] = self._jit(steps, *takes, returns=self._specs, donate=True)
            else:
                self._train_steps[key] = self._jit(steps_of_rows, *takes, SEED, returns=self._specs, donate=True)
        return self._train_steps[key](state, data, self._rates, self.rows_of_data, *(() if rows is None else (rows,)))

    def rows_to_train(self, active: Bool[np.ndarray, " S"]) -> Int[Array, " R"] | None:
        """Rows of the state, counted on each device, that hold all active seeds: an eighth, a quarter or half of all
        (each size is compiled), equally many on every device; None if more are needed."""
        active = active.reshape(self.mesh.shape["seed"], -1)
        seeds = active.shape[1]
        sizes = sorted({-(-seeds // part) for part in (8, 4, 2)})
        size = next((size for size in sizes if size >= active.sum(1).max()), seeds)
        if size == seeds:
            return None
        rows = np.sort(np.argsort(~active, axis=1, kind="stable")[:, :size], axis=1).astype(np.int32).reshape(-1)
        return jax.make_array_from_callback(rows.shape, self.sharding, lambda at: rows[at])

    def evaluate_and_record(self, state: SeedState, data: dict[str, Any]) -> tuple[SeedState, Array, Array]:
        """Validation loss and accuracy of every seed, and the state with them by `SeedTrainer.record`."""
        return self._record(state, self._sums_of_parts(state.params, data["validation"], self.rows_of_data))

    def sums_by_position(self, params: Any, windows: tuple[Array, ...]) -> tuple[Array, Array]:
        """`SeedTrainer.sums_by_position` for every seed's parameters."""
        return self._sums_by_position(params, windows, self.rows_of_data)

    def test(self, params: Any) -> tuple[Float[np.ndarray, "S parts"], Float[np.ndarray, "S parts"]]:
        """(mean loss in nats, accuracy) over the scored positions of each part of the test sequences, for every
        seed's parameters, with the same program as validation. Every process must call it."""
        pieces = [self._sums_of_parts(params, piece, self.rows_of_data) for piece in self._draw_test(self._drawn)]
        total: Any = sum(np.stack(to_host(sums)).astype(np.float64) for sums in pieces)
        loss, accuracy = means(*total)
        return loss.astype(np.float32), accuracy.astype(np.float32)

    def abstract_state(self) -> SeedState:
        """Shapes, dtypes and shardings of the state, for a checkpoint to be restored into."""
        shapes = jax.eval_shape(self.init, self.seeds)
        shardings = jax.tree.broadcast(self.state_sharding, shapes)
        return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, shardings)

    def place(self, name: str, value: Any) -> Any:
        """Host arrays, the same on every process, as data[name] of all devices together."""
        sharding = NamedSharding(self.mesh, DATA_SPECS[name])
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at]), value)

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def _jit(self, function: Callable, *takes: Any, returns: Any = SEED, donate: bool = False) -> Callable:
        """function: of the seeds that a device has."""
        sharded = jax.shard_map(function, mesh=self.mesh, in_specs=takes, out_specs=returns, check_vma=False)
        jitted = jax.jit(sharded, donate_argnums=(0,) if donate else ())

        def call(*args):
            with standard_settings(), jax.default_matmul_precision(PRECISIONS[self.trainer.settings.precision]):
                return jitted(*args)

        return call
