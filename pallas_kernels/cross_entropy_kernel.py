"""The kernel of `cross_entropy`, in Triton's own language. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def loss_and_gradient(
    logits, targets, vocab, losses, gradients, columns: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr
):
    """One row a program: its loss, and the gradient of that with respect to its logits, whose memory `gradients` may be.

    The row comes from memory once, in blocks of LANE neighbours for each lane; for the gradient it comes from the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    gradients += row * columns
    target = tl.load(targets + row)
    label_logit = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    in_block = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Of each lane's logits so far the largest, and the sum of exp(logit - largest).
    largests = tl.full((BLOCK // LANE,), -1e38, tl.float32)
    sums = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, columns, BLOCK):
        logit = _logits_from(logits, start + in_block, vocab, columns, "evict_last")
        new_largests = tl.maximum(largests, tl.max(logit, 1))
        sums = sums * tl.exp(largests - new_largests) + tl.sum(tl.exp(logit - new_largests[:, None]), 1)
        largests = new_largests
    largest = tl.max(largests, 0)
    log_total = largest + tl.log(tl.sum(sums * tl.exp(largests - largest), 0))
    scored = target >= 0
    tl.store(losses + row, tl.where(scored, log_total - label_logit, 0.0))
    for start in range(0, columns, BLOCK):
        column = start + in_block
        probability = tl.exp(_logits_from(logits, column, vocab, columns, "evict_first") - log_total)
        gradient = tl.where(scored, probability - tl.where(column == target, 1.0, 0.0), 0.0)
        tl.store(gradients + column, gradient.to(gradients.dtype.element_ty), mask=column < columns)


@triton.jit
def _logits_from(logits, column, vocab, columns: tl.constexpr, EVICTION: tl.constexpr):
    """The row's logits in these columns, -inf where there is none.

    What is loaded depends on `columns`, not on `vocab`: only of that the compiler knows that 16 bytes are inside or outside.
    """
    logit = tl.load(logits + column, mask=column < columns, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return tl.where(column < vocab, logit, float("-inf"))
