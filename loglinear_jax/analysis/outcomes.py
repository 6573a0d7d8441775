"""What came out of runs? The variants of one beside each other, every seed, and tests of differences; and several runs: the
paper's tables, one of all settings, and accuracies by the size of what a layer keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from loglinear_jax.analysis import paper
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.paper import RELEASED, changed_settings, describe_run, experiment_of, setting_of
from loglinear_jax.analysis.rates import RATES, by_variant, chosen_rate, named_rates, pairs_of_like_rates
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.config.building import checked_experiment
from loglinear_jax.models import OwnSettings
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set, shared_seeds
from loglinear_jax.statistics import mcnemar, mean_difference, mean_interval
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, SOLVED_ACCURACY

MEANS, SHARES = "accuracy %", "≥ 90 %, ≥ 99 %"  # what a row shows
OF_STATES = {"model.heads", "model.key_groups", "model.key_dim", "model.head_dim"}
COUNTED = "Then how many seeds reached 90 %, with Wilson's 95 % interval of their share, and 99 %"


# --- Of one run -------------------------------------------------------------------------------------------------------


def outcome_columns(outcome: VariantOutcome) -> dict[str, str]:
    """Formats one variant's outcome as the cells of a table, by column."""
    if outcome.score.thresholds:
        return {
            f"{outcome.shown_as} %, mean ± std": cells.mean_and_std(100 * outcome.accuracy),
            "peak %": f"{100 * outcome.peak_accuracy:.1f}",
            f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]": cells.num_and_share_converged(outcome),
            f"seeds ≥ {SOLVED_ACCURACY:.0%} in validation; median step": cells.solved_and_step(outcome),
            "λ adds": f"{outcome.lam_params_percent:.2f} %",
        }
    best, rate = cells.finite(outcome.best), outcome.tokens_per_second
    columns = {
        "predicts": outcome.predicts,
        "validation perplexity, mean ± std": cells.perplexity(outcome.best_loss),
        "best": f"{best.min():.2f}" if len(best) else "–",
        "test perplexity": cells.perplexity(_tested(outcome)),
        "at step": cells.median_of(outcome.best_step),
        "λ adds": f"{outcome.lam_params_percent:.4f} %",
        "tokens/s": "–" if rate is None else f"{rate:,.0f}",
    }
    return {name: cell for name, cell in columns.items() if cell is not None}


def outcomes(run: Run) -> Table:
    """Tabulate what came out of a run, a row for each finished variant.

    A row has the mean ± standard deviation over seeds, the peak, the share of seeds that reach 90 % with Wilson's interval,
    and the paper's number where the paper has this experiment; of a language model, perplexities. Accuracies are of the test
    set if every variant has one, else the best in validation.

    Args:
        run: with at least one finished variant.
    """
    variants, rows = on_one_set(run.outcomes), []
    published = {variant: paper.result(run.config, variant) for variant in variants}
    for variant, outcome in variants.items():
        numbers = {k: v for k, v in outcome.to_json().items() if not isinstance(v, (dict, list, str))}
        numbers.pop("share_converged", None)  # a cell of its own has it
        for name, losses in (("perplexity", outcome.best_loss), ("test_perplexity", _tested(outcome))):
            if not outcome.score.thresholds and len(values := cells.finite(np.exp(cells.finite(losses)))):
                numbers |= {f"num_{name}": len(values), f"mean_{name}": float(values.mean())}
        named = Cell(variant, run=run.name, variant=variant, **numbers)
        row = {"variant": named, "seeds": cells.num_seeds(outcome)} | outcome_columns(outcome)
        row |= {"diverged": str(outcome.num_diverged)} if any(o.num_diverged for o in variants.values()) else {}
        rows.append(row | ({"the paper": published[variant] or "–"} if any(published.values()) else {}))
    first = next(iter(variants.values()))
    note = cells.accuracy_note(first, counts_solved=True)
    note += " Intervals: Wilson, 95 %." if run.task.score.thresholds else ""
    note += " Last column: the paper's, from 3 to 11 seeds." if any(published.values()) else ""
    return Table(f"outcomes, {first.shown_as}", rows, note, describe_run(run))


def _tested(outcome: VariantOutcome) -> np.ndarray:
    return cells.of_evaluated(outcome, outcome.test_loss)


