"""The tables and numbers of Markdown pages about runs; `checked_pages` says how a page names them.

Every function of TABLES returns rows (cells by column), every function of NUMBERS one piece of text. Their first argument is
the runs to choose from, the others are the options that the page gives, all as text:

    runs       names of runs, comma-separated, with * and ?; the runs of a pattern come in natural order
    variant    one trained setting of a run, such as linear or mixer=softmax; variants: several, comma-separated
    a, b       two variants, paired by seed
    rows       "label = runs; label = runs:variant", one row each; columns: "label = runs", one column each
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from loglinear_jax.analysis import paper, tables
from loglinear_jax.analysis.answer_levels import answer_levels as levels_of_task
from loglinear_jax.analysis.answer_levels import table as answer_levels_table
from loglinear_jax.analysis.decays import initial_memory as memory_of
from loglinear_jax.analysis.labels import setting_of
from loglinear_jax.analysis.tables.rates import by_rate, chosen_rate, name_of
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.loading import Run, read_run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import longer_among, mcnemar, mean_difference, mean_interval
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, SOLVED_ACCURACY

Rows = list[dict[str, str]]
ONE_STATE = "mixer=linear"
Made = TypeVar("Made")


class Results:
    """The finished runs in a folder, read when they are asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = sorted((path.parent.name for path in folder.glob("*/summary.json")), key=_natural)
        self._read: dict[str, Run] = {}
        self._given: dict[str, Run] = {}

    def matching(self, patterns: str) -> list[Run]:
        """The runs of these comma-separated patterns. Raises ConfigError for a pattern that matches none."""
        names: dict[str, None] = {}
        for pattern in patterns.split(","):
            found = fnmatch.filter(self.names, pattern.strip())
            if not found:
                raise ConfigError(f"no run in {self.folder} matches {pattern.strip()!r}")
            names |= dict.fromkeys(found)
        return [self[name] for name in names]

    def __getitem__(self, name: str) -> Run:
        if name not in self._read:
            self._read[name] = read_run(self.folder / name)
        return self._given.setdefault(name, self._read[name])

    def on_one_set(self, make: Callable[[Results], Made]) -> tuple[Made, VariantOutcome | None]:
        """What `make` makes of some of these runs, with accuracies that may be compared; and an outcome whose notes say what
        they are, None if none of the runs has a test."""
        results = copy.copy(self)
        results._given = {}
        made = make(results)
        outcomes = {(name, v): o for name, run in results._given.items() for v, o in run.outcomes.items()}
        compared = on_one_set(outcomes)
        if compared != outcomes:
            for name, run in results._given.items():
                variants = {variant: compared[name, variant] for variant in run.outcomes}
                summary = dataclasses.replace(run.summary, variants=variants)
                results._given[name] = dataclasses.replace(run, summary=summary)
            made = make(results)
        tested = [key for key, o in outcomes.items() if o.score is ACCURACY and o.test_accuracy is not None]
        return made, compared[tested[0]] if tested else None


def outcome(run: Run, variant: str) -> VariantOutcome:
    """Raises ConfigError if the run has no such variant."""
    if variant not in run.outcomes:
        raise ConfigError(f"{run.name} has no variant {variant!r}: it has {', '.join(run.outcomes)}")
    return run.outcomes[variant]


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
    """Two variants of MQAR paired by seed, a row for each run: McNemar's test, and the mean difference with its interval."""
    rows = []
    for run in results.matching(runs):
        pair = [outcome(run, variant) for variant in (a, b)]
        row = {"setting": setting_of(run.config) or "–", "pairs": str(run.config.task.num_pairs)}
        for threshold in (CONVERGED_ACCURACY, SOLVED_ACCURACY):
            only_a, only_b, p_value = mcnemar(*(o.reached(threshold) for o in pair))
            row[f"≥ {100 * threshold:.0f} %: only {a}, only {b}, p"] = f"{only_a}, {only_b}, {_short(p_value, 2)}"
        rows.append(row | {f"accuracy, {a} − {b}, points": _points_between(*pair)})
    return rows


