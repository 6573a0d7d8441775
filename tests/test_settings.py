"""Values as a command line gives them, and the limits of fields."""

import dataclasses

import numpy as np
import pytest

from loglinear_jax.settings import INT32_MAX, SettingError, check_fields, read_value, setting


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("1000", int, 1000),
        ("1_000", int, 1000),
        ("1e3", int, 1000),
        ("50.0", int, 50),
        ("0x10", int, 16),
        ("-3", int, -3),
        ("9007199254740993", int, 9007199254740993),
        ("1e-3", float, 0.001),
        ("2", float, 2.0),
        ("Yes", bool, True),
        ("on", bool, True),
        ("0", bool, False),
        ("None", str, "None"),
        ("None", int | None, None),
        ("", str | None, None),
        ("7", int | None, 7),
        ("(1, 2)", tuple, (1, 2)),
        ("1e-3", float | list[float], 0.001),
        ("1e-3, 2", float | list[float], [0.001, 2.0]),
    ],
)
def test_what_can_mean_one_thing_alone_is_read(text, hint, value):
    found = read_value(text, hint)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "message"),
    [
        ("1.5", int, "expected a whole number, got '1.5'"),
        ("nan", int, "expected a whole number, got 'nan'"),
        ("1e400", int, "expected a whole number, got '1e400'"),
        ("1e-400", int, "expected a whole number, got '1e-400'"),
        ("1e300", int, "expected a whole number, got '1e300'"),
        ("9" * 5000, int, "expected a whole number, got '9{60}…'"),
        ("", int, "expected a whole number, got ''"),
        ("few", int | None, "expected a whole number or None, got 'few'"),
        ("few", float, "expected a number, got 'few'"),
        ("maybe", bool, "expected true or false, got 'maybe'"),
        ("(1,", tuple, "expected a tuple, got '\\(1,'"),
        ("1,few", float | list[float], "expected a number, or several with commas between them, got '1,few'"),
        ("3", tuple, "expected a tuple, got '3'"),
    ],
)
def test_what_came_is_named_with_what_was_expected(text, hint, message):
    with pytest.raises(ValueError, match=message):
        read_value(text, hint)


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
