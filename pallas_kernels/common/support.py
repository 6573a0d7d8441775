"""The device, the interpreter and the precision of products: what every kernel asks before it runs."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from pallas_kernels.common.gpu import DEFAULT, GPUS, SMALLEST, Gpu, assumed

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

NEWEST_TESTED = (0, 12)  # of JAX

INTERPRET_VARIABLE = "LOGLINEAR_PALLAS_INTERPRET"
MIN_COMPUTE_CAPABILITY = (8, 0)

_interpreting: contextvars.ContextVar[bool | None] = contextvars.ContextVar("interpreting", default=None)


class UnsupportedError(ValueError):
    """Raised where kernels cannot run a problem; the message says what came, and what can be run."""


@contextlib.contextmanager
def interpret(enabled: bool = True) -> Iterator[None]:
    """Context in which the kernels are traced for Pallas's interpreter, which runs on any device, slowly: for tests.

    The environment variable LOGLINEAR_PALLAS_INTERPRET=1 does the same for a whole process.
    """
    token = _interpreting.set(enabled)
    try:
        yield
    finally:
        _interpreting.reset(token)


def interpreting() -> bool:
    """Whether the interpreter was asked for."""
    chosen = False if assumed() else _interpreting.get()
    if chosen is not None:
        return chosen
    value = os.environ.get(INTERPRET_VARIABLE, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"the environment variable {INTERPRET_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def why_not_precise(dtype: DTypeLike, precision: PrecisionLike) -> str | None:
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


def _platform() -> str:
    default = jax.config.jax_default_device
    return default if isinstance(default, str) else getattr(default, "platform", None) or jax.default_backend()


def runs_on_gpu() -> bool:
    """Whether JAX's default device is a GPU."""
    return assumed() is not None or _platform() in ("gpu", "cuda")


def newer_than_tested() -> bool:
    """Whether nobody has tried the kernels with this JAX."""
    return jax.__version_info__[:2] > NEWEST_TESTED


def why_no_hopper() -> str | None:
    """Why no kernel for Hopper GPUs can run here; None if they can."""
    if mosaic is None:
        return (
            f"JAX {jax.__version__} has no Mosaic GPU lowering of Pallas for the kernels for Hopper: JAX 0.11.2 has it, "
            "which needs Python 3.12"
        )
    if interpreting():
        return None
    reason = why_no_device()
    if reason is None and (capability := compute_capability())[0] != 9:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}: the kernels for Hopper need 9.0"
    return reason


def why_no_device() -> str | None:
    """Why the kernels cannot run on the default device; None if they can."""
    if assumed():
        return None
    hint = f"set {INTERPRET_VARIABLE}=1 or use pallas_kernels.interpret() to run them in Pallas's interpreter"
    if not runs_on_gpu():
        return f"JAX runs on {_platform()}: the Pallas kernels need an NVIDIA GPU ({hint})"
    kind, version = _device().device_kind, compute_capability()
    if version is None:
        return f"{kind} is no NVIDIA GPU with a compute capability: the Pallas kernels need one ({hint})"
    if version < MIN_COMPUTE_CAPABILITY:
        has, needed = (".".join(map(str, x)) for x in (version, MIN_COMPUTE_CAPABILITY))
        return f"{kind} has compute capability {has}: the Pallas kernels need {needed} or newer ({hint})"
    return None


def _device():
    return jax.local_devices(backend="gpu")[0]


def compute_capability() -> tuple[int, ...] | None:
    """Of the GPU; None if it has none."""
    if assumed():
        return assumed().capability
    try:
        return tuple(int(part) for part in _device().compute_capability.split("."))
    except (AttributeError, ValueError, RuntimeError):  # RuntimeError: there is no GPU
        return None


def gpu() -> Gpu:
    """The GPU that kernels are cut for: the one that they run on; where there is none, or in the interpreter, DEFAULT."""
    if assumed():
        return assumed()
    if interpreting() or not runs_on_gpu() or (capability := compute_capability()) is None:
        return DEFAULT
    known = GPUS.get(".".join(map(str, capability)), dataclasses.replace(SMALLEST, capability=capability))
    return dataclasses.replace(known, multiprocessors=getattr(_device(), "core_count", None) or known.multiprocessors)


FAST_MODES = "bfloat16 and TF32 (precision='tensorfloat32')"  # as messages name them


# JAX's names for what multiplies float32: see jax.lax.Precision and jax.lax.DotAlgorithmPreset.
_F32_MODES = {
    "DEFAULT": "tf32",
    "HIGH": "tf32",
    "TF32_TF32_F32": "tf32",
    "HIGHEST": "f32",
    "F32_F32_F32": "f32",
    "TF32_TF32_F32_X3": "f32",
}


def dot_mode(dtype: DTypeLike, precision: PrecisionLike) -> str | None:
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
