"""Tables of other things than accuracies in summaries: answers, λ, longer sequences, perplexity, time."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from loglinear_jax.analysis import paper
from loglinear_jax.analysis.answer_levels import answer_levels, levels_table
from loglinear_jax.analysis.pages.options import Labelled, Rows, Runs, table
from loglinear_jax.runs.cells import (
    mean_and_std,
    mean_std_and_reached,
    num_seeds,
    of_evaluated,
    perplexity,
)
from loglinear_jax.tasks import CONVERGED_ACCURACY


@table("answer_levels", of_accuracies=False)
def levels_of_tasks(rows: Labelled) -> Rows:
    """The Fenwick levels that hold a task's answers, from its definition. rows: "label = run"."""
    shares = {label: answer_levels(runs[0].task) for label, runs, _ in rows}
    return levels_table(shares).rows


@table(of_accuracies=False)
def looks(runs: Runs) -> Rows:
    """How often λ is largest at the answer, from the runs' looks.md."""
    return [row for run in runs for row in _markdown_rows(run.workdir / "looks.md")]


@table(of_accuracies=False)
def lengths(runs: Runs) -> Rows:
    """Accuracy in % (seeds at ≥ 90 %) or perplexity at the trained length and beyond, mean ± std; from lengths.csv."""
    rows: dict[str, dict[str, str]] = {}
    one_task = all(run.config.task == runs[0].config.task for run in runs)
    for run in runs:
        with (run.workdir / "lengths.csv").open(encoding="utf-8") as file:
            evaluated = list(csv.DictReader(file))
        for line in evaluated:
            row = rows.setdefault(line["variant"], {"variant": line["variant"]})
            length = f"length {line['length']}"
            column = length if one_task else f"kv={run.config.task.num_pairs}, {length}"
            if column not in row:
                alike = [other for other in evaluated if all(other[key] == line[key] for key in ("variant", "length"))]
                row[column] = _mean_at_length(alike)
    if all(run.config.task.name == "mqar" for run in runs):
        for variant, row in rows.items():
            row["the paper at 256"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
    return list(rows.values())


def _mean_at_length(lines: list[dict[str, str]]) -> str:
    """Of one variant at one length, a line a seed."""
    if "perplexity" in lines[0]:
        return mean_and_std([float(line["perplexity"]) for line in lines])
    return mean_std_and_reached([float(line["accuracy"]) for line in lines], 100 * CONVERGED_ACCURACY)


@table(of_accuracies=False)
def variation_of_lam(runs: Runs) -> Rows:
    """How much λ varies over tokens in all seeds, from the runs' lam-dependence.md; `fixed` does not vary and is left out."""
    rows = []
    for run in runs:
        for row in _markdown_rows(run.workdir / "lam-dependence.md"):
            if row.pop("seeds").startswith("all") and row["variant"] != "fixed":
                rows.append({"pairs": str(run.config.task.num_pairs)} | row)
    return rows


@table(of_accuracies=False)
def perplexities(runs: Runs) -> Rows:
    """Perplexity of language models, mean ± std over seeds, the median step of the best, and what λ adds to the parameters."""
    rows = []
    for run in runs:
        for variant, o in run.outcomes.items():
            steps = [step for step in o.best_step if step is not None]
            rows.append(
                {
                    "hidden": str(run.config.model.hidden),
                    "predicts": o.predicts,
                    "variant": variant,
                    "seeds": num_seeds(o),
                    "validation": perplexity(o.best_loss),
                    "test": perplexity(of_evaluated(o, o.test_loss)),
                    "best at step": f"{np.median(steps):,.0f}" if steps else "–",
                    "λ adds": f"{o.lam_params_percent:.4f} %",
                }
            )
    return rows


@table(of_accuracies=False)
def losses_by_position(runs: Runs) -> Rows:
    """Test loss of language models in nats, mean ± std over seeds, by the position in the window: from 2^i to 2^(i+1) - 1."""
    return [
        {"variant": variant}
        | {
            f"from {first}": mean_and_std(of_evaluated(o, losses), 3)
            for first, losses in o.test_loss_from_position.items()
        }
        for run in runs
        for variant, o in run.outcomes.items()
    ]


@table("time", of_accuracies=False)
def training_time(rows: Labelled) -> Rows:
    """Minutes of training and evaluation, compilation included, and the range of seed-steps a second. rows: "label = runs"."""
    found, all_runs, all_minutes = [], 0, 0.0
    for label, runs, _ in rows:
        variants = [o for run in runs for o in run.outcomes.values()]
        minutes = sum(o.seconds for o in variants) / 60
        rates = [o.seed_steps_per_second for o in variants]
        found.append(
            {
                "experiment": label,
                "runs": str(len(runs)),
                "minutes": f"{minutes:.1f}",
                "seed-steps a second": f"{_round(min(rates)):,.0f} to {_round(max(rates)):,.0f}",
            }
        )
        all_runs, all_minutes = all_runs + len(runs), all_minutes + minutes
    return [*found, {"experiment": "all of these", "runs": str(all_runs), "minutes": f"{all_minutes:.0f}"}]


def _markdown_rows(path: Path) -> Rows:
    """The rows of a Markdown table."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, cells, strict=True)) for cells in body]


def _round(rate: float) -> float:
    """To three digits."""
    return float(f"{rate:.3g}")
