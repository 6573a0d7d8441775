"""Writes the tables in reference/{settings,command-line,api}.md from the code: python -m docs.reference_tables"""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import tabulate
from ml_collections import ConfigDict

from loglinear_jax.commands.main import find_commands
from loglinear_jax.config import Setting, describe_settings
from loglinear_jax.config.files import get_config, load_config_file

tabulate.WIDE_CHARS_MODE = False  # else tables are wider or not by whether wcwidth is installed
REFERENCE = Path(__file__).parent / "reference"
BEGIN, END = "<!-- generated -->\n", "<!-- /generated -->\n"
MAD = ("mad:recall", "mad:noisy", "mad:fuzzy", "mad:copying", "mad:memorisation")
OWN_TASK = "task:mqar"  # its sections model and train are those of every task:module
CONFIGS = (
    *(
        "mqar",
        "zoology_mqar",
        "interleaved",
        "power_law",
        "forgetting",
        "selective_copy",
        *MAD,
        "state_tracking",
        OWN_TASK,
    ),
    *("wikitext103", "wikitext2", "books"),
)
API_PAGES = ("operations", "layers", "models", "training", "analysis", "kernels")
# A heading, the section of the config, and the configs of which it shows the defaults.
TABLES = (
    ("Variants", "variants", CONFIGS),
    ("Task: MQAR", "task", ("mqar",)),
    ("Task: Zoology's MQAR", "task", ("zoology_mqar",)),
    ("Task: interleaved MQAR", "task", ("interleaved",)),
    ("Task: power-law MQAR", "task", ("power_law",)),
    ("Task: forgetting MQAR", "task", ("forgetting",)),
    ("Task: selective copying", "task", ("selective_copy",)),
    ("Tasks: MAD", "task", MAD),
    ("Task: state tracking", "task", ("state_tracking",)),
    ("Task: text", "task", ("wikitext103", "wikitext2")),
    ("Task: documents", "task", ("books",)),
    ("Model", "model", CONFIGS),
    ("Training", "train", CONFIGS),
)


def defaults(configs: Mapping[str, ConfigDict], section: str) -> str:
    """A table of a section's settings, with a column of defaults for the configs that have the same ones."""
    described = {name: _of_section(config, section) for name, config in configs.items()}
    meanings: dict[str, str] = {}
    for settings in described.values():  # the fuller one, where a model says less than another
        meanings |= {key: max(meanings.get(key, ""), s.meaning, key=len) for key, s in settings.items()}
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, settings in described.items():
        columns.setdefault(tuple(_shown(settings.get(key)) for key in meanings), []).append(name)
    heads = [_joined(names) for names in columns.values()] if len(columns) > 1 else ["Default"]
    keys = [f"`{key}`" for key in meanings]
    rows = zip(keys, *columns, meanings.values(), strict=True)
    return tabulate.tabulate(rows, ["Setting", *heads, "Meaning"], tablefmt="github", disable_numparse=True)


def _joined(names: list[str]) -> str:
    """The configs of a column; `mad` stands for all of its tasks."""
    if set(MAD) <= set(names):
        names = list(dict.fromkeys("mad" if name in MAD else name for name in names))
    return ", ".join(f"`{'task:module' if name == OWN_TASK else name}`" for name in names)


def _config(name: str) -> ConfigDict:
    file, _, presets = name.partition(":")
    return get_config(load_config_file(file), presets)


def _of_section(config: ConfigDict, section: str) -> dict[str, Setting]:
    return {s.name: s for s in describe_settings(config) if s.name.partition(".")[0] == section}


def _shown(setting: Setting | None) -> str:
    shown = "" if setting is None else str(setting.default).replace("|", "\\|") or "''"  # a bar would end the cell
    return f"`{shown}`" if shown else "–"


def presets() -> str:
    """A table of what each preset does, and which configs have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for config in dict.fromkeys(config.partition(":")[0] for config in CONFIGS):
        for name, function in load_config_file(config).presets.items():
            shown = f"`{name}N`" if name.endswith("=") else f"`{name}`"
            meaning = " ".join(inspect.getdoc(function).split()).replace("<", "&lt;")
            rows.setdefault((shown, meaning), []).append(f"`{config}`")
    rows = [(preset, ", ".join(configs), meaning) for (preset, meaning), configs in rows.items()]
    return tabulate.tabulate(rows, ("Preset", "Configs", "What it does"), tablefmt="github")


def settings() -> str:
    configs = {name: _config(name) for name in CONFIGS}
    parts = {"Presets": presets()} | {
        title: defaults({name: configs[name] for name in shown}, section) for title, section, shown in TABLES
    }
    return "\n".join(f"## {title}\n\n{table}\n" for title, table in parts.items())


def command_line() -> str:
    """A section for each command: what it does, and a table of its options."""
    parts = []
    for name, module in find_commands().items():
        parser = argparse.ArgumentParser(prog=name, description=module.__doc__)
        module.add_arguments(parser)
        for path, one in _with_subcommands(parser):
            purpose = " ".join(one.description.partition("\n\n")[0].split())
            options = [row for action in one._actions if (row := _option(one, action))]
            table = tabulate.tabulate(options, ("Option", "Meaning"), tablefmt="github", disable_numparse=True)
            parts.append("\n\n".join([f"## {path}", purpose, *([table] if options else [])]) + "\n")
    return "\n".join(parts)


def _with_subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                yield f"{parser.prog} {name}", one


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str] | None:
    """Its name with what it takes, and its help with the default; None for --help and subcommands."""
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return None
    takes = f"={action.metavar}" if action.metavar and action.option_strings else ""
    name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"`{name}{takes}`", " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def api() -> str:
    """A table for each page of the API: its names, each with the first sentence of its docstring."""
    parts = []
    for page in API_PAGES:
        text = (REFERENCE / f"api/{page}.md").read_text(encoding="utf-8")
        names = []
        for name, members in re.findall(r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\])?", text, re.MULTILINE):
            names += [f"{name}.{member}" for member in members.split(", ")] if members else [name]
        rows = [(f"`{name}`", _first_sentence(name)) for name in names]
        title = text.partition("\n")[0].removeprefix("# ")
        table = tabulate.tabulate(rows, ("Name", "What it is"), tablefmt="github")
        parts.append(f"## [{title}](api/{page}.md)\n\n{table}\n")
    return "\n".join(parts)


def _first_sentence(name: str) -> str:
    found = pkgutil.resolve_name(name)
    if isinstance(found, dict):
        return "the kernels by name"
    text = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split()).replace("|", "\\|").replace("<", "&lt;")
    return re.split(r"(?<=[^.]\.) (?=[A-Z])", text, maxsplit=1)[0]


# By page: what is between its markers.
PAGES = {REFERENCE / "settings.md": settings, REFERENCE / "command-line.md": command_line, REFERENCE / "api.md": api}


def with_tables(page: Path) -> str:
    """The text of the page with what the code says between its markers."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{PAGES[page]()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page), encoding="utf-8")
