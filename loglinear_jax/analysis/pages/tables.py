"""Tables of the accuracies of runs of recall, and of which seeds converge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from loglinear_jax.analysis import decays, paper, tables
from loglinear_jax.analysis.experiments import setting_of
from loglinear_jax.analysis.pages.options import SOLVED, Labelled, Repetitions, Rows, Runs, split_labels, table
from loglinear_jax.analysis.pages.results import outcome_of
from loglinear_jax.analysis.tables.rates import (
    AtRate,
    at_best,
    by_rate,
    by_variant,
    chosen_rate,
    difference_at_best_rates,
    name_of,
    named_rates,
)
from loglinear_jax.analysis.tables.several_runs import SHARES
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.cells import (
    converged_and_solved,
    mean_and_std,
    mean_with_interval,
    num_and_share_converged,
    share_converged,
    short_p,
    solved_and_step,
    with_interval,
)
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import longer_among, mcnemar, mean_difference
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, SOLVED_ACCURACY

ONE_STATE = "mixer=linear"


@table()
def by_pairs(runs: Runs, variants: str = "", lines: str = "") -> Rows:
    """λ against pairs (or length): `tables.as_the_paper` of runs that differ in nothing else. lines=shares: only how many
    seeds reached 90 and 99 %."""
    found = tables.as_the_paper(runs)
    if len(found) != 1:
        raise ConfigError(
            f"runs={runs.text} make {len(found)} tables, expected one: they differ in more than pairs or length"
        )
    rows = found[0].rows
    if lines == "shares":
        rows = [{k: v for k, v in row.items() if k} for row in rows if row[""] == SHARES]
    return _chosen_rows(rows, variants)


@table()
def by_setting(runs: Runs, variants: str) -> Rows:
    """A row of how many seeds converge for each setting of model and training that differs: of `tables.by_setting` of one
    task."""
    found = list(tables.by_setting(runs).values())
    if len(found) != 1:
        raise ConfigError(f"runs={runs.text} are of {len(found)} tasks in several settings, expected one")
    chosen = variants.split(",")
    return [
        {"changed": row["changed"]} | {v: row[v] for v in chosen if v in row}
        for row in found[0].rows
        if row[""] == SHARES and any(v in row for v in chosen)
    ]


@table()
def differences(runs: Runs, a: str, b: str) -> Rows:
    """Two variants of MQAR paired by seed, a row for each run: McNemar's test, and the mean difference with its interval."""
    rows = []
    for run in runs:
        pair = [outcome_of(run, variant) for variant in (a, b)]
        row = {"setting": setting_of(run.config) or "–", "pairs": str(run.config.task.num_pairs)}
        for threshold in (CONVERGED_ACCURACY, SOLVED_ACCURACY):
            only_a, only_b, p_value = mcnemar(*(o.reached(threshold) for o in pair))
            row[f"≥ {100 * threshold:.0f} %: only {a}, only {b}, p"] = f"{only_a}, {only_b}, {short_p(p_value, 2)}"
        rows.append(row | {f"accuracy, {a} − {b}, points": _points_between(*pair)})
    return rows


@table()
def accuracies(runs: Runs, columns: str, variants: str = "") -> Rows:
    """A row for each variant of each run. columns: names in COLUMNS."""
    rows = []
    for run in runs:
        for variant, of_seeds in run.outcomes.items():
            if variants and variant not in variants.split(","):
                continue
            cells = {"variant": variant}
            for column in columns.split(","):
                if column not in COLUMNS:
                    raise ConfigError(f"there is no column {column!r}: there are {', '.join(COLUMNS)}")
                title, cell = COLUMNS[column]
                cells[title] = cell(run, variant, of_seeds)
            rows.append(cells)
    return rows


