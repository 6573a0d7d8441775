"""The tables and numbers of Markdown pages about runs; `checked_pages` says how a page names them.

Every function of TABLES returns rows (cells by column), every function of NUMBERS one piece of text. Their first argument is
the runs to choose from, the others are the options that the page gives, all as text:

    runs       names of runs, comma-separated, with * and ?; the runs of a pattern come in natural order
    variant    one trained setting of a run, such as linear or mixer=softmax; variants: several, comma-separated
    a, b       two variants, paired by seed
    rows       "label = runs; label = runs:variant", one row each
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from loglinear_jax.analysis import paper, tables
from loglinear_jax.analysis.decays import initial_memory as memory_of
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.loading import Record, load_record
from loglinear_jax.runs.outcome import CONVERGED_ACCURACY

Rows = list[dict[str, str]]
ONE_STATE, SOFTMAX = "mixer=linear", "mixer=softmax"


class Results:
    """The finished runs in a folder, read when they are asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = sorted((path.parent.name for path in folder.glob("*/summary.json")), key=_natural)
        self._read: dict[str, Record] = {}

    def matching(self, patterns: str) -> list[Record]:
        """The runs of these comma-separated patterns. Raises ConfigError for a pattern that matches none."""
        names: dict[str, None] = {}
        for pattern in patterns.split(","):
            found = fnmatch.filter(self.names, pattern.strip())
            if not found:
                raise ConfigError(f"no run in {self.folder} matches {pattern.strip()!r}")
            names |= dict.fromkeys(found)
        return [self[name] for name in names]

    def __getitem__(self, name: str) -> Record:
        if name not in self._read:
            self._read[name] = load_record(self.folder / name)
        return self._read[name]


def outcomes(record: Record) -> dict[str, SimpleNamespace]:
    """The outcome of every variant."""
    return {name: SimpleNamespace(**outcome) for name, outcome in record.summary["variants"].items()}


def outcome(record: Record, variant: str) -> SimpleNamespace:
    """Raises ConfigError if the run has no such variant."""
    found = outcomes(record)
    if variant not in found:
        raise ConfigError(f"{record.name} has no variant {variant!r}: it has {', '.join(found)}")
    return found[variant]


# --- Tables ---------------------------------------------------------------------------------------------------------


def by_pairs(results: Results, runs: str, variants: str = "", lines: str = "") -> Rows:
    """λ against pairs (or length): `tables.as_the_paper` of runs that differ in nothing else. lines=shares: only how many
    seeds reached 90 and 99 %."""
    found = tables.as_the_paper(results.matching(runs))
    if len(found) != 1:
        raise ConfigError(
            f"runs={runs} make {len(found)} tables, expected one: they differ in more than pairs or length"
        )
    rows = found[0].rows
    if lines == "shares":
        rows = [{k: v for k, v in row.items() if k} for row in rows if row[""].startswith("≥")]
    return _chosen_rows(rows, variants)


def by_setting(results: Results, runs: str, variants: str) -> Rows:
    """A row for each setting of model and training that differs: `tables.by_setting` of one task."""
    found = list(tables.by_setting(results.matching(runs)).values())
    if len(found) != 1:
        raise ConfigError(f"runs={runs} are of {len(found)} tasks in several settings, expected one")
    chosen = variants.split(",")
    return [
        {"changed": row["changed"]} | {v: row[v] for v in chosen if v in row}
        for row in found[0].rows
        if any(v in row for v in chosen)
    ]


def differences(results: Results, runs: str, a: str, b: str) -> Rows:
    """Two variants paired by seed, a row for each run."""
    rows = []
    for record in results.matching(runs):
        number = _difference(record, a, b)
        row = {"setting": setting_of(record), "pairs": str(record.config.task.get("num_pairs", "–"))}
        for at in (90, 99):
            counts = f"{number[f'only_a_{at}']}, {number[f'only_b_{at}']}"
            row[f"≥ {at} %: only {a}, only {b}, p"] = f"{counts}, {_short(number[f'mcnemar_p_{at}'], 2)}"
        rows.append(row | {f"accuracy, {a} − {b}, points": _with_interval(number, "+.1f")})
    return rows


