"""What ends a run, besides bad settings and bugs."""

from __future__ import annotations


class RunFailed(Exception):
    """The machine did not let a run, or its report, go on; the message is one line. The same command goes on once that is
    mended."""


class NoReadableCheckpoint(Exception):
    """Checkpoints exist, but none can be read; the message is one line."""


class OutOfMemory(RunFailed):
    """A device has too little memory for a variant's settings."""