def accuracies(results: Results, runs: str, columns: str, variants: str = "") -> Rows:
    """A row for each variant of each run. columns: names in COLUMNS."""
    rows = []
    for run in results.matching(runs):
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


def _converged_cell(run: Run, variant: str, o: VariantOutcome) -> str:
    low, high = o.share_converged_interval
    return f"{o.num_converged}/{len(o.seeds)} = {o.share_converged:.2f} [{low:.2f}, {high:.2f}]"


SOLVED = "≥ 99 %"  # in the heads of columns that count such seeds


def _solved_cell(run: Run, variant: str, o: VariantOutcome) -> str:
    median = "" if o.median_solved_step is None else f"; {o.median_solved_step:,.0f}"
    return f"{o.num_solved}/{len(o.seeds)}{median}"


Cell = Callable[[Run, str, VariantOutcome], str]
COLUMNS: dict[str, tuple[str, Cell]] = {
    "run": ("run", lambda run, v, o: f"`{run.name}`"),
    "setting": ("setting", lambda run, v, o: setting_of(run.config) or "–"),
    "vocabulary": ("vocabulary", lambda run, v, o: str(run.config.task.vocab_size)),
    "interval": ("mean % [95 % interval]", lambda run, v, o: _mean_and_interval(o.accuracy)),
    "mean": ("accuracy %, mean ± std", lambda run, v, o: _mean_and_std(o.accuracy)),
    "least": ("least %", lambda run, v, o: f"{100 * min(o.accuracy):.1f}"),
    "median": ("median %", lambda run, v, o: f"{100 * np.median(o.accuracy):.1f}"),
    "peak": ("peak %", lambda run, v, o: f"{100 * o.peak_accuracy:.1f}"),
    "converged": ("≥ 90 %", _converged_cell),
    "solved": (f"{SOLVED}; median step", _solved_cell),
    "paper": ("the paper", lambda run, variant, o: paper.result(run.config, variant) or "–"),
}


def solved_by_pairs(results: Results, rows: str) -> Rows:
    """Seeds at ≥ 99 % and the median step at which they reach it, against pairs. rows: "label = runs:variant"."""
    found = []
    for label, runs, variant in _listed(rows):
        cells = {"mixer": label}
        for run in results.matching(runs):
            cells[f"kv={run.config.task.num_pairs}"] = _solved_cell(run, variant, outcome(run, variant))
        found.append(cells)
    return found


def shares_by_pairs(results: Results, rows: str) -> Rows:
    """Seeds at ≥ 90 % with the interval of their share, and at ≥ 99 %, against pairs. rows: "label = runs:variant"."""
    found = []
    for label, runs, variant in _listed(rows):
        cells = {"mixer": label}
        for run in results.matching(runs):
            o = outcome(run, variant)
            low, high = o.share_converged_interval
            shares = f"{o.num_converged}/{len(o.seeds)} [{low:.2f}, {high:.2f}], {o.num_solved}/{len(o.seeds)}"
            cells[f"kv={run.config.task.num_pairs}"] = shares
        found.append(cells)
    return found


def converged_by_pairs(results: Results, rows: str) -> Rows:
    """The share of seeds at ≥ 90 % with its interval, against pairs. rows: "label = runs:variant,variant"."""
    found = []
    for label, runs, variants in _listed(rows):
        for index, variant in enumerate(variants.split(",")):
            cells = {"setting": "" if index else label, "λ": f"`{variant}`"}
            for run in results.matching(runs):
                o = outcome(run, variant)
                low, high = o.share_converged_interval
                cells[f"{run.config.task.num_pairs} pairs"] = f"{o.share_converged:.2f} [{low:.2f}, {high:.2f}]"
            found.append(cells)
    return found