def parts(run: Run) -> Table | None:
    """Tabulates every variant's mean test accuracy on each part of the test; None where the test has one part alone."""
    rows = []
    for variant, outcome in run.outcomes.items():
        of_parts = outcome.test_accuracy_of_parts or {}
        found = {part: cells.with_interval(*mean_interval(100 * cells.finite(x))) for part, x in of_parts.items()}
        if found:
            rows.append({"variant": variant, "seeds": cells.num_seeds(outcome)} | found)
    note = "Test accuracy in %, mean over seeds [95 % interval by bootstrap], with the parameters chosen in validation."
    return Table("test accuracy on each part of the test", rows, note, describe_run(run)) if rows else None


def differences(run: Run) -> Table | None:
    """Test the difference between every two variants of a run, paired by seed.

    Variants with several learning rates are compared at the same rate; at the best rates by
    `rates.differences_at_best_rates`.

    Returns:
        For each pair how many seeds only one of them brings to each threshold, with McNemar's p-value, and the mean
        difference of the score with its interval; None if there is no pair.
    """
    variants = on_one_set(run.outcomes)
    pairs, score, rows = pairs_of_like_rates(run, variants), run.task.score, []
    for name_a, name_b in pairs:
        seeds = shared_seeds([variants[name_a], variants[name_b]])
        a, b = (variants[name].of_seeds(seeds) for name in (name_a, name_b))
        values = np.array([a.shown, b.shown])
        row = {"A": name_a, "B": name_b}
        values = values[:, there := np.isfinite(values).all(0)]
        row["seeds"] = Cell(cells.num_finite(np.where(there, 0, np.nan)), seeds=len(values[0]))
        for threshold in score.thresholds:
            only_a, only_b, p = mcnemar(a.reached(threshold), b.reached(threshold))
            at = f"{100 * threshold:.0f}"
            numbers = {f"only_a_{at}": only_a, f"only_b_{at}": only_b, f"mcnemar_p_{at}": p}
            text = f"{only_a}, {only_b}, {p:.2g}"
            row[f"≥ {threshold:.0%}: only A, only B, McNemar p"] = Cell(text, **numbers)
        what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
        difference = cells.with_interval(*mean_difference(*values), digits=2, sign="+", name="mean_difference")
        rows.append(row | {f"{what} [95 % interval]": difference})
    if not rows:
        return None
    first = next(iter(variants.values()))
    note = (
        f"{cells.accuracy_note(first)} Paired by seed. The p-values are exact and not corrected for the number of "
        "comparisons; intervals are bootstrapped, if there are at least 10 seeds."
    )
    if len(pairs) < len(variants) * (len(variants) - 1) // 2:
        note += " Pairs of different learning rates or weight decays are left out."
    return Table(f"differences in {first.shown_as}", rows, note, describe_run(run))


class Outcomes(Section):
    """The tables of each run, from its summary."""

    NAME = "tables"
    TITLE = "Results"

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        if not run.outcomes:
            self.context.report.problems.append(f"{run.workdir}: no results yet: there is no summary.json")
            return
        for name, make in (("outcomes", outcomes), ("parts", parts), ("differences", differences)):
            self.add(make(run), name, run)


# --- Of several runs --------------------------------------------------------------------------------------------------


def _shown_runs(found: Iterable[tuple[tuple, Run]]) -> tuple[dict[tuple, Run], list[str]]:
    """(By (variant, another place) in a table the run with most seeds, or the first; notes of what is not shown)."""
    kept, left_out = {}, []
    for place, run in found:
        other = kept.setdefault(place, run)
        if other is not run:
            if len(run.outcomes[place[0]].seeds) > len(other.outcomes[place[0]].seeds):
                kept[place], run = run, other
            left_out.append((place, run))
    return kept, [f"not shown: {place[0]} of {run.name}, as {kept[place].name} has it too" for place, run in left_out]


def _share(outcome: VariantOutcome, step: str = "") -> Cell:
    """How many seeds reached 90 % and 99 %, then `step`, with the accuracies as numbers."""
    names = ("mean_accuracy", "std_accuracy", "peak_accuracy", "num_converged", "num_solved")
    numbers = {name: getattr(outcome, name) for name in names} | cells.share_converged(outcome).numbers
    text = cells.converged_and_solved(outcome) + step
    return Cell(text, shown=outcome.shown_as, num_seeds=len(outcome.seeds), **numbers)


