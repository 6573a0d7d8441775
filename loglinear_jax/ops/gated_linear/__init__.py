"""Gated linear attention with one state (SSD; Dao & Gu 2024)."""

from loglinear_jax.ops.gated_linear.api import gated_linear_attention

__all__ = ["gated_linear_attention"]
