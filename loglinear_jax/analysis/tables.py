"""Tables of runs: outcomes as the paper prints them, with shares and intervals, and tests of differences."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from tabulate import tabulate

from loglinear_jax.analysis import paper
from loglinear_jax.analysis.figures import describe_run
from loglinear_jax.analysis.lam_values import relative_variation
from loglinear_jax.config import default_config, differing_names, flat_settings, released_config, robust_config
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.runs.outcome_table import mean_and_std, outcome_columns
from loglinear_jax.statistics import longer_among, mcnemar, mean_difference
from loglinear_jax.tasks import CONVERGED_ACCURACY

LATEX = {
    "±": r"$\pm$", "λ": r"$\lambda$", "≥": r"$\ge$", "–": "--", "×": r"$\times$", "−": "$-$", "→": r"$\to$",
    "≡": r"$\equiv$", "²": "$^2$",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table:
    """rows: cells to be read, by column. raw: the same as plain numbers, for CSV; rows if None. note: stands below."""

    title: str
    rows: list[dict[str, str]]
    raw: list[dict[str, Any]] | None = None
    note: str = ""

    def text(self, style: str) -> str:
        """In one of tabulate's styles."""
        return tabulate(self.rows, headers="keys", tablefmt=style, disable_numparse=True, missingval="–")

    def write(self, stem: Path) -> list[Path]:
        """Writes stem.md, stem.csv and stem.tex."""
        note = f"\n\n{self.note}" if self.note else ""
        stem.with_suffix(".md").write_text(f"**{self.title}**\n\n{self.text('github')}{note}\n")
        raw = self.rows if self.raw is None else self.raw
        with stem.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in raw for key in row)))
            writer.writeheader()
            writer.writerows(raw)
        tex = self.text("latex_booktabs")
        for sign, command in LATEX.items():
            tex = tex.replace(sign, command)
        stem.with_suffix(".tex").write_text(f"% {self.title}\n{tex}\n")
        return [stem.with_suffix(suffix) for suffix in (".md", ".csv", ".tex")]


# --- Outcomes -------------------------------------------------------------------------------------------------------


def outcomes(record: Run) -> Table:
    """Every variant of a run: mean ± std, peak, share of converged seeds with Wilson's interval, and the paper's number."""
    rows, raw = [], []
    variants = _variants(record)
    published = {variant: paper.result(record.config, variant) for variant in variants}
    for variant, s in variants.items():
        row = {"variant": variant, "seeds": str(len(s.seeds))} | outcome_columns(s)
        if any(published.values()):
            row["the paper"] = published[variant] or "–"
        rows.append(row)
        lists = ("seeds", "best_loss", "best_accuracy", "best_step", "solved_step", "diverged_step", "test_loss")
        numbers = {k: v for k, v in s.to_json().items() if k not in lists and not isinstance(v, (dict, list))}
        low, high = s.share_converged_interval
        raw.append(
            {"run": record.name, "variant": variant, "num_seeds": len(s.seeds)}
            | numbers
            | {
                "share_low": low,
                "share_high": high,
                "diverged": s.num_diverged,
                "the_paper": published[variant],
            }
        )
    metric = "highest accuracy" if record.task.score.higher_is_better else "lowest loss"
    note = f"Of each seed its {metric} over the evaluations counts, in validation. Intervals: Wilson, 95 %."
    if any(published.values()):
        note += " The last column is the paper's, of 3 to 11 seeds."
    return Table(f"{describe_run(record)}: outcomes", rows, raw, note)


def by_seed(record: Run) -> Table:
    """What each seed came to: best accuracy in %, or lowest perplexity."""
    variants = _variants(record)
    seeds = next(iter(variants.values())).seeds
    best = {v: [None if np.isnan(x) else float(x) for x in s.best] for v, s in variants.items()}
    raw = [{"seed": seed} | {v: best[v][i] for v in variants} for i, seed in enumerate(seeds)]
    rows = [{k: "–" if x is None else str(x) if k == "seed" else f"{x:.1f}" for k, x in row.items()} for row in raw]
    what = "best accuracy in %" if record.task.score.unit else "validation perplexity"
    return Table(f"{describe_run(record)}: {what} of every seed", rows, raw)


PRESETS = {"released setting": released_config, "robust": robust_config}
# What does not make a setting another one.
BESIDES = {
    "variants", "model.lam", "train.num_seeds", "train.first_seed", "train.checkpoint_every", "train.steps_per_dispatch",
    "train.eval_batch_size",
}  # fmt: skip


