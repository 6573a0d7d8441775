"""The limits of fields."""

import dataclasses

import numpy as np
import pytest

from loglinear_jax.settings import INT32_MAX, SettingError, check_fields, setting


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = setting(4, "", least=1)
    depth: int | None = setting(2, "", least=1, most=10)
    rate: float = setting(0.1, "", above=0)
    fast: bool = setting(False, "")
    name: str = setting("a", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 2**31}, "x.width must be at most 2,147,483,647, got 2,147,483,648"),
        ({"width": -(2**63)}, "x.width must be at least 1, got"),
        ({"width": True}, "x.width must be a whole number, got True"),
        ({"width": 2.0}, "x.width must be a whole number, got 2.0"),
        ({"width": None}, "x.width must be a whole number, got None"),
        ({"depth": 11}, "x.depth must be at most 10, got 11"),
        ({"rate": float("nan")}, "x.rate must be finite and positive, got nan"),
        ({"rate": 1e39}, "x.rate must be finite and positive, got 1e\\+39"),  # infinite in float32
        ({"rate": "fast"}, "x.rate must be a number, got 'fast'"),
        ({"fast": 1}, "x.fast must be true or false, got 1"),
        ({"name": 3}, "x.name must be a text, got 3"),
    ],
)
def test_a_field_with_another_value_or_type_is_named(change, message):
    with pytest.raises(SettingError, match=message):
        check_fields(Sizes(**change), "x")


def test_numbers_of_numpy_are_numbers():
    check_fields(Sizes(width=np.int64(INT32_MAX), rate=np.float32(0.5), depth=None), "x")
