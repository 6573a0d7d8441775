"""Tasks: where the sequences come from. One file a task; a task's name is its file's."""

from loglinear_jax.tasks.base import Task, check_sample, find_task, load_task

__all__ = ["Task", "check_sample", "find_task", "load_task"]
