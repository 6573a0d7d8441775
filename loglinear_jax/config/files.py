"""Config files: found by path or name, loaded, and changed by arguments such as --config.train.num_seeds=3."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from loglinear_jax.command_line import split_arguments
from loglinear_jax.config.defaults import ConfigError, default_config, naming, some_of
from loglinear_jax.config.variants import override
from loglinear_jax.files import why_not_local
from loglinear_jax.models import is_own
from loglinear_jax.settings import did_you_mean

PACKAGE = Path(__file__).parents[1]


def configs_folder() -> Path:
    """Where this package's config files are: in it when installed as a wheel, beside it in a checkout."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """The names by which this package's config files are found."""
    return sorted(path.stem for path in configs_folder().glob("[!_]*.py"))


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A loaded config file. presets: name -> function that changes a config; a name that ends in "=" takes a number."""

    path: Path
    docstring: str
    presets: Mapping[str, Callable]
    get_config: Callable[..., ConfigDict]


@dataclasses.dataclass(frozen=True)
class ChosenConfig:
    """A config as a command line asks for it, and "selective_copy-smoke", the folder's name of its run. given: the settings
    that the command line changes, such as "train.num_seeds"."""

    config: ConfigDict
    name: str
    given: frozenset[str]


def chosen_file(arguments: Sequence[str]) -> str:
    """What follows --config=: a config file, and its presets after a colon; '' if it is not given. Raises ConfigError for a
    second one."""
    given = [argument.partition("=")[2] for argument in arguments if chooses_config(argument)]
    if len(given) > 1:
        raise ConfigError(f"--config is given {len(given)} times, as {some_of(given)}: expected it once")
    return given[0] if given else ""


def chooses_config(argument: str) -> bool:
    """Whether it is --config=..., not a setting of the config."""
    return argument.partition("=")[0].lstrip("-") == "config"


def read_config_arguments(argv: Sequence[str]) -> ChosenConfig:
    """The config that a command line asks for; arguments that are not about the config are left out.

    Raises ConfigError for an unreadable config file, an unknown preset or setting, and a value of the wrong type.
    """
    arguments, _ = split_arguments(argv)
    chosen = chosen_file(arguments)
    filename, _, presets = chosen.partition(":")
    if not filename:
        before = f"--config={chosen} names no config file before the colon" if chosen else "name a config"
        raise ConfigError(f"{before}: --config=selective_copy:smoke; there are {', '.join(config_names())}")
    config = get_config(load_config_file(filename), presets)
    config.lock()
    given = frozenset(override(config, argument) for argument in arguments if not chooses_config(argument))
    if "model.kind" in given and is_own(config.model.kind):  # which has no settings but its arguments
        with naming(), config.unlocked():
            known = default_config(config.model.kind).model
            for name in set(config.model) - set(known):
                if f"model.{name}" not in given:  # those that are, `check_sections` refuses
                    del config.model[name]
    return ChosenConfig(config, shell_safe(Path(filename).stem + (f"-{presets}" if presets else "")), given)


def shell_safe(name: str) -> str:
    """A folder's name that needs no quoting in a shell: "mqar-kv=8+released" for "mqar-kv=8,released"."""
    return re.sub(r"[^\w.=+-]", "-", name.replace(",", "+"))


def find_config_file(name: str) -> Path:
    """The file of that path if there is one, else this package's config of that name.

    Raises ConfigError if there is neither.
    """
    if problem := why_not_local(name):
        raise ConfigError(f"the config {problem}")
    path, names = Path(name).expanduser(), config_names()
    try:
        if path.is_file():
            return path
    except OSError as error:  # too long a name
        raise ConfigError(f"the config {name} can't be read: {error.strerror}") from error
    if name in names:
        return configs_folder() / f"{name}.py"
    known = ", ".join(names) + did_you_mean(name, names)
    raise ConfigError(f"there is no config file {name}, and the configs by name are {known}")


def load_config_file(name: str) -> ConfigFile:
    """Executes a config file. Raises ConfigError if it can't be read, or defines no get_config."""
    path = find_config_file(name)
    module = ModuleType(f"loglinear_jax_config_{path.stem}")
    module.__file__ = str(path)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:  # also of another encoding, or with zero bytes
        raise ConfigError(f"the config {path} can't be read: {error}") from error
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)  # what it raises is its own, and keeps its traceback
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"the config {path} has no function get_config")
    return ConfigFile(path, inspect.getdoc(module) or "", getattr(module, "PRESETS", {}), module.get_config)


def get_config(file: ConfigFile, presets: str = "") -> ConfigDict:
    """The file's config with these presets, such as "kv=32,robust". Raises ConfigError for presets it doesn't have."""
    arguments = [presets] if presets else []
    try:
        inspect.signature(file.get_config).bind(*arguments)
    except TypeError:
        raise ConfigError(f"the config {file.path} {'takes no' if presets else 'needs'} presets") from None
    with naming():
        config = file.get_config(*arguments)
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ConfigError(f"the config {file.path}: get_config returns a {kind}, expected a ConfigDict")
    return config
