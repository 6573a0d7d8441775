"""The tables and numbers of Markdown pages about runs; `checked_pages` says how a page names them.

Every function of TABLES returns rows (cells by column), every function of NUMBERS one piece of text. Their options are what the
page gives, all as text:

    runs       names of runs, comma-separated, with * and ?; the runs of a pattern come in natural order
    variant    one trained setting of a run, such as linear or mixer=softmax; variants: several, comma-separated
    a, b       two variants, paired by seed
    rows       "label = runs; label = runs:variant", one row each; columns: "label = runs", one column each

To add one: a function in tables.py, other_tables.py or numbers.py with the decorator of its kind; an option that names runs has
one of the types in options.py.
"""

from loglinear_jax.analysis.pages import numbers, other_tables, tables  # noqa: F401  # what they define is registered
from loglinear_jax.analysis.pages.options import NUMBERS, TABLES
from loglinear_jax.analysis.pages.results import Results

__all__ = ["NUMBERS", "TABLES", "Results"]
