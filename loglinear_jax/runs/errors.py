"""What ends a run, besides bad settings and bugs."""

from __future__ import annotations

from loglinear_jax.command_line import BadInput, Failed


class RunFailed(Failed):
    """The machine did not let a run, or its report, go on; the message is one line. The same command goes on once that is
    mended."""


class NoReadableCheckpoint(BadInput):
    """Checkpoints exist, but none can be read; the message is one line."""


class OutOfMemory(RunFailed):
    """A device has too little memory for a variant's settings."""
