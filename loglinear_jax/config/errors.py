"""What a config can be wrong with."""

from __future__ import annotations

from loglinear_jax.settings import SettingError


class ConfigError(SettingError):
    """An invalid config or run; the message is one line that names what is wrong."""


def missing_setting(section: str, name: str) -> ConfigError:
    """The error for a section that was, or would be, replaced as a whole, and lacks this setting then."""
    return ConfigError(
        f"{section}.{name} is missing: set single fields, such as --config.{section}.{name}=..., not {section} as a whole"
    )
