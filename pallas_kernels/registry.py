"""Which kernels there are, whether each can run a problem here and is the best for it, and if not, why."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import jax

from pallas_kernels.common import support


def _always(*problem: object) -> bool:
    return True


@dataclasses.dataclass
class Kernel:
    """A kernel with its gradient, and what it can run. A "problem" is the arguments of `limits`: sizes, dtype, precision.

    title: what it computes, as messages call it.
    limits: function of a problem to the reason why no GPU can run it, or None.
    device: function to the reason why nothing can run on this machine, or None.
    pays: function of a problem to whether the kernel is faster than plain JAX there.
    warns: whether plain JAX in its place on a GPU is worth a warning, one for each reason.
    """

    title: str
    limits: Callable[..., str | None]
    device: Callable[[], str | None] = support.why_cannot_run
    pays: Callable[..., bool] = _always
    warns: bool = True

    def why_not(self, *problem: object) -> str | None:
        """Why the kernel cannot run this problem here; None if it can."""
        return self.limits(*problem) or self.device()

    def require(self, *problem: object) -> None:
        """Raises UnsupportedError where `why_not` gives a reason."""
        if (reason := self.why_not(*problem)) is not None:
            raise support.UnsupportedError(reason)

    def is_best(self, *problem: object) -> bool:
        """Whether to take the kernel where no implementation is asked for: on a GPU, where it pays and can run."""
        if support.interpreting() or not support.runs_on_gpu() or not self.pays(*problem):
            return False
        reason = self.why_not(*problem)
        if reason is not None and self.warns:
            _warn_once(f"{self.title} falls back to implementation='xla', which is slower: {reason}")
        if reason is None and support.newer_than_tested():
            newest = ".".join(map(str, support.NEWEST_TESTED))
            _warn_once(
                f"JAX {jax.__version__} is newer than {newest}, the newest that the Pallas kernels were tested with"
            )
        return reason is None

    def is_chosen(self, implementation: str | None, *problem: object) -> bool:
        """Whether a part of a model takes the kernel, where the attention beside it has this implementation: with "pallas" if
        it can run, with None if it is best."""
        if implementation is None:
            return self.is_best(*problem)
        return implementation == "pallas" and self.why_not(*problem) is None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=6)  # where the operation is called


KERNELS: dict[str, Kernel] = {}


def register(name: str, kernel: Kernel) -> Kernel:
    """The kernel, which is `KERNELS[name]` from now on."""
    KERNELS[name] = kernel
    return kernel
