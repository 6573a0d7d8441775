"""A grid file: which cells it stands for.

    keep_in = "runs"                     # finished cells leave NAME.json, config and outcomes, in this folder beside the file

    [values]                             # texts used in several grids, as {paper}
    paper = "fixed,linear,mlp_softmax"

    [settings]                           # of every cell; a grid's own override them
    train.precision = "tf32"

    [[grid]]
    name = "mqar-kv{kv}-{model}"         # the workdir's name
    config = "configs/mqar.py:kv={kv}"
    kv = [4, 8, 16, 32]                  # an axis: one cell for each of its values, and for each of the others'
    model = ["text", "released"]
    settings.variants = "{paper}"
    settings.train.num_seeds = 64
    settings.train.learning_rate = [0.001, 0.004]

A cell is a call of `loglinear_jax train`: the file has its arguments, and nothing else decides what is trained.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loglinear_jax.config import ConfigError, some_of

NAME = re.compile(r"[\w=][\w.,+=@-]{0,199}")  # a folder's name, the same in every shell
OF_FILE = {"keep_in": str, "values": dict, "settings": dict, "grid": list}
OF_GRID = {"name": str, "config": str, "settings": dict}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a grid. arguments: of `loglinear_jax train`, except --workdir. source: file and grid, for messages."""

    name: str
    arguments: tuple[str, ...]
    source: str

    def error(self, message: object) -> ConfigError:
        """Returns a ConfigError that names the cell."""
        return ConfigError(f"{self.source}, cell {self.name}: {message}")


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cells that a grid file stands for.

    keep_in: the folder in which finished cells leave their config and outcomes as NAME.json.
    """

    cells: list[Cell]
    keep_in: Path | None = None

    def only(self, patterns: Sequence[str]) -> list[Cell]:
        """Select the cells whose name matches one of the patterns, such as "mqar-*"; all cells without a pattern.

        Raises:
            ConfigError: for a pattern that matches none.
        """
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(cell.name, pattern) for cell in self.cells):
                raise ConfigError(
                    f"no cell's name matches {pattern!r}: there are {some_of(c.name for c in self.cells)}"
                )
        return [c for c in self.cells if not patterns or any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]


def read_grid(path: Path) -> Grid:
    """Read a grid file.

    Raises:
        ConfigError: naming the file and the grid in it, for whatever is wrong.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # with or without a byte order mark
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except ValueError as error:  # also of another encoding
        raise ConfigError(f"{path} can't be read as TOML: {error}") from error
    _check_keys(path, content, OF_FILE)
    if not content.get("grid"):
        raise ConfigError(f"{path} has no [[grid]]: expected at least one, with a name and a config")
    values = content.get("values", {})
    for name, value in values.items():
        _text(f"{path}: values.{name}", value)
    cells = []
    for number, grid in enumerate(content["grid"], 1):
        if not isinstance(grid, dict):
            raise ConfigError(f"{path}: grid {number} is {grid!r}: expected a table, [[grid]]")
        cells += _cells_of(path, number, grid, values, content.get("settings", {}))
    names = Counter(cell.name for cell in cells)
    if twice := next((name for name, count in names.items() if count > 1), None):
        sources = " and ".join(dict.fromkeys(cell.source for cell in cells if cell.name == twice))
        raise ConfigError(
            f"{sources}: {names[twice]} cells have the name {twice}: expected another for each, with every axis in it"
        )
    keep_in = content.get("keep_in")
    return Grid(cells, None if keep_in is None else path.parent / keep_in)


def _cells_of(
    path: Path, number: int, grid: dict[str, Any], values: Mapping[str, Any], shared: dict[str, Any]
) -> list[Cell]:
    source = f"{path}, grid {number}"
    for name in ("name", "config"):
        if name not in grid:
            raise ConfigError(f"{source} has no {name}: expected a text")
    source += f" ({grid['name']})"
    axes = {name: value for name, value in grid.items() if isinstance(value, list) and name not in OF_GRID}
    _check_keys(
        source, {name: value for name, value in grid.items() if name not in axes}, OF_GRID, "a list for an axis"
    )
    for axis, points in axes.items():
        if axis in values:
            raise ConfigError(f"{source}: {axis} is an axis here and one of [values]: expected another name")
        if not points:
            raise ConfigError(f"{source}: {axis} is an empty list: expected at least one value")
    settings = _flat(f"{path}: settings", shared) | _flat(f"{source}: settings", grid.get("settings", {}))
    templates = {"name": grid["name"], "config": grid["config"]}
    templates |= {f"settings.{name}": text for name, text in settings.items()}
    if unused := [axis for axis in axes if not any(f"{{{axis}}}" in text for text in templates.values())]:
        raise ConfigError(f"{source}: nothing uses {{{unused[0]}}}: expected it in the name and the config or settings")
    cells = []
    for point in itertools.product(*axes.values()):
        known = dict(values) | dict(zip(axes, point, strict=True))
        texts = {name: _text(f"{source}: {name}", value) for name, value in known.items()}
        try:
            name, config, *given = (text.format_map(texts) for text in templates.values())
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{source}: a name in braces has no values, or is no name ({error}): expected an axis, such as kv = [4, 8], or "
                "one of [values]; a brace itself is written twice"
            ) from error
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{source}: the name {name!r}: expected up to 200 letters, digits and any of _ = - . , + @"
            )
        changes = [f"--config.{setting}={text}" for setting, text in zip(settings, given, strict=True)]
        cells.append(Cell(name, (f"--config={config}", *changes), source))
    return cells


def _check_keys(source: object, table: Mapping[str, Any], known: Mapping[str, type], other: str = "") -> None:
    for name, value in table.items():
        if name not in known:
            instead = f"{', '.join(known)}{other and f', or {other}'}"
            raise ConfigError(f"{source}: there is no key {name} (= {value!r}): expected {instead}")
        if not isinstance(value, known[name]):
            kinds = {str: "a text", dict: "a table", list: "[[grid]] tables"}
            raise ConfigError(f"{source}: {name} is {value!r}: expected {kinds[known[name]]}")


def _flat(source: str, table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Each setting's text by its dotted name; a list's has commas between its values."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(source, value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if not value:
                raise ConfigError(f"{source}.{prefix}{name} is an empty list: expected at least one value")
            flat[prefix + name] = ",".join(_text(f"{source}.{prefix}{name}", one) for one in value)
        else:
            flat[prefix + name] = _text(f"{source}.{prefix}{name}", value)
    return flat


def _text(source: str, value: Any) -> str:
    """A value of the file as the command line would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(f"{source} is {value!r}: expected a text, a number, true or false")
