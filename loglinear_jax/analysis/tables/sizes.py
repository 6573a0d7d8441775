"""Accuracy against how much a mixer keeps of a sequence: runs that differ in the size of their states alone."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loglinear_jax.analysis.experiments import changed_settings
from loglinear_jax.analysis.tables.rates import RATES, AtBest, at_best_of_runs, named_rates, without_rates
from loglinear_jax.analysis.tables.table import Table
from loglinear_jax.config import variant_config
from loglinear_jax.config.building import checked_settings
from loglinear_jax.runs.cells import with_interval
from loglinear_jax.runs.loading import Run

OF_STATES = {"model.heads", "model.key_groups", "model.key_dim", "model.head_dim"}
_numbers = operator.attrgetter("numbers", "states")


class AtSize(NamedTuple):
    """numbers: how many a layer keeps of the task's longest sequence (`MixerSettings.numbers_kept`). states: the size of
    its states in words. at_best: accuracies in %."""

    numbers: int
    states: str
    at_best: AtBest


def accuracies_by_size(runs: Sequence[Run]) -> tuple[dict[str, dict[str, list[AtSize]]], str]:
    """(By task and setting in words, then by variant, its accuracies from small to large states; what they are, such as "test
    accuracy").

    Runs go together that differ in nothing but OF_STATES, and in rates that each of their variants names; a variant that has
    one size is left out. Of one that was run twice with the same size, the run with more seeds, or the first. Rates as in
    `at_best_rates`.
    """
    of_runs, shown_as = at_best_of_runs(runs)
    named_by_all = RATES.intersection(*(named_rates(variant) for run, _ in of_runs for variant in run.outcomes))
    changed = changed_settings([run for run, _ in of_runs], unnamed=OF_STATES | named_by_all)
    found: dict[str, dict[str, dict[str, AtSize]]] = {}  # by name, variant and size
    for (run, of_run), changes in zip(of_runs, changed, strict=True):
        of_task = found.setdefault("; ".join(filter(None, (run.task.describe(), changes))), {})
        at_rates = without_rates(run.config, run.outcomes)
        for variant, at_best in of_run.items():
            _, model, _ = checked_settings(variant_config(run.config, next(iter(at_rates[variant]))))
            sizes, states = of_task.setdefault(variant, {}), f"{model.heads} × {model.key_dim} × {model.head_dim}"
            if len(at_best.shown) > (len(sizes[states].at_best.shown) if states in sizes else 0):
                sizes[states] = AtSize(model.numbers_kept(run.task.max_seq_len), states, at_best)
    several = {
        task: {variant: sorted(sizes.values(), key=_numbers) for variant, sizes in variants.items() if len(sizes) > 1}
        for task, variants in found.items()
    }
    return {task: variants for task, variants in several.items() if variants}, shown_as


def by_size(task: str, variants: Mapping[str, Sequence[AtSize]], shown_as: str) -> Table:
    """A row for each variant, a column for each size of states, of one task of `accuracies_by_size`."""
    rows, raw = [], []
    columns = dict.fromkeys(at.states for at in sorted(itertools.chain(*variants.values()), key=_numbers))
    for variant, sizes in variants.items():
        cells = {at.states: f"{with_interval(*at.at_best[1:])} with {at.numbers:,}" for at in sizes}
        rows.append({"variant": variant} | {states: cells.get(states, "–") for states in columns})
        for at in sizes:
            numbers = {"variant": variant, "states": at.states, "numbers_kept": at.numbers}
            of_seeds = at.at_best._asdict()
            raw.append(numbers | {"num_seeds": len(of_seeds.pop("shown"))} | of_seeds)
    note = (
        "Columns: heads × width of keys × width of values. Cells: mean over seeds in % [95 % interval], with how many numbers "
        "a layer keeps of the longest sequence when it decodes: one state, or a state for each level (and sums of keys, if λ "
        "looks at them), or all keys and values."
    )
    return Table(f"{task}: {shown_as}, by the size of the states", rows, raw, note)
