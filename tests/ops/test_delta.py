"""What the delta rule is for, and what its functions refuse; their values, states and gradients: test_forms.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax import (
    gated_delta_attention,
    init_fenwick_state,
    log_linear_delta_attention,
    log_linear_delta_step,
)
from loglinear_jax.ops.delta import pallas
from pallas_kernels.common import support

from .forms import DELTA, FORMS, GATED_DELTA
from .inputs import in_float64, relative_error

# But the kernels, which take no float64.
NAMES = [form.name for form in FORMS if form.operation is GATED_DELTA and form.name != "pallas"]
every_form = pytest.mark.parametrize("implementation", NAMES)


@every_form
@in_float64
def test_lambda_of_one_is_gated_deltanet(implementation):
    *inputs, lam = DELTA.inputs(4, 2, 45, 2, 4, 3, 5)
    out = log_linear_delta_attention(*inputs, jnp.ones_like(lam), implementation=implementation, chunk_size=8)
    assert relative_error(out, gated_delta_attention(*inputs, implementation="recurrent")) < 1e-12


@every_form
@in_float64
def test_nothing_is_written_with_beta_zero(implementation):
    q, k, v, log_decay, beta, lam = DELTA.inputs(5, 1, 20, 1, 2, 3, 5)
    out = log_linear_delta_attention(q, k, v, log_decay, 0 * beta, lam, implementation=implementation)
    np.testing.assert_array_equal(out, 0.0)


@every_form
@in_float64
def test_the_last_value_of_each_key_is_recalled_exactly(implementation):
    """Orthonormal keys, β = 1 and no decay: each key is written twice, and found as it was written last."""
    rng = np.random.default_rng(0)
    keys, values = np.linalg.qr(rng.normal(size=(6, 6)))[0], rng.normal(size=(12, 4))
    order = np.concatenate([rng.permutation(6), rng.permutation(6)])
    asked = rng.permutation(6)
    last = np.array([6 + np.argmax(order[6:] == key) for key in asked])
    k = np.concatenate([keys[order], np.zeros((6, 6))])
    q = np.concatenate([np.zeros((12, 6)), keys[asked]])
    v = np.concatenate([values, np.zeros((6, 4))])
    q, k, v = (jnp.asarray(x)[None, :, None] for x in (q, k, v))
    ones = jnp.ones((1, 18, 1))
    for attention, more in ((gated_delta_attention, ()), (log_linear_delta_attention, (jnp.ones((1, 18, 1, 6)),))):
        out = attention(q, k, v, 0 * ones, ones, *more, implementation=implementation, chunk_size=4)
        np.testing.assert_allclose(out[0, 12:, 0], values[last], atol=1e-12)


@every_form
@pytest.mark.parametrize("operation", [DELTA, GATED_DELTA], ids=lambda operation: operation.name)
def test_bad_arguments_are_named(operation, implementation):
    inputs = dict(zip(operation.arguments, operation.inputs(0, 1, 6, 1, 2, 3, 4, dtype=np.float32), strict=True))
    for changes, message in (
        (dict(beta=inputs["beta"][:, :5]), r"beta has shape \(1, 5, 2\): expected \[B, T, H\] with T = 6"),
        (dict(beta=inputs["beta"].astype(int)), "beta has dtype int32: expected a floating dtype"),
        (dict(return_state=0), "return_state must be True or False, got 0"),
        (dict(chunk_size=3), "chunk_size must be a power of two"),
        (dict(implementation="fast"), "implementation must be one of 'parallel', 'recurrent', 'xla'"),
        (dict(initial_state=jnp.zeros((1, 2, 3))), "initial_state"),
    ):
        with pytest.raises(ValueError, match=message):
            operation.function(**dict(implementation=implementation) | inputs | changes)


@pytest.mark.parametrize(
    ("dtype", "dim", "precision", "expected"),
    [
        (jnp.bfloat16, 24, None, True),
        (np.float32, 24, "default", True),  # on a GPU that is TF32
        (np.float32, 24, "tensorfloat32", True),
        (np.float32, 24, "highest", False),
        (np.float32, 64, "default", True),
        (np.float32, 80, "default", False),
        (np.float32, 48, None, False),
        (np.float16, 24, None, False),
        (jnp.bfloat16, 160, None, False),
    ],
)
def test_kernels_are_taken_where_they_pay(monkeypatch, dtype, dim, precision, expected):
    for name, found in dict(runs_on_gpu=True, why_no_device=None).items():
        monkeypatch.setattr(support, name, lambda found=found: found)
    q, k, v, *_ = DELTA.inputs(0, 1, 100, 1, 2, 16, dim, dtype=dtype)
    assert pallas.is_best(q, k, v, precision=precision) == expected
    assert not pallas.is_best(q[:, :16], k[:, :16], v[:, :16], precision=precision)  # one chunk


@pytest.mark.parametrize("operation", [DELTA, GATED_DELTA], ids=lambda operation: operation.name)
def test_what_is_best_is_taken(monkeypatch, operation):
    """But not where another form is named."""
    inputs = operation.inputs(0, 1, 40, 1, 2, 16, 16, dtype=np.float32)
    monkeypatch.setattr(pallas, "is_best", lambda *arguments: True)
    with pallas_kernels.interpret():
        taken = operation.function(*inputs)
        np.testing.assert_array_equal(taken, operation.function(*inputs, implementation="pallas"))
        assert (np.asarray(taken) != operation.function(*inputs, implementation="xla")).any()
    monkeypatch.setattr(pallas, "is_best", lambda *arguments: False)
    np.testing.assert_array_equal(operation.function(*inputs), operation.function(*inputs, implementation="xla"))


def test_a_chunk_longer_than_the_sequence_is_no_longer_than_it_has_to_be():
    inputs = GATED_DELTA.inputs(0, 1, 40, 1, 2, 16, 16, dtype=np.float32)
    with pallas_kernels.interpret():
        out = gated_delta_attention(*inputs, implementation="pallas", chunk_size=128)
    assert relative_error(out, gated_delta_attention(*inputs, implementation="recurrent")) < 1e-5


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_kernels_that_are_asked_for_and_cannot_run_are_an_error():
    for length, dim in ((6, 16), (40, 16)):
        inputs = DELTA.inputs(0, 1, length, 1, 2, dim, dim, dtype=np.float32)
        with pytest.raises(ValueError, match="JAX runs on cpu"):
            log_linear_delta_attention(*inputs, implementation="pallas", chunk_size=16)
    inputs = DELTA.inputs(0, 1, 40, 1, 2, 160, 16, dtype=np.float32)
    with pytest.raises(
        ValueError, match="K, the key dim, is 160: the kernels of the delta rule take up to 64 for float32"
    ):
        log_linear_delta_attention(*inputs, implementation="pallas")


def test_a_step_past_the_states_end_is_an_error():
    inputs = [x[:, 0] for x in DELTA.inputs(0, 1, 6, 1, 2, 3, 4, dtype=np.float32)]
    state = init_fenwick_state(1, 2, 3, 4, 2)
    for _ in range(2):
        _, state = log_linear_delta_step(state, *inputs)
    with pytest.raises(ValueError, match="state.levels has 2 levels, room for 2 tokens"):
        log_linear_delta_step(state, *inputs)


@pytest.mark.parametrize("operation", [DELTA, GATED_DELTA], ids=lambda operation: operation.name)
@pytest.mark.parametrize("implementation", ["xla", "parallel"])
def test_no_solver_of_a_library_is_called(operation, implementation):
    """On a CPU of two cores LAPACK's, called by several parts of one program, waits for threads for ever."""
    inputs = operation.inputs(0, 1, 40, 1, 2, 3, 4, dtype=np.float32)
    attend = functools.partial(operation.function, implementation=implementation)
    gradient = jax.grad(lambda inputs: jnp.sum(attend(*inputs)))
    text = jax.jit(gradient).lower(inputs).as_text()
    assert "stablehlo.dot_general" in text
    assert "triangular" not in text and "custom_call" not in text
