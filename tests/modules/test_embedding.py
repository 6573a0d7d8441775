"""The embedding and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loglinear_jax.models import RecallModel, RecallSettings
from loglinear_jax.modules import embedding
from loglinear_jax.modules.embedding import Embed, lookup, sum_by_id_blocks, sum_by_id_sorted


def table_gradient(ids, weights, vocab_size):
    def weighted(table):
        return jnp.sum(weights * lookup(table, ids, weights.dtype))

    return jax.grad(weighted)(jnp.zeros((vocab_size, weights.shape[-1])))


def expected_sums(weights, ids, num_ids):
    expected = np.zeros((num_ids, weights.shape[-1]))
    np.add.at(expected, np.asarray(ids), np.asarray(weights, np.float64))
    return expected


@pytest.mark.parametrize("form", [sum_by_id_sorted, sum_by_id_blocks])
@settings(max_examples=30)
@given(st.data(), st.sampled_from([1, 25]))  # few lengths: each is compiled
def test_rows_of_equal_ids_are_added_up(form, data, length):
    ids = data.draw(st.lists(st.integers(0, 6), min_size=length, max_size=length))
    rows = np.random.default_rng(0).normal(size=(length, 3)).astype(np.float32)
    actual = jax.jit(form, static_argnums=2)(rows, jnp.array(ids), 7)
    np.testing.assert_allclose(actual, expected_sums(rows, ids, 7), atol=1e-5)


@pytest.mark.parametrize(("counts", "dtype"), [((63, 1, 64, 200, 5), jnp.float32), ((10, 130, 0, 52), jnp.bfloat16)])
@pytest.mark.slow
def test_ids_of_which_several_blocks_have_rows(counts, dtype):
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    rows = jnp.asarray(rng.normal(size=(len(ids), 3)), dtype)
    sums = sum_by_id_blocks(rows, jnp.array(ids), len(counts))
    assert sums.dtype == jnp.float32
    np.testing.assert_allclose(sums, expected_sums(rows, ids, len(counts)), atol=1e-4)


def test_a_gpu_has_the_rows_that_are_added_up_token_by_token():
    """Seeds are apart, then tokens, and the features of a token are neighbours in memory."""
    operands = jnp.zeros((2, 100, 8), jnp.bfloat16), jnp.zeros((2, 100), jnp.int32)
    form = jax.jit(jax.vmap(lambda rows, ids: sum_by_id_blocks(rows, ids, 5)))
    [constraint] = [
        line
        for line in form.trace(*operands).lower(lowering_platforms=("cuda",)).as_text().splitlines()
        if "@LayoutConstraint" in line
    ]
    assert "result_layouts = [dense<[2, 1, 0]>" in constraint and "(tensor<2x100x8xbf16>)" in constraint


@pytest.mark.parametrize("gpu", [True, False])
def test_lookup_has_a_gradient_for_each_seed_and_ids_of_any_shape(gpu, monkeypatch):
    monkeypatch.setattr(embedding, "runs_on_gpu", lambda: gpu)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (3, 2, 4))
    weights = rng.normal(size=(3, 2, 4, 2)).astype(np.float32)
    actual = jax.jit(jax.vmap(lambda i, w: table_gradient(i, w, 5)))(ids, weights)
    np.testing.assert_allclose(actual, [expected_sums(w, i, 5) for i, w in zip(ids, weights, strict=True)], atol=1e-5)


@pytest.mark.parametrize("gpu", [True, False])
def test_embed_rounds_rows_and_adds_up_gradients_in_float32(gpu, monkeypatch):
    monkeypatch.setattr(embedding, "runs_on_gpu", lambda: gpu)
    embed = Embed(4, 2, dtype=jnp.bfloat16)
    ids = jnp.zeros(1000, jnp.int32)
    params = jax.jit(embed.init)(jax.random.key(0), ids)
    table = params["params"]["embedding"]
    out = jax.jit(embed.apply)(params, ids)
    assert out.dtype == jnp.bfloat16 and (out == table[0].astype(jnp.bfloat16)).all()
    gradients = jax.jit(jax.grad(lambda params: jnp.sum(embed.apply(params, ids).astype(jnp.float32))))
    grad = gradients(params)["params"]["embedding"]
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, [[1000, 1000], [0, 0], [0, 0], [0, 0]])  # bfloat16 stops at 256 + 1 = 256


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_many_equal_ids_has_the_same_bits_each_time(dtype):
    key = jax.random.key(0)
    ids, weights = jax.random.randint(key, (20_000,), 0, 50), jax.random.normal(key, (20_000, 32), dtype)
    once, *more = (np.asarray(table_gradient(ids, weights, 50)) for _ in range(5))
    assert all((other == once).all() for other in more)
    np.testing.assert_allclose(once, expected_sums(weights, ids, 50), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gpu", [True, False])
def test_ids_outside_the_vocabulary_are_nan(gpu, monkeypatch):
    monkeypatch.setattr(embedding, "runs_on_gpu", lambda: gpu)
    model = RecallModel(RecallSettings(vocab_size=16, max_length=8, layers=1, implementation="recurrent"))
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))
    tokens = jnp.arange(8)[None]
    logits = jax.jit(lambda tokens: model.apply(params, tokens))
    for bad in (16, 99, -1):
        out = logits(tokens.at[0, 5].set(bad))
        assert np.isnan(out[0, 5:]).all() and np.isfinite(out[0, :5]).all()


def test_wide_ids_outside_the_vocabulary_are_nan():
    """Their lower half alone would be an id."""
    table, ids = jnp.ones((7, 2)), np.array([3, 2**32 + 3, 2**63 - 1, 6])
    np.testing.assert_array_equal(lookup(table, ids)[:, 0], [1, np.nan, np.nan, 1])
