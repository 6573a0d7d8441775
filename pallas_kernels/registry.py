"""Which kernels there are, whether each can run a problem here and is the best for it, and if not, why."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax

from pallas_kernels.common import support

log = logging.getLogger("pallas_kernels")


@functools.cache
def tell_once(message: str) -> None:
    """A line of the log at level warning. A GPU that takes a form more than 1.5 times slower than another one there could be is
    told so, with the reason, and what to do about it."""
    log.warning(message)


def _never(*problem: object) -> None:
    return None


@dataclasses.dataclass
class Kernel:
    """A kernel with its gradient, and what it can run. A "problem" is the arguments of `limits`: sizes, dtype, precision.

    title: what it computes, as messages call it.
    limits: (problem) -> the reason why no GPU can run it, or None.
    device: () -> the reason why nothing can run on this machine, or None.
    no_gain: (problem) -> the reason why plain JAX is as fast as the kernel, but slower than a kernel for other
      settings; None if the kernel is faster.
    tells: whether plain JAX is so much slower that on a GPU a warning says so, once for each reason.
    """

    title: str
    limits: Callable[..., str | None]
    device: Callable[[], str | None] = support.why_cannot_run
    no_gain: Callable[..., str | None] = _never
    tells: bool = True

    def why_not(self, *problem: object) -> str | None:
        """Why the kernel cannot run this problem here; None if it can."""
        return self.limits(*problem) or self.device()

    def require(self, *problem: object) -> None:
        """Raises UnsupportedError where `why_not` gives a reason."""
        if (reason := self.why_not(*problem)) is not None:
            raise support.UnsupportedError(reason)

    def is_best(self, *problem: object) -> bool:
        """Whether to use the kernel if no implementation is asked for: on a GPU, if it is faster and can run."""
        if support.interpreting() or not support.runs_on_gpu():
            return False
        reason = self.why_not(*problem) or self.no_gain(*problem)
        if reason is not None and self.tells:
            tell_once(f"{self.title} falls back to implementation='xla', which is slower: {reason}")
        if reason is None and support.newer_than_tested():
            newest = ".".join(map(str, support.NEWEST_TESTED))
            tell_once(
                f"JAX {jax.__version__} is newer than {newest}, the newest that the Pallas kernels were tested with"
            )
        return reason is None

    def is_chosen(self, implementation: str | None, *problem: object) -> bool:
        """Whether a part of a model uses the kernel if the attention beside it has this implementation: with
        "pallas" if it can run, with None if it is best."""
        if implementation is None:
            return self.is_best(*problem)
        return implementation == "pallas" and self.why_not(*problem) is None


KERNELS: dict[str, Kernel] = {}


def register(name: str, kernel: Kernel) -> Kernel:
    """The kernel, which is `KERNELS[name]` from now on."""
    KERNELS[name] = kernel
    return kernel
