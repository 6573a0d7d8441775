"""Tables of runs: outcomes as the paper prints them, with shares and intervals, and tests of differences. None needs
matplotlib."""

from loglinear_jax.analysis.tables.lam import dependence, looks
from loglinear_jax.analysis.tables.one_run import by_seed, differences, outcomes, parts
from loglinear_jax.analysis.tables.rates import differences_at_best_rates, few_seeds_table, rates
from loglinear_jax.analysis.tables.several_runs import (
    accuracies_by_task,
    as_the_paper,
    by_setting,
    initial_memory,
)
from loglinear_jax.analysis.tables.sizes import accuracies_by_size, by_size
from loglinear_jax.analysis.tables.table import Table

__all__ = [
    "Table",
    "accuracies_by_size",
    "accuracies_by_task",
    "as_the_paper",
    "by_seed",
    "by_setting",
    "by_size",
    "dependence",
    "differences",
    "differences_at_best_rates",
    "few_seeds_table",
    "initial_memory",
    "looks",
    "outcomes",
    "parts",
    "rates",
]