def as_the_paper(runs: Sequence[Run]) -> list[Table]:
    """Tabulate several runs as the paper's Tables 2 and 3: λ against key-value pairs or length, the paper's numbers below
    ours.

    Returns:
        A table for each set of runs that differ in nothing else, and have two columns at least.
    """
    runs = [run for run in runs if run.outcomes and run.task.AXIS is not None]
    groups: dict[tuple, list[tuple[Run, str]]] = {}
    for run, changes in zip(runs, changed_settings(runs), strict=True):
        axis = f"task.{run.task.AXIS[0]}"
        same = tuple((name, repr(value)) for name, value in experiment_of(run).items() if name != axis)
        groups.setdefault(same, []).append((run, changes))
    tables = [_against_axis([run for run, _ in group], group[0][1]) for group in groups.values()]
    return [table for table in tables if table is not None]


def _against_axis(runs: list[Run], changes: str) -> Table | None:
    """One table of λ against pairs or length; None for fewer than two columns."""
    field, shown, words = runs[0].task.AXIS
    runs = sorted(runs, key=lambda run: run.config.task[field])
    columns = sorted({run.config.task[field] for run in runs})
    if len(columns) < 2:
        return None
    places, notes = _shown_runs(((variant, run.config.task[field]), run) for run in runs for variant in run.outcomes)
    outcomes = on_one_set({place: run.outcomes[place[0]] for place, run in places.items()})
    rows, by_length = [], field == "seq_len"
    for variant in dict.fromkeys(variant for variant, _ in places):
        ours, theirs, shares = ({"variant": variant, "": x} for x in (MEANS, "the paper", SHARES))
        for value in (value for value in columns if (variant, value) in places):
            outcome, name = outcomes[variant, value], f"{shown}={value}"
            theirs[name] = paper.result(places[variant, value].config, variant) or "–"
            mean_and_peak = f"{100 * outcome.mean_accuracy:.1f} ({100 * outcome.peak_accuracy:.1f})"
            ours[name] = cells.mean_and_std(100 * outcome.accuracy) if by_length else mean_and_peak
            shares[name] = _share(outcome)
        rows += [ours, shares] + ([theirs] if any(x != "–" for k, x in theirs.items() if "=" in k) else [])
    first = (
        f"{cells.accuracy_note(outcome, counts_solved=True)} Shown: {'mean ± std' if by_length else 'mean (peak)'} of the "
        f"seeds. {COUNTED}. Runs: {', '.join(run.name for run in runs)}"
    )
    if field == "num_pairs" and 32 in columns and any("paper" in row[""] for row in rows):
        again = " and ".join(f"{variant} {number}" for variant, number in paper.MQAR_32_AGAIN.items())
        notes.append(f"in its text the paper has another run at kv=32: {again}")
    setting = "" if RELEASED in changes else setting_of(runs[0].config)
    title = f"{runs[0].task.TITLE}{setting and f', setting {setting}'}: {outcome.shown_as}, by {words}"
    title += f", length {runs[0].config.task.seq_len}" if shown == "kv" else ""
    return Table(title + (changes and f" ({changes})"), rows, "; ".join([first, *notes]) + ".")


def by_setting(runs: Sequence[Run]) -> list[Table]:
    """Tabulate each task that was run in several settings: for each setting the accuracies of every variant, and below them
    how many seeds reach 90 % and 99 %.

    Returns:
        A table for each such task, settings with few changes first, all accuracies on one set (test or validation).
    """
    groups: dict[str, list[Run]] = {}
    finished = [run for run in runs if run.outcomes and run.task.score.thresholds]
    for run in sorted(finished, key=lambda run: cells.natural(run.task.describe())):
        groups.setdefault(run.task.describe(), []).append(run)
    shown, notes = {}, {}  # by task; runs by variant and changes
    for task, group in groups.items():
        changed = sorted(
            zip(changed_settings(group), group, strict=True),
            key=lambda pair: (bool(pair[0]) + pair[0].count(","), pair[0]),
        )
        if len({changes for changes, _ in changed}) > 1:
            places = (((variant, changes), run) for changes, run in changed for variant in run.outcomes)
            shown[task], notes[task] = _shown_runs(places)
    outcomes = on_one_set({(task, *at): run.outcomes[at[0]] for task in shown for at, run in shown[task].items()})
    tables = []
    for task, of_task in shown.items():
        rows: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        for variant, changes in of_task:
            outcome, changed = outcomes[task, variant, changes], {"changed": changes or "nothing"}
            means, shares = rows.setdefault(changes, (changed | {"": MEANS}, changed | {"": SHARES}))
            means[variant] = cells.mean_and_std(cells.finite(100 * outcome.accuracy))
            shares[variant] = _share(outcome, cells.median_step(outcome))
        note = (
            f"{cells.accuracy_note(outcome, counts_solved=True)} Mean ± std of the seeds. {COUNTED}; the median step at which "
            "those did. Changed: against the default settings, as far as these runs differ"
        )
        title, both = f"{task}: {outcome.shown_as}, by what is changed", list(itertools.chain(*rows.values()))
        tables.append(Table(title, both, "; ".join([note, *notes[task]]) + "."))
    return tables


