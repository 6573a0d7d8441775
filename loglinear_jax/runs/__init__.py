"""What a run is: its folder, its checkpoints, its outcomes; training it, and reading it back.

A *run* is a folder, a *variant* one trained setting in it, a *record* one line of its metrics.jsonl.
"""

from loglinear_jax.command_line import needs_extra

with needs_extra("train"):
    import ml_collections  # noqa: F401

from loglinear_jax.runs.errors import NoReadableCheckpoint
from loglinear_jax.runs.loading import Run, TrainedVariant, load_run, read_run
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome
from loglinear_jax.runs.training import RunResult, run

__all__ = [
    "NoReadableCheckpoint",
    "Run",
    "RunResult",
    "RunSummary",
    "TrainedVariant",
    "VariantOutcome",
    "load_run",
    "read_run",
    "run",
]
