"""The kernel of `cross_entropy`, in Triton's own language. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def loss_and_gradient(logits, targets, vocab, losses, gradients, columns: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: its loss, and the gradient of that with respect to its logits, whose memory `gradients` may be.

    The second reading of a row comes from the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    gradients += row * columns
    target = tl.load(targets + row)
    label_logit = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(logit, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(logit - new_largest), 0)
        largest = new_largest
    log_total = largest + tl.log(total)
    scored = target >= 0
    tl.store(losses + row, tl.where(scored, log_total - label_logit, 0.0))
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(logit - log_total) - tl.where(column == target, 1.0, 0.0)
        tl.store(
            gradients + column, tl.where(scored, gradient, 0.0).to(gradients.dtype.element_ty), mask=column < columns
        )
