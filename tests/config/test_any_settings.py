"""Malformed and odd command lines: each is refused in one line that names what is wrong, or means what was asked for."""

import ast
import contextlib
import io
import logging
import math
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loglinear_jax.commands.main import main
from loglinear_jax.config import describe_settings, flat_settings
from loglinear_jax.config.files import get_config, load_config_file, read_config_arguments
from loglinear_jax.runs.training import checked_experiments

BASES = (
    "mqar", "mqar:released", "selective_copy:smoke", "interleaved:robust", "zoology_mqar:mixture", "state_tracking",
    "mad:recall",
)  # fmt: skip
TEXTS = (
    "", " ", "word", "None", "true", "no", "λ", "'", "a\nb", "=", ",", "0", "-1", "1", "2", "7", "64", "1.5", "-0.5", "1e3",
    "1_000", "0x10", "50.0", "1000003", str(2**31), str(10**30), "1e400", "nan", "-inf", "1e38", "[]", "[1, 2]", "{}", "1,2",
    "lambda: 0", "${HOME}", "\\",
)  # fmt: skip


def ending(*argv):
    """(exit code, standard error, config and experiments that would be trained, or nothing) of a command line."""
    accepted, err = [], io.StringIO()

    def instead(config, *_):
        accepted.extend((config, checked_experiments(config)[0]))
        raise SystemExit(0)

    with mock.patch("loglinear_jax.runs.run", instead), contextlib.redirect_stderr(err):
        try:
            code = main(list(argv), command="train", called="python run.py")
        except SystemExit:
            code = 0
        finally:
            logging.getLogger("loglinear_jax").handlers = []
    return code, err.getvalue(), accepted


def check_refused(code, err, *names):
    assert code == 2 and err.count("\n") == 1 and len(err) < 400, err
    assert any(name in err for name in names), err


def means(text, value):
    """Whether a setting's text can stand for this value."""
    if value is None:
        return text in ("", "None")
    if isinstance(value, bool):
        return text in (("true", "1") if value else ("no", "0"))
    if isinstance(value, str):
        return value == text
    if isinstance(value, list):
        return all(map(means, text.strip("[]").split(","), value))
    readings = []
    for read in (float, lambda text: int(text, 0), ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, OverflowError):
            readings.append(read(text))
    return value in readings and math.isfinite(value)


@st.composite
def one_change(draw):
    """A config, and one of its settings with some text."""
    base = draw(st.sampled_from(BASES))
    name, _, presets = base.partition(":")
    names = [setting.name for setting in describe_settings(get_config(load_config_file(name), presets))]
    return base, draw(st.sampled_from(names)), draw(st.sampled_from(TEXTS))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(one_change())
@pytest.mark.slow
def test_a_setting_is_refused_by_name_or_means_what_was_asked(change):
    base, setting, text = change
    code, err, accepted = ending(f"--config={base}", f"--config.{setting}={text}")
    if not accepted:
        return check_refused(code, err, setting.partition(".")[2] or setting)
    config, _ = accepted
    if setting != "variants":
        section, _, name = setting.partition(".")
        assert means(text, config[section][name])
    if setting != "task.name":
        before, after = flat_settings(read_config_arguments([f"--config={base}"]).config), flat_settings(config)
        assert {name for name in before if before[name] != after[name]} <= {setting, "variants"}
