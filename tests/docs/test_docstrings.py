"""Every public name has a docstring whose first sentence is a line, and examples that run."""

import doctest

import pytest

import loglinear_jax

NAMES = [name for name in loglinear_jax.__all__ if name != "FenwickState"]  # made by init_fenwick_state


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name):
    text = getattr(loglinear_jax, name).__doc__
    first = text.splitlines()[0]
    assert first.endswith(".") and len(first) > 20, first
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
