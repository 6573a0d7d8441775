"""Cross-entropy of next-token prediction, over the tokens at once or in chunks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels

# Logits of a chunk of one seed are this many at most, 1 GiB in float32; twice as many where they stay in bfloat16.
CHUNK_ELEMENTS = 1 << 28
ALIGNMENT = 128
# From so many columns on, a row of logits fills a program of the kernel of cross-entropy.
KERNEL_COLUMNS = 2048


def token_losses(
    logits: Float[Array | np.ndarray, "*B vocab"], targets: Int[Array | np.ndarray, "*B"], z_loss: float = 0.0
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """Cross-entropy in nats at each position, and whether the argmax is right; 0 and False where the target is < 0.

    z_loss: weight with which (log Σ exp logits)² is added to the cross-entropy (Chowdhery et al., "PaLM", 2022, section
    5).
    """
    scored = targets >= 0
    labels = jnp.where(scored, targets, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if z_loss:
        losses += z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.where(scored, losses, 0.0), (jnp.argmax(logits, axis=-1) == labels) & scored


def chunked_token_losses(
    x: Float[Array, "B T D"],
    kernel: Float[Array | np.ndarray, "D vocab"],
    targets: Int[Array | np.ndarray, "B T"],
    chunk: int | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """`token_losses` of logits x @ kernel (products in x's dtype, the rest in float32), in chunks of tokens.

    chunk: tokens whose logits exist at a time; if None, so many that their logits are no more than CHUNK_ELEMENTS.
    """
    chunk = chunk or _chunk_size(kernel, jnp.float32)
    losses, right = _losses_of_chunks(*_in_chunks(x, targets, chunk), kernel)
    return tuple(y.reshape(-1)[: targets.size].reshape(targets.shape) for y in (losses, right))


def summed_loss(
    x: Float[Array, "B T D"],
    kernel: Float[Array | np.ndarray, "D vocab"],
    targets: Int[Array | np.ndarray, "B T"],
    chunk: int | None = None,
    pallas: bool = True,
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """The sum of `chunked_token_losses`, each with its z_loss (see `token_losses`). Its gradients are computed along with it,
    so that no logits are computed twice; then logits are rounded to x's dtype, as every product of the model is, before the
    loss is taken in float32.

    chunk: as there; but the kernel's chunks, if None, have twice as many logits in bfloat16, as it keeps them so.
    pallas: take the GPU kernel of cross-entropy where it can run.
    """
    pallas = pallas and pallas_kernels.KERNELS["cross_entropy"].is_best()
    chunk = chunk or _chunk_size(kernel, x.dtype if pallas else jnp.float32)
    return _summed(pallas, z_loss, *_in_chunks(x, targets, chunk), kernel)


def takes_kernel(vocab: int) -> bool:
    """Whether `summed_loss` computes the loss and its gradient by a kernel that pays for so large a vocabulary: then it moves
    less than the gradient of `token_losses`, also where all logits exist at a time."""
    return vocab >= KERNEL_COLUMNS and pallas_kernels.KERNELS["cross_entropy"].is_best()


def _chunk_size(kernel, dtype) -> int:
    """How many tokens have logits at a time, in this dtype."""
    elements = CHUNK_ELEMENTS * jnp.dtype(jnp.float32).itemsize // jnp.dtype(dtype).itemsize
    return max(elements // kernel.shape[1], 1)


def _in_chunks(x, targets, chunk):
    """x [chunks, size, D] and targets [chunks, size], padded with targets that do not count."""
    tokens = targets.size
    chunks = -(-tokens // chunk)
    size = -(-tokens // chunks)
    pad = chunks * size - tokens
    x = jnp.pad(x.reshape(tokens, -1), [(0, pad), (0, 0)])
    targets = jnp.pad(targets.reshape(-1), (0, pad), constant_values=-1)
    return x.reshape(chunks, size, -1), targets.reshape(chunks, size)


def _pad_vocabulary(kernel):
    """Up to a multiple of ALIGNMENT columns: products over an odd vocabulary, such as GPT-2's, take several times as long."""
    return jnp.pad(kernel, [(0, 0), (0, -kernel.shape[1] % ALIGNMENT)])


def _counting(logits, vocab):
    """In float32, with -inf for the columns that pad the vocabulary."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits.astype(jnp.float32), -jnp.inf)


def _losses_of_chunks(x, targets, kernel, z_loss=0.0):
    """`token_losses` of each chunk, [chunks, size]."""
    padded = _pad_vocabulary(kernel).astype(x.dtype)

    def of_chunk(part):
        logits = jnp.dot(part[0], padded, preferred_element_type=jnp.float32)
        return token_losses(_counting(logits, kernel.shape[1]), part[1], z_loss)

    return jax.lax.map(of_chunk, (x, targets))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(pallas, z_loss, x, targets, kernel):
    return jnp.sum(_losses_of_chunks(x, targets, kernel, z_loss)[0])


def _summed_forward(pallas, z_loss, x, targets, kernel):
    padded = _pad_vocabulary(kernel).astype(x.dtype)

    def step(sums, part):
        loss_sum, d_padded = sums
        x, targets = part
        logits = jnp.dot(x, padded)
        losses, d_logits = _loss_and_gradient(pallas, logits, targets, kernel.shape[1])
        if z_loss:
            losses, d_logits = _with_z_loss(z_loss, logits, targets, losses, d_logits)
        dx = jnp.dot(d_logits, padded.T)
        d_padded += jnp.dot(x.T, d_logits, preferred_element_type=jnp.float32)
        return (loss_sum + jnp.sum(losses), d_padded), dx

    start = jnp.zeros((), jnp.float32), jnp.zeros(padded.shape, jnp.float32)
    (loss_sum, d_padded), dx = jax.lax.scan(step, start, (x, targets))
    return loss_sum, (dx, d_padded[:, : kernel.shape[1]].astype(kernel.dtype))


def _loss_and_gradient(pallas, logits, targets, vocab):
    """(losses [N], their gradient with respect to the logits [N, columns] in their dtype), of which `vocab` columns count."""
    if pallas:
        return pallas_kernels.cross_entropy(logits, targets, vocab)
    dtype, scored = logits.dtype, targets >= 0
    logits = _counting(logits, vocab)
    is_label = jnp.arange(logits.shape[-1]) == targets[:, None]
    log_total = jax.nn.logsumexp(logits, axis=-1)
    label_logit = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    d_logits = jnp.where(scored[:, None], jnp.exp(logits - log_total[:, None]) - is_label, 0.0).astype(dtype)
    return jnp.where(scored, log_total - label_logit, 0.0), d_logits


def _with_z_loss(z_loss, logits, targets, losses, d_logits):
    """The losses and their gradient with what z_loss adds to them. From the gradient of the cross-entropy, p - 1 at the label,
    follows the softmax p, and from the loss log Σ exp, so that neither is computed again."""
    scored = targets >= 0
    is_label = (jnp.arange(logits.shape[-1]) == targets[:, None]).astype(jnp.float32)
    label_logit = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0].astype(jnp.float32)
    log_total = jnp.where(scored, losses + label_logit, 0.0)
    d_log_total = 2 * z_loss * log_total[:, None]
    more = d_log_total * (d_logits.astype(jnp.float32) + is_label)
    return losses + z_loss * log_total**2, (d_logits.astype(jnp.float32) + more).astype(d_logits.dtype)


def _summed_backward(pallas, z_loss, gradients, d_loss):
    del pallas, z_loss
    dx, d_kernel = gradients
    return (d_loss * dx).astype(dx.dtype), None, (d_loss * d_kernel).astype(d_kernel.dtype)


_summed.defvjp(_summed_forward, _summed_backward)
