"""Kernels against plain functions of the same arguments, computed in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def value_and_gradients(function, inputs):
    """function(*inputs), and the gradient in each of a sum of it with random weights."""
    value, vjp = jax.vjp(function, *inputs)
    cotangent = np.random.default_rng(1).normal(size=value.shape)
    return value, *vjp(jnp.asarray(cotangent, value.dtype))


def check_against_float64(names, kernel, plain, inputs, tolerance):
    """Returns the kernel's value and gradients, whose relative errors are within the tolerance. names: theirs."""
    results = jax.jit(functools.partial(value_and_gradients, kernel))(inputs)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
        expected = jax.tree.map(np.asarray, jax.jit(functools.partial(value_and_gradients, plain))(exact))
    for name, result, wanted in zip(names, results, expected, strict=True):
        error = np.linalg.norm(np.asarray(result, np.float64) - wanted)
        assert error <= tolerance * (1e-2 + np.linalg.norm(wanted)), name
    return results
