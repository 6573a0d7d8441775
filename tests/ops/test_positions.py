"""Tokens that have no place in a state: an error where the position is known, NaN where it is traced, never a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax import FenwickState, fenwick_step, init_fenwick_state, log_linear_attention
from loglinear_jax.ops.continuation import take_step
from loglinear_jax.ops.delta import recurrent as delta
from loglinear_jax.ops.log_linear import pallas, recurrent
from loglinear_jax.ops.positions import END
from loglinear_jax.ops.softmax import attend_to_cache, key_value_cache

from .forms import BUCKET_SCORES, FORMS, LOG_LINEAR, in_tiers
from .inputs import in_float64, random_inputs, relative_error

every_form = pytest.mark.parametrize("form", in_tiers(form for form in FORMS if form.operation is LOG_LINEAR))


def continued(form):
    """The form from a traced position on: (inputs, levels of the state, position) to (output, state)."""
    return jax.jit(
        lambda inputs, levels, position: form(inputs, initial_state=FenwickState(levels, position), return_state=True)
    )


def is_nan(x):
    return np.isnan(np.asarray(x, np.float32))


@pytest.mark.parametrize("form", in_tiers(form for form in FORMS if form.operation in (LOG_LINEAR, BUCKET_SCORES)))
def test_tokens_beyond_the_levels_are_nan_and_those_before_keep_outputs_and_gradients(form):
    """4 levels are for 8 positions: of 6 tokens from position 5 on, 3."""
    inputs, operation = form.inputs(0, 2, 6, 1, 2, levels=4), form.operation
    levels = operation.draw_state(1, inputs, 4)

    def loss(inputs, levels, position):
        options = dict(initial_state=FenwickState(levels, position), return_state=True, **operation.with_room(8))
        out, _ = form(inputs, **options)
        return jnp.sum(out[:, :3] ** 2), out

    with_gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, out), gradients = with_gradients(inputs, levels, 5)
    assert is_nan(out[:, 3:]).all()
    known = [x[:, :3] for x in inputs]
    (_, expected), wanted = with_gradients(known, levels, 5)
    assert relative_error(out[:, :3], expected) < form.tolerance
    for gradient, of_known in zip(gradients[0], wanted[0], strict=True):
        assert relative_error(gradient[:, :3], of_known) < form.gradient_tolerance and not np.any(gradient[:, 3:])
    assert relative_error(gradients[1], wanted[1]) < form.gradient_tolerance


@every_form
def test_a_state_that_outgrew_its_levels_never_gives_a_number_again(form):
    inputs = form.inputs(0, 1, 6, 1, 2, levels=4)
    more = form.inputs(0, 1, 6, 1, 2, levels=9)  # λ has levels enough; the state has lost what belonged there
    _, state = continued(form)(inputs, LOG_LINEAR.draw_state(1, inputs), 5)
    assert state.position == 11
    out, state = continued(form)(more, state.levels, state.position)
    assert is_nan(out).all() and state.position == END and state.levels.shape[2] == 9
    out, state = jax.jit(fenwick_step)(state, *(x[:, 0] for x in more))
    assert is_nan(out).all() and state.position == END


@every_form
def test_a_negative_position_gives_nan_and_never_becomes_valid(form):
    inputs = form.inputs(0, 1, 6, 1, 2, levels=4)
    run = continued(form)
    for position in (-1, -(2**31)):
        out, state = run(inputs, LOG_LINEAR.draw_state(1, inputs), position)
        assert is_nan(out).all() and state.position == END


@every_form
def test_positions_stop_where_int32_does(form):
    inputs = form.inputs(0, 1, 5, 1, 2, levels=34)
    levels = LOG_LINEAR.draw_state(1, inputs)
    out, state = continued(form)(inputs, levels, END - 2)
    assert is_nan(out[:, 2:]).all() and state.position == END
    known = form([x[:, :2] for x in inputs], initial_state=FenwickState(levels, END - 2))
    assert relative_error(out[:, :2], known) < form.tolerance
    with pytest.raises(ValueError, match=rf"position \+ T tokens is {END + 1}: expected at most {END}"):
        form([x[:, :3] for x in inputs], initial_state=FenwickState(levels, END - 2))


@in_float64
def test_positions_of_64_bits_do_not_wrap():
    inputs = random_inputs(0, 1, 2, 1, 1, 2, 2, levels=5)
    levels = LOG_LINEAR.draw_state(1, inputs)
    for position in (2**32 + 3, -(2**32) + 3, 2**63 - 1):
        for dtype in (np.int64, np.uint64):
            traced = jax.jit(lambda p: log_linear_attention(*inputs, initial_state=FenwickState(levels, p)))
            assert is_nan(traced(np.asarray(position % 2**64).astype(dtype))).all()


@pytest.mark.parametrize("step", [recurrent.step, pallas.step, delta.step])
@pytest.mark.parametrize("position", [-1, END])
def test_a_step_at_no_position_is_nan_and_ends_the_state(step, position):
    q, k, v, log_decay, lam = random_inputs(0, 1, 1, 1, 2, 16, 16, levels=4, dtype=np.float32)
    beta = [] if step is not delta.step else [jnp.ones_like(log_decay)]
    inputs = [x[:, 0] for x in (q, k, v, log_decay, *beta, lam)]
    state = FenwickState(jnp.ones((1, 2, 4, 16, 16)), jnp.asarray(position, jnp.int32))
    with pallas_kernels.interpret():
        for _ in range(2):
            out, state = take_step(step, state, *inputs)
            assert is_nan(out).all() and state.position == END


def test_steps_past_a_traced_states_end_are_nan():
    inputs = random_inputs(0, 1, 7, 1, 1, 2, 2, levels=9, dtype=np.float32)
    step = jax.jit(fenwick_step)
    state = init_fenwick_state(1, 1, 2, 2, max_length=4)
    outs = []
    for t in range(7):
        out, state = step(state, *(x[:, t] for x in inputs))
        outs.append(out)
    assert relative_error(jnp.stack(outs[:4], 1), log_linear_attention(*(x[:, :4] for x in inputs))) < 1e-5
    assert is_nan(outs[4:]).all() and state.position == 7


def test_a_step_beyond_lams_levels_is_nan_and_the_larger_state_goes_on():
    """The state does not depend on λ: with λ's levels there, it gives the right numbers again."""
    inputs = random_inputs(0, 1, 7, 1, 1, 2, 2, levels=4, dtype=np.float32)
    step = jax.jit(fenwick_step)
    state = init_fenwick_state(1, 1, 2, 2, max_length=8)
    for t in range(7):
        few = 3 if t == 5 else 4
        out, state = step(state, *(x[:, t] for x in (*inputs[:4], inputs[4][..., :few])))
        assert is_nan(out).all() == (t == 5)
    assert relative_error(out, log_linear_attention(*inputs)[:, 6]) < 1e-5


def test_softmax_steps_past_the_caches_end_are_nan():
    q, k, v = random_inputs(0, 1, 6, 1, 1, 2, 2, dtype=np.float32)[:3]
    cache = key_value_cache(k[:, :2], v[:, :2], max_length=3)
    for t in range(2, 6):
        out, cache = jax.jit(attend_to_cache)(cache, *(x[:, t : t + 1] for x in (q, k, v)))
        assert is_nan(out).all() == (t >= 3)
    out, _ = jax.jit(attend_to_cache)(cache.replace(position=-1), q[:, :1], k[:, :1], v[:, :1])
    assert is_nan(out).all()
    with pytest.raises(ValueError, match=r"k has shape .* T = 6 tokens: expected at most max_length = 5"):
        key_value_cache(k, v, max_length=5)
