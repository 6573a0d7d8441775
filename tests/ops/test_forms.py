"""Every form of every operation: the definition, its identities, states, gradients, extreme decays, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from loglinear_jax import (
    FenwickState,
    fenwick_level,
    num_levels,
    occupied_levels,
)
from loglinear_jax.ops import softmax_attention
from loglinear_jax.ops.softmax import attend_to_cache, key_value_cache, parallel

from .forms import (
    BUCKET_SCORES,
    DELTA,
    FORMS,
    GATED_DELTA,
    GATED_LINEAR,
    LOG_LINEAR,
    SOFTMAX,
    WITH_STATES,
    exact_output,
    exact_outputs_and_gradients,
    in_tiers,
    of_documents_alone,
    outputs_and_gradients,
)
from .inputs import extreme_decays, in_float64, relative_error, softmax_definition


def every_form(which=lambda form: True):
    return pytest.mark.parametrize("form", in_tiers(form for form in FORMS if which(form)))


def of_its_own(form):
    """One state under the delta rule goes through the same transitions and the same tree as a state for each level."""
    return form.operation is not GATED_DELTA


def assert_close(results, expected, form, tolerance=None):
    """Outputs and states to the form's tolerance, gradients to theirs. In float32, what should be 0 is compared with 1e-3."""
    for name, result in results.items():
        assert np.isfinite(result).all(), name
        limit = form.gradient_tolerance if name.startswith("d ") else form.tolerance
        error = np.linalg.norm(result.astype(np.float64) - expected[name])
        scale = np.linalg.norm(expected[name]) + (1e-3 if form.dtype == np.float32 else 0)
        assert error <= (tolerance or limit) * scale, (name, error / scale)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("length", [1, 20])
def test_definition(form, length):
    inputs = form.inputs(0, 2, length, 2, 4)
    assert relative_error(form(inputs), form.operation.definition(*inputs)) < form.tolerance


@every_form(lambda form: form.operation is SOFTMAX)
@pytest.mark.parametrize("window", [1, 4])
def test_definition_of_a_window(form, window):
    inputs = form.inputs(0, 1, 20, 1, 2)
    assert relative_error(form(inputs, window=window), softmax_definition(*inputs, window)) < form.tolerance


@pytest.mark.parametrize(("window", "length"), [(4, 130), (70, 150)])
@in_float64
def test_a_window_of_a_long_sequence_goes_by_blocks(window, length):
    q, k, v = SOFTMAX.inputs(0, 2, length, 1, 2, 4, 3)
    one = jnp.zeros((1, length), jnp.int32)
    for segment_ids in (None, jnp.concatenate([segment_ids_of((10, 64, 100), length), one])):
        options = dict(segment_ids=segment_ids, window=window)

        def output_and_gradients(q, k, v, form, options=options):
            out, pull = jax.vjp(lambda *x: softmax_attention(*x, implementation=form, **options), q, k, v)
            return out, *pull(v)

        by_blocks, scan = (
            jax.jit(output_and_gradients, static_argnums=3)(q, k, v, form) for form in (None, "recurrent")
        )
        for found, expected in zip(by_blocks, scan, strict=True):
            assert relative_error(found, expected) < 1e-10