def as_the_paper(records: Sequence[Run]) -> list[Table]:
    """The paper's Tables 2 and 3 from several runs: λ against key-value pairs, or against length; its numbers below ours.

    Runs go together that differ in nothing else; of a variant that was run twice the run with more seeds is shown, or the
    first.
    """
    records = _recall_results(records)
    groups: dict[tuple, list[int]] = {}
    for index, record in enumerate(records):
        axis = f"task.{record.task.AXIS[0]}"
        same = tuple((name, value) for name, value in _setting(record).items() if name != axis)
        groups.setdefault(same, []).append(index)
    changes = changed_settings(records)
    tables = [_against_axis([records[i] for i in group], changes[group[0]]) for group in groups.values()]
    return [table for table in tables if table is not None]


def by_setting(records: Sequence[Run]) -> dict[str, Table]:
    """For each recall task, in words, that was run in several settings: a row for each, with every variant's share of converged
    seeds; settings with few changes first."""
    groups: dict[str, list[Run]] = {}
    for record in sorted(_recall_results(records), key=lambda record: tuple(record.config.task.values())):
        groups.setdefault(record.task.describe(), []).append(record)
    return {
        task: _against_settings(task, group) for task, group in groups.items() if len(set(changed_settings(group))) > 1
    }


def changed_settings(records: Sequence[Run]) -> list[str]:
    """For each run the settings of model and training in which the runs differ, where they are not the default:
    "norm=pre, conv_width=4"; a preset of `PRESETS` is one of them."""
    settings, default = [_setting(record) for record in records], flat_settings(default_config())
    differing = [name for name in differing_names(settings) if not name.startswith("task.")]
    return [_changes({name: setting[name] for name in differing if name in setting}, default) for setting in settings]


