"""What a config can be wrong with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from loglinear_jax.settings import SettingError


class ConfigError(SettingError):
    """An invalid config or run; the message is one line that names what is wrong."""


@contextlib.contextmanager
def naming(where: str = "") -> Iterator[None]:
    """Raises ConfigError, with `where` before its message, for a SettingError inside."""
    try:
        yield
    except SettingError as error:
        raise ConfigError(f"{where}{error}") from error


def some_of(names: Iterable[str], most: int = 8) -> str:
    """Names with commas between them, the first ones alone where there are many, so that an error stays one short line."""
    names = list(names)
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")
