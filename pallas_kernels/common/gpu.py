"""The GPU that kernels are cut for: how much shared memory a program may have, and how many multiprocessors there are."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Gpu:
    """shared_memory: bytes that a program may have. kind: a GPU with this compute capability, as JAX names it."""

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    kind: str


GPUS = {
    "8.0": Gpu((8, 0), 163 * KIB, 108, "NVIDIA A100"),
    "8.6": Gpu((8, 6), 99 * KIB, 72, "NVIDIA A10"),
    "8.9": Gpu((8, 9), 99 * KIB, 142, "NVIDIA L40"),
    "9.0": Gpu((9, 0), 227 * KIB, 132, "NVIDIA H100"),
    "10.0": Gpu((10, 0), 227 * KIB, 148, "NVIDIA B200"),
    "12.0": Gpu((12, 0), 99 * KIB, 188, "NVIDIA RTX PRO 6000"),
}
SMALLEST = GPUS["8.6"]  # what a GPU that is not known is taken for
DEFAULT = GPUS["9.0"]  # what kernels are cut for where there is no GPU

_assumed: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("assumed", default=None)


def assumed() -> Gpu | None:
    """The GPU of the `assumed_to_be` or `as_if_on` that this is in."""
    return _assumed.get()


@contextlib.contextmanager
def assumed_to_be(gpu: Gpu) -> Iterator[None]:
    """Within it kernels are cut for this GPU, whatever there is."""
    token = _assumed.set(gpu)
    try:
        yield
    finally:
        _assumed.reset(token)


@contextlib.contextmanager
def as_if_on(gpu: Gpu) -> Iterator[None]:
    """Within it kernels are cut for this GPU and can be lowered (JAX from 0.11 on), whatever there is; not run."""
    device = jax.sharding.AbstractDevice(device_kind=gpu.kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with assumed_to_be(gpu), jax.sharding.use_abstract_mesh(mesh):
        yield
