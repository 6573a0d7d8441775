"""The tables and numbers that Markdown pages show of runs: what entries of tables.toml and checked prose may name.

Every function of TABLES returns rows, as cells by column; `variants` are names of trained settings, such as linear or
mixer=softmax. Every function of NUMBERS returns a piece of text.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loglinear_jax.analysis import comparisons, outcomes, paper, rates, sizes
from loglinear_jax.analysis.answers import answer_levels, levels_table
from loglinear_jax.analysis.best_rates import (
    AtRate,
    at_best,
    by_rate,
    by_variant,
    chosen_rate,
    difference_at_best_rates,
    name_of,
    named_rates,
)
from loglinear_jax.analysis.cells import (
    converged_and_solved,
    mean_and_std,
    mean_std_and_reached,
    mean_with_interval,
    num_and_share_converged,
    num_seeds,
    of_evaluated,
    perplexity,
    share_converged,
    short_p,
    solved_and_step,
    with_interval,
)
from loglinear_jax.analysis.decays import initial_memory
from loglinear_jax.analysis.experiments import setting_of
from loglinear_jax.config import ConfigError, some_of
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import longer_among, mcnemar, mean_difference
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY

SOLVED = "≥ 99 %"  # in the heads of columns that count such seeds
Rows = list[dict[str, str]]


class Runs(list[Run]):
    """The runs that an option names."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some runs, and some of their variants."""

    runs: Runs
    variants: list[str]


TABLES: dict[str, Callable[..., Rows]] = {}