Cell = Callable[[Run, str, VariantOutcome], str]
COLUMNS: dict[str, tuple[str, Cell]] = {
    "run": ("run", lambda run, v, o: f"`{run.name}`"),
    "setting": ("setting", lambda run, v, o: setting_of(run.config) or "–"),
    "vocabulary": ("vocabulary", lambda run, v, o: str(run.config.task.vocab_size)),
    "interval": ("mean % [95 % interval]", lambda run, v, o: mean_with_interval(100 * o.accuracy)),
    "mean": ("accuracy %, mean ± std", lambda run, v, o: mean_and_std(100 * o.accuracy)),
    "least": ("least %", lambda run, v, o: f"{100 * min(o.accuracy):.1f}"),
    "median": ("median %", lambda run, v, o: f"{100 * np.median(o.accuracy):.1f}"),
    "peak": ("peak %", lambda run, v, o: f"{100 * o.peak_accuracy:.1f}"),
    "converged": ("≥ 90 %", lambda run, v, o: num_and_share_converged(o)),
    "solved": (f"{SOLVED}; median step", lambda run, v, o: solved_and_step(o, ",")),
    "paper": ("the paper", lambda run, variant, o: paper.result(run.config, variant) or "–"),
}


@table(of_accuracies=False)
def solved_by_pairs(rows: Labelled) -> Rows:
    """Seeds at ≥ 99 % and the median step at which they reach it, against pairs. rows: "label = runs:variant"."""
    return _cells_by_pairs(rows, lambda outcome: solved_and_step(outcome, ","))


@table(counts_solved=True)
def shares_by_pairs(rows: Labelled) -> Rows:
    """Seeds at ≥ 90 % with the interval of their share, and at ≥ 99 %, against pairs. rows: "label = runs:variant"."""
    return _cells_by_pairs(rows, converged_and_solved)


def _cells_by_pairs(rows: Labelled, cell: Callable[[VariantOutcome], str]) -> Rows:
    return [
        {"mixer": label} | {f"kv={run.config.task.num_pairs}": cell(outcome_of(run, variant)) for run in runs}
        for label, runs, variant in rows
    ]


@table()
def converged_by_pairs(rows: Labelled) -> Rows:
    """The share of seeds at ≥ 90 % with its interval, against pairs. rows: "label = runs:variant,variant"."""
    found = []
    for label, runs, variants in rows:
        for index, variant in enumerate(variants.split(",")):
            cells = {"setting": "" if index else label, "λ": f"`{variant}`"}
            for run in runs:
                cells[f"{run.config.task.num_pairs} pairs"] = share_converged(outcome_of(run, variant))
            found.append(cells)
    return found


@table()
def repeated(runs: Repetitions, variants: str) -> Rows:
    """Mean accuracy of the seeds that several runs of one task share, against pairs. runs: repetitions, separated by ';'."""
    rows = []
    for variant in variants.split(","):
        row = {"variant": variant}
        for same_pairs in zip(*runs, strict=True):
            if len({run.config.task.num_pairs for run in same_pairs}) > 1:
                raise ConfigError(f"runs={runs.text}: {', '.join(run.name for run in same_pairs)} have different pairs")
            by_seed = [
                dict(zip(o.seeds, o.accuracy, strict=True)) for o in (outcome_of(r, variant) for r in same_pairs)
            ]
            common = set.intersection(*map(set, by_seed))
            means = [100 * np.mean([of_one[seed] for seed in sorted(common)]) for of_one in by_seed]
            row[f"kv={same_pairs[0].config.task.num_pairs}"] = ", ".join(f"{mean:.1f}" for mean in means)
        rows.append(row)
    return rows


@table()
def compared(rows: Labelled, change: str) -> Rows:
    """Seeds that converge without a change and with it, paired by seed. rows: "label = run without, run with"."""
    found = []
    for label, runs, _ in rows:
        without, with_it = (run.outcomes for run in runs)
        for variant in (name for name in without if name in with_it):
            reached = [of_one[variant].reached(CONVERGED_ACCURACY) for of_one in (with_it, without)]
            only_with, only_without, p_value = mcnemar(*reached)
            found.append(
                {
                    "setting": label,
                    "λ": variant,
                    "without": f"{sum(reached[1])}/{len(reached[1])}",
                    f"with {change}": f"{sum(reached[0])}/{len(reached[0])}",
                    "only with, only without, p": f"{only_with}, {only_without}, {short_p(p_value)}",
                }
            )
    return found


