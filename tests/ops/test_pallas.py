"""When implementation="pallas" is chosen, and what is said where it cannot be. What it computes: test_forms.py."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax import log_linear_attention
from loglinear_jax.ops.log_linear import pallas
from pallas_kernels import KERNELS, registry
from pallas_kernels.common import support

from .forms import FORMS
from .inputs import random_inputs, relative_error

HAS_GPU = jax.default_backend() == "gpu"


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_nothing_is_chosen_and_nothing_said(caplog):
    inputs = random_inputs(2, 1, 9, 1, 1, 16, 16, dtype=np.float32)
    with pytest.raises(ValueError, match="JAX runs on cpu"):
        log_linear_attention(*inputs, implementation="pallas")
    log_linear_attention(*inputs)
    with pallas_kernels.interpret():  # which is for tests: it must be named to be used
        assert not pallas.is_best(*inputs[:3])
    assert not caplog.records


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize(
    "operation", [form.operation for form in FORMS if form.name == "pallas"], ids=lambda operation: operation.name
)
def test_after_the_interpreter_kernels_are_refused_again(operation):
    inputs = operation.inputs(0, 1, 20, 1, 1, 16, 16, dtype=np.float32)
    with pallas_kernels.interpret():
        operation.function(*inputs, implementation="pallas", chunk_size=16)
    with pytest.raises(ValueError, match="JAX runs on cpu"):
        operation.function(*inputs, implementation="pallas", chunk_size=16)


def test_a_gpu_that_cannot_run_the_kernels_falls_back_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(support, "interpreting", lambda: False)
    inputs = random_inputs(3, 1, 9, 1, 1, 8, 8, dtype=np.float32)
    registry.tell_once.cache_clear()
    out = log_linear_attention(*inputs)
    log_linear_attention(*inputs)
    [message] = caplog.messages
    assert re.search(r"falls back to implementation='xla'.*K, the key dim, is 8", message)
    assert relative_error(out, log_linear_attention(*inputs, implementation="parallel")) < 1e-5


def test_whether_kernels_can_run_is_asked_for_the_dtype_that_is_computed_in(monkeypatch):
    asked = []
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    monkeypatch.setattr(support, "interpreting", lambda: False)
    monkeypatch.setattr(KERNELS["log_linear_attention"], "limits", lambda *problem: asked.append(problem[2]))
    q, k, v, *_ = random_inputs(3, 1, 9, 1, 1, 16, 16, dtype=np.float32)
    assert pallas.is_best(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v)
    assert asked == [jnp.float32]


@pytest.mark.gpu
def test_pallas_is_the_default_on_a_gpu():
    inputs = random_inputs(4, 1, 200, 1, 2, 32, 32, dtype=np.float32)
    np.testing.assert_array_equal(log_linear_attention(*inputs), log_linear_attention(*inputs, implementation="pallas"))


def test_rows_at_positions_of_their_own_are_mapped_over_seeds():
    """A vmap of a vmap of lax.cond, which maps the constants of the kernels' functions, too."""
    inputs = [jnp.stack([x, -x]) for x in random_inputs(0, 2, 32, 1, 1, 16, 16, 8, np.float32)[:3]]
    inputs += [jnp.stack([x, x]) for x in random_inputs(0, 2, 32, 1, 1, 16, 16, 8, np.float32)[3:]]
    position = jnp.asarray([[3, 16], [5, 40]], jnp.int32)

    def run(implementation):
        def loss(*inputs):
            attend = functools.partial(log_linear_attention, implementation=implementation)
            out = jax.vmap(lambda position, *inputs: attend(*inputs, first_position=position))(position, *inputs)
            return jnp.sum(jnp.cos(out)), out

        grads, out = jax.grad(loss, range(5), has_aux=True)(*inputs)
        return out, *grads

    with pallas_kernels.interpret():
        for x, y in zip(run("pallas"), run("xla"), strict=True):
            assert relative_error(x, y) < 1e-5