def tables_by_size(runs: Sequence[Run]) -> list[Table]:
    """Tabulate accuracies by what a layer keeps: a row for each variant, a column for each size of its states.

    Runs go together that differ in nothing but OF_STATES, and in rates that each of their variants names. Of several
    learning rates the one counts that the other half of the seeds choose. Variants of one size are left out.

    Returns:
        A table for each task and setting.
    """
    runs = [run for run in runs if run.outcomes and run.task.score is ACCURACY]
    outcomes = on_one_set({(i, v): outcome for i, run in enumerate(runs) for v, outcome in run.outcomes.items()})
    named_by_all = RATES.intersection(*(named_rates(variant) for run in runs for variant in run.outcomes))
    changed = changed_settings(runs, unnamed=OF_STATES | named_by_all)
    tasks: dict[str, dict[str, dict[str, tuple]]] = {}  # by task, variant and size in words
    for index, (run, changes) in enumerate(zip(runs, changed, strict=True)):
        name = "; ".join(filter(None, (run.task.describe(), changes)))
        for variant, group in by_variant(run, {v: outcomes[index, v] for v in run.outcomes}).items():
            model, best = checked_experiment(run.config, group[0].variant).model.settings, chosen_rate(ACCURACY, group)
            kept = None if isinstance(model, OwnSettings) else model.numbers_kept(run.task.max_seq_len)
            if kept is not None and len(best.shown):
                states = f"{model.heads} × {model.key_dim} × {model.head_dim}"
                sizes = tasks.setdefault(name, {}).setdefault(variant, {})
                if states not in sizes or len(best.shown) > len(sizes[states][2].shown):
                    sizes[states] = kept, states, best
    note = (
        "Columns: heads × width of keys × width of values. Cells: mean over seeds in % [95 % interval], with the recurrent "
        "state size, how many numbers a layer keeps at the longest sequence: one state, or a state for each level (and sums "
        "of keys for a content-aware λ), or all keys and values."
    )
    tables = []
    for task, variants in tasks.items():
        several = {variant: sizes for variant, sizes in variants.items() if len(sizes) > 1}
        every = sorted((one for sizes in several.values() for one in sizes.values()), key=lambda one: one[:2])
        rows = []
        for variant, sizes in several.items():
            row = {"variant": variant} | {states: "–" for _, states, _ in every}
            for numbers_kept, states, best in sizes.values():
                cell = cells.with_interval(*best[2:])
                numbers = {"numbers_kept": numbers_kept, "num_seeds": len(best.shown), **cell.numbers}
                row[states] = Cell(f"{cell} with {numbers_kept:,}", **numbers)
            rows.append(row)
        if rows:
            shown_as = next(iter(outcomes.values())).shown_as
            tables.append(Table(f"{task}: {shown_as}, by the size of the states", rows, note))
    return tables


class Comparisons(Section):
    """The tables of several runs, from their summaries."""

    NAME = "tables"
    TITLE = "Results"

    def show_all(self) -> None:
        for name, make in (("as-the-paper", as_the_paper), ("by-setting", by_setting), ("by-size", tables_by_size)):
            with self.context.attempt("all runs", f"tables {name}"):
                for index, table in enumerate(make(self.context.runs), 1):
                    self.add(table, f"{name}-{index}")