def accuracies(results: Results, runs: str, columns: str, variants: str = "") -> Rows:
    """A row for each variant of each run. columns: names in COLUMNS."""
    rows = []
    for record in results.matching(runs):
        for variant, of_seeds in outcomes(record).items():
            if variants and variant not in variants.split(","):
                continue
            cells = {"variant": variant}
            for column in columns.split(","):
                if column not in COLUMNS:
                    raise ConfigError(f"there is no column {column!r}: there are {', '.join(COLUMNS)}")
                title, cell = COLUMNS[column]
                cells[title] = cell(record, variant, of_seeds)
            rows.append(cells)
    return rows


def _converged_cell(record: Record, variant: str, o: SimpleNamespace) -> str:
    low, high = o.share_converged_interval
    return f"{o.num_converged}/{len(o.seeds)} = {o.share_converged:.2f} [{low:.2f}, {high:.2f}]"


def _solved_cell(record: Record, variant: str, o: SimpleNamespace) -> str:
    median = "" if o.median_solved_step is None else f"; {o.median_solved_step:,.0f}"
    return f"{_count(o.solved_step)}/{len(o.seeds)}{median}"


Cell = Callable[[Record, str, SimpleNamespace], str]
COLUMNS: dict[str, tuple[str, Cell]] = {
    "run": ("run", lambda record, v, o: f"`{record.name}`"),
    "setting": ("setting", lambda record, v, o: setting_of(record)),
    "vocabulary": ("vocabulary", lambda record, v, o: str(record.config.task.vocab_size)),
    "mean": ("accuracy %, mean ± std", lambda record, v, o: _mean_and_std(o.best_accuracy)),
    "least": ("least %", lambda record, v, o: f"{100 * min(o.best_accuracy):.1f}"),
    "median": ("median %", lambda record, v, o: f"{100 * np.median(o.best_accuracy):.1f}"),
    "peak": ("peak %", lambda record, v, o: f"{100 * o.peak_accuracy:.1f}"),
    "converged": ("≥ 90 %", _converged_cell),
    "solved": ("≥ 99 %; median step", _solved_cell),
    "paper": ("the paper", lambda record, variant, o: paper.result(record.config, variant) or "–"),
}


def solved_by_pairs(results: Results, rows: str) -> Rows:
    """Seeds at ≥ 99 % and the median step at which they reach it, against pairs. rows: "label = runs:variant"."""
    found = []
    for label, runs, variant in _listed(rows):
        cells = {"mixer": label}
        for record in results.matching(runs):
            cells[f"kv={record.config.task.num_pairs}"] = _solved_cell(record, variant, outcome(record, variant))
        found.append(cells)
    return found


def shares_by_pairs(results: Results, rows: str) -> Rows:
    """Seeds at ≥ 90 % with the interval of their share, and at ≥ 99 %, against pairs. rows: "label = runs:variant"."""
    found = []
    for label, runs, variant in _listed(rows):
        cells = {"mixer": label}
        for record in results.matching(runs):
            o = outcome(record, variant)
            low, high = o.share_converged_interval
            shares = f"{o.num_converged}/{len(o.seeds)} [{low:.2f}, {high:.2f}], {_count(o.solved_step)}/{len(o.seeds)}"
            cells[f"kv={record.config.task.num_pairs}"] = shares
        found.append(cells)
    return found


def repeated(results: Results, runs: str, variants: str) -> Rows:
    """Mean accuracy of the seeds that several runs of one task share, against pairs. runs: repetitions, separated by ';'."""
    repetitions = [results.matching(patterns) for patterns in runs.split(";")]
    rows = []
    for variant in variants.split(","):
        row = {"variant": variant}
        for records in zip(*repetitions, strict=True):
            if len({record.config.task.num_pairs for record in records}) > 1:
                raise ConfigError(f"runs={runs}: {', '.join(record.name for record in records)} have different pairs")
            by_seed = [dict(zip(o.seeds, o.best_accuracy, strict=True)) for o in (outcome(r, variant) for r in records)]
            common = set.intersection(*map(set, by_seed))
            means = [100 * np.mean([of_one[seed] for seed in sorted(common)]) for of_one in by_seed]
            row[f"kv={records[0].config.task.num_pairs}"] = ", ".join(f"{mean:.1f}" for mean in means)
        rows.append(row)
    return rows


