"""What users give: arguments and paths read, fields of settings checked, and how wrong ones are named."""

import argparse
import dataclasses
import os
import pwd
from pathlib import Path

import numpy as np
import pytest

from loglinear_jax.benchmarks.language_model import Shape
from loglinear_jax.command_line import BadInput, Parser, comma_separated, integer, number, one_of, size, whole_number
from loglinear_jax.files import local_path
from loglinear_jax.settings import INT32_MAX, SettingError, check_fields, setting


@pytest.mark.parametrize(
    ("item", "text", "expected"),
    [
        (whole_number, "0, 7", [0, 7]),
        (size, "12", [12]),
        (integer, "-1,2", [-1, 2]),
        (number, "1e-3,2", [0.001, 2.0]),
        (one_of(["a", "b"]), "b,a", ["b", "a"]),
        (Shape.read, "8x512", [(8, 512)]),
        (whole_number, "1,-2", "whole number from 0 on, got '-2'"),
        (str, "tables,,lam", "without empty parts, got 'tables,,lam'"),
        (number, "nan", "expected a number, got 'nan'"),
        (one_of(["a", "b"]), "a,c", "some of a, b, got 'c'"),
    ],
)
def test_lists_are_read_item_by_item_or_named(item, text, expected):
    if isinstance(expected, list):
        assert comma_separated(item)(text) == expected
        return
    with pytest.raises(argparse.ArgumentTypeError, match=expected):
        comma_separated(item)(text)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--seed=3", r"unrecognized argument --seed=3: did you mean --seeds\?"),  # no abbreviations
        ("extra", "unexpected argument 'extra'"),
        ("--seeds=few", "argument --seeds: expected a whole number from 0 on, got 'few'"),
    ],
)
def test_an_argument_that_does_not_exist_is_named(argument, message):
    parser = Parser()
    parser.add_argument("--seeds", type=comma_separated(whole_number))
    with pytest.raises(BadInput, match=message):
        parser.parse_args([argument])


def test_a_home_folder_is_found_and_what_is_not_on_this_machine_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/runs/a", "workdir") == tmp_path / "runs" / "a"
    assert local_path(f"~{pwd.getpwuid(os.getuid()).pw_name}", "workdir").is_absolute()
    for plain in ("runs/~", "./~x", "gs:/x", "owner/name"):
        assert local_path(plain, "workdir") == Path(plain)

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)  # as in a container, whose user has no entry
    no_home = "there is no home folder for {}: expected a path without it"
    for path, problem in (
        ("~/runs", no_home.format("~")),
        ("~nobody-here/x", no_home.format("~nobody-here")),
        ("gs://bucket/run", "is an address: expected a path on this machine, as only local folders and"),
    ):
        with pytest.raises(SettingError, match=f"^task.cache: {path}.*{problem}"):
            local_path(path, "task.cache")


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
    check_fields(Sizes(width=np.int64(INT32_MAX), rate=np.float32(0.5), depth=None), "x")  # NumPy's numbers are numbers
    with pytest.raises(SettingError, match=message):
        check_fields(Sizes(**change), "x")