def table(slow: bool = False, accuracies: bool = True) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Registers a table. slow: made only if asked for. accuracies: whether it shows accuracies, so that a line below says on
    which set."""

    def register(function: Callable[..., Rows]) -> Callable[..., Rows]:
        function.slow, function.accuracies = slow, accuracies
        TABLES[function.__name__] = function
        return function

    return register


def outcome_of(run: Run, variant: str) -> VariantOutcome:
    """Raises ConfigError if the run has no such variant."""
    if variant not in run.outcomes:
        raise ConfigError(f"{run.name} has no variant {variant!r}: it has {some_of(run.outcomes)}")
    return run.outcomes[variant]


# Tables of the report, by their names in pages: of several runs, or of one.
OF_REPORT: dict[str, Callable[[Sequence[Run]], Sequence[Any]]] = {
    "by axis": comparisons.as_the_paper,
    "by setting": lambda runs: list(comparisons.by_setting(runs).values()),
    "by size": sizes.tables_by_size,
    "few seeds": lambda runs: [rates.few_seeds_table(run) for run in runs],
    "parts": lambda runs: [outcomes.parts(run) for run in runs],
    "best rates": lambda runs: [made for run in runs for made in rates.rates(run)[1:]],
    "best differences": lambda runs: [rates.differences_at_best_rates(run) for run in runs],
}


@table()
def of_report(
    runs: Runs, name: str, variants: list[str] | None = None, columns: list[str] | None = None, lines: str = ""
) -> Rows:
    """A table of the report about these runs, which must make one.

    name: in OF_REPORT. variants: their rows alone, in this order; where a row compares two, A and B, those of two of them.
    columns: those alone, behind the first. lines: only the rows of this kind, such as those that count seeds.
    """
    if name not in OF_REPORT:
        raise ConfigError(f"there is no table {name!r}: there are {', '.join(OF_REPORT)}")
    found = [made for made in OF_REPORT[name](runs) if made is not None]
    if len(found) != 1:
        raise ConfigError(f"these runs make {len(found)} tables {name!r}, expected one")
    rows = found[0].rows
    if lines:
        rows = [{k: v for k, v in row.items() if k} for row in rows if row[""] == lines]
    if columns is not None:
        first = next(iter(rows[0]))
        rows = [{k: row[k] for k in (first, *columns) if k in row} for row in rows if set(columns) & set(row)]
    if variants is not None:
        kept = [row for row in rows if set(_variants_of(row)) <= set(variants)]
        if missing := [variant for variant in variants if not any(variant in _variants_of(row) for row in kept)]:
            raise ConfigError(f"{name} has no row of {missing[0]}")
        rows = sorted(kept, key=lambda row: [variants.index(variant) for variant in _variants_of(row)])
    return rows


def _variants_of(row: dict[str, str]) -> tuple[str, ...]:
    return (row["A"], row["B"]) if "A" in row else (row["variant"],)


# Of `of_variants`: by their names, their heads, and their cells of a run, a variant and its outcome.
COLUMNS: dict[str, tuple[str, Callable[[Run, str, VariantOutcome], str]]] = {
    "run": ("run", lambda run, v, o: f"`{run.name}`"),
    "variant": ("variant", lambda run, variant, o: variant),
    "setting": ("setting", lambda run, v, o: setting_of(run.config) or "–"),
    "vocabulary": ("vocabulary", lambda run, v, o: str(run.config.task.vocab_size)),
    "hidden": ("hidden", lambda run, v, o: str(run.config.model.hidden)),
    "predicts": ("predicts", lambda run, v, o: o.predicts),
    "seeds": ("seeds", lambda run, v, o: num_seeds(o)),
    "interval": ("mean % [95 % interval]", lambda run, v, o: mean_with_interval(100 * o.accuracy)),
    "mean": ("accuracy %, mean ± std", lambda run, v, o: mean_and_std(100 * o.accuracy)),
    "least": ("least %", lambda run, v, o: f"{100 * min(o.accuracy):.1f}"),
    "median": ("median %", lambda run, v, o: f"{100 * np.median(o.accuracy):.1f}"),
    "peak": ("peak %", lambda run, v, o: f"{100 * o.peak_accuracy:.1f}"),
    "converged": ("≥ 90 %", lambda run, v, o: num_and_share_converged(o)),
    "solved": (f"{SOLVED}; median step", lambda run, v, o: solved_and_step(o, ",")),
    "paper": ("the paper", lambda run, variant, o: paper.result(run.config, variant) or "–"),
    "validation": ("validation", lambda run, v, o: perplexity(o.best_loss)),
    "test": ("test", lambda run, v, o: perplexity(of_evaluated(o, o.test_loss))),
    "best step": ("best at step", lambda run, v, o: _median([step for step in o.best_step if step is not None])),
    "lam": ("λ adds", lambda run, v, o: f"{o.lam_params_percent:.4f} %"),
}


def _median(steps: Sequence[int]) -> str:
    return f"{np.median(steps):,.0f}" if len(steps) else "–"


@table()
def of_variants(runs: Runs, columns: list[str], variants: list[str] | None = None) -> Rows:
    """A row for each variant of each run. columns: names in COLUMNS, behind the variant if that is not among them."""
    if unknown := [column for column in columns if column not in COLUMNS]:
        raise ConfigError(f"there is no column {unknown[0]!r}: there are {', '.join(COLUMNS)}")
    names = columns if "variant" in columns else ["variant", *columns]
    return [
        {COLUMNS[name][0]: COLUMNS[name][1](run, variant, outcome) for name in names}
        for run in runs
        for variant, outcome in run.outcomes.items()
        if variants is None or variant in variants
    ]


CELLS = {
    "share converged": share_converged,
    "converged and solved": converged_and_solved,
    "solved": lambda outcome: solved_and_step(outcome, ","),
}


@table()
def by_pairs(rows: dict[str, Chosen], cell: str, heads: list[str]) -> Rows:
    """A cell of CELLS against pairs, in the runs of each row. heads: of the column of labels, and of one of variants if there
    are several in a row."""
    found = []
    for label, chosen in rows.items():
        for index, variant in enumerate(chosen.variants):
            cells = dict(zip(heads, ("" if index else label, f"`{variant}`"), strict=False))
            found.append(cells | {_pairs(run): CELLS[cell](outcome_of(run, variant)) for run in chosen.runs})
    return found


def _pairs(run: Run) -> str:
    return f"{run.config.task.num_pairs} pairs"


@table()
def paired(rows: dict[str, list[Chosen]], heads: list[str]) -> Rows:
    """Two outcomes a row, paired by seed: how many seeds of each converge, McNemar's test at 90 and 99 %, and the mean
    difference of accuracies with its interval. heads: of the column of labels, and what the two are."""
    found, (head, a, b) = [], heads
    for label, pair in rows.items():
        first, second = (outcome_of(chosen.runs[0], chosen.variants[0]) for chosen in pair)
        row = {head: label} | {name: f"{o.num_converged}/{len(o.seeds)}" for name, o in ((a, first), (b, second))}
        for percent in (90, 99):
            only_a, only_b, p = mcnemar(*(o.reached(percent / 100) for o in (first, second)))
            row[f"≥ {percent} %: only {a}, only {b}, p"] = f"{only_a}, {only_b}, {short_p(p, 2)}"
        found.append(row | {f"accuracy, {a} − {b}, points": _points_between(first, second)})
    return found


@table()
def means(columns: dict[str, Runs], variants: list[str], best_rates: bool = False, average: str = "") -> Rows:
    """Mean accuracy of each variant with its bootstrapped 95 % interval, in the runs of each column.

    best_rates: the variants are named without rates, and are at their best learning rate, which one half of the seeds choose
    for the other (`chosen_rate`); in the first run of each column that has them at several rates, or that names their rate,
    which other seeds may have chosen. average: the head of a column with the mean over all columns, of variants that have the
    same seeds in each. Its interval takes the chosen rates as given.
    """
    rows = []
    for variant in variants:
        cells, of_columns = {"variant": variant}, []
        for label, runs in columns.items() if not best_rates else ():
            if found := [run.outcomes[variant].accuracy for run in runs if variant in run.outcomes]:
                cells[label] = mean_with_interval(100 * np.concatenate(found))
        for label, group in _groups(columns, variant, _several_or_named) if best_rates else ():
            found = at_best(ACCURACY, group)
            cells[label] = with_interval(found.mean, found.low, found.high)
            if len(group) > 1:
                decays = len({at.weight_decay for at in group}) > 1
                cells[label] += f" at {name_of(chosen_rate(ACCURACY, group).rates, decays)}"
            of_columns.append((group[0].outcome.seeds, found.shown))
        if len(cells) == 1:
            rates = " at several learning rates, or at one that its name sets" if best_rates else ""
            raise ConfigError(f"no column has {variant}{rates}")
        if average and len(of_columns) == len(columns) and all(seeds == of_columns[0][0] for seeds, _ in of_columns):
            cells[average] = mean_with_interval(np.mean([shown for _, shown in of_columns], axis=0))
        rows.append(cells)
    return rows


def _several_or_named(run: Run) -> dict[str, list[AtRate]]:
    """`by_variant`, of variants with several rates, or with one that is part of the variant's name."""
    return {v: group for v, group in by_variant(run).items() if len(group) > 1 or named_rates(group[0].variant)}


