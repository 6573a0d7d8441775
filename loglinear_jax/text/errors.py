"""The error of this package."""

from loglinear_jax.settings import SettingError


class CorpusError(SettingError):
    """Text, a tokenizer or windows that cannot be had; the message says what to give instead."""
