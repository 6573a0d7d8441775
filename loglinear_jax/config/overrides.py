"""Settings changed by arguments such as --config.train.num_seeds=3, which ml_collections' config_flags reads.

What it can't read is done here: None, whole numbers written as 1e5, yes and no, and errors of one line with the nearest
setting of any section. See docs/development/config.md.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from absl import flags
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import FieldReference
from ml_collections.config_flags import config_path

from loglinear_jax.config.errors import ConfigError
from loglinear_jax.settings import in_words

TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def override(config: ConfigDict, argument: str) -> str:
    """Changes a locked config by one argument; returns the dotted name of the setting.

    "--config.train.stream" alone sets it to true, "--noconfig.train.stream" to false.
    Raises ConfigError for a setting that does not exist, and for a value of another type.
    """
    given, equals, text = argument.partition("=")
    name = re.sub(r"^--?(no)?config\.?", "", given)
    try:
        kind = config_path.get_type(name, config)
        old = config_path.get_value(name, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        close = difflib.get_close_matches(name, flatten_dict(config.to_dict(), sep="."), n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        shown = name if name.replace(".", "").isidentifier() else repr(name)
        raise ConfigError(f"there is no setting {shown}{hint}") from error
    if re.fullmatch(r"\d+(\.\d+)?e\d+", text) and float(text).is_integer() and float(text) <= 2**53:
        argument = f"{given}={int(float(text))}"
    elif kind is bool and text.lower() in TRUTH:
        argument = f"{given}={TRUTH[text.lower()]}"
    try:
        if text == "None" or (equals and not text and kind is not str):
            value = None
        else:
            value = _read(name, FieldReference(old, field_type=kind), argument)
        if kind is object and isinstance(value, tuple):
            value = list(value)  # as it is in a run's config.json
        config.update_from_flattened_dict({name: value})
    except (flags.Error, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: expected {in_words(kind)}, got {text!r}") from error
    return name


def _read(name: str, setting: FieldReference, argument: str) -> Any:
    """The value that an argument gives to a setting, alone in a config, as the flags of a whole one take long to define."""
    config = ConfigDict(unflatten_dict({name: setting}, sep="."))
    values, argv = flags.FlagValues(), ["", argument]
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    values(argv)
    return config_path.get_value(name, config)
