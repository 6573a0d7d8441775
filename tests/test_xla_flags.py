"""Several seeds at once, compiled as users compile them, where a version of XLA needs flags for that."""

import os
import subprocess
import sys

import pytest

from loglinear_jax.xla_flags import avoid_faults

# Gradients of two seeds at once are those of each: two heads share their keys, so arrays have seven axes.
GRADIENTS = """
import jax
import jax.numpy as jnp
import numpy as np
from loglinear_jax import gated_delta_attention, log_linear_attention

keys = jax.random.split(jax.random.key(0), 6)
q, k, v = (jax.random.normal(key, (2, 2, 32, heads, 16)) for key, heads in zip(keys, (1, 1, 2)))
log_decay = -jnp.abs(jax.random.normal(keys[3], (2, 2, 32, 2)))
beta = jax.random.uniform(keys[4], (2, 2, 32, 2))
lam = jax.random.uniform(keys[5], (2, 2, 32, 2, 6))
for attention, inputs in (
    (log_linear_attention, (q, k, v, log_decay, lam)),
    (gated_delta_attention, (q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, log_decay, beta)),
):
    gradient = jax.grad(lambda *x: jnp.sum(attention(*x, implementation="xla") ** 2), argnums=range(5))
    together, alone = jax.jit(jax.vmap(gradient)), jax.jit(gradient)
    for _ in range(10):
        ours = together(*inputs)
    for seed in range(2):
        for got, expected in zip(ours, alone(*(x[seed] for x in inputs))):
            np.testing.assert_allclose(got[seed], expected, rtol=1e-3, atol=1e-3)
print("equal")
"""


@pytest.mark.slow
def test_gradients_of_several_seeds():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run([sys.executable, "-c", GRADIENTS], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "equal\n"), ended.stderr


FLAG = "--xla_cpu_experimental_ynn_fusion_type=dot,individual_dot"
NO_FUSION = "--xla_cpu_experimental_ynn_fusion_type="


@pytest.mark.parametrize(
    "jaxlib, before, after",
    [
        ("0.10.2", None, FLAG),
        ("0.10.2", "", FLAG),
        ("0.10.2", "--xla_a=1 --xla_b=2", f"{FLAG} --xla_a=1 --xla_b=2"),
        ("0.10.2", "my_flags", "my_flags"),
        ("0.10.2", NO_FUSION, NO_FUSION),
        ("0.11.2", "--xla_a=1", "--xla_a=1"),
    ],
)
def test_flags_are_added_where_they_are_needed(monkeypatch, jaxlib, before, after):
    """XLA takes a value that begins with no - for the name of a file."""
    monkeypatch.setattr("importlib.metadata.version", {"jaxlib": jaxlib}.__getitem__)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if before is not None:
        monkeypatch.setenv("XLA_FLAGS", before)
    avoid_faults()
    assert os.environ["XLA_FLAGS"] == after
