"""What a run is: its folder, its checkpoints, its outcomes; training it, and reading it back.

A *run* is a folder, a *variant* one trained setting in it, a *record* one line of its metrics.jsonl.
"""

# ruff: noqa: F401 - what is imported here is this package's interface

from loglinear_jax.command_line import needs_extra

with needs_extra("train"):
    import ml_collections

from loglinear_jax.runs.loading import Run, TrainedVariant, load_run, read_run
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome
from loglinear_jax.runs.training import RunResult, run
from loglinear_jax.runs.writing import NoReadableCheckpoint