@pytest.mark.parametrize("window", [None, 13])
@in_float64
def test_some_queries_of_softmax_attention_at_a_time_are_as_all_at_once(window, monkeypatch):
    q, k, v = SOFTMAX.inputs(0, 2, 20, 1, 2, 4, 3)
    segment_ids = jnp.concatenate([segment_ids_of((5, 8, 16), 20), jnp.zeros((1, 20), jnp.int32)])

    def output_and_gradients(q, k, v):
        out, pull = jax.vjp(lambda *x: softmax_attention(*x, segment_ids=segment_ids, window=window), q, k, v)
        cache = key_value_cache(k[:, :2], v[:, :2], 20, window)
        return out, *pull(v), attend_to_cache(cache, *(x[:, 2:] for x in (q, k, v)), window, segment_ids[:, 2:])[0]

    expected = jax.jit(output_and_gradients)(q, k, v)
    monkeypatch.setattr(parallel, "QUERIES_AT_ONCE", 8)
    for one, other in zip(jax.jit(lambda *x: output_and_gradients(*x))(q, k, v), expected, strict=True):
        assert relative_error(one, other) < 1e-12


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="counts the memory of a CPU")
@pytest.mark.parametrize("segmented", [False, True], ids=["whole", "segments"])
def test_memory_of_softmax_attention_grows_with_the_length(segmented):
    """Forward and backward: of twice the tokens twice, not four times."""

    def memory(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if segmented else None
        gradients = jax.grad(lambda x, ids: jnp.sum(softmax_attention(x, x, x, segment_ids=ids) ** 2))
        return jax.jit(gradients).lower(x, ids).compile().memory_analysis().temp_size_in_bytes

    assert memory(4096) < 2.2 * memory(2048)


@every_form()
@pytest.mark.parametrize("start", [None, 16, 45])
def test_values_states_and_gradients(form, start):
    if start is not None and not form.operation.has_state:
        pytest.skip("no state to start from")
    length, operation = 35, form.operation
    levels = num_levels(length + 45) + 1
    inputs = form.inputs(1, 1, length, 1, 2, levels=levels)
    values = None if start is None else operation.draw_state(2, inputs)
    got = outputs_and_gradients(operation, form.name, inputs, values, start, form.chunk_size)
    assert_close(got, exact_outputs_and_gradients(operation, inputs, values, start), form)


@in_float64
@pytest.mark.slow
@pytest.mark.parametrize("operation", WITH_STATES, ids=lambda operation: operation.name)
@settings(max_examples=2)
@given(
    length=st.integers(1, 60),
    log_chunk=st.integers(0, 6),
    groups=st.integers(1, 2),
    heads_per_group=st.integers(1, 2),
    more_levels=st.integers(0, 2),
    start=st.one_of(st.none(), st.integers(0, 40)),
    min_decay=st.sampled_from([0.0, -2.0, -30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_float64_forms_agree_on_any_shape(
    operation, length, log_chunk, groups, heads_per_group, more_levels, start, min_decay, seed
):
    levels = num_levels(length + (start or 0)) + more_levels
    inputs = operation.inputs(seed, 1, length, groups, groups * heads_per_group, 2, 3, levels, min_decay=min_decay)
    values = None if start is None else operation.draw_state(seed, inputs)
    expected = outputs_and_gradients(operation, operation.oracle, inputs, values, start)
    for form in FORMS:
        if form.operation is operation and form.dtype == np.float64 and form.name != operation.oracle:
            chunk_size = 1 << log_chunk if form.chunk_sizes else None
            got = outputs_and_gradients(operation, form.name, inputs, values, start, chunk_size)
            assert_close(got, expected, form, 1e-10)


@every_form(lambda form: form.operation is LOG_LINEAR)
@pytest.mark.parametrize("decay", [-0.1, -50.0])
def test_gradients_of_strong_decays_are_as_exact_as_those_of_weak_ones(form, decay):
    """Against the sum of the definition: of s < r ≤ t, what s adds to t."""
    q, k, v, _, lam = form.inputs(7, 1, 20, 1, 1)
    log_decay = jnp.full((1, 20, 1), decay, lam.dtype)
    output_gradient = np.random.default_rng(8).normal(size=v.shape).astype(lam.dtype)
    exact_q, exact_k, exact_v, exact_lam = (np.asarray(x, np.float64) for x in (q, k, v, lam))
    expected = np.zeros(20)
    for t in range(20):
        for s in range(t):
            weight = exact_lam[0, t, 0, int(fenwick_level(t, s))] * np.exp(decay * (t - s))
            weight *= exact_q[0, t, 0] @ exact_k[0, s, 0]
            expected[s + 1 : t + 1] += weight * (exact_v[0, s, 0] @ output_gradient[0, t, 0])

    def total(log_decay):
        return jnp.sum(form((q, k, v, log_decay, lam)) * output_gradient)

    assert relative_error(jax.grad(total)(log_decay)[0, :, 0], expected) < form.tolerance


def segment_ids_of(cuts, length):
    """Ids that change at the cuts, and come again."""
    return jnp.asarray(np.searchsorted(cuts, np.arange(length), side="right") % 2 * 7 - 3, jnp.int32)[None]


@every_form()
@pytest.mark.parametrize(
    ("cuts", "start"),
    [
        ((5, 37, 38), None),  # one of them over whole chunks
        pytest.param((5, 37, 38), 45, marks=pytest.mark.slow),
        pytest.param((5, 37, 38), 64, marks=pytest.mark.slow),
    ],
)
def test_documents_in_a_pack_are_as_alone(form, cuts, start):
    operation, length, room = form.operation, 48, 128
    inputs = form.inputs(1, 1, length, 1, 2, levels=num_levels(room))
    if not operation.has_state:
        start = None
    values = None if start is None else operation.draw_state(2, inputs, num_levels(room))
    packed = dict(segment_ids=segment_ids_of(cuts, length), room=room)
    got = outputs_and_gradients(operation, form.name, inputs, values, start, form.chunk_size, **packed)
    assert_close(got, of_documents_alone(operation, inputs, cuts, values, start, room), form)


@every_form(lambda form: form.name != "pallas" and "log_decay" in form.operation.arguments and of_its_own(form))
@pytest.mark.parametrize("cuts", [(7, 9, 40, 70), pytest.param(range(1, 100), marks=pytest.mark.slow)], ids=len)
def test_boundaries_cost_no_precision_in_float32(form, cuts):
    """Slow decays on both sides of them, within a chunk; and documents of one token."""
    with jax.enable_x64(False):
        inputs = form.inputs(8, 1, 100, 1, 2, dtype=np.float32, min_decay=-1e-3)
        packed, chunk_size = segment_ids_of(cuts, 100), 32 if form.chunk_sizes else None
        got = outputs_and_gradients(form.operation, form.name, inputs, chunk_size=chunk_size, segment_ids=packed)
    expected = exact_outputs_and_gradients(form.operation, inputs, segment_ids=packed)
    for name, result in got.items():
        assert relative_error(result, expected[name]) < form.float32_tolerance, name


@every_form(lambda form: form.name != form.operation.oracle and of_its_own(form))
@pytest.mark.slow
def test_packs_at_any_alignment(form):
    """As by the oracle, which goes token by token."""
    operation, length, room = form.operation, 24, 64
    inputs = form.inputs(1, 1, length, 1, 2, levels=num_levels(room))

    @settings(max_examples=10)
    @given(cuts=st.sets(st.integers(1, length - 1)).map(sorted), first=st.integers(0, room - length))
    def check(cuts, first):
        packed = dict(position=first if operation.has_positions else None, room=room)
        packed |= dict(segment_ids=segment_ids_of(cuts, length), of_state=False)
        got = outputs_and_gradients(operation, form.name, inputs, chunk_size=form.chunk_size, **packed)
        assert_close(got, exact_outputs_and_gradients(operation, inputs, **packed), form)

    check()


@in_float64
@pytest.mark.slow
@pytest.mark.parametrize("operation", [LOG_LINEAR, BUCKET_SCORES], ids=lambda operation: operation.name)
def test_chunks_in_pieces_change_nothing(operation, monkeypatch):
    inputs = operation.inputs(11, 2, 45, 1, 2, 3, 4)
    for name in ("MAX_ELEMENTS_CPU", "MAX_ELEMENTS"):
        monkeypatch.setattr(f"loglinear_jax.ops.tree.{name}", 4 * 5 * 4 * 4)  # 5 of 12 chunks at a time
    got = outputs_and_gradients(operation, "xla", inputs, chunk_size=4)
    expected = outputs_and_gradients(operation, "parallel", inputs)
    assert all(relative_error(x, expected[name]) < 1e-12 for name, x in got.items())


@every_form(lambda form: form.operation.has_state)
@pytest.mark.parametrize("split", [5, 16])  # inside a window of the tokens that follow, and at the beginning of one
def test_a_state_handed_over_anywhere_continues_the_sequence(form, split):
    operation, length = form.operation, 31
    inputs = form.inputs(1, 2, length, 1, 2)
    expected = exact_outputs_and_gradients(operation, inputs)
    room = operation.with_room(length)
    run = jax.jit(lambda inputs, state: form(inputs, initial_state=state, return_state=True, **room))
    first, state = run([x[:, :split] for x in inputs], None)
    second, state = run([x[:, split:] for x in inputs], state)
    assert relative_error(jnp.concatenate([first, second], axis=1), expected["o"]) < form.tolerance
    assert relative_error(operation.state_values(state), expected["state"]) < form.tolerance
    assert not operation.has_levels or state.position == length


@every_form(lambda form: form.operation.has_state)
def test_a_state_of_the_last_document_continues_it(form):
    operation, length, split, cuts = form.operation, 31, 16, (3, 13, 25)
    inputs, segment_ids = form.inputs(1, 1, length, 1, 2), segment_ids_of(cuts, length)
    room = operation.with_room(length)
    expected = form(inputs, segment_ids=segment_ids, **room)
    first, state = form([x[:, :split] for x in inputs], segment_ids=segment_ids[:, :split], return_state=True, **room)
    rest = dict(segment_ids=segment_ids[:, split:], initial_state=state)
    second = form([x[:, split:] for x in inputs], **rest, **room)
    assert relative_error(jnp.concatenate([first, second], axis=1), expected) < form.tolerance


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_of_the_last_document_continues_it(window):
    """In two parts, and token by token."""
    q, k, v = SOFTMAX.inputs(1, 1, 31, 1, 2, 3, 5, dtype=np.float32)
    segment_ids = segment_ids_of((3, 13, 25), 31)
    whole = functools.partial(softmax_attention, segment_ids=segment_ids, window=window)
    expected = jax.jit(whole)(q, k, v)
    cache = key_value_cache(k[:, :16], v[:, :16], 31, window, segment_ids[:, :16])
    attend = jax.jit(attend_to_cache, static_argnums=4)
    at_once, _ = attend(cache, q[:, 16:], k[:, 16:], v[:, 16:], window, segment_ids[:, 16:])
    assert relative_error(at_once, expected[:, 16:]) < 1e-6
    for t in range(16, 25):
        out, cache = attend(cache, *(x[:, t : t + 1] for x in (q, k, v)), window)
        assert relative_error(out[:, 0], expected[:, t]) < 1e-6


@every_form(lambda form: form.operation.has_positions)
def test_rows_at_positions_of_their_own_are_as_alone(form):
    """From a state, and from a first position; a step further."""
    operation, room = form.operation, form.operation.with_room(64)
    inputs = form.inputs(1, 2, 12, 1, 2, levels=num_levels(64))
    values, position = operation.draw_state(2, inputs, num_levels(64)), np.array([16, 45])
    occupied = occupied_levels(position - 1, values.shape[2])[:, None, :, None, None]
    states = FenwickState(jnp.where(occupied, values, 0), jnp.asarray(position, jnp.int32))
    tokens = [x[:, :-1] for x in inputs]
    from_state, state = form(tokens, initial_state=states, return_state=True, **room)
    afresh = form(tokens, first_position=states.position, **room)
    stepped, last = operation.step(state, [x[:, -1] for x in inputs])
    assert state.position.tolist() == [27, 56] and last.position.tolist() == [28, 57]
    for row, start in enumerate(position):
        of_row, state_of_row = [x[row : row + 1] for x in inputs], operation.make_state(values[row : row + 1], start)
        expected = form(of_row, initial_state=state_of_row, **room)
        assert relative_error(from_state[row], expected[0, :-1]) < form.tolerance
        assert relative_error(stepped[row], expected[0, -1]) < form.tolerance
        expected = form([x[row : row + 1] for x in tokens], first_position=int(start), **room)
        assert relative_error(afresh[row], expected[0]) < form.tolerance


def test_rows_of_a_cache_at_positions_of_their_own_are_as_alone():
    q, k, v = SOFTMAX.inputs(1, 2, 20, 1, 2, 3, 5, dtype=np.float32)
    lengths, expected = (9, 14), jax.jit(softmax_attention)(q, k, v)
    rows = [key_value_cache(k[row : row + 1, :n], v[row : row + 1, :n], 20) for row, n in enumerate(lengths)]
    cache = jax.tree.map(lambda *x: jnp.concatenate([jnp.atleast_1d(y) for y in x]), *rows)
    for _ in range(2):
        token = [jnp.stack([x[row, n] for row, n in enumerate(cache.position)])[:, None] for x in (q, k, v)]
        out, cache = jax.jit(attend_to_cache)(cache, *token)
        for row, n in enumerate(cache.position):
            assert relative_error(out[row, 0], expected[row, n - 1]) < 1e-6


@every_form()
def test_prefill_then_steps_is_one_pass(form):
    length, prefill = 20, 9
    inputs = form.inputs(2, 2, length, 2, 4)
    whole = exact_output(form.operation, inputs)
    out, state = form.operation.prefill(form, [x[:, :prefill] for x in inputs], length)
    outs = list(jnp.moveaxis(out, 1, 0))
    step = jax.jit(form.operation.step)
    for t in range(prefill, length):
        out, state = step(state, [x[:, t] for x in inputs])
        outs.append(out)
    assert relative_error(jnp.stack(outs, 1), whole) < form.tolerance


@every_form(lambda form: form.operation in (LOG_LINEAR, DELTA))
def test_lambda_of_one_is_one_state(form):
    *inputs, lam = form.inputs(4, 2, 45, 2, 4)
    out = form((*inputs, jnp.ones_like(lam)))
    one_state = GATED_LINEAR if form.operation is LOG_LINEAR else GATED_DELTA
    assert relative_error(out, exact_output(one_state, inputs)) < form.tolerance


@every_form(lambda form: form.operation is LOG_LINEAR)
def test_lambda_at_level_zero_sees_the_token_alone(form):
    q, k, v, log_decay, lam = form.inputs(5, 2, 20, 2, 4)
    one_hot = jnp.zeros_like(lam).at[..., 0].set(1)
    expected = np.repeat(np.sum(np.asarray(q, np.float64) * k, -1), 2, axis=2)[..., None] * v
    assert relative_error(form((q, k, v, log_decay, one_hot)), expected) < form.tolerance


@every_form()
def test_no_output_depends_on_later_tokens(form):
    inputs, others = (form.inputs(seed, 2, 20, 2, 4) for seed in (6, 7))
    attend = jax.jit(lambda inputs: form(inputs))
    whole = attend(inputs)
    for cut in (1, 8, 13):
        mixed = [jnp.concatenate([x[:, :cut], y[:, cut:]], axis=1) for x, y in zip(inputs, others, strict=True)]
        np.testing.assert_array_equal(attend(mixed)[:, :cut], whole[:, :cut])


def with_bad_token(inputs, index, token, value):
    """The inputs with `value` in all of one argument's token, in the first sequence's first head or group."""
    return [x.at[0, token, 0].set(value) if i == index else x for i, x in enumerate(inputs)]


@every_form(lambda form: "log_decay" in form.operation.arguments and of_its_own(form))
def test_a_log_decay_above_0_counts_as_0(form):
    inputs, at = list(form.inputs(6, 1, 20, 1, 2)), form.operation.arguments.index("log_decay")

    @jax.jit
    def output_and_gradient(log_decay):
        out, pull = jax.vjp(lambda x: form((*inputs[:at], x, *inputs[at + 1 :])), log_decay)
        return out, *pull(out)

    log_decay = inputs[at] + 1
    is_above = log_decay > 0
    (out, gradient), (expected, wanted) = map(output_and_gradient, (log_decay, jnp.where(is_above, 0, log_decay)))
    np.testing.assert_array_equal(out, expected)
    assert is_above.any() and (gradient[is_above] == 0).all() and (wanted[is_above] != 0).any()
    assert relative_error(gradient[~is_above], wanted[~is_above]) < form.gradient_tolerance


@every_form(of_its_own)
def test_what_is_not_finite_never_leaves_its_chunk_backwards_nor_its_sequence_or_group(form):
    inputs = form.inputs(6, 2, 70, 2, 4)
    attend = jax.jit(lambda inputs: form(inputs))
    clean = np.asarray(attend(inputs))
    for index, argument in enumerate(form.operation.arguments):
        for token, value in ((37, np.nan), (63, np.inf)):
            if argument == "log_decay" and value == np.inf:
                continue  # which counts as 0
            out = np.array(attend(with_bad_token(inputs, index, token, value)))
            first = form.first_reached(argument, token)
            finite = np.isfinite(out[0, [first, token], 0])
            # Of scores, those of the buckets that hold the token, or all if it is of the query.
            assert not (finite.all() if form.operation is BUCKET_SCORES else finite.any()), argument
            out[0, first:, :2] = clean[0, first:, :2]
            np.testing.assert_array_equal(out, clean, err_msg=f"{argument} of token {token}")


@every_form(lambda form: form.operation.has_state and of_its_own(form))
def test_gradients_of_other_sequences_and_groups_and_of_earlier_queries_and_lambda_stay_finite(form):
    """For a loss of tokens before the chunk that has the NaN."""
    inputs, before = form.inputs(6, 2, 36, 2, 4), 16
    gradients = jax.jit(jax.grad(lambda inputs: jnp.sum(form(inputs)[:, :before] ** 2)))
    clean = gradients(inputs)
    for index, argument in enumerate(form.operation.arguments):
        got = gradients(with_bad_token(inputs, index, 23, np.nan))
        for name, x, expected in zip(form.operation.arguments, map(np.array, got), clean, strict=True):
            own = 0, slice(before if name in ("q", "lam") and form.name != "parallel" else 0, None)
            half = x.shape[2] // 2
            x[own][:, :half] = expected[own][:, :half]
            np.testing.assert_array_equal(x, expected, err_msg=f"NaN in {argument}, d {name}")


@every_form(lambda form: form.operation.has_state and of_its_own(form))
def test_nan_in_an_initial_state_reaches_its_head_alone(form):
    inputs = form.inputs(6, 2, 9, 2, 4)
    values = form.operation.draw_state(1, inputs)
    attend = jax.jit(lambda values: form(inputs, initial_state=form.operation.make_state(values, 7)))
    clean, out = np.asarray(attend(values)), np.array(attend(values.at[0, 0].set(np.nan)))
    missing = np.isnan(out[0, :, 0])
    assert missing.any(-1).all() if form.operation is BUCKET_SCORES else missing.all()
    out[0, :, 0] = clean[0, :, 0]
    np.testing.assert_array_equal(out, clean)


@every_form(lambda form: len(form.chunk_sizes) > 1 and of_its_own(form))
def test_chunk_size_does_not_matter(form):
    inputs = form.inputs(12, 1, 45, 1, 2)
    expected = exact_output(form.operation, inputs)
    for chunk_size in (*form.chunk_sizes[1:], None):
        found = jax.jit(lambda inputs, chunk_size=chunk_size: form(inputs, chunk_size=chunk_size))(inputs)
        assert relative_error(found, expected) < form.tolerance


@every_form(lambda form: "log_decay" in form.operation.arguments)
@pytest.mark.parametrize("decay", ["strong", "mixed", "reset"])
def test_extreme_decays_in_float32(form, decay):
    length = 100
    with jax.enable_x64(False):
        inputs = list(form.inputs(8, 1, length, 1, 2, dtype=np.float32))
        inputs[form.operation.arguments.index("log_decay")] = jnp.asarray(extreme_decays(decay, length), jnp.float32)
        got = outputs_and_gradients(form.operation, form.name, inputs, chunk_size=32 if form.chunk_sizes else None)
    expected = exact_outputs_and_gradients(form.operation, inputs)
    for name, result in got.items():
        assert np.isfinite(result).all(), name
        assert relative_error(result, expected[name]) < max(form.float32_tolerance, form.gradient_tolerance), name


@every_form(lambda form: form.name not in ("parallel", "recurrent") or form.operation is SOFTMAX)
@pytest.mark.slow
def test_bfloat16_inputs_accumulate_in_float32(form):
    with jax.enable_x64(False):
        inputs = form.inputs(9, 1, 70, 1, 2, dtype=jnp.bfloat16)
        got = outputs_and_gradients(form.operation, form.name, inputs, chunk_size=32 if form.chunk_sizes else None)
    assert (got["o"].dtype == jnp.bfloat16 and "state" not in got) or got["state"].dtype == np.float32
    expected = exact_outputs_and_gradients(form.operation, inputs)
    for name, result in got.items():
        argument = dict(zip(form.operation.arguments, inputs, strict=True)).get(name.removeprefix("d "))
        assert argument is None or result.dtype == argument.dtype
        assert relative_error(result, expected[name]) < form.bfloat16_tolerance, name


@pytest.mark.slow
def test_the_error_of_the_parallel_delta_rule_in_bfloat16_does_not_grow_with_its_length():
    for length in (64, 512):
        inputs = DELTA.inputs(9, 1, length, 1, 1, 16, 16, dtype=jnp.bfloat16)
        out = DELTA.function(*inputs, implementation="parallel")
        assert relative_error(out, exact_output(DELTA, inputs)) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("operation", [LOG_LINEAR, GATED_LINEAR, DELTA], ids=lambda operation: operation.name)
def test_slow_decays_do_not_drift_in_the_recurrent_form(operation):
    """Rounded as a factor, exp(-1e-6) is off by 3 % of what is forgotten, alike at every token."""
    length = 20_000
    inputs = list(operation.inputs(9, 1, length, 1, 1, 2, 2, dtype=np.float32))
    inputs[operation.arguments.index("log_decay")] = jnp.full((1, length, 1), -1e-6)
    if "beta" in operation.arguments:
        inputs[operation.arguments.index("beta")] *= 1e-4  # which erases slowly, too
    got = operation.function(*inputs, implementation="recurrent")
    assert relative_error(got, exact_output(operation, inputs)) < 1.3e-4  # 1.7e-4 by exp


@every_form(lambda form: form.operation in (LOG_LINEAR, DELTA))
def test_lambda_of_an_empty_level_counts_for_nothing(form):
    *inputs, lam = form.inputs(6, 1, 20, 1, 2)
    occupied = occupied_levels(np.arange(20), lam.shape[-1])[:, None]
    bad = jnp.where(occupied, lam, jnp.inf)
    assert relative_error(form((*inputs, bad)), exact_output(form.operation, (*inputs, lam))) < form.tolerance
    _, state = form([x[:, :12] for x in (*inputs, lam)], return_state=True)
    out, _ = form.operation.step(state, [x[:, 12] for x in (*inputs, bad)])
    assert np.isfinite(out).all()
    for start in (12, 16):  # inside a window, and at its beginning
        _, state = form([x[:, :start] for x in (*inputs, lam)], return_state=True)
        assert np.isfinite(form([x[:, start:] for x in (*inputs, bad)], initial_state=state)).all()


@every_form(lambda form: form.name == "pallas" and of_its_own(form))
def test_second_derivatives_of_kernels_are_refused_by_name(form):
    inputs = form.inputs(6, 1, 20, 1, 2)
    gradient = jax.grad(lambda inputs: jnp.sum(form(inputs) ** 2))
    with pytest.raises(pallas_kernels.UnsupportedError, match="first derivatives .* implementation='xla' has all"):
        jax.jvp(gradient, (inputs,), (inputs,))


@every_form(lambda form: form.name == "xla")
@pytest.mark.slow
def test_settings_that_watch_over_a_users_promotions_change_nothing(form):
    inputs = form.inputs(6, 1, 20, 1, 2, dtype=np.float32)
    inputs = [
        x if name in ("log_decay", "lam") else x.astype(jnp.bfloat16)
        for name, x in zip(form.operation.arguments, inputs, strict=True)
    ]
    expected = form(inputs)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(form(inputs), expected)
        jax.grad(lambda inputs: jnp.sum(form(inputs).astype(jnp.float32)))(inputs)


@every_form(of_its_own)
def test_vmap_is_a_loop(form):
    seeds = [form.inputs(seed, 2, 20, 2, 4) for seed in range(3)]
    mapped = jax.jit(jax.vmap(lambda *x: form(x)))(*(jnp.stack(x) for x in zip(*seeds, strict=True)))
    alone = jax.jit(lambda inputs: form(inputs))
    for out, inputs in zip(mapped, seeds, strict=True):
        assert relative_error(out, alone(inputs)) < form.tolerance


@every_form(lambda form: form.operation in (LOG_LINEAR, SOFTMAX))
def test_the_widest_of_mixed_dtypes_counts(form):
    with jax.enable_x64(False):
        q, *others = form.inputs(12, 2, 20, 2, 4, dtype=np.float32)
        inputs = q.astype(jnp.bfloat16), *others
        out = form(inputs)
    assert relative_error(out, exact_output(form.operation, inputs)) < max(form.tolerance, 1e-6)