def repeated(results: Results, runs: str, variants: str) -> Rows:
    """Mean accuracy of the seeds that several runs of one task share, against pairs. runs: repetitions, separated by ';'."""
    repetitions = [results.matching(patterns) for patterns in runs.split(";")]
    rows = []
    for variant in variants.split(","):
        row = {"variant": variant}
        for same_pairs in zip(*repetitions, strict=True):
            if len({run.config.task.num_pairs for run in same_pairs}) > 1:
                raise ConfigError(f"runs={runs}: {', '.join(run.name for run in same_pairs)} have different pairs")
            by_seed = [dict(zip(o.seeds, o.accuracy, strict=True)) for o in (outcome(r, variant) for r in same_pairs)]
            common = set.intersection(*map(set, by_seed))
            means = [100 * np.mean([of_one[seed] for seed in sorted(common)]) for of_one in by_seed]
            row[f"kv={same_pairs[0].config.task.num_pairs}"] = ", ".join(f"{mean:.1f}" for mean in means)
        rows.append(row)
    return rows


def compared(results: Results, rows: str, change: str) -> Rows:
    """Seeds that converge without a change and with it, paired by seed. rows: "label = run without, run with"."""
    found = []
    for label, runs, _ in _listed(rows):
        without, with_it = (run.outcomes for run in results.matching(runs))
        for variant in (name for name in without if name in with_it):
            reached = [of_one[variant].reached(CONVERGED_ACCURACY) for of_one in (with_it, without)]
            only_with, only_without, p_value = mcnemar(*reached)
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
        accuracy = 100 * np.concatenate([outcome(r, variant).accuracy for r in results.matching(runs)])
        counts, _ = np.histogram(accuracy, [0, 10, 50, 90, 100.001])
        names = ("≥ 90 %", "50 to 90 %", "10 to 50 %", "< 10 %")
        found.append(
            {"setting": label, "seeds": str(len(accuracy))} | dict(zip(names, map(str, counts[::-1]), strict=True))
        )
    return found


def means(results: Results, columns: str, variants: str) -> Rows:
    """Mean accuracy of each variant with its bootstrapped 95 % interval, in the runs of each column."""
    chosen = [(label, results.matching(runs)) for label, runs, _ in _listed(columns)]
    rows = []
    for variant in variants.split(","):
        cells = {"variant": variant}
        for label, found in chosen:
            outcomes = [run.outcomes[variant] for run in found if variant in run.outcomes]
            if outcomes:
                cells[label] = _mean_and_interval(np.concatenate([o.accuracy for o in outcomes]))
        rows.append(cells)
    return rows


def gains(results: Results, columns: str, rows: str) -> Rows:
    """How much more accurate one variant is than another, in points, paired by seed, with the interval of the mean; in the runs
    of each column. rows: "label = variant, other variant"."""
    chosen = [(label, results.matching(runs)) for label, runs, _ in _listed(columns)]
    found = []
    for label, variants, _ in _listed(rows):
        cells, pair = {"gain": label}, [variant.strip() for variant in variants.split(",")]
        if len(pair) != 2:
            raise ConfigError(f"gains: {variants}: expected two variants")
        for column, runs in chosen:
            ours, others = (_of_one_run(runs, variant) for variant in pair)
            if ours.seeds != others.seeds:
                raise ConfigError(f"gains: {column}: the seeds of {variants} are not the same")
            cells[column] = _points_between(ours, others)
        found.append(cells)
    return found


def _of_one_run(runs: Sequence[Run], variant: str) -> VariantOutcome:
    """Of the first run that has it."""
    return next((run.outcomes[variant] for run in runs if variant in run.outcomes), None) or outcome(runs[0], variant)


def best_rates(results: Results, columns: str, variants: str) -> Rows:
    """Mean accuracy of each variant with its interval at its best learning rate, which one half of the seeds choose, of the
    other half; in the first run of each column that has it at several rates."""
    chosen = [(label, [by_rate(run) for run in results.matching(runs)]) for label, runs, _ in _listed(columns)]
    rows = []
    for variant in variants.split(","):
        cells = {"variant": variant}
        for label, found in chosen:
            group = next((groups[variant] for groups in found if variant in groups), None)
            if group is not None:
                best, shown = chosen_rate(ACCURACY, group)
                rate = name_of(best, decays=len({at.weight_decay for at in group}) > 1)
                cells[label] = f"{_mean_and_interval(shown / 100)} at {rate}" if len(shown) else "one seed"
        if len(cells) == 1:
            raise ConfigError(f"best_rates: no run of these columns has {variant} at several learning rates")
        rows.append(cells)
    return rows


