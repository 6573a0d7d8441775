"""Figures. Each function draws one matplotlib Figure from arrays or runs; `save` writes it as PNG and SVG."""

from loglinear_jax.analysis.figures.answers import draw_answer_levels, draw_looks
from loglinear_jax.analysis.figures.attention_rows import draw_attention_rows
from loglinear_jax.analysis.figures.growth import draw_complexity, draw_scores_by_length
from loglinear_jax.analysis.figures.lam import Panel, draw_dependence, draw_lam_by_head, draw_lam_over_tokens
from loglinear_jax.analysis.figures.learning import (
    draw_convergence,
    draw_initial_memory,
    draw_learning_curves,
    draw_shares,
)
from loglinear_jax.analysis.figures.positions import draw_perplexity_by_position
from loglinear_jax.analysis.figures.rates import draw_rates
from loglinear_jax.analysis.figures.sizes import draw_by_size
from loglinear_jax.analysis.figures.style import save
from loglinear_jax.analysis.figures.tasks import draw_by_task

__all__ = [
    "Panel",
    "draw_answer_levels",
    "draw_attention_rows",
    "draw_by_size",
    "draw_by_task",
    "draw_complexity",
    "draw_convergence",
    "draw_dependence",
    "draw_initial_memory",
    "draw_lam_by_head",
    "draw_lam_over_tokens",
    "draw_learning_curves",
    "draw_looks",
    "draw_perplexity_by_position",
    "draw_rates",
    "draw_scores_by_length",
    "draw_shares",
    "save",
]
