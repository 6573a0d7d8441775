"""Cross-entropy of logits and its gradient by one kernel, Triton's through jax-triton. Each logit is read from memory once, and
its gradient takes its place there."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import support
from pallas_kernels.common.launch import changed_in_place, fold_mapped_axes
from pallas_kernels.registry import Kernel, register

LANE = 8
BLOCK, WARPS = 2048, 8  # columns of a step, and warps, of a program
# The same for rows from so many bytes on. Fewer programs then run at once, so that the cache holds the rows they read twice.
LONG_ROW, LONG_BLOCK, LONG_WARPS = 32768, 8192, 16


def cross_entropy(
    logits: Float[Array, "N columns"], targets: Int[Array, " N"], vocab: int
) -> tuple[Float[Array, " N"], Float[Array, "N columns"]]:
    """(losses [N] in nats, float32; their gradient with respect to the logits [N, columns], in the logits' dtype).

    Args:
      logits: [N, columns], float32 or bfloat16; columns from `vocab` on do not count, and have gradient 0.
      targets: [N], whole numbers below `vocab`; where one is < 0, loss and gradient are 0.

    Batched by vmap, to any depth. Raises UnsupportedError where KERNELS["cross_entropy"] says why it cannot run.
    """
    CROSS_ENTROPY.require()
    return fold_mapped_axes(functools.partial(_cross_entropy, vocab=vocab))(logits, targets.astype(jnp.int32))


def _why_cannot_run() -> str | None:
    if support.interpreting():
        return "Pallas's interpreter was asked for, and cross_entropy is not Pallas's"
    for package in ("jax_triton", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"cross_entropy needs jax-triton, and {package} is not installed: pip install jax-triton"
    return support.why_no_device()


CROSS_ENTROPY = register("cross_entropy", Kernel("cross-entropy", limits=lambda: None, device=_why_cannot_run))


def _cross_entropy(logits, targets, *, vocab: int):
    import jax_triton

    from pallas_kernels.pointwise.cross_entropy_kernel import loss_and_gradient, with_aliased_output

    rows, columns = logits.shape
    is_long = columns * logits.dtype.itemsize >= LONG_ROW
    major, minor = support.compute_capability()
    sizes = dict(
        compute_capability=10 * major + minor,
        grid=(rows,),
        num_warps=LONG_WARPS if is_long else WARPS,
        columns=columns,
        BLOCK=LONG_BLOCK if is_long else BLOCK,
        LANE=LANE,
    )
    losses = jax.ShapeDtypeStruct((rows,), jnp.float32)
    if _jax_triton_version() < (0, 4):
        out_shape = [losses, jax.ShapeDtypeStruct(logits.shape, logits.dtype)]
        losses, gradients = jax_triton.triton_call(
            logits, targets, vocab,
            kernel=with_aliased_output, out_shape=out_shape, input_output_aliases={0: 1}, **sizes,
        )  # fmt: skip
        return losses, changed_in_place(gradients)
    gradients = jax.new_ref(logits)
    losses = jax_triton.triton_call(
        gradients, targets, vocab,
        kernel=loss_and_gradient, out_type=losses, backend_options={"enable_fp_fusion": True}, **sizes,
    )  # fmt: skip
    return losses, changed_in_place(jax.freeze(gradients))


def _jax_triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("jax-triton").split(".")[:2])
