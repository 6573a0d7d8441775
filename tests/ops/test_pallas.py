"""implementation="pallas": states in and out, which the kernels leave to plain JAX, and when it is chosen."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax import FenwickState, log_linear_attention, num_levels
from loglinear_jax.ops.log_linear import pallas

from .inputs import outputs_and_gradients, random_inputs, relative_error

HAS_GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize("start", [None, 0, 16, 45])
def test_states_in_and_out(start):
    length = 35
    levels = num_levels(length + (start or 0)) + 1
    inputs = random_inputs(0, 1, length, 1, 2, 16, 16, levels, dtype=np.float32)
    initial = None
    if start is not None:
        stood = np.random.default_rng(0).normal(size=(1, 2, levels, 16, 16))
        initial = FenwickState(jnp.asarray(stood, jnp.float32), jnp.asarray(start, jnp.int32))
    with pallas_kernels.interpret(not HAS_GPU):
        out, state, grads = outputs_and_gradients(
            inputs, initial, implementation="pallas", chunk_size=16, precision="highest"
        )
    expected, expected_state, expected_grads = outputs_and_gradients(inputs, initial, implementation="parallel")
    assert relative_error(out, expected) < 1e-5
    assert relative_error(state.levels, expected_state.levels) < 1e-5
    assert state.position == expected_state.position
    for name, grad in grads.items():
        assert np.linalg.norm(grad - expected_grads[name]) <= 1e-5 * (1 + np.linalg.norm(expected_grads[name])), name


def test_segments_are_one_pass():
    inputs = random_inputs(1, 1, 64, 1, 2, 16, 16, dtype=np.float32)
    whole = log_linear_attention(*inputs, implementation="parallel")
    with pallas_kernels.interpret(not HAS_GPU):
        kwargs = dict(implementation="pallas", return_state=True, chunk_size=16, precision="highest")
        first, state = log_linear_attention(*(x[:, :32] for x in inputs), **kwargs)
        second, state = log_linear_attention(*(x[:, 32:] for x in inputs), initial_state=state, **kwargs)
    assert relative_error(jnp.concatenate([first, second], axis=1), whole) < 1e-5
    assert state.position == 64


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_nothing_is_chosen_silently():
    inputs = random_inputs(2, 1, 9, 1, 1, 16, 16, dtype=np.float32)
    with pytest.raises(ValueError, match="JAX runs on cpu"):
        log_linear_attention(*inputs, implementation="pallas")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_linear_attention(*inputs)
        with pallas_kernels.interpret():  # which is for tests: it must be named to be used
            assert not pallas.is_best(*inputs[:3])


def test_a_gpu_that_cannot_run_the_kernels_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(pallas.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(pallas.pallas_kernels, "interpreting", lambda: False)
    inputs = random_inputs(3, 1, 9, 1, 1, 8, 8, dtype=np.float32)
    pallas._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"falls back to implementation='xla'.*K, the key dim, is 8") as caught:
        out = log_linear_attention(*inputs)
        log_linear_attention(*inputs)
    assert len(caught) == 1
    assert relative_error(out, log_linear_attention(*inputs, implementation="parallel")) < 1e-5


def test_whether_kernels_can_run_is_asked_for_the_dtype_that_is_computed_in(monkeypatch):
    asked = []
    monkeypatch.setattr(pallas.pallas_kernels, "runs_on_gpu", lambda: True)
    monkeypatch.setattr(pallas.pallas_kernels, "interpreting", lambda: False)
    monkeypatch.setattr(pallas.pallas_kernels, "why_unsupported", lambda *settings: asked.append(settings[2]))
    q, k, v, *_ = random_inputs(3, 1, 9, 1, 1, 16, 16, dtype=np.float32)
    assert pallas.is_best(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v)
    assert asked == [jnp.float32]


@pytest.mark.gpu
def test_pallas_is_the_default_on_a_gpu():
    inputs = random_inputs(4, 1, 200, 1, 2, 32, 32, dtype=np.float32)
    np.testing.assert_array_equal(log_linear_attention(*inputs), log_linear_attention(*inputs, implementation="pallas"))
