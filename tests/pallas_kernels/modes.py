"""In which arithmetic the kernels are tested, how exact they are to be in it; and their grids."""

import functools

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


def but_slow(shapes, *fast):
    """The names of shapes as a test's parameters; all but those named after them are slow."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in shapes]


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