@table()
def bands(rows: Labelled) -> Rows:
    """How many seeds end in which range of accuracy. rows: "label = runs:variant", over all of these runs together."""
    found = []
    for label, runs, variant in rows:
        accuracy = 100 * np.concatenate([outcome_of(r, variant).accuracy for r in runs])
        counts, _ = np.histogram(accuracy, [0, 10, 50, 90, 100.001])
        names = ("≥ 90 %", "50 to 90 %", "10 to 50 %", "< 10 %")
        found.append(
            {"setting": label, "seeds": str(len(accuracy))} | dict(zip(names, map(str, counts[::-1]), strict=True))
        )
    return found


@table("means")
def mean_accuracies(columns: Labelled, variants: str) -> Rows:
    """Mean accuracy of each variant with its bootstrapped 95 % interval, in the runs of each column."""
    rows = []
    for variant in variants.split(","):
        cells = {"variant": variant}
        for label, runs, _ in columns:
            outcomes = [run.outcomes[variant] for run in runs if variant in run.outcomes]
            if outcomes:
                cells[label] = mean_with_interval(100 * np.concatenate([o.accuracy for o in outcomes]))
        rows.append(cells)
    return rows


@table()
def gains(columns: Labelled, rows: str) -> Rows:
    """How much more accurate one variant is than another, in points, paired by seed, with the interval of the mean; in the runs
    of each column. rows: "label = variant, other variant"."""
    found = []
    for label, variants, _ in split_labels(rows):
        cells, pair = {"gain": label}, _pair("gains", variants)
        for column, runs, _ in columns:
            ours, others = (_of_one_run(runs, variant) for variant in pair)
            _check_seeds("gains", column, variants, ours, others)
            cells[column] = _points_between(ours, others)
        found.append(cells)
    return found


def _pair(table: str, variants: str) -> list[str]:
    pair = [variant.strip() for variant in variants.split(",")]
    if len(pair) != 2:
        raise ConfigError(f"{table}: {variants}: expected two variants")
    return pair


def _check_seeds(table: str, column: str, variants: str, ours: VariantOutcome, others: VariantOutcome) -> None:
    if ours.seeds != others.seeds:
        raise ConfigError(f"{table}: {column}: the seeds of {variants} are not the same")


def _points_between(ours: VariantOutcome, others: VariantOutcome) -> str:
    """The mean difference of two variants' accuracies, paired by seed."""
    return _points(mean_difference(*(100 * o.accuracy for o in (ours, others))))


def _points(difference: Sequence[float]) -> str:
    """ "+1.2 [−0.3, +2.7]" of a mean difference and its interval."""
    return with_interval(*difference, sign="+").replace("-", "−")


def _of_one_run(runs: Sequence[Run], variant: str) -> VariantOutcome:
    """Of the first run that has it."""
    return next((run.outcomes[variant] for run in runs if variant in run.outcomes), None) or outcome_of(
        runs[0], variant
    )


@table()
def best_rates(columns: Labelled, variants: str, average: str = "") -> Rows:
    """Mean accuracy of each variant with its interval at its best learning rate, which one half of the seeds choose for the
    other (`rates.chosen_rate`); in the first run of each column that has it at several rates, or that names its rate, which
    other seeds may have chosen. variants: names without rates.

    average: the head of a column with the mean over all columns, of variants that have the same seeds in each. Its interval
    takes the chosen rates as given.
    """
    rows = []
    for variant in variants.split(","):
        cells, of_columns = {"variant": variant}, []
        for label, group in _groups(columns, variant, _several_or_named):
            found = at_best(ACCURACY, group)
            if not len(found.shown):
                cells[label] = "one seed"
                continue
            cells[label] = with_interval(found.mean, found.low, found.high)
            if len(group) > 1:
                decays = len({at.weight_decay for at in group}) > 1
                cells[label] += f" at {name_of(chosen_rate(ACCURACY, group).rates, decays)}"
            of_columns.append((group[0].outcome.seeds, found.shown))
        if len(cells) == 1:
            raise ConfigError(
                f"best_rates: no run of these columns has {variant} at several learning rates, or at one that its name sets"
            )
        if average and len(of_columns) == len(columns) and all(seeds == of_columns[0][0] for seeds, _ in of_columns):
            cells[average] = mean_with_interval(np.mean([shown for _, shown in of_columns], axis=0))
        rows.append(cells)
    return rows


