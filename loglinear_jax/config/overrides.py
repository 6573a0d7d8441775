"""Settings changed by arguments such as --config.train.num_seeds=3, which ml_collections' config_flags reads.

What it can't read is done here: None, whole numbers written as 1e5, yes and no, and errors of one line with the nearest
setting of any section. See docs/development/config.md.
"""

from __future__ import annotations

import difflib
import re

from absl import flags
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict, config_flags
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
    if re.fullmatch(r"\d+(\.\d+)?e\d+", text) and float(text).is_integer() and float(text) <= 2**53:
        argument = f"{given}={int(float(text))}"
    try:
        kind = config_path.get_type(name, config)
        if kind is bool and text.lower() in TRUTH:
            argument = f"{given}={TRUTH[text.lower()]}"
        if text == "None" or (equals and not text and kind is not str):
            config.update_from_flattened_dict({name: None})
        else:
            values = flags.FlagValues()
            argv = ["", argument]
            config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
            values(argv)
    except (AttributeError, KeyError) as error:
        close = difflib.get_close_matches(name, flatten_dict(config.to_dict(), sep="."), n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise ConfigError(f"there is no setting {name}{hint}") from error
    except (flags.Error, TypeError, ValueError) as error:
        if not name.replace(".", "").isidentifier():
            raise ConfigError(f"there is no setting {name!r}") from error
        raise ConfigError(f"{name}: expected {in_words(kind)}, got {text!r}") from error
    value = config_path.get_value(name, config)
    if kind is object and isinstance(value, tuple):
        config.update_from_flattened_dict({name: list(value)})  # as it is in a run's config.json
    return name