def _changes(setting: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    changed = {name: value for name, value in setting.items() if value != default.get(name)}
    words = []
    for word, preset in _presets().items():
        if preset.items() <= changed.items():
            words.append(word)
            changed = {name: value for name, value in changed.items() if name not in preset}
    return ", ".join([*words, *(f"{name.partition('.')[2]}={value}" for name, value in changed.items())])


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    """By the words for each of `PRESETS` the default settings that it changes, as it sets them."""
    changes = {}
    for word, apply in PRESETS.items():
        config = default_config()
        apply(config)
        names = differing_names([flat_settings(default_config()), flat_settings(config)])
        changes[word] = {name: flat_settings(config)[name] for name in names}
    return changes


def _setting(record: Run) -> dict[str, Any]:
    return {name: value for name, value in flat_settings(record.config).items() if name not in BESIDES}


def _recall_results(records: Sequence[Run]) -> list[Run]:
    return [record for record in records if record.summary is not None and record.task.AXIS is not None]


def _against_settings(task: str, records: list[Run]) -> Table:
    """One such table."""
    found: dict[str, dict[str, Run]] = {}  # by changes and variant
    notes = []
    by_changes = zip(changed_settings(records), records, strict=True)
    for changes, record in sorted(by_changes, key=lambda pair: (bool(pair[0]) + pair[0].count(","), pair[0])):
        for variant in _variants(record):
            _keep_most_seeds(found.setdefault(changes, {}), variant, variant, record, notes)
    rows, raw = [], []
    for changes, by_variant in found.items():
        row = {"changed": changes or "nothing"}
        for variant, record in by_variant.items():
            s = _variants(record)[variant]
            row[variant] = _shares(s)
            if s.median_solved_step is not None:
                row[variant] += f"; {s.median_solved_step:.0f}"
            raw.append({"run": record.name, "changed": changes, "variant": variant} | _share_numbers(s))
        rows.append(row)
    notes.insert(
        0,
        "Seeds that reached 90 %, with Wilson's 95 % interval of their share, and 99 %; the median step at which those did. "
        "Changed: against the default settings, as far as these runs differ",
    )
    return Table(f"{task}: by setting", rows, raw, "; ".join(notes) + ".")


def _keep_most_seeds(place: dict[Any, Run], key: Any, variant: str, record: Run, notes: list[str]) -> None:
    """Puts a run in its place in a table; of two for one place that with more seeds, or the first. The notes say which is
    not shown."""
    kept = place.setdefault(key, record)
    if kept is record:
        return
    if len(_variants(record)[variant].seeds) > len(_variants(kept)[variant].seeds):
        place[key], kept, record = record, record, kept
    notes.append(f"not shown: {variant} of {record.name}, as {kept.name} has it too")


def _shares(summary: VariantOutcome) -> str:
    """ "49/64 [0.65, 0.85], 38/64": how many seeds reached 90 %, and 99 %."""
    low, high = summary.share_converged_interval
    seeds = len(summary.seeds)
    return f"{summary.num_converged}/{seeds} [{low:.2f}, {high:.2f}], {summary.num_solved}/{seeds}"


def _share_numbers(summary: VariantOutcome) -> dict[str, Any]:
    """The same, and the accuracies, as plain numbers."""
    low, high = summary.share_converged_interval
    names = ("mean_accuracy", "std_accuracy", "peak_accuracy", "num_converged")
    return (
        {"num_seeds": len(summary.seeds)}
        | {name: getattr(summary, name) for name in names}
        | {"share_low": low, "share_high": high, "num_solved": summary.num_solved}
    )


def _against_axis(records: list[Run], changes: str) -> Table | None:
    """One table of λ against pairs or length; None for fewer than two columns."""
    records = sorted(records, key=lambda record: record.config.task[record.task.AXIS[0]])
    first = records[0]
    field, shown, words = first.task.AXIS
    found: dict[str, dict[int, Run]] = {}  # by variant and column
    notes = []
    for record in records:
        for variant in _variants(record):
            _keep_most_seeds(found.setdefault(variant, {}), record.config.task[field], variant, record, notes)
    columns = sorted({record.config.task[field] for record in records})
    if len(columns) < 2:
        return None
    rows, raw = [], []
    for variant, by_column in found.items():
        ours, theirs, shares = (
            {"variant": variant, "": what} for what in ("accuracy %", "the paper", "≥ 90 %, ≥ 99 %")
        )
        for value in columns:
            if value not in by_column:
                continue
            s, name = _variants(by_column[value])[variant], f"{shown}={value}"
            published = paper.result(by_column[value].config, variant)
            theirs[name] = published or "–"
            mean_and_peak = f"{100 * s.mean_accuracy:.1f} ({100 * s.peak_accuracy:.1f})"
            ours[name] = mean_and_std(s) if field == "seq_len" else mean_and_peak
            shares[name] = _shares(s)
            raw.append({"variant": variant, field: value} | _share_numbers(s) | {"the_paper": published})
        rows += [ours, shares] + ([theirs] if any(x != "–" for k, x in theirs.items() if "=" in k) else [])
    how = "mean ± std" if field == "seq_len" else "mean (peak)"
    notes.insert(
        0,
        f"Accuracy: {how} of the seeds' best. Then how many seeds reached 90 %, with Wilson's 95 % interval of their share, "
        f"and 99 %. Runs: {', '.join(record.name for record in records)}",
    )
    if field == "num_pairs" and 32 in columns and any("paper" in row[""] for row in rows):
        again = " and ".join(f"{variant} {number}" for variant, number in paper.MQAR_32_AGAIN.items())
        notes.append(f"in its text the paper has another run at kv=32: {again}")
    scheme = ", text setting" if "released" not in changes else ""
    title = f"{first.task.TITLE}{scheme}, by {words}"
    if shown == "kv":
        title += f", length {first.config.task.seq_len}"
    if changes:
        title += f" ({changes})"
    return Table(title, rows, raw, "; ".join(notes) + ".")


def initial_memory(memory: Sequence[tuple[Run, str, Float[np.ndarray, "S layers heads"]]]) -> Table:
    """Whether the seeds that converged are those that remembered further back at the start.

    memory: runs, variants and their `decays.initial_memory`. Of each layer, and of all, the head that remembers longest counts.
    """
    changes = changed_settings([record for record, *_ in memory])
    rows, raw = [], []
    for (record, variant, tokens), changed in zip(memory, changes, strict=True):
        summary = _variants(record)[variant]
        converged = np.array(summary.best_accuracy, float) >= CONVERGED_ACCURACY
        name = {"task": record.task.describe(), "changed": changed or "nothing", "variant": variant}
        row = name | {"≥ 90 %": f"{converged.sum()}/{len(converged)}"}
        number = name | {"run": record.name, "num_converged": int(converged.sum()), "num_seeds": len(converged)}
        longest = {f"layer {i}": of_layer for i, of_layer in enumerate(tokens.max(2).T)} | {"all": tokens.max((1, 2))}
        for place, of_seeds in longest.items():
            chance, p = longer_among(of_seeds, converged)
            row[place] = f"{chance:.2f} (p = {p:.1g})" if np.isfinite(chance) else "–"
            number |= {f"{place}: probability": chance, f"{place}: p": p}
        rows.append(row)
        raw.append(number)
    note = (
        "The probability that a seed that reached 90 % started with a longer memory than one that did not (0.5: no matter; 1: "
        "the outcome follows from it), and the p-value of the Mann-Whitney test, not corrected for the number of comparisons. "
        "Memory: tokens after which a head's state has decayed to 1/e before training; the longest of the heads of a layer, "
        "or of all."
    )
    return Table("Which seeds converge, by how far back they remember at the start", rows, raw, note)


# --- Differences ------------------------------------------------------------------------------------------------------


def differences(record: Run) -> Table | None:
    """Every two variants of a run, paired by seed; None if there is only one."""
    variants = _variants(record)
    if len(variants) < 2:
        return None
    score = record.task.score
    rows, raw = [], []
    for (name_a, a), (name_b, b) in itertools.combinations(variants.items(), 2):
        values = np.array([a.best, b.best])
        values = values[:, np.isfinite(values).all(0)]
        row = {"A": name_a, "B": name_b, "seeds": str(len(values[0]))}
        number = dict(row)
        for threshold in score.thresholds:
            only_a, only_b, p = mcnemar(*([x >= threshold for x in s.best_accuracy] for s in (a, b)))
            row[f"≥ {threshold:.0%}: only A, only B, McNemar p"] = f"{only_a}, {only_b}, {p:.2g}"
            at = f"{100 * threshold:.0f}"
            number |= {f"only_a_{at}": only_a, f"only_b_{at}": only_b, f"mcnemar_p_{at}": p}
        what = "accuracy A − B, points" if score.unit else f"{score.name} A − B"
        mean, low, high = mean_difference(*values) if len(values[0]) else (np.nan,) * 3
        interval = f" [{low:+.2f}, {high:+.2f}]" if np.isfinite(low) else ""
        row[f"{what} [95 % interval]"] = f"{mean:+.2f}{interval}" if np.isfinite(mean) else "–"
        rows.append(row)
        raw.append(number | {"mean_difference": mean, "low": low, "high": high})
    note = (
        "Paired by seed. The p-values are exact and not corrected for the number of comparisons; intervals are bootstrapped, "
        "from 10 seeds on."
    )
    return Table(f"{describe_run(record)}: differences", rows, raw, note)


# --- λ ----------------------------------------------------------------------------------------------------------------


def dependence(
    by_variant: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]],
    converged: Mapping[str, Mapping[int, bool]],
    title: str,
) -> Table:
    """How input-dependent each variant's λ is: one row for all seeds, and for those that converged and those that did not.

    by_variant: for each variant, an `input_dependence` by seed. converged: whether that seed did. The CSV has every layer, head
    and level. Seeds whose λ is not finite are counted, and left out.
    """
    rows, raw = [], []
    for variant, seeds in by_variant.items():
        flags = {seed: bool(converged[variant][seed]) for seed, d in seeds.items() if np.isfinite(d["entropy"]).all()}
        parts = {"all": list(flags)}
        if len(set(flags.values())) == 2:
            parts |= {
                name: [s for s, flag in flags.items() if flag == want]
                for name, want in (("converged", True), ("others", False))
            }
        if left_out := len(seeds) - len(flags):
            parts |= {f"not finite: {left_out}": []}
        for name, chosen in parts.items():
            row = {"variant": variant, "seeds": f"{name} ({len(chosen)})"}
            if chosen:
                row |= _dependence_cells([seeds[seed] for seed in chosen])
            rows.append(row)
        for seed, d in seeds.items():
            for at in np.ndindex(d["mean"].shape):
                raw.append(
                    {"variant": variant, "seed": seed, "converged": bool(converged[variant][seed])}
                    | dict(zip(("layer", "head", "level"), at, strict=True))
                    | {name: float(d[name][at]) for name in ("mean", "std", "min", "max", "role_share")}
                    | {"entropy_of_head_bits": float(d["entropy"][at[:2]])}
                )
    low, high = paper.BASELINE_LAM_RANGE
    note = (
        "Over the tokens at which a level's bucket is not empty. Σ std / Σ mean: sums over layers, heads and levels, mean ± "
        "std over seeds; beside it the median of std / mean, in which levels of small λ count as much. The paper calls its "
        f"baseline (linear) input-independent, with λ from {low} to {high}."
    )
    return Table(title, rows, raw, note)


