"""Types of arguments, and how wrong ones are named."""

import argparse

import pytest

from loglinear_jax.benchmarks.language_model import Shape
from loglinear_jax.command_line import (
    BadInput,
    Parser,
    comma_separated,
    integer,
    number,
    one_of,
    size,
    whole_number,
)


@pytest.mark.parametrize(
    ("item", "text", "value"),
    [
        (whole_number, "0, 7", [0, 7]),
        (size, "12", [12]),
        (integer, "-1,2", [-1, 2]),
        (number, "1e-3,2", [0.001, 2.0]),
        (one_of(["a", "b"]), "b,a", ["b", "a"]),
        (Shape.read, "8x512", [(8, 512)]),
        (str, "tables,decays", ["tables", "decays"]),
    ],
)
def test_lists_are_read_item_by_item(item, text, value):
    assert comma_separated(item)(text) == value


@pytest.mark.parametrize(
    ("item", "text", "message"),
    [
        (whole_number, "1,-2", "whole number from 0 on, got '-2'"),
        (str, "tables,,lam", "without empty parts, got 'tables,,lam'"),
        (size, "4,0", "whole number from 1 on, got '0'"),
        (number, "nan", "expected a number, got 'nan'"),
        (one_of(["a", "b"]), "a,c", "some of a, b, got 'c'"),
    ],
)
def test_what_cannot_be_read_is_named(item, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        comma_separated(item)(text)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--sedes=3", r"unrecognized argument --sedes=3 \(did you mean --seeds\?\)"),
        ("--seed=3", r"unrecognized argument --seed=3 \(did you mean --seeds\?\)"),  # no abbreviations
        ("extra", "unexpected argument 'extra'"),
        ("--seeds=few", "argument --seeds: expected a whole number from 0 on, got 'few'"),
    ],
)
def test_an_argument_that_does_not_exist_is_named(argument, message):
    parser = Parser()
    parser.add_argument("--seeds", type=comma_separated(whole_number))
    with pytest.raises(BadInput, match=message):
        parser.parse_args([argument])
