"""Cross-entropy in chunks: the same values and gradients as all at once."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from loglinear_jax import losses
from loglinear_jax.losses import chunked_token_losses, summed_loss, token_losses
from loglinear_jax.models import LanguageModel, LanguageSettings, RecallModel, RecallSettings, recall


def draw(seed, batch, length, hidden, vocab):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(batch, length, hidden)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(hidden, vocab)), jnp.float32)
    return x, kernel, jnp.asarray(rng.integers(-1, vocab, (batch, length)), jnp.int32)


@settings(max_examples=3)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.sampled_from([2, 127, 128, 129])),
    chunk=st.one_of(st.none(), st.integers(1, 30)),
    z_loss=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunks_do_not_matter(shape, chunk, z_loss, seed):
    x, kernel, targets = draw(seed, *shape)
    expected, expected_right = jax.jit(token_losses)(x @ kernel, targets)
    losses, right = jax.jit(chunked_token_losses, static_argnums=3)(x, kernel, targets, chunk)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(right, expected_right)

    def at_once(x, kernel):
        return 0.3 * jnp.sum(token_losses(x @ kernel, targets, z_loss)[0])

    def in_chunks(x, kernel):
        return 0.3 * summed_loss(x, kernel, targets, chunk, z_loss=z_loss)

    (value, grads), (wanted, wanted_grads) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, kernel) for f in (in_chunks, at_once)
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(in_chunks)(x, kernel), wanted, rtol=1e-4, atol=1e-5)  # not differentiated
    for grad, expected in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=1e-5)


def test_z_loss_is_added_to_the_loss_of_scored_tokens():
    x, kernel, targets = draw(0, 2, 8, 4, 50)
    logits = np.asarray(x @ kernel, np.float64)
    added = 0.2 * np.log(np.exp(logits).sum(-1)) ** 2 * (np.asarray(targets) >= 0)
    (plain, right), (losses, same) = token_losses(x @ kernel, targets), token_losses(x @ kernel, targets, 0.2)
    np.testing.assert_allclose(losses - plain, added, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(right, same)


def test_bfloat16_features_give_a_float32_loss_and_kernel_gradient():
    x, kernel, targets = draw(0, 2, 8, 16, 50)
    value, (dx, d_kernel) = jax.value_and_grad(lambda x, k: summed_loss(x, k, targets), argnums=(0, 1))(
        x.astype(jnp.bfloat16), kernel
    )
    assert (value.dtype, dx.dtype, d_kernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert value == pytest.approx(float(jnp.sum(token_losses(x @ kernel, targets)[0])), rel=2e-2)


def test_all_logits_never_exist_at_once():
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU's products want room too
        x, kernel, targets = draw(0, 4, 64, 8, 1000)
        step = jax.jit(jax.grad(lambda x, k: summed_loss(x, k, targets, 16), argnums=(0, 1)))
        compiled = step.lower(x, kernel).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 64 * 1000 * 4  # one float32 of all logits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "columns"), [(20_000, 20_096), (1000, 1024), (4096, 4096), (16_384, 16_384), (16_384, 16_512)]
)
def test_the_kernel_agrees_with_plain_jax_on_a_gpu(vocab, columns, dtype):
    pytest.importorskip("jax_triton")
    assert pallas_kernels.KERNELS["cross_entropy"].why_not() is None
    rng = np.random.default_rng(0)
    logits = jnp.asarray(5 * rng.normal(size=(3, 70, columns)), dtype)
    targets = jnp.asarray(rng.integers(-1, vocab, (3, 70)), jnp.int32)
    (loss, gradient), (expected_loss, expected) = (
        jax.jit(jax.vmap(functools.partial(losses._loss_and_gradient, pallas, vocab=vocab)))(logits, targets)
        for pallas in (True, False)
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (gradient, expected)), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("chunk", [16, 4])
def test_a_model_takes_the_kernel_unless_it_is_told_not_to(implementation, chunk, monkeypatch):
    """With all logits at once, and in chunks."""

    def cross_entropy(logits, targets, vocab):
        raise RuntimeError("by the kernel")

    monkeypatch.setattr(pallas_kernels.KERNELS["cross_entropy"], "is_best", lambda: True)
    monkeypatch.setattr(pallas_kernels, "cross_entropy", cross_entropy)
    monkeypatch.setattr(recall, "MOST_LOGITS", chunk * 2048)
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk * 2048)
    tokens = jnp.zeros((1, 8), jnp.int32)
    sizes = dict(vocab_size=2048, max_length=8, lam="fixed", hidden=16, layers=1, head_dim=16, key_dim=16)
    for kind, settings_of in ((LanguageModel, LanguageSettings), (RecallModel, RecallSettings)):
        model = kind(settings_of(**sizes, implementation=implementation))
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)
        gradient = jax.grad(lambda p, model=model: model.apply(p, tokens, tokens, method="summed_loss"))
        by_kernel = pytest.raises(RuntimeError, match="by the kernel")
        with by_kernel if implementation is None else contextlib.nullcontext():
            jax.eval_shape(gradient, params)
