"""Tables of runs: outcomes as the paper prints them, with shares and intervals, and tests of differences."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap
from tabulate import tabulate

from loglinear_jax.analysis import paper
from loglinear_jax.analysis.figures import describe_run
from loglinear_jax.analysis.lam_values import relative_variation
from loglinear_jax.analysis.runs import Record
from loglinear_jax.summary import CONVERGED_SHARE, columns_of
from loglinear_jax.train import CONVERGED

RESAMPLES = 10_000
LATEX = {"±": r"$\pm$", "λ": r"$\lambda$", "≥": r"$\ge$", "–": "--", "×": r"$\times$", "−": "$-$", "→": r"$\to$", "≡": r"$\equiv$", "²": "$^2$"}  # fmt: skip


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


def outcomes(record: Record) -> Table:
    """Every variant of a run: mean ± std, peak, share of converged seeds with Wilson's interval, and the paper's number."""
    rows, raw = [], []
    variants = _variants(record)
    published = {variant: paper.result(record.config, variant) for variant in variants}
    for variant, s in variants.items():
        row = {"variant": variant, "seeds": str(len(s["seeds"]))} | columns_of(s)
        if any(published.values()):
            row["the paper"] = published[variant] or "–"
        rows.append(row)
        lists = ("seeds", "best_loss", "best_accuracy", "best_step", "converged_step", "diverged_step", "test_loss")
        numbers = {k: v for k, v in s.items() if k not in lists and not isinstance(v, (dict, list))}
        low, high = s["share_converged_interval"]
        raw.append(
            {"run": record.name, "variant": variant, "num_seeds": len(s["seeds"])}
            | numbers
            | {
                "share_low": low,
                "share_high": high,
                "diverged": _count(s["diverged_step"]),
                "the_paper": published[variant],
            }
        )
    metric = "lowest loss" if record.config.train.metric == "loss" else "best accuracy"
    note = f"Of each seed its {metric} over the evaluations counts, in validation. Intervals: Wilson, 95 %."
    if any(published.values()):
        note += " The last column is the paper's, of 3 to 11 seeds."
    return Table(f"{describe_run(record)}: outcomes", rows, raw, note)


def by_seed(record: Record) -> Table:
    """What each seed came to: best accuracy in %, or lowest perplexity."""
    variants = _variants(record)
    language = record.config.train.metric == "loss"

    def value(s, index):
        if language:
            return None if s["best_loss"][index] is None else float(np.exp(s["best_loss"][index]))
        return 100 * s["best_accuracy"][index]

    seeds = next(iter(variants.values()))["seeds"]
    raw = [{"seed": seed} | {v: value(s, i) for v, s in variants.items()} for i, seed in enumerate(seeds)]
    rows = [{k: "–" if x is None else str(x) if k == "seed" else f"{x:.1f}" for k, x in row.items()} for row in raw]
    what = "validation perplexity" if language else "best accuracy in %"
    return Table(f"{describe_run(record)}: {what} of every seed", rows, raw)


def as_the_paper(records: Sequence[Record]) -> list[Table]:
    """The paper's Tables 1 and 2 from several runs: λ against key-value pairs, or against length; its numbers below ours."""
    axes = {"mqar": ("num_pairs", "kv"), "selective_copy": ("seq_len", "length")}
    groups: dict[tuple, dict[int, Record]] = {}
    for record in records:
        if record.summary is None or record.config.task.name not in axes:
            continue
        field, _ = axes[record.config.task.name]
        config = record.config.to_dict()
        column = config["task"].pop(field)
        config["model"].pop("max_length")
        for name in ("num_seeds", "first_seed", "checkpoint_every", "steps_per_dispatch", "eval_batch_size"):
            config["train"].pop(name, None)
        key = str((config["task"], config["model"], config["train"]))
        groups.setdefault(key, {}).setdefault(column, record)
    tables = []
    for columns in groups.values():
        if len(columns) < 2:
            continue
        first = next(iter(columns.values()))
        field, shown = axes[first.config.task.name]
        rows, raw = [], []
        for variant in dict.fromkeys(v for record in columns.values() for v in _variants(record)):
            ours, theirs, shares = ({"variant": variant, "": what} for what in ("accuracy %", "the paper", "converged"))
            for value, record in sorted(columns.items()):
                s, name = _variants(record).get(variant), f"{shown}={value}"
                theirs[name] = paper.result(record.config, variant) or "–"
                if s is None:
                    continue
                cells = columns_of(s)
                mean = next(cell for column, cell in cells.items() if column.startswith("accuracy"))
                ours[name] = mean if field == "seq_len" else f"{100 * s['mean_accuracy']:.1f} ({cells['peak %']})"
                low, high = s["share_converged_interval"]
                shares[name] = f"{s['num_converged']}/{len(s['seeds'])} [{low:.2f}, {high:.2f}]"
                raw.append(
                    {"variant": variant, field: value, "num_seeds": len(s["seeds"])}
                    | {key: s[key] for key in ("mean_accuracy", "std_accuracy", "peak_accuracy", "num_converged")}
                    | {"share_low": low, "share_high": high, "the_paper": paper.result(record.config, variant)}
                )
            rows += [ours, shares] + ([theirs] if any(x != "–" for k, x in theirs.items() if "=" in k) else [])
        how = "mean ± std" if field == "seq_len" else "mean (peak)"
        scheme = f"{first.config.model.init_scheme} setting"
        note = f"accuracy: {how}; converged: seeds that reached {CONVERGED_SHARE:.0%}, Wilson's 95 % interval of their share."
        task = {"mqar": "MQAR", "selective_copy": "Selective copying"}[first.config.task.name]
        title = f"{task}, {scheme}, by {'key-value pairs' if shown == 'kv' else 'length'}"
        if shown == "kv":
            title += f", length {first.config.task.seq_len}"
        tables.append(Table(title, rows, raw, note))
    return tables


