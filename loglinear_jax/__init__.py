"""Log-linear attention with adaptive λ, in JAX."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from loglinear_jax.xla_flags import avoid_faults

if TYPE_CHECKING:
    from loglinear_jax.fenwick import FenwickState, fenwick_level, init_fenwick_state, num_levels, occupied_levels
    from loglinear_jax.layers import GatedDeltaNetBlock, LogLinearAttention, LogLinearMamba2Block
    from loglinear_jax.ops import (
        bucket_scores,
        fenwick_step,
        gated_delta_attention,
        gated_linear_attention,
        log_linear_attention,
        log_linear_delta_attention,
        log_linear_delta_step,
    )

avoid_faults()

try:
    __version__ = importlib.metadata.version("loglinear_jax")
except importlib.metadata.PackageNotFoundError:  # a checkout in PYTHONPATH
    __version__ = "not installed"

__all__ = [
    "FenwickState",
    "GatedDeltaNetBlock",
    "LogLinearAttention",
    "LogLinearMamba2Block",
    "bucket_scores",
    "fenwick_level",
    "fenwick_step",
    "gated_delta_attention",
    "gated_linear_attention",
    "init_fenwick_state",
    "log_linear_attention",
    "log_linear_delta_attention",
    "log_linear_delta_step",
    "num_levels",
    "occupied_levels",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that the command line starts without JAX."""
    if name in __all__:
        for module in ("fenwick", "ops", "layers"):
            if hasattr(found := importlib.import_module(f"{__name__}.{module}"), name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
