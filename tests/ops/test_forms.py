"""All forms compute one function: the definition, its identities, states, gradients, extreme decays, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loglinear_jax import (
    FenwickState,
    fenwick_level,
    fenwick_step,
    gated_linear_attention,
    init_fenwick_state,
    log_linear_attention,
    num_levels,
)

from .inputs import definition, in_float64, outputs_and_gradients, random_inputs, relative_error

FORMS = ("parallel", "recurrent", "xla")


@in_float64
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_every_form_is_the_definition(form, length):
    inputs = random_inputs(0, 2, length, 2, 4, 3, 5)
    out = log_linear_attention(*inputs, implementation=form, chunk_size=4)
    assert relative_error(out, definition(*inputs)) < 1e-12


@in_float64
@settings(max_examples=6)
@given(
    length=st.integers(1, 70),
    log_chunk=st.integers(0, 6),
    groups=st.integers(1, 2),
    heads_per_group=st.integers(1, 2),
    more_levels=st.integers(0, 2),
    start=st.one_of(st.none(), st.integers(0, 40)),
    min_decay=st.sampled_from([0.0, -2.0, -30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_forms_agree_in_values_states_and_gradients(
    length, log_chunk, groups, heads_per_group, more_levels, start, min_decay, seed
):
    heads = groups * heads_per_group
    levels = num_levels(length + (start or 0)) + more_levels
    inputs = random_inputs(seed, 1, length, groups, heads, 2, 3, levels, min_decay=min_decay)
    initial = None
    if start is not None:
        rng = np.random.default_rng(seed)
        initial = FenwickState(jnp.asarray(rng.normal(size=(1, heads, levels, 2, 3))), jnp.asarray(start, jnp.int32))
    expected, expected_state, expected_grads = outputs_and_gradients(inputs, initial, implementation="recurrent")
    for form in ("parallel", "xla"):
        out, state, grads = outputs_and_gradients(inputs, initial, implementation=form, chunk_size=1 << log_chunk)
        assert relative_error(out, expected) < 1e-10
        assert relative_error(state.levels, expected_state.levels) < 1e-10
        assert state.position == expected_state.position == length + (start or 0)
        for name, grad in grads.items():
            assert np.linalg.norm(grad - expected_grads[name]) <= 1e-10 * np.linalg.norm(expected_grads[name]), name


@in_float64
@pytest.mark.parametrize("decay", [-0.1, -5.0, -20.0, -50.0])
def test_gradients_of_strong_decays_are_as_exact_as_those_of_weak_ones(decay):
    """Against the sum of the definition: of s < r ≤ t, what s adds to t."""
    q, k, v, _, lam = random_inputs(7, 1, 20, 1, 1, 3, 4)
    log_decay = jnp.full((1, 20, 1), decay)
    output_gradient = np.random.default_rng(8).normal(size=v.shape)
    expected = np.zeros(20)
    for t in range(20):
        for s in range(t):
            weight = lam[0, t, 0, int(fenwick_level(t, s))] * np.exp(decay * (t - s)) * (q[0, t, 0] @ k[0, s, 0])
            expected[s + 1 : t + 1] += weight * (v[0, s, 0] @ output_gradient[0, t, 0])
    for form in FORMS:

        def total(log_decay, form=form):
            out = log_linear_attention(q, k, v, log_decay, lam, implementation=form, chunk_size=4)
            return jnp.sum(out * output_gradient)

        assert relative_error(jax.grad(total)(log_decay)[0, :, 0], expected) < 1e-12


@in_float64
def test_segments_of_chunks_and_of_the_batch_change_nothing(monkeypatch):
    inputs = random_inputs(11, 5, 45, 1, 2, 3, 4)
    monkeypatch.setattr(
        "loglinear_jax.ops.log_linear.chunkwise.MAX_VALUES_CPU", 2 * 45 * 2 * 4
    )  # 2 of 5 sequences at a time
    expected = outputs_and_gradients(inputs, implementation="parallel")
    monkeypatch.setattr(
        "loglinear_jax.ops.log_linear.chunkwise.MAX_SCORES_CPU", 4 * 5 * 4 * 4
    )  # 5 of 12 chunks at a time
    monkeypatch.setattr("loglinear_jax.ops.log_linear.chunkwise.MAX_SCORES", 4 * 5 * 4 * 4)
    out, state, grads = outputs_and_gradients(inputs, implementation="xla", chunk_size=4)
    assert relative_error(out, expected[0]) < 1e-12
    assert relative_error(state.levels, expected[1].levels) < 1e-12
    assert all(relative_error(grads[name], expected[2][name]) < 1e-12 for name in grads)


@in_float64
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", [1, 4, 5, 11, 16, 30])
def test_a_state_handed_over_anywhere_continues_the_sequence(form, split):
    length = 31
    inputs = random_inputs(1, 2, length, 1, 2, 3, 4)
    whole, end = log_linear_attention(*inputs, implementation="parallel", return_state=True)
    before, after = ([x[:, :split] for x in inputs], [x[:, split:] for x in inputs])
    first, state = log_linear_attention(*before, implementation=form, return_state=True, chunk_size=4)
    assert state.position == split
    continued = jax.jit(
        lambda inputs, state: log_linear_attention(
            *inputs, initial_state=state, implementation=form, return_state=True, chunk_size=4
        )
    )
    second, state = continued(after, state)
    assert relative_error(jnp.concatenate([first, second], axis=1), whole) < 1e-12
    assert relative_error(state.levels, end.levels) < 1e-12
    assert state.position == length


@in_float64
def test_prefill_then_steps_is_one_pass():
    length, prefill = 21, 9
    inputs = random_inputs(2, 2, length, 2, 4, 3, 5)
    whole = log_linear_attention(*inputs, implementation="parallel")
    out, state = log_linear_attention(*(x[:, :prefill] for x in inputs), return_state=True, chunk_size=4)
    outs = list(jnp.moveaxis(out, 1, 0))
    step = jax.jit(fenwick_step)
    for t in range(prefill, length):
        out, state = step(state, *(x[:, t] for x in inputs))
        outs.append(out)
    assert relative_error(jnp.stack(outs, 1), whole) < 1e-12


@in_float64
def test_steps_from_an_empty_state_are_one_pass():
    inputs = random_inputs(3, 1, 12, 1, 2, 3, 4)
    whole = log_linear_attention(*inputs)
    state = init_fenwick_state(1, 2, 3, 4, max_length=12, dtype=jnp.float64)
    for t in range(12):
        out, state = fenwick_step(state, *(x[:, t] for x in inputs))
        assert relative_error(out, whole[:, t]) < 1e-12


@in_float64
@pytest.mark.parametrize("form", FORMS)
def test_lambda_of_one_is_gated_linear_attention(form):
    q, k, v, log_decay, lam = random_inputs(4, 2, 37, 2, 4, 3, 5)
    out = log_linear_attention(q, k, v, log_decay, jnp.ones_like(lam), implementation=form, chunk_size=8)
    state = np.zeros((2, 4, 3, 5))
    for t in range(37):
        kv = np.einsum("bhk,bhv->bhkv", np.repeat(k[:, t], 2, axis=1), v[:, t])
        state = np.exp(log_decay[:, t])[..., None, None] * state + kv
        expected = np.einsum("bhk,bhkv->bhv", np.repeat(q[:, t], 2, axis=1), state)
        assert relative_error(out[:, t], expected) < 1e-11
    assert relative_error(gated_linear_attention(q, k, v, log_decay, chunk_size=8), out) < 1e-12


@in_float64
@pytest.mark.parametrize("form", FORMS)
def test_lambda_at_level_zero_sees_the_token_alone(form):
    q, k, v, log_decay, lam = random_inputs(5, 1, 19, 1, 2, 3, 4)
    one_hot = jnp.zeros_like(lam).at[..., 0].set(1)
    out = log_linear_attention(q, k, v, log_decay, one_hot, implementation=form, chunk_size=4)
    assert relative_error(out, jnp.sum(q * k, -1)[..., None] * v) < 1e-12


@in_float64
@pytest.mark.parametrize("form", FORMS)
def test_no_output_depends_on_later_tokens(form):
    inputs = random_inputs(6, 1, 24, 1, 2, 3, 4)
    others = random_inputs(7, 1, 24, 1, 2, 3, 4)
    for cut in (1, 8, 13):
        mixed = [jnp.concatenate([x[:, :cut], y[:, cut:]], axis=1) for x, y in zip(inputs, others, strict=True)]
        a, b = (log_linear_attention(*x, implementation=form, chunk_size=8)[:, :cut] for x in (inputs, mixed))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ["none", "strong", "mixed", "reset"])
def test_extreme_decays_in_float32(form, decay):
    """Finite and accurate in float32, in values and gradients, where a naive cumulative sum is neither."""
    length = 200
    rng = np.random.default_rng(8)
    inputs = random_inputs(8, 1, length, 1, 2, 4, 4, dtype=np.float32)
    log_decay = {
        "none": np.zeros((1, length, 2)),
        "strong": np.full((1, length, 2), -50.0),
        # Mostly slow forgetting with sudden losses: small differences of large sums.
        "mixed": np.where(rng.random((1, length, 2)) < 0.2, -50.0, -0.01 * rng.random((1, length, 2))),
        "reset": np.where(rng.random((1, length, 2)) < 0.1, -np.inf, -0.01),
    }[decay].astype(np.float32)
    inputs = (*inputs[:3], jnp.asarray(log_decay), inputs[4])
    out, state, grads = outputs_and_gradients(inputs, implementation=form, chunk_size=32, precision="highest")
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]
        exact[3] = jnp.maximum(exact[3], -1e4)
        expected, expected_state, expected_grads = outputs_and_gradients(exact, implementation="recurrent")
    assert relative_error(out, expected) < 2e-6
    assert relative_error(state.levels, expected_state.levels) < 2e-6
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name
        assert relative_error(grad, expected_grads[name]) < 5e-6, name


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_inputs_accumulate_in_float32(form):
    inputs = random_inputs(9, 2, 150, 1, 3, 16, 24, dtype=jnp.bfloat16)
    out, state = log_linear_attention(*inputs, implementation=form, return_state=True)
    assert out.dtype == jnp.bfloat16 and state.levels.dtype == jnp.float32
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
        expected = log_linear_attention(*exact, implementation="parallel")
    assert relative_error(out, expected) < 1e-2
    grads = jax.grad(
        lambda *x: log_linear_attention(*x, implementation=form).astype(jnp.float32).sum(), argnums=(2, 3, 4)
    )
    dv, d_decay, d_lam = grads(*inputs)
    assert dv.dtype == jnp.bfloat16 and d_decay.dtype == d_lam.dtype == jnp.float32


@pytest.mark.parametrize("form", FORMS)
def test_vmap_is_a_loop(form):
    seeds = [random_inputs(seed, 1, 20, 1, 2, 3, 4, dtype=np.float32) for seed in range(3)]
    stacked = [jnp.stack(x) for x in zip(*seeds, strict=True)]
    mapped = jax.vmap(lambda *x: log_linear_attention(*x, implementation=form, chunk_size=4))(*stacked)
    for out, inputs in zip(mapped, seeds, strict=True):
        assert relative_error(out, log_linear_attention(*inputs, implementation=form, chunk_size=4)) < 1e-6


def test_state_has_lams_levels_or_more():
    inputs = random_inputs(10, 1, 6, 1, 1, 2, 2, levels=9, dtype=np.float32)
    _, state = log_linear_attention(*inputs, return_state=True)
    assert state.levels.shape == (1, 1, 9, 2, 2)
    small = init_fenwick_state(1, 1, 2, 2, max_length=6)
    _, state = log_linear_attention(*inputs, initial_state=small, return_state=True)
    assert state.levels.shape == (1, 1, 9, 2, 2)
    large = init_fenwick_state(1, 1, 2, 2, max_length=2**11)
    _, state = log_linear_attention(*inputs, initial_state=large, return_state=True)
    assert state.levels.shape == (1, 1, 12, 2, 2)


def bad(**changes):
    q, k, v, log_decay, lam = random_inputs(0, 2, 9, 2, 4, 3, 5, dtype=np.float32)
    return {"q": q, "k": k, "v": v, "log_decay": log_decay, "lam": lam} | changes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (bad(q=np.zeros((2, 9, 6), np.float32)), r"q has shape \(2, 9, 6\) of rank 3: expected \[B, T, G, K\]"),
        (bad(k=np.zeros((2, 9, 2, 4), np.float32)), r"k has shape \(2, 9, 2, 4\): expected .* K = 3, as in q"),
        (bad(v=np.zeros((2, 8, 4, 5), np.float32)), r"v has shape \(2, 8, 4, 5\): expected .* T = 9"),
        (
            bad(
                v=np.zeros((2, 9, 3, 5), np.float32),
                log_decay=np.zeros((2, 9, 3), np.float32),
                lam=np.zeros((2, 9, 3, 5), np.float32),
            ),
            "H = 3 heads: expected a multiple of the G = 2 groups",
        ),
        (
            bad(lam=np.zeros((2, 9, 4, 4), np.float32)),
            r"lam has shape .* L = 4 levels: expected L ≥ num_levels\(9\) = 5",
        ),
        (bad(q=np.zeros((2, 9, 2, 3), np.int32)), "q has dtype int32: expected a floating dtype"),
        (bad(chunk_size=12), "chunk_size must be a power of two ≥ 1 or None, got 12"),
        (bad(implementation="cuda"), "implementation must be one of .*'xla'.* got 'cuda'"),
        (
            bad(initial_state=init_fenwick_state(2, 4, 3, 6, 9)),
            r"initial_state.levels has shape \(2, 4, 5, 3, 6\): expected \[2, 4, L, 3, 5\]",
        ),
        (bad(initial_state=np.zeros((2, 4, 5, 3, 5))), "initial_state is of type ndarray: expected a FenwickState"),
        (
            bad(initial_state=FenwickState(np.zeros((2, 4, 5, 3, 5), int), 0)),
            r"initial_state.levels has dtype int\d+: expected a floating dtype",
        ),
        (
            bad(initial_state=init_fenwick_state(2, 4, 3, 5, 9).replace(position=-2)),
            "initial_state.position is -2: expected the number of tokens seen, at least 0",
        ),
        (
            bad(initial_state=init_fenwick_state(2, 4, 3, 5, 9).replace(position=3.7)),
            "initial_state.position is 3.7: expected an integer",
        ),
        (bad(q=None), r"q is of type NoneType: expected an array \[B, T, G, K\]"),
        (
            bad(initial_state=init_fenwick_state(2, 4, 3, 5, 9).replace(position=jnp.asarray(16))),
            r"num_levels\(25\) = 6 for initial_state.position \+ T tokens",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        log_linear_attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k=np.zeros((1, 9, 2, 3), np.float32)), r"k has shape \(1, 9, 2, 3\): expected .* B = 2, as in q"),
        (dict(log_decay=np.zeros((2, 9, 1), np.float32)), r"log_decay has shape .* H = 4, as in v"),
        (dict(v=np.zeros((2, 9, 4, 5), int)), r"v has dtype int\d+: expected a floating dtype"),
        (dict(chunk_size=3), "chunk_size must be a power of two ≥ 1 or None, got 3"),
        (dict(initial_state=np.zeros((2, 4, 5, 3), np.float32)), r"initial_state has shape .* K = 3, as in q"),
        (
            dict(initial_state=init_fenwick_state(2, 4, 3, 5, 9)),
            "initial_state is of type FenwickState: expected an array",
        ),
    ],
)
def test_bad_arguments_of_gated_linear_attention_are_named(changes, message):
    arguments = {name: x for name, x in bad().items() if name != "lam"}
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**arguments | changes)


@pytest.mark.parametrize("attention", [log_linear_attention, gated_linear_attention])
def test_a_chunk_longer_than_the_sequence_is_the_sequence(attention):
    arguments = {n: x for n, x in bad().items() if n != "lam" or attention is log_linear_attention}
    expected = attention(**arguments, return_state=True)
    got = attention(**arguments, return_state=True, chunk_size=1 << 20)  # would be terabytes
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(("axis", "name"), [(0, "B"), (1, "T"), (3, "V")])
def test_empty_arrays_are_an_error(axis, name):
    arguments = bad()
    which = ["v"] if name == "V" else list(arguments)
    empty = {n: np.take(np.asarray(x), [], axis) if n in which else x for n, x in arguments.items()}
    with pytest.raises(ValueError, match=rf"with at least one of each \(no {name} here\)"):
        log_linear_attention(**empty)


@pytest.mark.parametrize("form", FORMS)
def test_the_widest_of_mixed_dtypes_counts(form):
    q, k, v, log_decay, lam = random_inputs(12, 1, 150, 1, 1, 8, 8, dtype=np.float32)
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    out = log_linear_attention(q, k, v, log_decay, lam, implementation=form)
    with jax.enable_x64(True):
        exact = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, log_decay, lam))
        expected = log_linear_attention(*exact, implementation="parallel")
    assert relative_error(out, expected) < 1e-6


def test_a_step_past_the_states_end_is_an_error():
    state = init_fenwick_state(1, 1, 2, 2, max_length=4)
    inputs = random_inputs(0, 1, 5, 1, 1, 2, 2, levels=9, dtype=np.float32)
    for t in range(4):
        _, state = fenwick_step(state, *(x[:, t] for x in inputs))
    with pytest.raises(ValueError, match=r"3 levels, room for 4 tokens.*larger max_length"):
        fenwick_step(state, *(x[:, 4] for x in inputs))