# --- Differences ------------------------------------------------------------------------------------------------------


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> tuple[int, int, float]:
    """(seeds in which only a holds, only b, two-sided p) by McNemar's exact test (1947)."""
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    p = float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0
    return only_a, only_b, p


def mean_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """(mean of a - b over seeds, low, high) with a bootstrap interval of 95 % (percentiles of 10,000 resamples; Efron 1979).

    nan for the interval of fewer than two seeds.
    """
    difference = np.subtract(a, b)
    if len(difference) < 2:
        return float(difference.mean()), np.nan, np.nan
    found = bootstrap(
        (difference,),
        np.mean,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
        vectorized=True,
    ).confidence_interval
    return float(difference.mean()), float(found.low), float(found.high)


def differences(record: Record) -> Table | None:
    """Every two variants of a run, paired by seed; None if there is only one."""
    variants = _variants(record)
    if len(variants) < 2:
        return None
    language = record.config.train.metric == "loss"
    rows, raw = [], []
    for (name_a, a), (name_b, b) in itertools.combinations(variants.items(), 2):
        if language:
            pairs = [(x, y) for x, y in zip(a["best_loss"], b["best_loss"], strict=True) if None not in (x, y)]
            values = [np.exp(column) for column in zip(*pairs, strict=True)]
        else:
            values = [100 * np.asarray(s["best_accuracy"]) for s in (a, b)]
        mean, low, high = mean_difference(*values)
        row = {"A": name_a, "B": name_b}
        number = dict(row)
        for threshold in () if language else (CONVERGED_SHARE, CONVERGED):
            only_a, only_b, p = mcnemar(*([x >= threshold for x in s["best_accuracy"]] for s in (a, b)))
            row[f"≥ {threshold:.0%}: only A, only B, McNemar p"] = f"{only_a}, {only_b}, {p:.2g}"
            at = f"{100 * threshold:.0f}"
            number |= {f"only_a_{at}": only_a, f"only_b_{at}": only_b, f"mcnemar_p_{at}": p}
        what = "perplexity A − B" if language else "accuracy A − B, points"
        row[f"{what} [95 % interval]"] = (
            f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" if np.isfinite(low) else f"{mean:+.2f}"
        )
        rows.append(row)
        raw.append(number | {"mean_difference": mean, "low": low, "high": high})
    note = "Paired by seed. The p-values are exact and not corrected for the number of comparisons; intervals are bootstrapped."
    return Table(f"{describe_run(record)}: differences", rows, raw, note)


# --- λ ----------------------------------------------------------------------------------------------------------------


def dependence(
    by_variant: Mapping[str, Sequence[Mapping[str, np.ndarray]]], converged: Mapping[str, Sequence[bool]], title: str
) -> Table:
    """How input-dependent each variant's λ is: one row for all seeds, and for those that converged and those that did not.

    by_variant: for each variant, one `input_dependence` a seed. The CSV has every layer, head and level.
    """
    rows, raw = [], []
    for variant, seeds in by_variant.items():
        flags = np.asarray(converged[variant], bool)
        parts = {"all": np.ones_like(flags)} | (
            {"converged": flags, "others": ~flags} if 0 < flags.sum() < len(flags) else {}
        )
        for name, chosen in parts.items():
            picked = [d for d, take in zip(seeds, chosen, strict=True) if take]
            variation = np.array([100 * relative_variation(d) for d in picked])
            share = (
                100 * np.nanmean([_pooled_share(d) for d in picked])
                if any(np.isfinite(_pooled_share(d)) for d in picked)
                else np.nan
            )
            entropy = np.mean([d["entropy"].mean() for d in picked])
            low, high = min(np.nanmin(d["min"]) for d in picked), max(np.nanmax(d["max"]) for d in picked)
            spread = f" ± {variation.std(ddof=1):.1f}" if len(picked) > 1 else ""
            rows.append(
                {
                    "variant": variant,
                    "seeds": f"{name} ({len(picked)})",
                    "std over tokens / mean of λ": f"{variation.mean():.1f}{spread} %",
                    "λ from – to": f"{low:.3g} – {high:.3g}",
                    "of the variance between roles": f"{share:.0f} %" if np.isfinite(share) else "–",
                    "entropy over levels, bits": f"{entropy:.2f}",
                }
            )
        for index, d in enumerate(seeds):
            for layer, head, level in np.ndindex(d["mean"].shape):
                at = (layer, head, level)
                numbers = {name: float(d[name][at]) for name in ("mean", "std", "min", "max", "role_share")}
                raw.append(
                    {"variant": variant, "seed_index": index, "converged": bool(flags[index])}
                    | {"layer": layer, "head": head, "level": level}
                    | numbers
                    | {"entropy_of_head_bits": float(d["entropy"][layer, head])}
                )
    low, high = paper.BASELINE_LAM_RANGE
    note = (
        "Over the tokens at which a level's bucket is not empty; means over layers, heads, levels and seeds. "
        f"The paper calls its baseline (linear) input-independent, with λ from {low} to {high}."
    )
    return Table(title, rows, raw, note)


def _pooled_share(d: Mapping[str, np.ndarray]) -> float:
    """The share of the variance over tokens that lies between roles, over all layers, heads and levels."""
    total = np.where(np.isfinite(d["role_share"]), d["std"] ** 2, 0)
    return float(np.nansum(d["role_share"] * total) / total.sum()) if total.sum() else np.nan


def _variants(record: Record) -> dict[str, dict[str, Any]]:
    return {} if record.summary is None else record.summary["variants"]


def _count(steps: Sequence[int | None]) -> int:
    return sum(step is not None for step in steps)
