"""What XLA is told before it starts, where a version of it computes wrongly otherwise."""

from __future__ import annotations

import importlib.metadata
import os

_FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"


def avoid_faults() -> None:
    """Adds to XLA_FLAGS what this jaxlib needs, unless it is said there. Without effect once JAX has computed something.

    On a CPU, jaxlib 0.10.2 computes dot products, and products with their sums, by YNNPACK. A sum over an outer axis of
    arrays of seven axes or more then writes where it must not, and the process ends with a segmentation fault:
    `jnp.sum(x * y, axis=3)` with x and y of shape [2, 2, 1, 2, 4, 16, 16] is enough. Several seeds, with heads that share
    their keys, make such arrays. Dot products alone stay with YNNPACK, as without it some in bfloat16 are refused. jaxlib
    0.10.1 has no such fusions, and 0.11.0 computes them rightly.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _FUSIONS not in flags and importlib.metadata.version("jaxlib") == "0.10.2":
        os.environ["XLA_FLAGS"] = f"{flags} {_FUSIONS}=dot,individual_dot".strip()
