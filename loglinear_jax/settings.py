"""Fields of settings classes: the one place of each default, with what it means and which values it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


class SettingError(ValueError):
    """A setting that does not exist or can't have this value; the message is one line that names it."""


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] | None = None,
    least: int | float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field that says what it means. choices, least, above: which values it takes, for `check_fields`; None always
    passes."""
    limits = {"choices": choices, "least": least, "above": above}
    return dataclasses.field(default=default, metadata={"meaning": meaning, **limits})


def other_default(settings_class: type, name: str, default: Any) -> Any:
    """The same field for a subclass, with another default."""
    return dataclasses.field(default=default, metadata=settings_class.__dataclass_fields__[name].metadata)


def setting_fields(settings_class: type) -> dict[str, dataclasses.Field]:
    """By name, the fields that were made by `setting`."""
    return {field.name: field for field in dataclasses.fields(settings_class) if "meaning" in field.metadata}


def check_fields(settings: Any, section: str) -> None:
    """Raises SettingError naming the first field whose value it does not take, as `section`.name."""
    for name, field in setting_fields(type(settings)).items():
        value, limits = getattr(settings, name), field.metadata
        if value is None:
            continue
        if limits["choices"] is not None and value not in limits["choices"]:
            raise SettingError(f"{section}.{name} must be one of {', '.join(limits['choices'])}, got {value!r}")
        not_finite = isinstance(value, float) and not math.isfinite(value)
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
