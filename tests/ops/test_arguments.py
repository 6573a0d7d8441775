"""What operations refuse by name, how many levels they give, and when kernels are chosen. What they compute: test_forms.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax import (
    FenwickState,
    bucket_scores,
    init_fenwick_state,
    log_linear_attention,
    num_levels,
)
from loglinear_jax.ops.delta import api as delta
from loglinear_jax.ops.log_linear import pallas
from pallas_kernels import KERNELS
from pallas_kernels.common import support

from .forms import BUCKET_SCORES, DELTA, FORMS, GATED_DELTA, HAS_GPU, LOG_LINEAR, SOFTMAX, WITH_STATES
from .inputs import random_inputs, relative_error

by_name = functools.partial(pytest.mark.parametrize, "operation", ids=lambda operation: operation.name)
without_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


def state_of(*sizes, position=0):
    """Of [B, H, L, K, V], by NumPy: nothing is compiled before tests run."""
    return FenwickState(np.zeros(sizes, np.float32), position)


STATE = state_of(2, 4, 5, 3, 5)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def at(position):
    return STATE.replace(position=position)


OF_ALL = [
    (dict(q=None), r"q is of type NoneType: expected an array \[B, T, G, K\]"),
    (dict(q=np.ma.ones((2, 9, 2, 3), np.float32)), "q is of type MaskedArray: expected an array"),
    (dict(k=np.ones((2, 9, 2, 3), jnp.float8_e4m3fn)), "k has dtype float8_e4m3fn: .* of 16 bits or more"),
    (dict(q=zeros(2, 9, 2, 3, dtype=np.int32)), "q has dtype int32: expected a floating dtype"),
    (dict(q=zeros(2, 9, 6)), r"q has shape \(2, 9, 6\) of rank 3: expected \[B, T, G, K\]"),
    (dict(k=zeros(2, 9, 2, 4)), r"k has shape \(2, 9, 2, 4\): expected .* K = 3, as in q"),
    (dict(segment_ids=zeros(2, 8, dtype=int)), r"segment_ids has shape \(2, 8\): expected \[B, T\] = \(2, 9\)"),
    (dict(segment_ids=zeros(2, 9)), r"segment_ids is of float32: expected an array of integers \[B, T\]"),
    (dict(implementation="cuda"), "implementation must be one of .*'recurrent'.* got 'cuda'"),
]
OF_STATES = [
    (dict(log_decay=zeros(2, 9, 3)), r"log_decay has shape .* (H = 4, as in v|H = 3 heads: .* of the G = 2 groups)"),
    (dict(chunk_size=12), "chunk_size must be a power of two ≥ 1 or None, got 12"),
]
OF_LEVELS = [
    (dict(first_position=-1), "first_position is -1: expected a position, at least 0"),
    (dict(first_position=zeros(3, dtype=int)), r"first_position has shape \(3,\): expected a scalar, or \[B\]"),
    (dict(first_position=1, initial_state=STATE), "first_position is 1: expected 0 with an initial_state, which has"),
    (dict(initial_state=state_of(2, 4, 5, 3, 6)), r"initial_state.levels has shape .* 6\): expected"),
]
OF_ONE_STATE = [
    (dict(initial_state=zeros(2, 4, 5, 3)), r"initial_state has shape .* K = 3, as in q"),
    (dict(initial_state=STATE), "initial_state is of type FenwickState: expected an array"),
]
OF_ONE = [
    (LOG_LINEAR, dict(v=zeros(2, 8, 4, 5)), r"v has shape \(2, 8, 4, 5\): expected .* T = 9"),
    (SOFTMAX, dict(v=zeros(2, 9, 3, 5)), "H = 3 heads: expected a multiple of the G = 2 groups"),
    (LOG_LINEAR, dict(lam=zeros(2, 9, 4, 4)), r"lam has shape .* L = 4 levels: expected L ≥ num_levels\(9\) = 5"),
    (LOG_LINEAR, dict(first_position=9), r"L = 5 levels: expected L ≥ num_levels\(18\) = 6 for first_position \+ T"),
    (LOG_LINEAR, dict(initial_state=at(-2)), "initial_state.position is -2: expected the number of tokens seen"),
    (LOG_LINEAR, dict(initial_state=at(3.7)), "initial_state.position is 3.7: expected an integer"),
    (LOG_LINEAR, dict(initial_state=at(np.asarray(16))), r"num_levels\(25\) = 6 for initial_state.position"),
    (LOG_LINEAR, dict(initial_state=at(17)), "5 levels, room for 16 tokens: expected at least 6 levels for .* = 17"),
    (BUCKET_SCORES, dict(num_levels=4), r"num_levels is 4: expected an integer ≥ num_levels\(9\) = 5 for T tokens"),
    (SOFTMAX, dict(window=0), "window must be None or an integer from 1 on, got 0"),
    (SOFTMAX, dict(window=2.5), "window must be None or an integer from 1 on, got 2.5"),
    (DELTA, dict(beta=zeros(2, 5, 4)), r"beta has shape \(2, 5, 4\): expected \[B, T, H\] with T = 9"),
    (GATED_DELTA, dict(beta=zeros(2, 9, 4, dtype=int)), r"beta has dtype int\d+: expected a floating dtype"),
]


def refused():
    for operation in (*WITH_STATES, SOFTMAX):
        cases = OF_ALL + (OF_STATES if operation.has_state else [])
        cases = cases + (OF_LEVELS if operation.has_positions else OF_ONE_STATE if operation.has_state else [])
        yield from (pytest.param(operation, *case, id=f"{operation.name}-{case[1][:40]}") for case in cases)
    yield from (pytest.param(*case, id=f"{case[0].name}-{case[2][:40]}") for case in OF_ONE)


def arguments_of(operation, **changes):
    inputs = operation.inputs(0, 2, 9, 2, 4, 3, 5, dtype=np.float32)
    return dict(zip(operation.arguments, inputs, strict=True)) | changes


@pytest.mark.parametrize(("operation", "changes", "message"), list(refused()))
def test_bad_arguments_are_named(operation, changes, message):
    with pytest.raises(ValueError, match=message):
        operation.function(**arguments_of(operation, **changes))


@pytest.mark.parametrize(("axis", "name"), [(0, "B"), (1, "T"), (3, "V")])
def test_empty_arrays_are_an_error(axis, name):
    arguments = arguments_of(LOG_LINEAR)
    which = ["v"] if name == "V" else list(arguments)
    empty = {n: np.take(np.asarray(x), [], axis) if n in which else x for n, x in arguments.items()}
    with pytest.raises(ValueError, match=rf"with at least one of each \(no {name} here\)"):
        log_linear_attention(**empty)


@by_name([LOG_LINEAR, DELTA])
def test_a_step_past_the_states_end_is_an_error(operation):
    state = init_fenwick_state(1, 1, 2, 2, max_length=4)
    inputs = operation.inputs(0, 1, 5, 1, 1, 2, 2, levels=9, dtype=np.float32)
    for t in range(4):
        _, state = operation.step(state, [x[:, t] for x in inputs])
    with pytest.raises(ValueError, match=r"3 levels, room for 4 tokens.*larger max_length"):
        operation.step(state, [x[:, 4] for x in inputs])


def test_a_chunk_longer_than_the_sequence_is_the_sequence():
    run = functools.partial(log_linear_attention, **arguments_of(LOG_LINEAR), return_state=True)
    jax.tree.map(np.testing.assert_array_equal, run(), run(chunk_size=1 << 20))  # would be terabytes


def test_state_has_lams_levels_or_more():
    inputs = random_inputs(10, 1, 6, 1, 1, 2, 2, levels=9, dtype=np.float32)
    states = [None, *(init_fenwick_state(1, 1, 2, 2, length) for length in (6, 2**11))]
    ends = [log_linear_attention(*inputs, initial_state=state, return_state=True)[1] for state in states]
    assert [end.levels.shape[2] for end in ends] == [9, 9, 12]


def test_scores_have_as_many_levels_as_the_tokens_or_the_state_need():
    inputs = BUCKET_SCORES.inputs(0, 1, 6, 1, 2, 3, 5, dtype=np.float32)

    def levels(max_length, position, **kwargs):
        state = init_fenwick_state(1, 2, 3, 1, max_length).replace(position=position)
        scores, state = bucket_scores(*inputs, initial_state=state, return_state=True, **kwargs)
        return scores.shape[3], state.levels.shape[2]

    assert bucket_scores(*inputs).shape[3] == num_levels(6)
    assert levels(3, 2) == (4, 4)  # 8 tokens in all
    assert levels(100, 2) == (8, 8)
    assert levels(100, 2, num_levels=4) == (4, 8)
    assert levels(3, 2, num_levels=9) == (9, 9)


# --- When kernels are chosen, and what is said where they cannot be -------------------------------------------------


@without_gpu
def test_without_a_gpu_nothing_is_chosen_and_nothing_said(caplog):
    inputs = random_inputs(2, 1, 9, 1, 1, 16, 16, dtype=np.float32)
    log_linear_attention(*inputs)
    with pallas_kernels.interpret():  # which is for tests: it must be named to be used
        assert not pallas.is_best(*inputs[:3])
    assert not caplog.records


@without_gpu
@by_name([form.operation for form in FORMS if form.name == "pallas"])
def test_after_the_interpreter_kernels_are_refused_again(operation):
    inputs = operation.inputs(0, 1, 20, 1, 1, 16, 16, dtype=np.float32)
    run = functools.partial(operation.function, implementation="pallas", chunk_size=16)
    with pallas_kernels.interpret():
        jax.eval_shape(run, *inputs)
    with pytest.raises(ValueError, match=r"JAX runs on cpu.*need an NVIDIA GPU.*LOGLINEAR_PALLAS_INTERPRET=1"):
        run(*inputs)


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


@pytest.mark.parametrize(
    ("dtype", "dim", "precision", "expected"),
    [
        (jnp.bfloat16, 24, None, True),
        (np.float32, 24, "default", True),  # on a GPU that is TF32
        (np.float32, 24, "highest", False),
        (np.float32, 80, "default", False),
        (np.float16, 24, None, False),
        (jnp.bfloat16, 160, None, False),
    ],
)
def test_kernels_of_the_delta_rule_are_taken_where_they_pay(monkeypatch, dtype, dim, precision, expected):
    for name, found in dict(runs_on_gpu=True, why_no_device=None).items():
        monkeypatch.setattr(support, name, lambda found=found: found)
    q, k, v, *_ = DELTA.inputs(0, 1, 100, 1, 2, 16, dim, dtype=dtype)
    assert delta.pallas.is_best(q, k, v, precision=precision) == expected
    assert not delta.pallas.is_best(q[:, :16], k[:, :16], v[:, :16], precision=precision)  # one chunk


@by_name([DELTA, GATED_DELTA])
def test_what_is_best_is_taken(monkeypatch, operation):
    """But not where another form is named."""

    def takes_kernel(**named):
        return "pallas_call" in str(jax.make_jaxpr(functools.partial(operation.function, **named))(*inputs))

    inputs = operation.inputs(0, 1, 40, 1, 2, 16, 16, dtype=np.float32)

    def set_best(best):
        for name in ("_OPERATION", "_ONE_STATE"):
            forms = getattr(delta, name)._replace(kernels_are_best=lambda *arguments: best)
            monkeypatch.setattr(delta, name, forms)

    set_best(True)
    with pallas_kernels.interpret():
        assert takes_kernel() and not takes_kernel(implementation="xla")
    set_best(False)
    assert not takes_kernel()


@without_gpu
@pytest.mark.parametrize(
    ("length", "dim", "message"), [(6, 16, "JAX runs on cpu"), (40, 160, "K, the key dim, is 160")]
)
def test_kernels_that_are_asked_for_and_cannot_run_are_an_error(length, dim, message):
    inputs = DELTA.inputs(0, 1, length, 1, 2, dim, 16, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        DELTA.function(*inputs, implementation="pallas", chunk_size=16)


@by_name([DELTA, GATED_DELTA])
@pytest.mark.parametrize("implementation", ["xla", "parallel"])
def test_no_solver_of_a_library_is_called(operation, implementation):
    """On a CPU of two cores LAPACK's, called by several parts of one program, waits for threads for ever."""
    inputs = operation.inputs(0, 1, 40, 1, 2, 3, 4, dtype=np.float32)
    attend = functools.partial(operation.function, implementation=implementation)
    text = jax.jit(jax.grad(lambda inputs: jnp.sum(attend(*inputs)))).lower(inputs).as_text()
    assert "stablehlo.dot_general" in text
    assert "triangular" not in text and "custom_call" not in text


