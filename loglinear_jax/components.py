"""Components chosen by text: λ, mixers and models, as `name(key=value, ...)` or `my_module:MyClass(key=value, ...)`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from loglinear_jax.settings import SettingError, did_you_mean

_OPENING, _CLOSING = "([{", ")]}"
_OF_EVERY_MODULE = {"parent", "name"}  # fields that Linen adds


@dataclasses.dataclass(frozen=True)
class Call:
    """A component's name, or its import path, and the keyword arguments written behind it."""

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def split_outside(text: str, separator: str) -> list[str]:
    """Splits text at a separator of one character, except inside brackets and quotes: "a,b(c=1,d=2)" into "a" and
    "b(c=1,d=2)"."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        if character == separator and not (depth or quote):
            parts.append("")
        else:
            parts[-1] += character
    return parts


@functools.lru_cache(maxsize=1024)
def parse_call(text: str) -> Call:
    """The name and the keyword arguments of `name(key=value, ...)`; the values are Python literals.

    Raises SettingError for text that is no such call.
    """
    name, opening, rest = text.strip().partition("(")
    if not opening:
        return Call(name.strip())
    problem = SettingError(
        f"{text!r}: expected name(key=value, ...), each value a number, a quoted text, True, False or None"
    )
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise problem
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise problem from error
    if len(arguments) < len(call.keywords):  # Python's own parser refuses this only when it compiles
        raise problem
    return Call(name.strip(), arguments)


def find_module(name: str) -> ModuleType | None:
    """The module of that name, imported; None if there is none. What its import raises is not caught, also if something that it
    imports is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def find_class(name: str, known: Mapping[str, Callable], what: str, example: str, base: type) -> Callable:
    """The component called `name` in `known`, or the class that "module:Class" names.

    what: the setting, for messages. example: an import path that messages show. base: what the class must be a subclass of.
    Raises SettingError for any other name, for a missing module (and says how to pass its path), and for what is no such class.
    An error that the module raises on import is not caught.
    """
    if name in known:
        return known[name]
    module_name, colon, class_name = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise SettingError(f"{what} must be one of {', '.join(known)}, or {example}, got {name!r}")
    if (module := find_module(module_name)) is None:
        raise SettingError(
            f"{what}={name!r}: there is no module {module_name} here: put the folder that holds it in PYTHONPATH"
        )
    found = getattr(module, class_name, None)
    if found is None:
        raise SettingError(f"{what}={name!r}: the module {module_name} has no class {class_name}")
    if not (isinstance(found, type) and issubclass(found, base)):
        expected = (
            "the class of a Linen module" if base.__module__.startswith("flax") else f"a subclass of {base.__name__}"
        )
        raise SettingError(f"{what}={name!r}: expected {expected}, got a {type(found).__name__}")
    if not any("__call__" in vars(parent) for parent in found.__mro__):
        raise SettingError(f"{what}={name!r}: the class {class_name} has no method __call__")
    return found


def fields_of(component: Callable) -> Mapping[str, inspect.Parameter]:
    """The fields of a component that can be set, by name."""
    hidden = _OF_EVERY_MODULE | set(getattr(component, "keywords", ()))  # of a functools.partial
    parameters = inspect.signature(component).parameters
    return {name: field for name, field in parameters.items() if name not in hidden}


def instantiate(component: Callable, call: Call, what: str, settings: Mapping[str, Any], **more: Any) -> Any:
    """The component with the call's arguments, and with those of the settings that it has other fields for.

    Raises SettingError for an argument that it has no field for, and for a field that gets no value.
    """
    fields = fields_of(component)
    for name in call.arguments:
        if name not in fields:
            known = did_you_mean(name, fields) or f": it has {', '.join(fields) or 'no arguments'}"
            raise SettingError(f"{what}={call.name!r} has no argument {name}{known}")
    values = {name: value for name, value in settings.items() if name in fields} | dict(call.arguments)
    if lacking := [name for name, field in fields.items() if field.default is field.empty and name not in values]:
        raise SettingError(f"{what}={call.name!r}: its field {lacking[0]} needs a default value")
    return component(**values, **more)
