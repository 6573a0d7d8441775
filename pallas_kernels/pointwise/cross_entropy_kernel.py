"""The kernel of `cross_entropy`, in Triton's own language. Importing this needs Triton."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def loss_and_gradient(logits, targets, vocab, losses, columns: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr):
    """One row a program: its loss, and the gradient of that with respect to its logits, which takes their place.

    The row comes from memory once, in blocks of LANE neighbours for each lane; for the gradient it comes from the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    scored = target >= 0
    label_logit = tl.load(logits + tl.minimum(tl.maximum(target, 0), vocab - 1)).to(tl.float32)
    column = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    whole = vocab // BLOCK * BLOCK  # columns in blocks that need no mask
    # Of each lane's logits so far the largest, and the sum of exp(logit - largest).
    largests = tl.full((BLOCK // LANE,), -1e38, tl.float32)
    sums = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, whole, BLOCK):
        logit = tl.load(logits + start + column, eviction_policy="evict_last").to(tl.float32)
        largests, sums = _with_block(largests, sums, logit)
    for start in range(whole, columns, BLOCK):
        largests, sums = _with_block(
            largests, sums, _masked_logits(logits, start + column, vocab, columns, "evict_last")
        )
    largest = tl.max(largests, 0)
    log_total = largest + tl.log(tl.sum(sums * tl.exp(largests - largest), 0))
    tl.store(losses + row, tl.where(scored, log_total - label_logit, 0.0))
    if scored:
        offset = log_total * LOG2_E
        for start in range(0, whole, BLOCK):
            logit = tl.load(logits + start + column, eviction_policy="evict_first").to(tl.float32)
            probability = tl.exp2(logit * LOG2_E - offset)
            tl.store(logits + start + column, probability.to(logits.dtype.element_ty))
        for start in range(whole, columns, BLOCK):
            here = start + column
            logit = _masked_logits(logits, here, vocab, columns, "evict_first")
            probability = tl.exp2(logit * LOG2_E - offset)
            tl.store(logits + here, probability.to(logits.dtype.element_ty), mask=here < columns)
        tl.debug_barrier()  # another thread has written the label's probability
        of_label = (tl.exp2(label_logit * LOG2_E - offset) - 1.0).to(logits.dtype.element_ty)
        tl.store(logits + target, of_label, mask=target < vocab)
    else:
        for start in range(0, columns, BLOCK):
            here = start + column
            tl.store(logits + here, tl.zeros_like(here).to(logits.dtype.element_ty), mask=here < columns)


@triton.jit
def with_aliased_output(
    logits, targets, vocab, losses, gradients, columns: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr
):
    """`loss_and_gradient` for jax-triton before 0.4, which also passes an output that has an input's memory."""
    loss_and_gradient(logits, targets, vocab, losses, columns, BLOCK, LANE)


@triton.jit
def _with_block(largests, sums, logit):
    new_largests = tl.maximum(largests, tl.max(logit, 1))
    powers = tl.exp2(logit * LOG2_E - (new_largests * LOG2_E)[:, None])
    return new_largests, sums * tl.exp2((largests - new_largests) * LOG2_E) + tl.sum(powers, 1)


@triton.jit
def _masked_logits(logits, column, vocab, columns: tl.constexpr, EVICTION: tl.constexpr):
    """The row's logits in these columns, -inf where there is none.

    What is loaded depends on `columns`, not on `vocab`: only of that the compiler knows that 16 bytes are inside or outside.
    """
    logit = tl.load(logits + column, mask=column < columns, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return tl.where(column < vocab, logit, float("-inf"))