def _groups(
    columns: dict[str, Runs], variant: str, groups_of: Callable[[Run], dict[str, list[AtRate]]]
) -> Iterator[tuple[str, list[AtRate]]]:
    """The label of each column of which a run has the variant among its groups, with the first such run's."""
    for label, runs in columns.items():
        groups = (groups_of(run) for run in runs)
        if (group := next((of_run[variant] for of_run in groups if variant in of_run), None)) is not None:
            yield label, group


@table()
def at_every_rate(runs: Runs, variants: list[str]) -> Rows:
    """Mean accuracy of each variant of one run with its interval, a column for each of its learning rates and weight decays."""
    (run,) = runs
    groups, rows = by_rate(run), []
    for variant in variants:
        if variant not in groups:
            raise ConfigError(f"{run.name} has no {variant} at several learning rates")
        decays = len({at.weight_decay for at in groups[variant]}) > 1
        of_rates = {name_of(at, decays): mean_with_interval(100 * at.outcome.accuracy) for at in groups[variant]}
        rows.append({"variant": variant} | of_rates)
    return rows


@table()
def gains(
    columns: dict[str, Runs],
    rows: dict[str, list[str]],
    best_rates: bool = False,
    parts: dict[str, list[str]] | None = None,
) -> Rows:
    """How much more accurate one variant is than another, in points, paired by seed, with the interval of the mean; in the
    first runs of each column that have them. rows: two variants each.

    best_rates: the variants are named without rates, and are each at their own best learning rates (`chosen_rate`), which may
    differ by column; where a run has a variant at one rate alone, that one counts. parts: of the test instead of all of it,
    several parts a column, of which the mean counts; of variants at one rate, named without it.
    """
    found = []
    for label, pair in rows.items():
        if len(pair) != 2:
            raise ConfigError(f"{', '.join(pair)}: expected two variants")
        cells = {"gain": label}
        groups = [dict(_groups(columns, variant, by_variant if best_rates or parts else _each)) for variant in pair]
        for column in (column for column in columns if all(column in of_one for of_one in groups)):
            ours, others = (of_one[column] for of_one in groups)
            if ours[0].outcome.seeds != others[0].outcome.seeds:
                raise ConfigError(f"{column}: the seeds of {', '.join(pair)} are not the same")
            if parts:
                cells |= {f"{column}, {part}": _points_on(names, ours, others) for part, names in parts.items()}
            elif best_rates:
                cells[column] = _points(difference_at_best_rates(ACCURACY, ours, others)[:3])
            else:
                cells[column] = _points_between(ours[0].outcome, others[0].outcome)
        if len(cells) == 1:
            raise ConfigError(f"no column has both {' and '.join(pair)}")
        found.append(cells)
    return found