def answer_levels(results: Results, rows: str) -> Rows:
    """The Fenwick levels that hold a task's answers, from its definition. rows: "label = run"."""
    shares = {label: levels_of_task(results.matching(runs)[0].task) for label, runs, _ in _listed(rows)}
    return answer_levels_table(shares).rows


def looks(results: Results, runs: str) -> Rows:
    """How often λ is largest at the answer, from the runs' looks.md."""
    return [row for run in results.matching(runs) for row in _markdown_rows(run.workdir / "looks.md")]


def lengths(results: Results, runs: str) -> Rows:
    """Accuracy in % (seeds at ≥ 90 %) or perplexity at the trained length and beyond, mean ± std; from lengths.csv."""
    rows: dict[str, dict[str, str]] = {}
    every = results.matching(runs)
    one_task = all(run.config.task == every[0].config.task for run in every)
    for run in every:
        with (run.workdir / "lengths.csv").open() as file:
            evaluated = list(csv.DictReader(file))
        for line in evaluated:
            row = rows.setdefault(line["variant"], {"variant": line["variant"]})
            length = f"length {line['length']}"
            column = length if one_task else f"kv={run.config.task.num_pairs}, {length}"
            if column not in row:
                alike = [other for other in evaluated if all(other[key] == line[key] for key in ("variant", "length"))]
                row[column] = _mean_at_length(alike)
    if all(run.config.task.name == "mqar" for run in every):
        for variant, row in rows.items():
            row["the paper at 256"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
    return list(rows.values())


def _mean_at_length(lines: list[dict[str, str]]) -> str:
    """Of one variant at one length, a line a seed."""
    if "perplexity" in lines[0]:
        return _mean_and_spread([float(line["perplexity"]) for line in lines], 1)
    scores = [float(line["accuracy"]) for line in lines]
    return f"{_mean_and_spread(scores, 1)} ({sum(score >= 90 for score in scores)}/{len(scores)})"


def variation_of_lam(results: Results, runs: str) -> Rows:
    """How much λ varies over tokens in all seeds, from the runs' lam-dependence.md; `fixed` does not vary and is left out."""
    rows = []
    for run in results.matching(runs):
        for row in _markdown_rows(run.workdir / "lam-dependence.md"):
            if row.pop("seeds").startswith("all") and row["variant"] != "fixed":
                rows.append({"pairs": str(run.config.task.num_pairs)} | row)
    return rows


def perplexities(results: Results, runs: str) -> Rows:
    """Perplexity of language models, mean ± std over seeds, the median step of the best, and what λ adds to the parameters."""
    rows = []
    for run in results.matching(runs):
        for variant, o in run.outcomes.items():
            rows.append(
                {
                    "hidden": str(run.config.model.hidden),
                    "predicts": o.predicts,
                    "variant": variant,
                    "seeds": str(len(o.seeds)),
                    "validation": _perplexity(o.best_loss),
                    "test": _perplexity(o.test_loss),
                    "best at step": f"{np.median(o.best_step):,.0f}",
                    "λ adds": lam_share(results, run.name, variant) + " %",
                }
            )
    return rows


def losses_by_position(results: Results, runs: str) -> Rows:
    """Test loss of language models in nats, mean ± std over seeds, by the position in the window: from 2^i to 2^(i+1) - 1."""
    return [
        {"variant": variant}
        | {f"from {first}": _mean_and_spread(losses, 3) for first, losses in o.test_loss_from_position.items()}
        for run in results.matching(runs)
        for variant, o in run.outcomes.items()
    ]


def time(results: Results, rows: str) -> Rows:
    """Minutes of training and evaluation, compilation included, and the range of seed-steps a second. rows: "label = runs"."""
    found, all_runs, all_minutes = [], 0, 0.0
    for label, runs, _ in _listed(rows):
        chosen = results.matching(runs)
        variants = [o for run in chosen for o in run.outcomes.values()]
        minutes = sum(o.seconds for o in variants) / 60
        rates = [o.seed_steps_per_second for o in variants]
        found.append(
            {
                "experiment": label,
                "runs": str(len(chosen)),
                "minutes": f"{minutes:.1f}",
                "seed-steps a second": f"{_round(min(rates)):,.0f} to {_round(max(rates)):,.0f}",
            }
        )
        all_runs, all_minutes = all_runs + len(chosen), all_minutes + minutes
    return [*found, {"experiment": "all of these", "runs": str(all_runs), "minutes": f"{all_minutes:.0f}"}]


def initial_memory(results: Results, rows: str) -> Rows:
    """Whether converged seeds are those that remember longest before training, layer by layer, against pairs: the probability
    that a converged seed's memory is longer (`longer_among`), of the head of a layer that remembers longest; † p < 0.01, ‡ p <
    0.0001."""
    found = []
    for label, runs, only in _listed(rows):
        chosen = results.matching(runs)
        for variant in [only] if only else chosen[0].outcomes:
            row = {"setting": label, "λ": "–" if variant == ONE_STATE else variant}
            for run in chosen:
                if variant not in run.outcomes:
                    continue
                reached = np.array(run.outcomes[variant].reached(CONVERGED_ACCURACY))
                by_layer = memory_of(run, variant).max(2).T
                layers = ", ".join(_probability(*longer_among(memory, reached)) for memory in by_layer)
                row[f"kv={run.config.task.num_pairs}"] = f"{layers} ({reached.sum()}/{len(reached)})"
            found.append(row)
    return found


def _probability(chance: float, p_value: float) -> str:
    return "–" if np.isnan(chance) else f"{chance:.2f}" + ("‡" if p_value < 1e-4 else "†" if p_value < 0.01 else "")


def by_memory(results: Results, rows: str) -> Rows:
    """How many seeds converge whose memory in a layer before training is in a range. rows: "label = run:layer,low,high",
    layers from 1, tokens from `low` to below `high`."""
    found = []
    for label, name, limits in _listed(rows):
        [run] = results.matching(name)
        layer, low, high = (float(limit) for limit in limits.split(","))
        row = {"pairs": str(run.config.task.num_pairs), "seeds whose": label}
        for variant, o in run.outcomes.items():
            memory = memory_of(run, variant)[:, int(layer) - 1].max(1)
            chosen = (memory >= low) & (memory < high)
            reached = np.array(o.reached(CONVERGED_ACCURACY))
            row |= {"number": str(chosen.sum()), f"converge under {variant}": str((reached & chosen).sum())}
        found.append(row)
    return found


TABLES: dict[str, Callable[..., Rows]] = {
    f.__name__: f
    for f in (
        by_pairs, by_setting, differences, accuracies, solved_by_pairs, shares_by_pairs, converged_by_pairs, repeated, compared,
        bands, means, gains, best_rates, answer_levels, looks, lengths, variation_of_lam, perplexities, losses_by_position,
        time, initial_memory, by_memory,
    )
}  # fmt: skip
SLOW = {"initial_memory", "by_memory"}  # made only if asked for: they draw every seed's initial parameters
WITHOUT_ACCURACIES = {
    "solved_by_pairs", "answer_levels", "looks", "lengths", "variation_of_lam", "perplexities", "losses_by_position", "time"
}  # of summaries  # fmt: skip


def note_below(name: str, rows: Rows, tested: VariantOutcome | None) -> str:
    """What stands below a table of that name: which accuracies it shows. tested: as from `Results.on_one_set`."""
    if tested is None or name in WITHOUT_ACCURACIES:
        return ""
    counts_solved = name == "shares_by_pairs" or any(SOLVED in column for row in rows for column in row)
    return tested.solved_note if counts_solved else tested.shown_note


# --- Numbers --------------------------------------------------------------------------------------------------------


def converged(results: Results, runs: str, variant: str = "*") -> str:
    """How many seeds reached 90 %, over all of these runs (and variants, without one)."""
    return f"{sum(o.num_converged for o in _matching(results, runs, variant)):,}"


def solved(results: Results, runs: str, variant: str = "*") -> str:
    """How many reached 99 %."""
    return f"{sum(o.num_solved for o in _matching(results, runs, variant)):,}"


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


def p(results: Results, runs: str, a: str, b: str, at: str = "90") -> str:
    """McNemar's exact p that two variants of one run reach `at` % equally often."""
    [run] = results.matching(runs)
    return _short(mcnemar(*(outcome(run, variant).reached(float(at) / 100) for variant in (a, b)))[2])


def changed_sides(results: Results, runs: str) -> str:
    """How many seeds of two runs converge in one of them only, over all their variants."""
    first, second = (run.outcomes for run in results.matching(runs))
    pairs = ((first[v].reached(CONVERGED_ACCURACY), second[v].reached(CONVERGED_ACCURACY)) for v in first)
    return str(sum(x != y for a, b in pairs for x, y in zip(a, b, strict=True)))


def perplexity(results: Results, runs: str, variant: str, digits: str = "1") -> str:
    """Validation perplexity, mean ± std over the seeds of one run."""
    [run] = results.matching(runs)
    return _perplexity(outcome(run, variant).best_loss, int(digits))


def lam_share(results: Results, runs: str, variant: str) -> str:
    """The parameters of λ in % of all others: "0.0083"."""
    [run] = results.matching(runs)
    return f"{outcome(run, variant).lam_params_percent:.4f}"


NUMBERS: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (converged, solved, seeds, between, mean, mean_and_std, p, changed_sides, perplexity, lam_share)
}  # fmt: skip