def compared(results: Results, rows: str, change: str) -> Rows:
    """Seeds that converge without a change and with it, paired by seed. rows: "label = run without, run with"."""
    found = []
    for label, runs, _ in _listed(rows):
        without, with_it = map(outcomes, results.matching(runs))
        for variant in (name for name in without if name in with_it):
            reached = [
                [x >= CONVERGED_ACCURACY for x in of_one[variant].best_accuracy] for of_one in (with_it, without)
            ]
            only_with, only_without, p_value = tables.mcnemar(*reached)
            found.append(
                {
                    "setting": label,
                    "λ": variant,
                    "without": f"{sum(reached[1])}/{len(reached[1])}",
                    f"with {change}": f"{sum(reached[0])}/{len(reached[0])}",
                    "only with, only without, p": f"{only_with}, {only_without}, {_short(p_value)}",
                }
            )
    return found


def bands(results: Results, rows: str) -> Rows:
    """How many seeds end in which range of accuracy. rows: "label = runs:variant", over all of these runs together."""
    found = []
    for label, runs, variant in _listed(rows):
        accuracy = 100 * np.concatenate([outcome(r, variant).best_accuracy for r in results.matching(runs)])
        counts, _ = np.histogram(accuracy, [0, 10, 50, 90, 100.001])
        names = ("≥ 90 %", "50 to 90 %", "10 to 50 %", "< 10 %")
        found.append(
            {"setting": label, "seeds": str(len(accuracy))} | dict(zip(names, map(str, counts[::-1]), strict=True))
        )
    return found


def lengths(results: Results, runs: str) -> Rows:
    """Accuracy at the trained length and beyond, from the runs' lengths.csv: mean ± std, seeds at ≥ 90 %."""
    rows: dict[str, dict[str, str]] = {}
    for record in results.matching(runs):
        with (record.workdir / "lengths.csv").open() as file:
            evaluated = list(csv.DictReader(file))
        for variant in dict.fromkeys(line["variant"] for line in evaluated):
            row = rows.setdefault(variant, {"variant": variant})
            for length in dict.fromkeys(line["length"] for line in evaluated):
                cell = (variant, length)
                scores = [float(line["accuracy"]) for line in evaluated if (line["variant"], line["length"]) == cell]
                reached = sum(score >= 90 for score in scores)
                column = f"kv={record.config.task.num_pairs}, length {length}"
                row[column] = f"{_mean_and_std(np.divide(scores, 100))} ({reached}/{len(scores)})"
    for variant, row in rows.items():
        row["the paper at 256"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
    return list(rows.values())


def variation_of_lam(results: Results, runs: str) -> Rows:
    """How much λ varies over tokens in all seeds, from the runs' lam-dependence.md; `fixed` does not vary and is left out."""
    rows = []
    for record in results.matching(runs):
        lines = (record.workdir / "lam-dependence.md").read_text().splitlines()
        header, _, *body = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
        ]
        for cells in body:
            row = dict(zip(header, cells, strict=True))
            if row.pop("seeds").startswith("all") and row["variant"] != "fixed":
                rows.append({"pairs": str(record.config.task.num_pairs)} | row)
    return rows


def perplexities(results: Results, runs: str) -> Rows:
    """Perplexity of language models, mean ± std over seeds, and the median step of the best."""
    rows = []
    for record in results.matching(runs):
        for variant, o in outcomes(record).items():
            rows.append(
                {
                    "hidden": str(record.config.model.hidden),
                    "predicts": o.predicts,
                    "variant": variant,
                    "seeds": str(len(o.seeds)),
                    "validation": _perplexity(o.best_loss),
                    "test": _perplexity(o.test_loss),
                    "best at step": f"{np.median(o.best_step):,.0f}",
                }
            )
    return rows


