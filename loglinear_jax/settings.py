"""Fields of settings classes: the one place of each default, with what it means and which values it takes."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import typing
from collections.abc import Iterable, Sequence
from typing import Any

INT32_MAX = 2**31 - 1  # what sizes and counts are indexed by
FLOAT32_MAX = 3.4028235e38


class SettingError(ValueError):
    """A setting that does not exist or can't have this value; the message is one line that names it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: ": did you mean X?", X the known one most like it; "" if none is."""
    return "".join(f": did you mean {close}?" for close in difflib.get_close_matches(name, list(known), n=1))


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] | None = None,
    least: int | float | None = None,
    above: float | None = None,
    most: int = INT32_MAX,
) -> Any:
    """Declare a setting: a dataclass field with a default, a meaning and allowed values. choices, least, above,
    most: which values `check_fields` allows; None always passes. most is for whole numbers."""
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
        if must := of_another_kind(value, types[name]):
            pass
        elif kind is int and value > limits["most"]:
            raise SettingError(f"{section}.{name} must be at most {limits['most']:,}, got {value:,}")
        elif limits["choices"] is not None and value not in limits["choices"]:
            must = f"be one of {', '.join(limits['choices'])}"
        elif kind is float:
            above, least = limits["above"], limits["least"]
            fits = abs(value) <= FLOAT32_MAX and (above is None or value > above) and (least is None or value >= least)
            also = " and positive" if above == 0 else " and not negative" if least == 0 else ""
            must = None if fits else f"be finite{also}"
        elif limits["least"] is not None and value < limits["least"]:
            must = "not be negative" if limits["least"] == 0 else f"be at least {limits['least']}"
        if must:
            raise SettingError(f"{section}.{name} must {must}, got {value!r}")


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_PLAIN = {int: numbers.Integral, float: numbers.Real, bool: bool, str: str}  # what a value of each kind is


def is_of(value: Any, kind: type) -> bool:
    """Whether a value is an int, float, bool or str, as settings have them: NumPy's numbers count; a bool is not one."""
    return isinstance(value, _PLAIN[kind]) and isinstance(value, bool) == (kind is bool)


def of_another_kind(value: Any, hint: Any) -> str | None:
    """What a value must be, such as "be a number or None", if its type is a plain one and it is not of that; else None."""
    kind, or_none = kind_of(hint), takes_none(hint)
    if kind not in _PLAIN or is_of(value, kind) or (value is None and or_none):
        return None
    return f"be {in_words(kind)}{' or None' * or_none}"


def kind_of(hint: Any) -> Any:
    """int for `int | None`; what is no such union stays as it is."""
    kinds = [part for part in typing.get_args(hint) if part is not type(None)]
    return kinds[0] if takes_none(hint) and len(kinds) == 1 else hint


def in_words(kind: type) -> str:
    """What a value of this type is: "a whole number" for int."""
    return _WORDS.get(kind, f"a {kind.__name__}")


def takes_none(hint: Any) -> bool:
    """Whether None is one of the values of this type."""
    return type(None) in typing.get_args(hint)
