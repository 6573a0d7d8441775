"""Models, from token ids to logits: one file each."""

from loglinear_jax.models.language import LanguageModel, LanguageSettings
from loglinear_jax.models.recall import RecallModel, RecallSettings

__all__ = ["LanguageModel", "LanguageSettings", "RecallModel", "RecallSettings"]
