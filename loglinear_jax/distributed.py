"""Several processes, one for each host or GPU, that train one model together: each runs the same command."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def leave_without_others() -> None:
    """Lets this process end with code 1 as soon as it has said why, if there are others: JAX would have it wait for them, and
    they wait for it. They end when they notice."""
    if jax.process_count() > 1:
        atexit.register(_end_at_once)  # the last that is registered comes first


def _end_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def is_main() -> bool:
    """Whether this process is the one that writes and reports."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; every process must ask."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def to_host(tree: Any) -> Any:
    """Every leaf as a whole NumPy array on every process; every process must ask."""

    def whole(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(whole, tree)
