"""What the campaign expects of everything that goes wrong: one short line that names what is at fault, and no traceback."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LONGEST = 400  # characters of a message


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended, in a word or two; failure: what is wrong with that as "sort: details", None if nothing is."""

    ended: str
    failure: str | None = None


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a command line came to: its exit code, or the exception that ended it, and what it wrote to stderr."""

    code: int | None
    error: BaseException | None
    err: str


def line_failure(message: str, names: Sequence[str]) -> str | None:
    """What is wrong with a message: not one line, too long, a traceback, or none of these names in it. None: nothing is."""
    lines = message.strip().splitlines()
    if not lines:
        return "no message"
    if "Traceback" in message:
        return f"traceback: {lines[-1][:200]}"
    if len(lines) > 1:
        return f"several lines: {len(lines)}: {lines[0][:200]}"
    if len(lines[0]) > LONGEST:
        return f"a long line: {len(lines[0])} characters: {lines[0][:200]}"
    if names and not any(name in lines[0] for name in names):
        return f"does not name it: none of {', '.join(names)[:100]} in {lines[0][:200]!r}"
    return None


def traceback_failure(error: BaseException) -> str:
    """A line about an exception that should have been a message: its type, its text, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if re.search(r"/(loglinear_jax|pallas_kernels)/", frame.filename)]
    where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__} in {where}: {text}"


def last_exception(err: str) -> str:
    """The line that ends the last traceback in this text."""
    lines = err.rpartition("Traceback (most recent call last)")[2].splitlines()[1:]
    return next((line for line in lines if line and not line[0].isspace()), "?")[:200]


@contextlib.contextmanager
def stderr_kept() -> Iterator[io.StringIO]:
    """What is written to sys.stderr and sys.stdout meanwhile, logs among it. Handlers that would outlive it are removed."""
    kept = io.StringIO()
    log = logging.getLogger("loglinear_jax")
    with contextlib.redirect_stderr(kept), contextlib.redirect_stdout(io.StringIO()):
        try:
            yield kept
        finally:
            log.handlers = []


def command_ending(call: Callable[[], int]) -> Ending:
    """What a command's call came to, also if it raises SystemExit (as --help does) or anything else."""
    code, error = None, None
    with stderr_kept() as err:
        try:
            code = call()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except Exception as raised:
            error = raised
    return Ending(code, error, err.getvalue())