def time(results: Results, rows: str) -> Rows:
    """Minutes of training and evaluation, compilation included, and the range of seed-steps a second. rows: "label = runs"."""
    found, all_runs, all_minutes = [], 0, 0.0
    for label, runs, _ in _listed(rows):
        records = results.matching(runs)
        variants = [o for record in records for o in outcomes(record).values()]
        minutes = sum(o.seconds for o in variants) / 60
        rates = [o.seed_steps_per_second for o in variants]
        found.append(
            {
                "experiment": label,
                "runs": str(len(records)),
                "minutes": f"{minutes:.1f}",
                "seed-steps a second": f"{_round(min(rates)):,.0f} to {_round(max(rates)):,.0f}",
            }
        )
        all_runs, all_minutes = all_runs + len(records), all_minutes + minutes
    return [*found, {"experiment": "all of these", "runs": str(all_runs), "minutes": f"{all_minutes:.0f}"}]


def initial_memory(results: Results, rows: str) -> Rows:
    """Whether converged seeds are those that remember longest before training: `tables.initial_memory`, against pairs."""
    found = []
    for label, runs, only in _listed(rows):
        records = results.matching(runs)
        for variant in [only] if only else outcomes(records[0]):
            row = {"setting": label, "λ": "–" if variant == ONE_STATE else variant}
            for record in records:
                if variant not in outcomes(record):
                    continue
                [number] = tables.initial_memory([(record, variant, memory_of(record, variant))]).raw
                layers = ", ".join(_probability(number, f"layer {i}") for i in range(record.config.model.layers))
                row[f"kv={record.config.task.num_pairs}"] = (
                    f"{layers} ({number['num_converged']}/{number['num_seeds']})"
                )
            found.append(row)
    return found


def _probability(number: dict, place: str) -> str:
    chance, p = number[f"{place}: probability"], number[f"{place}: p"]
    return "–" if np.isnan(chance) else f"{chance:.2f}" + ("‡" if p < 1e-4 else "†" if p < 0.01 else "")


TABLES: dict[str, Callable[..., Rows]] = {
    f.__name__: f
    for f in (
        by_pairs, by_setting, differences, accuracies, solved_by_pairs, shares_by_pairs, repeated, compared, bands, lengths,
        variation_of_lam, perplexities, time, initial_memory,
    )
}  # fmt: skip
SLOW = {"initial_memory"}  # made only if asked for: it draws every seed's initial parameters


# --- Numbers --------------------------------------------------------------------------------------------------------


def converged(results: Results, runs: str, variant: str = "*") -> str:
    """How many seeds reached 90 %, over all of these runs (and variants, without one)."""
    return f"{sum(o.num_converged for o in _matching(results, runs, variant)):,}"


def solved(results: Results, runs: str, variant: str = "*") -> str:
    """How many reached 99 %."""
    return f"{sum(_count(o.solved_step) for o in _matching(results, runs, variant)):,}"


def seeds(results: Results, runs: str, variant: str = "*") -> str:
    """How many seeds there are."""
    return f"{sum(len(o.seeds) for o in _matching(results, runs, variant)):,}"


def between(results: Results, runs: str, variant: str, low: str, high: str) -> str:
    """How many seeds end with an accuracy from `low` to below `high` %."""
    accuracy = 100 * _accuracies(results, runs, variant)
    return str(int(((accuracy >= float(low)) & (accuracy < float(high))).sum()))


def mean(results: Results, runs: str, variant: str) -> str:
    """Mean accuracy in %: "84.7"."""
    return f"{100 * np.mean(_accuracies(results, runs, variant)):.1f}"


def mean_and_std(results: Results, runs: str, variant: str) -> str:
    """ "84.7 ± 30.1"."""
    return _mean_and_std(_accuracies(results, runs, variant))


def median_step(results: Results, runs: str, variant: str) -> str:
    """The median step at which seeds of one run reached 99 %: "1,150"."""
    [record] = results.matching(runs)
    return f"{outcome(record, variant).median_solved_step:,.0f}"


def p(results: Results, runs: str, a: str, b: str, at: str = "90") -> str:
    """McNemar's exact p that two variants of one run reach `at` % equally often."""
    [record] = results.matching(runs)
    return _short(_difference(record, a, b)[f"mcnemar_p_{at}"])


