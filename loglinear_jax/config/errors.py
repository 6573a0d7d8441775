"""What a config can be wrong with."""

from __future__ import annotations

from loglinear_jax.settings import SettingError


class ConfigError(SettingError):
    """A config or run that can't be used as it is; the message is one line that names what is wrong."""
