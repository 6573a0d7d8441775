"""What a config can be wrong with."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that does not exist or cannot be; the message is one line that names it."""
