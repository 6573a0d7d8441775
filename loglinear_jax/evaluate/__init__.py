"""How well language models predict: windows of a text by position, documents by position and by what they repeat, and a fact
that is far back.

The command line is in loglinear_jax.commands.evaluate.
"""

from loglinear_jax.evaluate.windows import check_windows, window_losses, window_scores

__all__ = ["check_windows", "window_losses", "window_scores"]
