"""What XLA is told before it starts, where a version of it computes wrongly otherwise."""

from __future__ import annotations

import importlib.metadata
import os

_FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"


def avoid_faults() -> None:
    """Adds to XLA_FLAGS what this jaxlib needs, unless it is said there. Without effect once JAX has computed something.

    Where XLA_FLAGS names a file of flags, it is left as it is: the flag below then belongs into that file.

    On a CPU, jaxlib 0.10.2 computes dot products, and products with their sums, by YNNPACK. A sum over an outer axis of
    arrays of seven axes or more then writes where it must not, and the process ends with a segmentation fault:
    `jnp.sum(x * y, axis=3)` with x and y of shape [2, 2, 1, 2, 4, 16, 16] is enough. Several seeds, with heads that share
    their keys, make such arrays. Dot products alone stay with YNNPACK, as without it some in bfloat16 are refused. jaxlib
    0.10.1 has no such fusions, and 0.11.0 computes them rightly.
    """
    if importlib.metadata.version("jaxlib") != "0.10.2":
        return
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if _FUSIONS not in flags and (not flags or flags.startswith("-")):  # else the name of a file, to XLA
        os.environ["XLA_FLAGS"] = f"{_FUSIONS}=dot,individual_dot {flags}".strip()