# --- Cells ----------------------------------------------------------------------------------------------------------


def _short(p_value: float, digits: int = 1) -> str:
    """ "0.0005", "8e-7"."""
    return re.sub(r"e-0", "e-", f"{p_value:.{digits}g}")


def _round(rate: float) -> float:
    """To three digits."""
    return float(f"{rate:.3g}")


def _accuracies(results: Results, runs: str, variant: str) -> np.ndarray:
    return np.concatenate([o.accuracy for o in _matching(results, runs, variant)])


def _matching(results: Results, runs: str, variant: str) -> list[VariantOutcome]:
    """The outcomes of a variant in these runs, or with * of all of theirs."""
    chosen = results.matching(runs)
    if variant == "*":
        return [o for run in chosen for o in run.outcomes.values()]
    return [outcome(run, variant) for run in chosen]


def _points_between(ours: VariantOutcome, others: VariantOutcome) -> str:
    """ "+1.2 [−0.3, +2.7]": the mean difference of two variants' accuracies, paired by seed."""
    mean, low, high = mean_difference(*(100 * o.accuracy for o in (ours, others)))
    interval = f" [{low:+.1f}, {high:+.1f}]" if np.isfinite(low) else ""
    return f"{mean:+.1f}{interval}".replace("-", "−")


def _mean_and_interval(shares) -> str:
    mean, low, high = mean_interval(100 * np.asarray(shares))
    return f"{mean:.1f}" + (f" [{low:.1f}, {high:.1f}]" if np.isfinite(low) else "")


def _markdown_rows(path: Path) -> Rows:
    """The rows of a Markdown table."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, cells, strict=True)) for cells in body]


def _mean_and_std(shares) -> str:
    return _mean_and_spread(100 * np.asarray(shares), 1)


def _perplexity(losses, digits: int = 2) -> str:
    return _mean_and_spread(np.exp(np.asarray(losses, np.float64)), digits)


def _mean_and_spread(values, digits: int) -> str:
    """Mean ± standard deviation over seeds, which one seed does not have."""
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def _chosen_rows(rows: Rows, variants: str) -> Rows:
    if not variants:
        return rows
    return [row for variant in variants.split(",") for row in rows if row["variant"] == variant]


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
