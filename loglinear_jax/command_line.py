"""What commands have in common: their exit codes, their arguments, by argparse with errors of one line, and what they log."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loglinear_jax.files import MOST_BYTES_OF_NAME, bytes_of_longest_name, existing_part, why_not_local
from loglinear_jax.settings import INT32_MAX, did_you_mean

# Exit codes, beside 0: done.
FAILED = 1  # something was left out, or the disk was full, or memory too little: one line on stderr says which
BAD_INPUT = 2  # one line on stderr says which
INTERRUPTED = 130  # what there was to save is saved
BROKEN_PIPE = 141  # the reader of the output is gone

MOST_SHOWN = 1000  # characters of an error
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, or of a user's share of it


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that choose and change a config, each as one "--config=..." or "--config.field=...", and all others."""
    own: list[str] = []
    others: list[str] = []
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


def one_line(error: object) -> str:
    """An error's message on one line; of a long one, as of a long argument, the beginning and the end."""
    text = " ".join(str(error).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN * 3 // 4]} ... {text[-MOST_SHOWN // 4 :]}"


def how_to_install(error: ModuleNotFoundError, extra: str) -> str | None:
    """What to install where a module is missing that an extra brings, `extra` itself if it does; None for any other module, as
    that is a bug."""
    brought = [
        re.match(r"([\w-]+).*extra == .(\w+)", one) for one in importlib.metadata.requires("loglinear_jax") or ()
    ]
    name = (error.name or "").lower()
    extras = [found[2] for found in brought if found and found[1].replace("-", "_").lower() == name]
    if not extras:
        return None
    chosen = next((one for one in (extra, "all") if one in extras), extras[0])
    return f"needs {error.name}: pip install -e '.[{chosen}]' in the checkout"


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports: a missing module that this extra brings is named with what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if hint := how_to_install(error, extra):
            raise ModuleNotFoundError(f"this part of loglinear_jax {hint}", name=error.name) from error
        raise


class BadInput(Exception):
    """What the user gave cannot be used; the message is shown as one line, and the exit code is 2."""


class Failed(Exception):
    """The machine did not let the command go on; the message is shown as one line, and the exit code is 1."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, which raises BadInput instead of printing its usage."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | kwargs
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        namespace, rest = super().parse_known_args(args, namespace)
        if rest and not rest[0].startswith("-"):
            self.error(f"unexpected argument {rest[0]!r}")
        if rest:
            hint = did_you_mean(rest[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized argument {rest[0]}{hint}")
        return namespace, rest

    def _print_message(self, message, file=None):
        print(message, end="", file=file, flush=True)  # argparse itself passes over a print that fails

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


# Types of arguments: what each reads, or ArgumentTypeError.


def whole_number(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """A whole number from 1 to INT32_MAX."""
    value = whole_number(text, least=1)
    if value > INT32_MAX:
        raise argparse.ArgumentTypeError(f"expected at most {INT32_MAX}, got {value}")
    return value


def power_of_two(text: str) -> int:
    """A `size` that is one."""
    value = size(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError(f"expected a power of two, got {value}")
    return value


def integer(text: str) -> int:
    """A whole number, also a negative one."""
    return -whole_number(text[1:]) if text.startswith("-") else whole_number(text)


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}, got {text!r}")
        return text

    return read


def comma_separated(item: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """A list, each item read by `item`; none is empty."""

    def read(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"expected a list, separated by commas, without empty parts, got {text!r}")
        return [item(part) for part in parts]

    return read


def path_pattern(text: str) -> str:
    """A path, or a pattern of paths, with the home folder for a ~ at its beginning."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}")
    if problem := why_not_local(text):
        raise argparse.ArgumentTypeError(problem)
    if (longest := bytes_of_longest_name(text)) > MOST_BYTES_OF_NAME:
        raise argparse.ArgumentTypeError(f"a name of {longest:,} bytes: expected at most {MOST_BYTES_OF_NAME}")
    return os.path.expanduser(text)


def path(text: str) -> Path:
    return Path(path_pattern(text))


def read_text(file: Path, name: str) -> str:
    """The content of the file that the argument `name` gives, without a byte order mark. Raises BadInput if it can't be read,
    or is not UTF-8."""
    try:
        return file.read_bytes().decode().removeprefix("\ufeff")
    except OSError as error:
        raise BadInput(f"{name}: {file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: {file} is not UTF-8, at byte {error.start}") from error


def check_can_be_made(path: Path, name: str) -> None:
    """Raises BadInput unless the folder that the argument `name` gives is there and can be written to, or can be made. Makes
    nothing."""
    if path.is_file():
        raise BadInput(f"{name}: {path} is a file, expected a folder")
    check_writable(existing_part(path), name)


def check_folder(path: Path, name: str) -> None:
    """Makes the folder that the argument `name` gives, unless it is there. Raises BadInput if nothing can be written to it."""
    check_can_be_made(path, name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(error)(f"{name}: {path} can't be made: {error.strerror or error}") from error


def check_writable(folder: Path, name: str) -> None:
    """Raises BadInput if no file can be written to the folder that the argument `name` gives."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _refused(error)(f"{name}: {folder} can't be written: {error.strerror or error}") from error


def _refused(error: OSError) -> type[Exception]:
    return Failed if error.errno in FULL else BadInput


def quiet_libraries() -> None:
    """Silences Orbax for the rest of the process: it logs every step it takes and, with its traceback, what it then raises."""
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # its event loops log again what was raised in them


def show_log(log: logging.Logger, shown: bool) -> None:
    """Shows the lines of a logger as they are, from information on; errors alone if not `shown`."""
    log.setLevel(logging.INFO if shown else logging.ERROR)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
