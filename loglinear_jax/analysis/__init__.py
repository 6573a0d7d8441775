"""Analysis of runs: their parameters, λ, curves, tables and figures, as functions; `python -m loglinear_jax.analysis` makes a
report of them."""

from loglinear_jax.command_line import needs_extra

with needs_extra("analysis"):
    from loglinear_jax.analysis.answer_levels import answer_levels, levels_of_answers
    from loglinear_jax.analysis.attention_rows import AttentionRow, attention_row
    from loglinear_jax.analysis.lam_values import input_dependence, lam_values, sample_tokens, static_lam
    from loglinear_jax.analysis.lengths import scores_by_length
    from loglinear_jax.analysis.looks import looks_at_answers
    from loglinear_jax.runs.loading import Run, TrainedVariant, load_run, read_run

__all__ = [
    "AttentionRow",
    "Run",
    "TrainedVariant",
    "answer_levels",
    "attention_row",
    "input_dependence",
    "lam_values",
    "levels_of_answers",
    "load_run",
    "looks_at_answers",
    "read_run",
    "sample_tokens",
    "scores_by_length",
    "static_lam",
]
