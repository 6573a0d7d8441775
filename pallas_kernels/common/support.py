"""What the kernels can run, and where."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.common.tiles import MIN_TILE

try:
    from jax.experimental.pallas import triton
except ImportError:  # JAX 0.11 deprecates this lowering of Pallas: a later one will not have it
    triton = None
try:
    from jax.experimental.pallas import mosaic_gpu as mosaic
except ImportError:
    mosaic = None
if jax.__version_info__ < (0, 11, 2):  # its interfaces were others before
    mosaic = None

log = logging.getLogger("pallas_kernels")
INTERPRET_VARIABLE = "LOGLINEAR_PALLAS_INTERPRET"
MIN_COMPUTE_CAPABILITY = (8, 0)
MIN_DIM, MAX_DIM = MIN_TILE, 256
MIN_CHUNK, MAX_CHUNKS = MIN_TILE, {2: 128, 4: 64}  # by bytes an element
HOPPER_DIMS, HOPPER_CHUNKS = (33, 128), (64, 128)  # below, a block of 64 would be half empty

_interpreting: contextvars.ContextVar[bool | None] = contextvars.ContextVar("interpreting", default=None)


class UnsupportedError(ValueError):
    """The kernels cannot run this: the message says what, what came, and what can be run."""


@contextlib.contextmanager
def interpret(enabled: bool = True) -> Iterator[None]:
    """Within it the kernels are traced for Pallas's interpreter, which runs on any device, slowly: for tests.

    The environment variable LOGLINEAR_PALLAS_INTERPRET=1 does the same for a whole process.
    """
    token = _interpreting.set(enabled)
    try:
        yield
    finally:
        _interpreting.reset(token)


def interpreting() -> bool:
    """Whether the interpreter was asked for."""
    chosen = _interpreting.get()
    if chosen is not None:
        return chosen
    value = os.environ.get(INTERPRET_VARIABLE, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"the environment variable {INTERPRET_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def why_unsupported(
    key_dim: int, value_dim: int | None, dtype, chunk_size: int | None = None, precision=None
) -> str | None:
    """Why `fenwick_attention`, or `chunk_scores` if value_dim is None, would raise UnsupportedError here for q, k, v of this
    dtype; None if it would run."""
    if value_dim is not None and why_hopper_unsupported(key_dim, value_dim, dtype, chunk_size) is None:
        return None
    return why_triton_unsupported(key_dim, value_dim, dtype, chunk_size, precision)


def choose_backend(
    key_dim: int, value_dim: int, dtype, chunk_size: int | None = None, precision=None, asked: str | None = None
) -> str:
    """ "hopper" or "triton": whose kernels of the attention to take; in the interpreter Triton's, if they run.

    Raises UnsupportedError if there are none, or if those that were asked for cannot run.
    """
    reasons = dict(
        hopper=why_hopper_unsupported(key_dim, value_dim, dtype, chunk_size),
        triton=why_triton_unsupported(key_dim, value_dim, dtype, chunk_size, precision),
    )
    order = [asked] if asked else sorted(reasons, reverse=interpreting())
    chosen = next((name for name in order if reasons[name] is None), None)
    if chosen is None:
        raise UnsupportedError(reasons[asked or "triton"])
    log.debug("K=%d, V=%d, %s: kernels for %s", key_dim, value_dim, jnp.dtype(dtype), chosen)
    return chosen


def why_hopper_unsupported(key_dim: int, value_dim: int, dtype, chunk_size: int | None = None) -> str | None:
    """Why the kernels for Hopper GPUs cannot run this here; None if they can."""
    low, high = HOPPER_DIMS
    for name, size in (("K, the key dim,", key_dim), ("V, the value dim,", value_dim)):
        if not low <= size <= high:
            return f"{name} is {size}: the kernels for Hopper take {low} to {high}"
    if dtype != jnp.bfloat16:
        return f"q, k and v have dtype {jnp.dtype(dtype)}: the kernels for Hopper take bfloat16"
    if chunk_size not in (None, *HOPPER_CHUNKS):
        return f"chunk_size is {chunk_size}: the kernels for Hopper take {' or '.join(map(str, HOPPER_CHUNKS))}"
    if mosaic is None:
        return (
            f"JAX {jax.__version__} has no Mosaic GPU lowering of Pallas for the kernels for Hopper: JAX 0.11.2 has it"
        )
    if interpreting():
        return None
    reason = why_no_device()
    if reason is None and (capability := _compute_capability())[0] != 9:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}: the kernels for Hopper need 9.0"
    return reason


def why_triton_unsupported(
    key_dim: int, value_dim: int | None, dtype, chunk_size: int | None = None, precision=None
) -> str | None:
    """Why the kernels for any GPU since Ampere cannot run this here; None if they can."""
    for name, size in (("K, the key dim,", key_dim), ("V, the value dim,", value_dim)):
        if size is not None and not MIN_DIM <= size <= MAX_DIM:
            return f"{name} is {size}: the Pallas kernels take {MIN_DIM} to {MAX_DIM}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"q, k and v have dtype {jnp.dtype(dtype)}: the Pallas kernels take float32 and bfloat16"
    max_chunk = MAX_CHUNKS[jnp.dtype(dtype).itemsize]
    if chunk_size is not None and not (MIN_CHUNK <= chunk_size <= max_chunk and chunk_size & (chunk_size - 1) == 0):
        return (
            f"chunk_size is {chunk_size}: the Pallas kernels take powers of two from {MIN_CHUNK} to {max_chunk} for "
            f"{jnp.dtype(dtype)}"
        )
    return why_not_precise(dtype, precision) or why_cannot_run()


def why_not_precise(dtype, precision) -> str | None:
    """Why the kernels cannot multiply this dtype under `precision`; None if they can."""
    if dot_mode(dtype, precision) is not None:
        return None
    named = f"precision is {precision!r}"
    if precision is None:
        named = f"jax_default_matmul_precision is {jax.config.jax_default_matmul_precision!r}"
    return f"{named}: the Pallas kernels multiply float32 in full precision or TF32"


def why_cannot_run() -> str | None:
    """Why no kernel at all can run here; None if they can."""
    if triton is None:
        return f"JAX {jax.__version__} has no Triton lowering of Pallas, which the kernels are written for: JAX 0.12 has it"
    return None if interpreting() else why_no_device()


def are_best(what: str, why_not: Callable[[], str | None]) -> bool:
    """Whether to take kernels for `what` where no implementation is asked for: on a GPU, unless `why_not` gives a reason why
    they cannot run, of which there is one warning."""
    if interpreting() or not runs_on_gpu():
        return False
    reason = why_not()
    if reason is not None:
        _warn_once(f"{what} falls back to implementation='xla', which is slower: {reason}")
    return reason is None


def chooses_kernel(what: str, implementation: str | None, why_not: Callable[[], str | None]) -> bool:
    """Whether a part of a model takes its kernel, where the attention's implementation is this: with "pallas" if it can run,
    with None if it is best."""
    if implementation is None:
        return are_best(what, why_not)
    return implementation == "pallas" and why_not() is None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def _platform() -> str:
    default = jax.config.jax_default_device
    return default if isinstance(default, str) else getattr(default, "platform", None) or jax.default_backend()


def runs_on_gpu() -> bool:
    """Whether JAX's default device is a GPU."""
    return _platform() in ("gpu", "cuda")


