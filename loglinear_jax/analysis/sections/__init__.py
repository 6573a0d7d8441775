"""The sections of a report. To add one: a file here with a subclass of `Section`, and an entry in `SECTIONS`."""

from loglinear_jax.analysis.sections.answers import Answers
from loglinear_jax.analysis.sections.attention_rows import AttentionRows
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.analysis.sections.complexity import Complexity
from loglinear_jax.analysis.sections.curves import Curves
from loglinear_jax.analysis.sections.dependence import Dependence
from loglinear_jax.analysis.sections.initial_decays import InitialDecays
from loglinear_jax.analysis.sections.lam import Lam
from loglinear_jax.analysis.sections.lengths import Lengths
from loglinear_jax.analysis.sections.looks import Looks
from loglinear_jax.analysis.sections.rates import Rates
from loglinear_jax.analysis.sections.results import Results

# By the name that the command line has for them, in the report's order.
SECTIONS: dict[str, type[Section]] = {
    "tables": Results,
    "rates": Rates,
    "curves": Curves,
    "decays": InitialDecays,
    "answers": Answers,
    "lam": Lam,
    "dependence": Dependence,
    "looks": Looks,
    "rows": AttentionRows,
    "lengths": Lengths,
    "complexity": Complexity,
}
DEFAULT_SECTIONS = tuple(name for name, section in SECTIONS.items() if section.BY_DEFAULT)

__all__ = ["DEFAULT_SECTIONS", "SECTIONS", "Context", "Section"]
