"""Cross-entropy of next-token prediction, over the tokens at once or in chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

# Logits of a chunk take this many elements at most: 1 GiB in float32.
CHUNK_ELEMENTS = 1 << 28


def token_losses(
    logits: Float[Array, "*B vocab"], targets: Int[Array, "*B"]
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """(cross-entropy in nats, whether argmax is right) at each position; 0 and False where the target is < 0."""
    scored = targets >= 0
    labels = jnp.where(scored, targets, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses * scored, (jnp.argmax(logits, axis=-1) == labels) & scored


def chunked_token_losses(
    x: Float[Array, "B T D"], kernel: Float[Array, "D vocab"], targets: Int[Array, "B T"], chunk: int | None = None
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """`token_losses` of logits x @ kernel (products in x's dtype, the rest in float32), never all of them at once.

    chunk: tokens whose logits exist at a time; by CHUNK_ELEMENTS if None.
    """
    losses, right = jax.lax.map(
        lambda part: token_losses(_logits(part[0], kernel), part[1]), _in_chunks(x, kernel, targets, chunk)
    )
    return tuple(y.reshape(-1)[: targets.size].reshape(targets.shape) for y in (losses, right))


def summed_loss(
    x: Float[Array, "B T D"], kernel: Float[Array, "D vocab"], targets: Int[Array, "B T"], chunk: int | None = None
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """(sum of the cross-entropies, number of right argmaxes) of `chunked_token_losses`.

    Its gradients are computed along with the loss, chunk by chunk, so that no logits are computed twice.
    """
    return _summed(*_in_chunks(x, kernel, targets, chunk), kernel)


def _in_chunks(x, kernel, targets, chunk):
    """x [chunks, size, D] and targets [chunks, size], padded with targets that do not count."""
    tokens = targets.size
    chunks = -(-tokens // (chunk or max(CHUNK_ELEMENTS // kernel.shape[1], 1)))
    size = -(-tokens // chunks)
    pad = chunks * size - tokens
    x = jnp.pad(x.reshape(tokens, -1), [(0, pad), (0, 0)])
    targets = jnp.pad(targets.reshape(-1), (0, pad), constant_values=-1)
    return x.reshape(chunks, size, -1), targets.reshape(chunks, size)


def _logits(x, kernel):
    return jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _summed(x, targets, kernel):
    losses, right = jax.lax.map(lambda part: token_losses(_logits(part[0], kernel), part[1]), (x, targets))
    return jnp.sum(losses), jnp.sum(right)


def _summed_forward(x, targets, kernel):
    def step(sums, part):
        loss_sum, right_sum, d_kernel = sums
        x, targets = part
        logits = _logits(x, kernel)
        losses, right = token_losses(logits, targets)
        d_logits = jax.nn.softmax(logits) - jax.nn.one_hot(targets, logits.shape[-1])
        d_logits = jnp.where((targets >= 0)[:, None], d_logits, 0.0).astype(x.dtype)
        dx = jnp.dot(d_logits, kernel.astype(x.dtype).T)
        d_kernel += jnp.dot(x.T, d_logits, preferred_element_type=jnp.float32)
        return (loss_sum + jnp.sum(losses), right_sum + jnp.sum(right), d_kernel), dx

    start = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros(kernel.shape, jnp.float32)
    (loss_sum, right_sum, d_kernel), dx = jax.lax.scan(step, start, (x, targets))
    return (loss_sum, right_sum), (dx, d_kernel.astype(kernel.dtype))


def _summed_backward(gradients, cotangents):
    d_loss = cotangents[0]
    dx, d_kernel = gradients
    return (d_loss * dx).astype(dx.dtype), None, (d_loss * d_kernel).astype(d_kernel.dtype)


_summed.defvjp(_summed_forward, _summed_backward)