@pytest.mark.slow
def test_rows_at_positions_of_their_own_are_mapped_over_seeds():
    """A vmap of a vmap of lax.cond, which maps the constants of the kernels' functions, too."""
    inputs = [jnp.stack([x, -x]) for x in random_inputs(0, 2, 16, 1, 1, 16, 16, 8, np.float32)[:3]]
    inputs += [jnp.stack([x, x]) for x in random_inputs(0, 2, 16, 1, 1, 16, 16, 8, np.float32)[3:]]
    position = jnp.asarray([[3, 16], [5, 40]], jnp.int32)

    def run(implementation):
        def loss(*inputs):
            attend = functools.partial(log_linear_attention, implementation=implementation)
            out = jax.vmap(lambda position, *inputs: attend(*inputs, first_position=position))(position, *inputs)
            return jnp.sum(jnp.cos(out)), out

        grads, out = jax.jit(jax.grad(loss, range(5), has_aux=True))(*inputs)
        return out, *grads

    with pallas_kernels.interpret():
        for x, y in zip(run("pallas"), run("xla"), strict=True):
            assert relative_error(x, y) < 1e-5


@pytest.mark.slow
def test_one_token_of_the_delta_rule_in_rows_at_positions_of_their_own_has_gradients():
    """Its matrix depends on nothing, and so is not mapped over the rows, as its derivative is."""
    q, k, v, log_decay, lam = random_inputs(0, 2, 1, 1, 2, 3, 5, 3, np.float32)
    position = np.array([0, 2], np.int32)

    def gradients(implementation):
        def loss(*inputs):
            attend = functools.partial(DELTA.function, implementation=implementation, return_state=True)
            out, state = attend(*inputs, jnp.ones_like(log_decay) / 2, lam, first_position=position)
            return jnp.sum(jnp.cos(out)) + jnp.sum(state.levels**2)

        return jax.grad(loss, range(4))(q, k, v, log_decay)

    for x, y in zip(gradients("xla"), gradients("recurrent"), strict=True):
        assert relative_error(x, y) < 1e-5


def test_all_bits_of_numpys_segment_ids_count():
    q, k, v, log_decay, lam = random_inputs(1, 1, 6, 1, 2, 4, 4, dtype=np.float32)
    ids = np.array([[0, 0, 1, 1, 2, 2]])
    expected = log_linear_attention(q, k, v, log_decay, lam, segment_ids=ids)
    np.testing.assert_array_equal(log_linear_attention(q, k, v, log_decay, lam, segment_ids=ids << 32), expected)