def _several_or_named(run: Run) -> dict[str, list[AtRate]]:
    """`by_variant`, of variants with several rates, or with one that is part of the variant's name."""
    return {v: group for v, group in by_variant(run).items() if len(group) > 1 or named_rates(group[0].variant)}


@table()
def gains_at_best_rates(columns: Labelled, rows: str) -> Rows:
    """`gains` of variants, each at its own best learning rates (`rates.chosen_rate`), which may differ by column. Where a run
    has a variant at one rate alone, that one counts: other seeds may have chosen it. rows: names without rates."""

    def gain(column: str, ours: list[AtRate], others: list[AtRate]) -> dict[str, str]:
        *difference, _ = difference_at_best_rates(ACCURACY, ours, others)
        return {column: _points(difference)}

    return _gains("gains_at_best_rates", columns, rows, gain)


@table()
def gains_on_parts(columns: Labelled, rows: str, parts: str) -> Rows:
    """`gains_at_best_rates` on parts of the test, of variants at one rate. parts: "label = part,part", whose mean counts."""
    groups_of_parts = [(label, names.split(",")) for label, names, _ in split_labels(parts)]

    def gains_of_groups(column: str, *pair: list[AtRate]) -> dict[str, str]:
        outcomes, found = [_at_one_rate("gains_on_parts", group) for group in pair], {}
        for label, names in groups_of_parts:
            means = [100 * np.mean([_on_part(outcome, name) for name in names], axis=0) for outcome in outcomes]
            found[f"{column}, {label}"] = _points(mean_difference(*means))
        return found

    return _gains("gains_on_parts", columns, rows, gains_of_groups)


def _gains(
    table: str, columns: Labelled, rows: str, cells_of: Callable[[str, list[AtRate], list[AtRate]], dict[str, str]]
) -> Rows:
    """A row for each pair of variants, rates aside, with the cells of each column that has both. cells_of: of the column's
    label and what each of the two has at its rates."""
    found = []
    for label, variants, _ in split_labels(rows):
        cells, (ours, others) = {"gain": label}, _pair(table, variants)
        of_others = dict(_groups(columns, others, by_variant))
        for column, group in _groups(columns, ours, by_variant):
            if column in of_others:
                _check_seeds(table, column, variants, group[0].outcome, of_others[column][0].outcome)
                cells |= cells_of(column, group, of_others[column])
        if len(cells) == 1:
            raise ConfigError(f"{table}: no column has both {ours} and {others}")
        found.append(cells)
    return found


def _at_one_rate(table: str, group: list[AtRate]) -> VariantOutcome:
    if len(group) > 1:
        raise ConfigError(f"{table}: {group[0].variant} and {group[1].variant}: expected one rate")
    return group[0].outcome


def _on_part(outcome: VariantOutcome, name: str) -> Float[np.ndarray, " seeds"]:
    of_parts = outcome.test_accuracy_of_parts or {}
    if name not in of_parts:
        raise ConfigError(f"parts={name}: the test has {', '.join(of_parts) or 'no parts'}")
    return np.array(of_parts[name], float)


@table()
def at_every_rate(runs: Runs, variants: str) -> Rows:
    """Mean accuracy of each variant of one run with its interval, a column for each of its learning rates and weight decays."""
    (run,) = runs
    groups = by_rate(run)
    rows = []
    for variant in variants.split(","):
        if variant not in groups:
            raise ConfigError(f"at_every_rate: {run.name} has no {variant} at several learning rates")
        decays = len({at.weight_decay for at in groups[variant]}) > 1
        of_rates = {name_of(at, decays): mean_with_interval(100 * at.outcome.accuracy) for at in groups[variant]}
        rows.append({"variant": variant} | of_rates)
    return rows


@table()
def by_size(runs: Runs, variants: str) -> Rows:
    """Accuracy by the size of the states, and how many numbers a layer keeps: `tables.by_size` of one task."""
    found, shown_as = tables.accuracies_by_size(runs)
    if len(found) != 1:
        raise ConfigError(f"runs={runs.text} are of {len(found)} tasks with states of several sizes, expected one")
    ((task, sizes),) = found.items()
    return _chosen_rows(tables.by_size(task, sizes, shown_as).rows, variants)