def why_no_device() -> str | None:
    """Why the kernels cannot run on the default device; None if they can."""
    hint = f"set {INTERPRET_VARIABLE}=1 or use pallas_kernels.interpret() to run them in Pallas's interpreter"
    if not runs_on_gpu():
        return f"JAX runs on {_platform()}: the Pallas kernels need an NVIDIA GPU ({hint})"
    kind, version = _device().device_kind, _compute_capability()
    if version is None:
        return f"{kind} is no NVIDIA GPU with a compute capability: the Pallas kernels need one ({hint})"
    if version < MIN_COMPUTE_CAPABILITY:
        has, needed = (".".join(map(str, x)) for x in (version, MIN_COMPUTE_CAPABILITY))
        return f"{kind} has compute capability {has}: the Pallas kernels need {needed} or newer ({hint})"
    return None


def _device():
    return jax.local_devices(backend="gpu")[0]


def _compute_capability() -> tuple[int, ...] | None:
    """Of the GPU; None if it has none."""
    try:
        return tuple(int(part) for part in _device().compute_capability.split("."))
    except (AttributeError, ValueError):
        return None


# JAX's names for what multiplies float32: see jax.lax.Precision and jax.lax.DotAlgorithmPreset.
_F32_MODES = {
    "DEFAULT": "tf32",
    "HIGH": "tf32",
    "TF32_TF32_F32": "tf32",
    "HIGHEST": "f32",
    "F32_F32_F32": "f32",
    "TF32_TF32_F32_X3": "f32",
}


def dot_mode(dtype, precision) -> str | None:
    """ "bf16", "tf32" or "f32": how matrix products of this dtype run under `precision`; None if they cannot."""
    if dtype == jnp.bfloat16:
        return "bf16"
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    if isinstance(precision, tuple):
        first, second = (dot_mode(dtype, part) for part in precision)
        return first if first == second else None
    if precision is None:
        return "tf32"
    name = getattr(precision, "name", str(precision)).upper()
    return _F32_MODES.get({"FLOAT32": "HIGHEST", "TENSORFLOAT32": "HIGH", "FASTEST": "DEFAULT"}.get(name, name))
