"""Writes the tables in settings.md from the code: python docs/settings_table.py"""

from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

from loglinear_jax.config import default_config, describe_settings, language_config

PAGE = Path(__file__).with_name("settings.md")
BEGIN, END = "<!-- settings -->\n", "<!-- /settings -->\n"
TITLES = {"Recall tasks": default_config, "Language model": language_config}


def table(settings) -> str:
    rows = [(f"`{setting.name}`", f"`{setting.default!r}`", setting.meaning) for setting in settings]
    return tabulate(rows, ("Setting", "Default", "Meaning"), tablefmt="github")


def with_tables(page: str) -> str:
    """The page with what the code says between its markers."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "\n".join(f"## {title}\n\n{table(describe_settings(config()))}\n" for title, config in TITLES.items())
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
