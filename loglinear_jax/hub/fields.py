"""Fields of another's config.json, each read by its type: null, "400" and 400.0 are no sizes, and "false" is not False."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from loglinear_jax.settings import FLOAT32_MAX, INT32_MAX

Config = Mapping[str, Any]


def whole(config: Config, name: str, default: Any = ..., most: int = INT32_MAX, also: str | None = None) -> Any:
    """A whole number from 1 to `most`. default: of a config without the field; ... is an error there, and None lets null pass.
    also: another name of the field."""

    def fits(value):
        return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= value <= most

    return _read(config, name, also, default, fits, f"a whole number from 1 to {most:,}", int)


def positive(config: Config, name: str, default: Any = ..., also: str | None = None) -> Any:
    """A number above 0 that float32 holds. The arguments are those of `whole`."""

    def fits(value):
        return isinstance(value, Real) and not isinstance(value, bool) and 0 < value <= FLOAT32_MAX

    return _read(config, name, also, default, fits, "a positive number", float)


def truth(config: Config, name: str, default: Any = ...) -> Any:
    """true or false. The arguments are those of `whole`."""
    return _read(config, name, None, default, lambda value: isinstance(value, bool), "true or false", bool)


def _read(config, name, also, default, fits: Callable[[Any], bool], expected: str, kind: type) -> Any:
    if also in config and name not in config:
        name, also = also, None
    if name not in config:
        if default is ...:
            raise ValueError(f"config has no {name}: expected it")
        return default
    value = config[name]
    if also in config and config[also] != value:
        raise ValueError(
            f"config has {name}={shown(value)}, {also}={shown(config[also])}: expected one of them, or the same"
        )
    if value is None and default is None:
        return None
    if not fits(value):
        raise ValueError(f"config has {name}={shown(value)}: expected {expected}{' or null' * (default is None)}")
    return kind(value)


def size_from(config: Config, name: str, value: float) -> int:
    """The size that the ratio, or divisor, `name` makes with others; the nearest whole number, as ratios are rounded."""
    nearest = round(value) if math.isfinite(value) else 0
    if not 1 <= nearest <= INT32_MAX or not math.isclose(value, nearest, rel_tol=1e-5):
        raise ValueError(
            f"config has {name}={shown(config.get(name))}, which makes {value!r}: expected a whole number from 1 on"
        )
    return nearest


def ratio_to(size: int, of: int, times: int = 1) -> float:
    """A ratio r, about size / of, with int(r · of) = size, as others compute it, and int(r · of · times) = size · times."""
    ratio = size / of
    while int(ratio * of) < size or int(ratio * (of * times)) < size * times:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def is_one_of(value: Any, values: tuple) -> bool:
    """Whether it equals one of them; 0 and 1 are not False and True."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def shown(value: Any) -> str:
    """A value in a message: cut, if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
