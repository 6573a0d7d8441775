"""Command-line flags that are lists, each item read and checked; absl has them for text only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

flags.disclaim_key_flags()  # --help lists a flag under the module that asks for it here


class _ListParser(flags.ArgumentParser):
    """Comma-separated items, read by `item`, which raises ValueError."""

    def __init__(self, item: Callable[[str], Any]):
        super().__init__()
        self._item = item
        self.syntactic_help = "a comma-separated list"

    def parse(self, argument: str | Sequence[Any]) -> list[Any]:
        items = argument.split(",") if isinstance(argument, str) else argument
        return [self._item(str(item).strip()) for item in items]

    def flag_type(self) -> str:
        return "comma-separated list"


def define_list(
    name: str, default: Sequence[Any] | None, help: str, item: Callable[[str], Any]
) -> flags.FlagHolder[list[Any] | None]:
    """absl.flags.DEFINE_list whose items are what `item` makes of them, such as `whole_number` or one_of(names)."""
    return flags.DEFINE(_ListParser(item), name, default, help, serializer=flags.CsvListSerializer(","))


def whole_number(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"expected whole numbers from {least} on, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """A whole number of at least 1."""
    return whole_number(text, least=1)


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    def item(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected some of {', '.join(names)}, got {text!r}")
        return text

    return item
