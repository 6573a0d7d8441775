"""Fields of settings classes: the one place of each default, with what it means and which values it takes."""

from __future__ import annotations

import ast
import dataclasses
import numbers
import typing
from collections.abc import Sequence
from typing import Any

INT32_MAX = 2**31 - 1  # what sizes and counts are indexed by
FLOAT32_MAX = 3.4028235e38


class SettingError(ValueError):
    """A setting that does not exist or can't have this value; the message is one line that names it."""


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] | None = None,
    least: int | float | None = None,
    above: float | None = None,
    most: int = INT32_MAX,
) -> Any:
    """A dataclass field that says what it means. choices, least, above, most: which values it takes, for `check_fields`; None
    always passes. most is of whole numbers."""
    limits = {"choices": choices, "least": least, "above": above, "most": most}
    return dataclasses.field(default=default, metadata={"meaning": meaning, **limits})


def other_default(settings_class: type, name: str, default: Any) -> Any:
    """The same field for a subclass, with another default."""
    return dataclasses.field(default=default, metadata=settings_class.__dataclass_fields__[name].metadata)


def setting_fields(settings_class: type) -> dict[str, dataclasses.Field]:
    """By name, the fields that were made by `setting`."""
    return {field.name: field for field in dataclasses.fields(settings_class) if "meaning" in field.metadata}


def check_fields(settings: Any, section: str) -> None:
    """Raises SettingError naming the first field whose value it does not take, as `section`.name."""
    types = typing.get_type_hints(type(settings))
    for name, field in setting_fields(type(settings)).items():
        value, limits = getattr(settings, name), field.metadata
        kind = kind_of(types[name])
        if value is None and takes_none(types[name]):
            continue
        if kind in _PLAIN and not (isinstance(value, _PLAIN[kind]) and isinstance(value, bool) == (kind is bool)):
            raise SettingError(f"{section}.{name} must be {in_words(types[name])}, got {value!r}")
        if kind is int and value > limits["most"]:
            raise SettingError(f"{section}.{name} must be at most {limits['most']:,}, got {value:,}")
        if limits["choices"] is not None and value not in limits["choices"]:
            raise SettingError(f"{section}.{name} must be one of {', '.join(limits['choices'])}, got {value!r}")
        not_finite = kind is float and not abs(value) <= FLOAT32_MAX
        if not_finite or (limits["above"] is not None and not value > limits["above"]):
            raise SettingError(f"{section}.{name} must be finite{_also(limits)}, got {value}")
        if limits["least"] is not None and value < limits["least"]:
            of_floats = isinstance(limits["least"], float)
            must = f"be finite{_also(limits)}" if of_floats else _least(limits["least"])
            raise SettingError(f"{section}.{name} must {must}, got {value}")


def _least(least: int) -> str:
    return "not be negative" if least == 0 else f"be at least {least}"


def _also(limits: Any) -> str:
    if limits["above"] == 0:
        return " and positive"
    return " and not negative" if limits["least"] == 0 else ""


# --- Values, as a command line or a variant gives them ------------------------------------------------------------------

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_PLAIN = {int: numbers.Integral, float: numbers.Real, bool: bool, str: str}  # what a value of each kind is
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def kind_of(hint: Any) -> Any:
    """int for `int | None`; what is no such union stays as it is."""
    kinds = [part for part in typing.get_args(hint) if part is not type(None)]
    return kinds[0] if takes_none(hint) and len(kinds) == 1 else hint


def takes_none(hint: Any) -> bool:
    """Whether None is one of the values of this type."""
    return type(None) in typing.get_args(hint)


def _takes_several(hint: Any) -> bool:
    return list[float] in typing.get_args(hint)


def in_words(hint: Any) -> str:
    """ "a whole number or None" for `int | None`."""
    if _takes_several(hint):
        return "a number, or several with commas between them"
    kind = kind_of(hint)
    return _WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}") + (" or None" if takes_none(hint) else "")


def read_value(text: str, hint: Any) -> Any:
    """text as a value of this type, such as `int | None`: "1000", "1_000", "1e3" and "0x3e8" are the same whole number; "true",
    "yes", "on" and "1" are true, in any case. Where None is a value, "None" and an empty text stand for it. Of the type
    `float | list[float]`, "0.1,0.2" is a list.

    Raises ValueError saying what was expected and what came.
    """
    if _takes_several(hint):
        several = [_read_float(part) for part in text.split(",")]
        if None in several:
            raise ValueError(f"expected {in_words(hint)}, got {text!r}")
        return several if "," in text else several[0]
    kind = kind_of(hint)
    if takes_none(hint) and text in ("None", ""):
        return None
    if kind is str:
        return text
    # of other types a Python literal, such as (1, 2)
    read = {int: _read_int, float: _read_float, bool: lambda text: _TRUTH.get(text.lower())}.get(kind, _read_literal)
    value = read(text)
    is_value = isinstance(value, typing.get_origin(kind) or kind) if kind not in _PLAIN else value is not None
    if not is_value:
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise ValueError(f"expected {in_words(hint)}, got {shown!r}")
    return value


def _read_int(text: str) -> int | None:
    try:
        return int(text, 0) if text.lower().lstrip("+-").startswith(("0x", "0o", "0b")) else int(text)
    except ValueError:
        value = _read_float(text)
        # Beyond 2**53, and below the least float, a float is not the number that is written.
        is_exact = value is not None and value.is_integer() and abs(value) <= 2**53 and "e-" not in text.lower()
        return int(value) if is_exact else None


def _read_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # what it raises for what is no literal
        return None
