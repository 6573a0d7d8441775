"""Analysis of runs: their parameters, λ, curves, tables and figures, as functions; `loglinear_jax analyze`
makes a report of them."""

# ruff: noqa: F401  # what is imported here is the public API
from loglinear_jax.command_line import needs_extra

with needs_extra("analysis"):
    from loglinear_jax.analysis.answers import answer_levels, found_by_position, levels_of_answers, looks_at_answers
    from loglinear_jax.analysis.attention_rows import AttentionRow, attention_row, draw_attention_rows
    from loglinear_jax.analysis.lam import (
        Panel,
        draw_lam_by_head,
        draw_lam_over_tokens,
        input_dependence,
        relative_variation,
    )
    from loglinear_jax.analysis.lam_values import lam_values, static_lam
    from loglinear_jax.analysis.lengths import scores_by_length
    from loglinear_jax.analysis.rates import by_rate, chosen_rate
    from loglinear_jax.runs.loading import Run, TrainedVariant, load_run, read_run
