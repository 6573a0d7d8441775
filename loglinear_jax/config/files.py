"""Config files: found by path or name, loaded, and changed by arguments such as --config.train.num_seeds=3."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from loglinear_jax.config.defaults import default_config
from loglinear_jax.config.errors import ConfigError, some_of
from loglinear_jax.config.overrides import override
from loglinear_jax.files import why_not_local
from loglinear_jax.models import is_own
from loglinear_jax.settings import SettingError

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


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that choose and change a config, each as one "--config=..." or "--config.field=...", and all others."""
    own, others = [], []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not re.match(r"--?(no)?config(\.|=|$)", argument):
            others.append(argument)
            continue
        if "=" not in argument and rest and not rest[0].startswith("--"):
            argument += "=" + rest.pop(0)
        own.append(argument)
    return own, others


def chosen_file(arguments: Sequence[str]) -> str | None:
    """What follows --config= in the first part of `split_arguments`: a config file, and its presets after a colon. Raises
    ConfigError for a second one."""
    given = [argument.partition("=")[2] for argument in arguments if _chooses(argument)]
    if len(given) > 1:
        raise ConfigError(f"--config is given {len(given)} times, as {some_of(given)}: expected it once")
    return given[0] if given else None


def _chooses(argument: str) -> bool:
    return argument.partition("=")[0].lstrip("-") == "config"


def read_config_arguments(argv: Sequence[str]) -> ChosenConfig:
    """The config that a command line asks for; arguments that are not about the config are left out.

    Raises ConfigError for an unreadable config file, an unknown preset or setting, and a value of the wrong type.
    """
    arguments, _ = split_arguments(argv)
    filename, colon, presets = (chosen_file(arguments) or "").partition(":")
    if not filename:
        before = f"--config={colon}{presets} names no config file before the colon" if colon else "name a config"
        raise ConfigError(f"{before}: --config=selective_copy:smoke; there are {', '.join(config_names())}")
    config = get_config(load_config_file(filename), presets)
    config.lock()
    given = frozenset(override(config, argument) for argument in arguments if not _chooses(argument))
    if "model.kind" in given and is_own(config.model.kind):
        _leave_out_settings_of_other_models(config, given)
    return ChosenConfig(config, shell_safe(Path(filename).stem + (f"-{presets}" if presets else "")), given)


def _leave_out_settings_of_other_models(config: ConfigDict, given: Collection[str]) -> None:
    """Of the model those that were given stay, for `check_sections` to refuse."""
    try:
        known = default_config(config.model.kind).model
    except SettingError as error:
        raise ConfigError(str(error)) from error
    with config.unlocked():
        for name in set(config.model) - set(known):
            if f"model.{name}" not in given:
                del config.model[name]


def shell_safe(name: str) -> str:
    """A folder's name that needs no quoting in a shell: "mqar-kv=8+released" for "mqar-kv=8,released"."""
    return re.sub(r"[^\w.=+-]", "-", name.replace(",", "+"))


def find_config_file(name: str) -> Path:
    """The file of that path if there is one, else this package's config of that name.

    Raises ConfigError if there is neither.
    """
    if problem := why_not_local(name):
        raise ConfigError(f"the config {problem}")
    path = Path(name).expanduser()
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:  # too long a name
        raise ConfigError(f"the config {name} can't be read: {error.strerror}") from error
    names = config_names()
    if is_file:
        return path
    if name in names:
        return configs_folder() / f"{name}.py"
    if is_folder:
        raise ConfigError(f"the config {name} is a folder: expected a file in it, or one of {', '.join(names)}")
    close = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {close[0]}?" if close else ""
    raise ConfigError(f"there is no config file {name}, and the configs by name are {', '.join(names)}{hint}")


def load_config_file(name: str) -> ConfigFile:
    """Executes a config file. Raises ConfigError if it can't be read, or defines no get_config."""
    path = find_config_file(name)
    module = _execute(path)
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
    try:
        config = file.get_config(*arguments)
    except SettingError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"the config {file.path}: get_config returns a {type(config).__name__}, expected a ConfigDict"
        )
    return config


def _execute(path: Path) -> ModuleType:
    name = f"loglinear_jax_config_{path.stem}"
    loader = SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    try:
        code = loader.get_code(name)
    except (OSError, SyntaxError, ValueError) as error:  # also of another encoding, or with zero bytes
        raise ConfigError(f"the config {path} can't be read: {error}") from error
    sys.modules[name] = module
    exec(code, module.__dict__)  # what it raises is its own, and keeps its traceback
    return module
