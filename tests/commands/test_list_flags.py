"""Lists on the command line."""

import pytest
from absl import flags

from loglinear_jax.benchmarks import language_model as language_benchmark
from loglinear_jax.commands import list_flags
from loglinear_jax.commands.list_flags import one_of, size, whole_number


@pytest.mark.parametrize(
    ("item", "text", "value"),
    [
        (whole_number, "0, 7", [0, 7]),
        (size, "12", [12]),
        (one_of(["a", "b"]), "b,a", ["b", "a"]),
        (language_benchmark.Shape.read, "8x512", [(8, 512)]),
    ],
)
def test_items_are_read_and_written_as_they_were(item, text, value):
    parser = list_flags._ListParser(item)
    read = parser.parse(text)
    assert read == value
    assert parser.parse(flags.CsvListSerializer(",").serialize(read)) == read


@pytest.mark.parametrize(
    ("item", "text", "message"),
    [
        (whole_number, "1,-2", "whole numbers from 0 on, got '-2'"),
        (whole_number, "", "got ''"),
        (size, "4,0", "whole numbers from 1 on, got '0'"),
        (one_of(["a", "b"]), "a,c", "some of a, b, got 'c'"),
        (language_benchmark.Shape.read, "8", "batch x length such as 8x512, got '8'"),
        (language_benchmark.Shape.read, "8x512x2", "got '512x2'"),
    ],
)
def test_what_cannot_be_read_is_named(item, text, message):
    with pytest.raises(ValueError, match=message):
        list_flags._ListParser(item).parse(text)
