"""The dtypes that operations compute in: products in the inputs', sums in float32 or wider."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.ops import decays


def accumulation_dtype(*arrays) -> jnp.dtype:
    """Dtype of decays, λ, states and sums: float32, or float64 if an input is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def to_common_dtypes(log_decay: Float[Array, "B T H"], *arrays: Array, bounded: bool = True) -> tuple[Array, ...]:
    """(log_decay in the dtype of sums, by `decays.bounded` if `bounded`; the others in the widest of their dtypes)."""
    log_decay, widest = log_decay.astype(accumulation_dtype(*arrays)), jnp.result_type(*arrays)
    return decays.bounded(log_decay) if bounded else log_decay, *(x.astype(widest) for x in arrays)