def changed_sides(results: Results, runs: str) -> str:
    """How many seeds of two runs converge in one of them only, over all their variants."""
    first, second = map(outcomes, results.matching(runs))
    pairs = ((first[v].best_accuracy, second[v].best_accuracy) for v in first)
    return str(
        sum((x >= CONVERGED_ACCURACY) != (y >= CONVERGED_ACCURACY) for a, b in pairs for x, y in zip(a, b, strict=True))
    )


def difference(results: Results, runs: str, a: str, b: str) -> str:
    """Mean accuracy of a minus b in points, paired by seed, with its bootstrapped interval: "6.2 [−1.9, 19.7]"."""
    [record] = results.matching(runs)
    return _with_interval(_difference(record, a, b), ".1f")


def perplexity(results: Results, runs: str, variant: str, digits: str = "1") -> str:
    """Validation perplexity, mean ± std over the seeds of one run."""
    [record] = results.matching(runs)
    return _perplexity(outcome(record, variant).best_loss, int(digits))


NUMBERS: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (converged, solved, seeds, between, mean, mean_and_std, median_step, p, changed_sides, difference, perplexity)
}  # fmt: skip


# --- Cells ----------------------------------------------------------------------------------------------------------


def setting_of(record: Record) -> str:
    """ "text" or "released": whose initial values and heads the recall model has."""
    return "released" if record.config.model.init_scheme == "released" else "text"


def _difference(record: Record, a: str, b: str) -> dict:
    """The numbers of `tables.differences` for a and b; a minus b whichever was trained first."""
    found = [number for number in tables.differences(record).raw if {number["A"], number["B"]} == {a, b}]
    if not found:
        raise ConfigError(f"{record.name} does not have both {a} and {b}")
    [number] = found
    if number["A"] == a:
        return number
    swapped = {
        f"only_{x}_{at}": number[f"only_{y}_{at}"]
        for x, y in (("a", "b"), ("b", "a"))
        for at in (90, 99)
        if f"only_a_{at}" in number
    }
    bounds = {"mean_difference": -number["mean_difference"], "low": -number["high"], "high": -number["low"]}
    return number | swapped | bounds


def _with_interval(number: dict, form: str) -> str:
    """ "6.2 [−1.9, 19.7]"; the interval is left out of too few seeds."""
    shown = format(number["mean_difference"], form)
    if np.isfinite(number["low"]):
        shown += f" [{number['low']:{form}}, {number['high']:{form}}]"
    return shown.replace("-", "−")


def _short(p_value: float, digits: int = 1) -> str:
    """ "0.0005", "8e-7"."""
    return re.sub(r"e-0", "e-", f"{p_value:.{digits}g}")


def _round(rate: float) -> float:
    """To three digits."""
    return float(f"{rate:.3g}")


def _accuracies(results: Results, runs: str, variant: str) -> np.ndarray:
    return np.concatenate([o.best_accuracy for o in _matching(results, runs, variant)])


def _matching(results: Results, runs: str, variant: str) -> list[SimpleNamespace]:
    """The outcomes of a variant in these runs, or with * of all of theirs."""
    records = results.matching(runs)
    if variant == "*":
        return [o for record in records for o in outcomes(record).values()]
    return [outcome(record, variant) for record in records]


def _mean_and_std(shares) -> str:
    return f"{100 * np.mean(shares):.1f} ± {100 * np.std(shares, ddof=1):.1f}"


def _perplexity(losses, digits: int = 2) -> str:
    values = np.exp(np.asarray(losses, np.float64))
    spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"


def _chosen_rows(rows: Rows, variants: str) -> Rows:
    if not variants:
        return rows
    return [row for variant in variants.split(",") for row in rows if row["variant"] == variant]


def _count(steps) -> int:
    return sum(step is not None for step in steps)


def _listed(rows: str) -> Iterator[tuple[str, str, str]]:
    """(label, runs, variant or "") of each "label = runs:variant", separated by ';'."""
    for item in filter(None, (part.strip() for part in rows.split(";"))):
        label, equals, rest = item.partition(" = ")
        runs, _, variant = rest.partition(":")
        if not equals or not runs.strip():
            raise ConfigError(f"rows: {item!r}: expected 'label = runs' or 'label = runs:variant'")
        yield label.strip(), runs.strip(), variant.strip()


@functools.cache
def _natural(name: str) -> tuple:
    """So that kv4 comes before kv16."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))
