"""The errors of this package."""

from loglinear_jax.settings import SettingError


class CorpusError(SettingError):
    """Text, a tokenizer or windows that cannot be had; the message says what to give instead."""


def unreadable(error: PermissionError) -> CorpusError:
    """For a file of the cache that is there, whole or not, but of which this user may not know."""
    return CorpusError(
        f"cache: {error.filename} can't be read: {error.strerror}: expected a readable one, or another folder as task.cache"
    )