# Of the report about a run, by their names in pages.
OF_REPORT: dict[str, Callable[[Run], tables.Table | None]] = {
    "few seeds": tables.few_seeds_table,
    "parts": tables.parts,
    "best rates": lambda run: next(iter(tables.rates(run)[1:]), None),
    "best differences": tables.differences_at_best_rates,
}


@table()
def of_report(runs: Runs, name: str, variants: str = "") -> Rows:
    """A table of the report about one run. name: in OF_REPORT. variants: their rows alone; where a row compares two, A and B,
    those of two of them."""
    if name not in OF_REPORT:
        raise ConfigError(f"of_report: there is no table {name!r}: there are {', '.join(OF_REPORT)}")
    (run,) = runs
    found = OF_REPORT[name](run)
    if found is None:
        raise ConfigError(f"of_report: {run.name} has no table {name!r}")
    if not variants:
        return found.rows
    wanted = variants.split(",")
    kept = [row for row in found.rows if set(_variants_of(row)) <= set(wanted)]
    if missing := [variant for variant in wanted if not any(variant in _variants_of(row) for row in kept)]:
        raise ConfigError(f"of_report: {name} of {run.name} has no row of {missing[0]}")
    return sorted(kept, key=lambda row: [wanted.index(variant) for variant in _variants_of(row)])


def _variants_of(row: dict[str, str]) -> tuple[str, ...]:
    return (row["A"], row["B"]) if "A" in row else (row["variant"],)


def _groups(
    columns: Labelled, variant: str, groups_of: Callable[[Run], dict[str, list[AtRate]]]
) -> Iterator[tuple[str, list[AtRate]]]:
    """The label of each column of which a run has the variant among its groups, with the first such run's."""
    for label, runs, _ in columns:
        found = map(groups_of, runs)
        if (group := next((groups[variant] for groups in found if variant in groups), None)) is not None:
            yield label, group


@table(slow=True)
def initial_memory(rows: Labelled) -> Rows:
    """Whether converged seeds are those that remember longest before training, layer by layer, against pairs: the probability
    that a converged seed's memory is longer (`longer_among`), of the head of a layer that remembers longest; † p < 0.01, ‡ p <
    0.0001."""
    found = []
    for label, runs, only in rows:
        for variant in [only] if only else runs[0].outcomes:
            row = {"setting": label, "λ": "–" if variant == ONE_STATE else variant}
            for run in runs:
                if variant not in run.outcomes:
                    continue
                reached = np.array(run.outcomes[variant].reached(CONVERGED_ACCURACY))
                by_layer = decays.initial_memory(run, variant).max(2).T
                layers = ", ".join(_probability(*longer_among(memory, reached)) for memory in by_layer)
                row[f"kv={run.config.task.num_pairs}"] = f"{layers} ({reached.sum()}/{len(reached)})"
            found.append(row)
    return found


def _probability(chance: float, p_value: float) -> str:
    return "–" if np.isnan(chance) else f"{chance:.2f}" + ("‡" if p_value < 1e-4 else "†" if p_value < 0.01 else "")


@table(slow=True)
def by_memory(rows: Labelled) -> Rows:
    """How many seeds converge whose memory in a layer before training is in a range. rows: "label = run:layer,low,high",
    layers from 1, tokens from `low` to below `high`."""
    found = []
    for label, [run], limits in rows:
        layer, low, high = (float(limit) for limit in limits.split(","))
        row = {"pairs": str(run.config.task.num_pairs), "seeds whose": label}
        for variant, o in run.outcomes.items():
            memory = decays.initial_memory(run, variant)[:, int(layer) - 1].max(1)
            chosen = (memory >= low) & (memory < high)
            reached = np.array(o.reached(CONVERGED_ACCURACY))
            row |= {"number": str(chosen.sum()), f"converge under {variant}": str((reached & chosen).sum())}
        found.append(row)
    return found


def _chosen_rows(rows: Rows, variants: str) -> Rows:
    if not variants:
        return rows
    return [row for variant in variants.split(",") for row in rows if row["variant"] == variant]
