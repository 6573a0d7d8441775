"""Bucket scores: how well a query matches the decayed sum of the keys in each bucket of the Fenwick partition."""

from loglinear_jax.ops.bucket_scores.api import bucket_scores

__all__ = ["bucket_scores"]