def _each(run: Run) -> dict[str, list[AtRate]]:
    """Every variant by its full name."""
    return {at.variant: [at] for group in by_variant(run).values() for at in group}


def _points_between(ours: VariantOutcome, others: VariantOutcome) -> str:
    """The mean difference of two variants' accuracies, paired by seed."""
    return _points(mean_difference(*(100 * o.accuracy for o in (ours, others))))


def _points_on(names: list[str], *groups: list[AtRate]) -> str:
    """The same of the mean accuracy on some parts of the test."""
    means = []
    for group in groups:
        if len(group) > 1:
            raise ConfigError(f"{group[0].variant} and {group[1].variant}: expected one rate")
        of_parts = group[0].outcome.test_accuracy_of_parts or {}
        if unknown := [name for name in names if name not in of_parts]:
            raise ConfigError(f"parts={unknown[0]}: the test has {', '.join(of_parts) or 'no parts'}")
        means.append(100 * np.mean([np.array(of_parts[name], float) for name in names], axis=0))
    return _points(mean_difference(*means))


def _points(difference: Sequence[float]) -> str:
    """ "+1.2 [−0.3, +2.7]" of a mean difference and its interval."""
    return with_interval(*difference, sign="+").replace("-", "−")


def beside(run: Run, file: str) -> Path:
    """A table of the report that is kept beside a run's record."""
    return run.workdir.with_name(f"{run.name}-{file}")


