"""Tasks: what is learned. One file a task; a task's name is its file's."""

from loglinear_jax.tasks.base import (
    ACCURACY,
    CONVERGED_ACCURACY,
    PERPLEXITY,
    SOLVED_ACCURACY,
    BaseTask,
    Score,
    Task,
    check_sample,
    find_task,
    load_task,
)
from loglinear_jax.tasks.mixture import Mixture

__all__ = [
    "ACCURACY",
    "CONVERGED_ACCURACY",
    "PERPLEXITY",
    "SOLVED_ACCURACY",
    "BaseTask",
    "Mixture",
    "Score",
    "Task",
    "check_sample",
    "find_task",
    "load_task",
]
