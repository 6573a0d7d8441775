"""In which arithmetic the kernels are tested, how exact they are to be in it; and their grids."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

TOLERANCE = {"bf16": 1e-2, "tf32": 2e-3, "f32": 1e-5}
DTYPES = {"bf16": jnp.bfloat16, "tf32": jnp.float32, "f32": jnp.float32}
PRECISIONS = {"bf16": None, "tf32": "tensorfloat32", "f32": "highest"}
# The interpreter computes what is to be in TF32 in float32, as it does "f32".
LOWER = ["bf16", pytest.param("tf32", marks=pytest.mark.gpu)]


def value_and_gradients(function, inputs):
    """(what function gives, the gradients of its inputs for random ones of that)."""
    out, vjp = jax.vjp(function, *inputs)
    rng = np.random.default_rng(1)
    return out, vjp(jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), out))


def results(function, inputs):
    """The arrays of `value_and_gradients`, compiled."""
    return jax.tree.leaves(jax.jit(functools.partial(value_and_gradients, function))(inputs))


def exact_results(function, inputs):
    """The same in float64 on the CPU, as NumPy arrays."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return [np.asarray(x) for x in results(function, [jnp.asarray(np.asarray(x, np.float64)) for x in inputs])]


def assert_exact_enough(mode, names, found, expected, floor=0.0):
    """Each within TOLERANCE[mode], relative to what is expected, in norm; floor: added to that norm."""
    for name, x, wanted in zip(names, found, expected, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - wanted)
        assert error <= TOLERANCE[mode] * (floor + np.linalg.norm(wanted)), name


@dataclasses.dataclass(frozen=True)
class Kernel:
    """run: (shape, mode, **options) to the function of arrays; exact: (shape, **options) to the same in float64; draw: (random
    numbers, *shape) to its arguments, as float64, of which `low` are in the mode's dtype.

    shapes: (shape, options) by name, the first ones fast. wide: what is taken on a GPU, (mode) to (shape, options). outer,
    inner: the axes of two vmaps, none for an argument that is shared. floor: as of `assert_exact_enough`.
    """

    run: Callable
    exact: Callable
    draw: Callable
    low: tuple[int, ...]
    shapes: dict[str, tuple]
    wide: Callable
    outer: tuple
    inner: tuple | int = 0
    modes: tuple[str, ...] = tuple(TOLERANCE)
    floor: float = 1e-3
    fast: int = 1

    def inputs(self, shape, mode="f32", seed=0):
        drawn = self.draw(np.random.default_rng(seed), *shape)
        dtypes = [DTYPES[mode] if i in self.low else np.float32 for i in range(len(drawn))]
        return [jnp.asarray(x, jnp.float32).astype(dtype) for x, dtype in zip(drawn, dtypes, strict=True)]

    def check(self, mode, shape, inputs=None, **options):
        """Returns the value and the gradients of the inputs, as exact as the mode has to be, and of the inputs' dtypes."""
        inputs = self.inputs(shape, mode) if inputs is None else inputs
        found = results(self.run(shape, mode, **options), inputs)
        assert [x.dtype for x in found[-len(inputs) :]] == [x.dtype for x in inputs]
        expected = exact_results(self.exact(shape, **options), inputs)
        assert_exact_enough(mode, range(len(found)), found, expected, self.floor)
        return found


def by_precision(function):
    return lambda shape, mode, **options: functools.partial(function, precision=PRECISIONS[mode], **options)


def always(function):
    """Whatever the shape, the mode and the options are."""
    return lambda *shape_and_mode, **options: function


def grids(function, *arguments):
    """The grid of every pallas_call that function makes."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["grid_mapping"].grid
            else:
                for inner in jax.extend.core.jaxprs_in_params(equation.params):
                    yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*arguments).jaxpr))