def _dependence_cells(found: Sequence[Mapping[str, np.ndarray]]) -> dict[str, str]:
    variation = 100 * np.array([relative_variation(d) for d in found])
    spread = f" ± {variation[:, 0].std(ddof=1):.1f}" if len(found) > 1 else ""
    shares = [share for d in found if np.isfinite(share := _pooled_share(d))]
    low, high = min(np.nanmin(d["min"]) for d in found), max(np.nanmax(d["max"]) for d in found)
    return {
        "Σ std over tokens / Σ mean of λ": f"{variation[:, 0].mean():.1f}{spread} %",
        "median std / mean": f"{variation[:, 1].mean():.1f} %",
        "λ from – to": f"{low:.3g} – {high:.3g}",
        "of the variance between roles": f"{100 * np.mean(shares):.0f} %" if shares else "–",
        "entropy over levels, bits": f"{np.mean([d['entropy'].mean() for d in found]):.2f}",
    }


def _pooled_share(d: Mapping[str, np.ndarray]) -> float:
    """The share of the variance over tokens that lies between roles, over all layers, heads and levels."""
    total = np.where(np.isfinite(d["role_share"]), d["std"] ** 2, 0)
    return float(np.nansum(d["role_share"] * total) / total.sum()) if total.sum() else np.nan


def _variants(record: Run) -> dict[str, VariantOutcome]:
    return record.outcomes