@table(accuracies=False)
def lengths(runs: Runs) -> Rows:
    """Accuracy in % (seeds at ≥ 90 %) or perplexity at the trained length and beyond, mean ± std; from lengths.csv."""
    rows: dict[str, dict[str, str]] = {}
    one_task = all(run.config.task == runs[0].config.task for run in runs)
    for run in runs:
        evaluated: dict[tuple[str, str], list[dict[str, str]]] = {}  # a line a seed
        with beside(run, "lengths.csv").open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                evaluated.setdefault((line["variant"], line["length"]), []).append(line)
        for (variant, length), lines in evaluated.items():
            column = f"length {length}" if one_task else f"{_pairs(run)}, length {length}"
            if "perplexity" in lines[0]:
                cell = mean_and_std([float(line["perplexity"]) for line in lines])
            else:
                cell = mean_std_and_reached([float(line["accuracy"]) for line in lines], 100 * CONVERGED_ACCURACY)
            rows.setdefault(variant, {"variant": variant}).setdefault(column, cell)
    if all(run.config.task.name == "mqar" for run in runs):
        for variant, row in rows.items():
            row["the paper at 256"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
    return list(rows.values())


@table(accuracies=False)
def losses_by_position(runs: Runs) -> Rows:
    """Test loss of language models in nats, mean ± std over seeds, by the position in the window: from 2^i to 2^(i+1) - 1."""
    return [
        {"variant": variant}
        | {f"from {i}": mean_and_std(of_evaluated(o, losses), 3) for i, losses in o.test_loss_from_position.items()}
        for run in runs
        for variant, o in run.outcomes.items()
    ]


@table(accuracies=False)
def saved(runs: Runs, file: str, seeds: str = "", without: str = "") -> Rows:
    """Rows of a table of the report that is kept beside the runs' summaries as Markdown; of several runs behind their pairs.
    seeds: only of rows whose column of seeds begins so. without: a variant that is left out."""
    rows = []
    for run in runs:
        lines = [x for x in beside(run, file).read_text(encoding="utf-8").splitlines() if x.startswith("|")]
        header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for row in (dict(zip(header, cells, strict=True)) for cells in body):
            if row["seeds"].startswith(seeds) and row["variant"] != without:
                rows.append({"pairs": str(run.config.task.num_pairs)} | row if len(runs) > 1 else row)
    return rows


@table(accuracies=False)
def levels_of_answers(tasks: dict[str, Runs]) -> Rows:
    """The Fenwick levels that hold a task's answers, from its definition, of the task of a run."""
    return levels_table({label: answer_levels(runs[0].task) for label, runs in tasks.items()}).rows


@table(accuracies=False)
def time(rows: dict[str, Runs]) -> Rows:
    """Minutes of training and evaluation, compilation included, and the range of seed-steps a second."""
    found, all_runs, all_minutes = [], 0, 0.0
    for label, runs in rows.items():
        variants = [outcome for run in runs for outcome in run.outcomes.values()]
        minutes = sum(o.seconds for o in variants) / 60
        speeds = [float(f"{o.seed_steps_per_second:.3g}") for o in variants]
        cells = {"experiment": label, "runs": str(len(runs)), "minutes": f"{minutes:.1f}"}
        found.append(cells | {"seed-steps a second": f"{min(speeds):,.0f} to {max(speeds):,.0f}"})
        all_runs, all_minutes = all_runs + len(runs), all_minutes + minutes
    return [*found, {"experiment": "all of these", "runs": str(all_runs), "minutes": f"{all_minutes:.0f}"}]


@table(slow=True)
def memory_at_start(rows: dict[str, Chosen]) -> Rows:
    """Whether converged seeds are those that remember longest before training, layer by layer, against pairs: the probability
    that a converged seed's memory is longer (`longer_among`), of the head of a layer that remembers longest; † p < 0.01, ‡ p <
    0.0001."""
    found = []
    for label, chosen in rows.items():
        for variant in chosen.variants or chosen.runs[0].outcomes:
            row = {"setting": label, "λ": "–" if variant == "mixer=gated_linear" else variant}
            for run in (run for run in chosen.runs if variant in run.outcomes):
                reached = np.array(run.outcomes[variant].reached(CONVERGED_ACCURACY))
                by_layer = initial_memory(run, variant).max(2).T
                layers = ", ".join(_probability(*longer_among(memory, reached)) for memory in by_layer)
                row[_pairs(run)] = f"{layers} ({reached.sum()}/{len(reached)})"
            found.append(row)
    return found


def _probability(chance: float, p_value: float) -> str:
    return "–" if np.isnan(chance) else f"{chance:.2f}" + ("‡" if p_value < 1e-4 else "†" if p_value < 0.01 else "")


def _outcomes(runs: Runs, variant: str) -> list[VariantOutcome]:
    """The outcomes of a variant in these runs, or with * of all of theirs."""
    return [o for run in runs for o in (run.outcomes.values() if variant == "*" else [outcome_of(run, variant)])]


def _count(counted: Callable[[VariantOutcome], int]) -> Callable[..., str]:
    """Of seeds, over all of these runs, and all variants without one."""
    return lambda runs, variant="*": f"{sum(map(counted, _outcomes(runs, variant))):,}"


def _percents(runs: Runs, variant: str) -> np.ndarray:
    """The accuracies of all seeds."""
    return 100 * np.concatenate([outcome.accuracy for outcome in _outcomes(runs, variant)])


def _between(runs: Runs, variant: str, low: str, high: str) -> str:
    """How many seeds end with an accuracy from `low` to below `high` %."""
    return str(int(((_percents(runs, variant) >= float(low)) & (_percents(runs, variant) < float(high))).sum()))


def _p(runs: Runs, a: str, b: str, at: str = "90") -> str:
    """McNemar's exact p that two variants of one run reach `at` % equally often."""
    return short_p(mcnemar(*(outcome_of(runs[0], variant).reached(float(at) / 100) for variant in (a, b)))[2])


def _changed_sides(runs: Runs) -> str:
    """How many seeds of two runs converge in one of them only, over all their variants."""
    first, second = (run.outcomes for run in runs)
    return str(sum(sum(mcnemar(*(x[v].reached(CONVERGED_ACCURACY) for x in (first, second)))[:2]) for v in first))


NUMBERS: dict[str, Callable[..., str]] = {
    "converged": _count(lambda outcome: outcome.num_converged),
    "solved": _count(lambda outcome: outcome.num_solved),
    "seeds": _count(lambda outcome: len(outcome.seeds)),
    "mean": lambda runs, variant: f"{np.mean(_percents(runs, variant)):.1f}",
    "mean_and_std": lambda runs, variant: mean_and_std(_percents(runs, variant)),
    "between": _between,
    "p": _p,
    "changed_sides": _changed_sides,
    "perplexity": lambda runs, variant: perplexity(outcome_of(runs[0], variant).best_loss, 1),
    "lam_share": lambda runs, variant: f"{outcome_of(runs[0], variant).lam_params_percent:.4f}",
}
