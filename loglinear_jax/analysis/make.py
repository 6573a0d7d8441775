"""What goes into a report: each section is computed and drawn here from runs; what a run lacks is named, and left out."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from loglinear_jax.analysis import complexity, figures, paper, tables
from loglinear_jax.analysis.attention_rows import attention_row
from loglinear_jax.analysis.cache import Cache
from loglinear_jax.analysis.figures import Panel, describe_run, describe_task, describe_variant
from loglinear_jax.analysis.lam_values import input_dependence, lam_values, sample_tokens, static_lam, used_levels
from loglinear_jax.analysis.lengths import lengths_to_test, scores_by_length
from loglinear_jax.analysis.report import Report, slug
from loglinear_jax.analysis.runs import Record, Run, load_record, load_run
from loglinear_jax.analysis.tables import Table
from loglinear_jax.checkpoints import NoReadableCheckpoint
from loglinear_jax.config import ConfigError, variant_config
from loglinear_jax.progress import progress_bar
from loglinear_jax.summary import CONVERGED_SHARE

log = logging.getLogger(__name__)

SECTIONS = ("tables", "curves", "lam", "dependence", "rows", "lengths", "complexity")
FROM_CHECKPOINTS = ("lam", "dependence", "rows", "lengths")
FEW_SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Choices:
    """What to show; the fields are the command line's flags.

    Raises ValueError for an unknown section.
    """

    sections: tuple[str, ...] = SECTIONS
    seeds: list[int] | None = None
    max_seeds: int | None = None
    layer: int = -1
    head: int = 0
    example: int = 0
    positions: list[int] | None = None
    sequences: int = 64
    evaluated: int = 256
    which: Literal["best", "last"] = "best"

    def __post_init__(self):
        if unknown := set(self.sections) - set(SECTIONS):
            raise ValueError(f"sections: there is no {sorted(unknown)[0]!r}, but {', '.join(SECTIONS)}")
        for name in ("sequences", "evaluated"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.example < self.sequences:
            raise ValueError(
                f"example={self.example}: expected 0 to {self.sequences - 1}, as there are {self.sequences}"
            )


def make_report(
    workdirs: Sequence[str | os.PathLike], out: str | os.PathLike, choices: Choices | None = None
) -> tuple[Path, list[str]]:
    """Writes figures, tables and report.html into `out`; returns the report's path and what had to be left out, and why.

    Raises ValueError if none of the workdirs can be read.
    """
    choices = choices or Choices()
    records, problems = [], []
    for workdir in dict.fromkeys(os.path.abspath(os.path.expanduser(workdir)) for workdir in workdirs):
        try:
            records.append(load_record(workdir))
        except (ConfigError, ValueError) as error:
            problems.append(str(error))
    if not records:
        raise ValueError("; ".join(problems) or "workdir: give at least one")
    maker = _Maker(records, Report(Path(out)), choices)
    maker.report.problems += problems
    maker.make()
    path = maker.report.write(_title(records), _settings(records), _commands(records))
    return path, maker.report.problems


def _title(records: Sequence[Record]) -> str:
    return describe_run(records[0]) if len(records) == 1 else f"Log-linear attention: {len(records)} runs"


def _commands(records: Sequence[Record]) -> list[str]:
    return [record.summary["command"] for record in records if record.summary and record.summary.get("command")]


def _settings(records: Sequence[Record]) -> Table:
    rows = []
    for record in records:
        model, train, summary = record.config.model, record.config.train, record.summary or {}
        variants = summary.get("variants", {})
        seconds = [s["seconds"] for s in variants.values() if "seconds" in s]
        rates = [s["seed_steps_per_second"] for s in variants.values() if s.get("seed_steps_per_second")]
        rows.append(
            {
                "run": record.name,
                "task": describe_task(record.config.task),
                "model": f"{model.layers} × {model.hidden}, {model.init_scheme} setting",
                "seeds": str(train.num_seeds),
                "steps": f"{train.num_steps:,} of {train.batch_size}, rate {train.learning_rate:g}, {train.precision}",
                "machine": summary.get("device", "–"),
                "JAX": summary.get("versions", {}).get("jax", "–"),
                "time": f"{sum(seconds) / 60:.1f} min" if seconds else "–",
                "seed-steps/s": f"{np.median(rates):,.0f}" if rates else "–",
            }
        )
    note = (
        "Time: training and evaluation of all variants, compilation included. seed-steps/s: the median over variants of optimiser "
        "steps of one seed in a second. Numbers called “the paper” are those that Amin, Li, Zhang and Ayhan print; all others "
        "were computed from these runs."
    )
    return Table("Runs", rows, note=note)


class _Maker:
    """Goes through the runs, one variant's parameters in memory at a time."""

    def __init__(self, records: list[Record], report: Report, choices: Choices):
        self.records, self.report, self.choices = records, report, choices
        self.cache = Cache(report.out / "cache")
        self._names = _distinct_names(records)

    def make(self) -> None:
        wanted = self.choices.sections
        if "tables" in wanted:
            self._tables()
        if "curves" in wanted:
            self._curves()
        by_tokens: dict[str, list[tuple[Record, list[Panel]]]] = {}
        if any(name in wanted for name in FROM_CHECKPOINTS):
            # Begun here, so that the report has them in this order.
            for name in ("λ over tokens", "λ by head and level", "How input-dependent is λ?", "What a head draws on"):
                self.report.section(name)
            for record in self.records:
                self._from_checkpoints(record, by_tokens)
            self._lam_of_several_runs(by_tokens)
        if "complexity" in wanted:
            self._complexity()

    def _stem(self, record: Record, what: str) -> str:
        return f"{what}-{self._names[record.workdir]}"

    def _titled(self, record: Record, what: str) -> str:
        """A title in the report: which run, if there are several, and what is shown."""
        return f"{describe_run(record)}: {what}" if len(self.records) > 1 else what[0].upper() + what[1:]

    # --- From summaries and metrics ---

    def _tables(self) -> None:
        section = self.report.section("Results")
        for index, table in enumerate(tables.as_the_paper(self.records)):
            self.report.add_table(section, table, f"as-the-paper-{index + 1}")
        several = len(self.records) > 4
        for record in self.records:
            if record.summary is None:
                self.report.problems.append(f"{record.workdir}: no results yet: there is no summary.json")
                continue
            for stem, make, folded in (
                ("outcomes", tables.outcomes, several),
                ("differences", tables.differences, True),
                ("seeds", tables.by_seed, True),
            ):
                table = make(record)
                if table is not None:
                    shown = self._titled(record, table.title.removeprefix(f"{describe_run(record)}: "))
                    self.report.add_table(section, table, self._stem(record, stem), shown, folded)

    def _curves(self) -> None:
        section = self.report.section(
            "Learning curves", "Every seed is a thin line; medians and quartiles over seeds are thick."
        )
        for record in self.records:
            if not len(record.metrics(record.variants[0])["step"]):
                self.report.problems.append(f"{record.workdir}: no learning curves: metrics.jsonl is empty or not here")
                continue
            task = describe_task(record.config.task)
            self.report.add_figure(section, figures.draw_learning_curves(record), self._stem(record, "curves"), task)
            self.report.add_figure(
                section,
                figures.draw_convergence(record),
                self._stem(record, "convergence"),
                f"{task}: when seeds converge",
            )

    # --- From checkpoints ---

    def _runs(self, record: Record) -> Iterator[Run]:
        for variant in record.variants:
            try:
                yield load_run(record.workdir, variant)
            except (ConfigError, NoReadableCheckpoint) as error:
                self.report.problems.append(str(error))

    def _seeds(self, run: Run) -> list[int]:
        """Seeds to draw."""
        chosen = run.seeds[:FEW_SEEDS] if self.choices.seeds is None else self.choices.seeds
        return [seed for seed in chosen if seed in run.seeds]

    def _score(self, run: Run, seed: int) -> str:
        index = run.seeds.index(seed)
        if run.config.train.metric == "loss":
            return f"seed {seed}, perplexity {np.exp(run.best_loss[index]):.1f}"
        return f"seed {seed}, {100 * run.best_accuracy[index]:.1f} %"

    def _over_seeds(self, run: Run, what: str, key: dict[str, Any], compute: Callable[[int], dict]) -> dict[int, dict]:
        """compute(seed) for the first max_seeds seeds, from the cache where it was computed before."""
        seeds = run.seeds[: self.choices.max_seeds]
        key = {"checkpoint": run.checkpoint, "what": what, "which": self.choices.which} | key
        found = {}
        with progress_bar(f"{run.workdir.name} {run.variant}: {what}", len(seeds), unit="seed") as bar:
            for seed in seeds:
                found[seed] = self.cache.get(key | {"seed": seed}, lambda seed=seed: compute(seed))
                bar.update()
        return found

    def _from_checkpoints(self, record: Record, by_tokens: dict[str, list[tuple[Record, list[Panel]]]]) -> None:
        wanted, language = self.choices.sections, record.config.train.metric == "loss"
        task = describe_run(record)
        dependence: dict[str, list[dict]] = {}
        converged: dict[str, list[bool]] = {}
        by_length: dict[str, tuple[list[int], np.ndarray]] = {}
        tokens_panels, mean_panels, static_panels = [], [], []
        longest = record.config.model.max_length or None
        for run in self._runs(record):
            try:
                if run.model.settings.mixer == "log_linear" and {"lam", "dependence"} & set(wanted):
                    found = self._dependence(run)
                    dependence[run.variant] = list(found.values())
                    best = dict(zip(run.seeds, run.best_accuracy, strict=True))
                    converged[run.variant] = [best[seed] >= CONVERGED_SHARE for seed in found]
                if run.model.settings.mixer == "log_linear" and "lam" in wanted:
                    panels = self._token_panels(run)
                    tokens_panels.append(panels)
                    by_tokens.setdefault(run.variant, []).append((record, panels))
                    mean_panels.append(self._mean_panels(run, found))
                    static_panels.append(self._static_panels(run))
                if "rows" in wanted and run.model.settings.mixer != "softmax":
                    self._rows(run, record)
                if "lengths" in wanted and len(lengths := lengths_to_test(run, longest)) > 1:
                    by_length[run.variant] = self._lengths(run, lengths, language)
            except ValueError as error:  # no text here, say, or a layer that there is not
                self.report.problems.append(f"{record.workdir}: {run.variant}: {error}")
        if tokens_panels:
            self._lam_of_a_run(record, tokens_panels, mean_panels, static_panels)
        if dependence and "dependence" in wanted:
            section = self.report.section("How input-dependent is λ?")
            title = f"{task}: variation of λ"
            table, shown = tables.dependence(dependence, converged, title), self._titled(record, "variation of λ")
            self.report.add_table(section, table, self._stem(record, "lam-dependence"), shown)
            figure, shown = figures.draw_dependence(dependence, title), self._titled(record, "variation of λ by level")
            self.report.add_figure(section, figure, self._stem(record, "lam-variation"), shown)
        if by_length:
            self._length_figure(record, by_length, language)

    def _dependence(self, run: Run) -> dict[int, dict[str, np.ndarray]]:
        tokens, _ = sample_tokens(run, self.choices.sequences)
        roles, num_roles = run.task.roles(tokens), len(run.task.ROLES)

        def compute(seed):
            return input_dependence(lam_values(run, seed, tokens, self.choices.which), roles, num_roles)

        sample = hashlib.sha256(np.ascontiguousarray([tokens, roles]).tobytes()).hexdigest()[:16]
        return self._over_seeds(run, "dependence", {"sample": sample}, compute)

    def _token_panels(self, run: Run) -> list[Panel]:
        """λ [levels, positions] of one example at the chosen layer and head, for each seed to draw."""
        tokens, _ = sample_tokens(run, self.choices.sequences)
        example = tokens[self.choices.example : self.choices.example + 1]
        layer, head = self._layer_and_head(run)
        panels = []
        for seed in self._seeds(run):
            lam = lam_values(run, seed, example, self.choices.which)[layer, 0, :, head]
            title = f"{describe_variant(run.variant)}; {self._score(run, seed)}"
            panels.append(Panel(lam.T, title, used_levels(*lam.shape).T, run.task.marks()))
        return panels

    def _layer_and_head(self, run: Run) -> tuple[int, int]:
        settings = run.model.settings
        for name, value, size in (
            ("layer", self.choices.layer, settings.layers),
            ("head", self.choices.head, settings.heads),
        ):
            if not -size <= value < size:
                raise ValueError(f"{name}={value}: expected -{size} to {size - 1}")
        return self.choices.layer % settings.layers, self.choices.head % settings.heads

    def _mean_panels(self, run: Run, dependence: dict[int, dict]) -> list[Panel]:
        drawn = [seed for seed in self._seeds(run) if seed in dependence]
        return [self._head_panel(run, seed, dependence[seed]["mean"], "") for seed in drawn]

    def _static_panels(self, run: Run) -> list[Panel]:
        panels = []
        for seed in self._seeds(run):
            values, what = static_lam(run, seed, self.choices.which)
            panels.append(self._head_panel(run, seed, values, f"{what}\n"))
        return panels

    def _head_panel(self, run: Run, seed: int, values: np.ndarray, what: str) -> Panel:
        rows = values.reshape(-1, values.shape[-1])
        return Panel(rows, f"{what}{describe_variant(run.variant)}; {self._score(run, seed)}")

    def _place(self, record: Record) -> str:
        layers = record.config.model.layers
        return f"layer {self.choices.layer % layers}, head {self.choices.head}"

    def _lam_of_a_run(self, record: Record, over_tokens: list, means: list, statics: list) -> None:
        task, section = describe_run(record), self.report.section("λ over tokens")
        title = f"λ over the tokens of one sequence; {task}; {self._place(record)}"
        figure = figures.draw_lam_over_tokens(over_tokens, title)
        self.report.add_figure(section, figure, self._stem(record, "lam-tokens"), self._titled(record, "λ over tokens"))
        section = self.report.section("λ by head and level")
        heads = num_heads(record)
        if any(means):
            title = f"Mean of λ over {self.choices.sequences} sequences, where the level is used; {task}"
            figure = figures.draw_lam_by_head([row for row in means if row], heads, title)
            self.report.add_figure(section, figure, self._stem(record, "lam-mean"), self._titled(record, "mean of λ"))
        figure = figures.draw_lam_by_head(statics, heads, f"What λ has learned apart from its input; {task}")
        note = "For linear (the paper's baseline): the weights Λ, as in the paper's figures of it; otherwise λ where its input is 0."
        self.report.add_figure(
            section, figure, self._stem(record, "lam-static"), self._titled(record, "static part of λ"), note
        )

    def _lam_of_several_runs(self, by_tokens: dict[str, list[tuple[Record, list[Panel]]]]) -> None:
        section = self.report.section("λ over tokens")
        for variant, found in by_tokens.items():
            if len(found) < 2:
                continue
            rows = [
                [dataclasses.replace(panel, title=f"{describe_run(record)}\n{panel.title}") for panel in panels]
                for record, panels in found
            ]
            title = f"{describe_variant(variant)}: λ over tokens; {self._place(found[0][0])}"
            figure = figures.draw_lam_over_tokens(rows, title)
            self.report.add_figure(
                section, figure, f"lam-tokens-{slug(variant)}", f"{describe_variant(variant)}, all runs"
            )

    def _rows(self, run: Run, record: Record) -> None:
        section = self.report.section("What a head draws on")
        section.intro = (
            "One row of the attention matrix: the weight λ · decay · (q · k) that a position gives to the value of each earlier "
            "token, by the Fenwick bucket that the token lies in. Diamonds: tokens that are the right answer. Triangle: the position."
        )
        tokens, targets = (x[self.choices.example] for x in sample_tokens(run, self.choices.sequences))
        layer, head = self._layer_and_head(run)
        scored = np.flatnonzero(targets >= 0)
        positions = self.choices.positions or [int(scored[i]) for i in (0, len(scored) // 2, len(scored) - 1)]
        seed = max(self._seeds(run) or run.seeds[:1], key=lambda s: run.best_accuracy[run.seeds.index(s)])
        roles, names = run.task.roles(tokens[None])[0], run.task.ROLES
        rows = []
        for position in dict.fromkeys(positions):
            row = attention_row(run, seed, tokens, layer=layer, head=head, position=position, which=self.choices.which)
            at = row.position
            pointed = np.flatnonzero(tokens[: at + 1] == targets[at]) if targets[at] >= 0 else []
            what = f"position {at}, {names[roles[at]]} (token {run.task.shown(tokens[at])})"
            rows.append(
                (row, what + (f", to predict: {run.task.shown(targets[at])}" if targets[at] >= 0 else ""), pointed)
            )
        title = (
            f"{describe_variant(run.variant)}; {self._score(run, seed)}; {describe_run(record)}; {self._place(record)}"
        )
        figure = figures.draw_attention_rows(rows, run.task.marks(), len(tokens), title)
        stem = self._stem(record, f"rows-{slug(run.variant)}")
        self.report.add_figure(section, figure, stem, self._titled(record, describe_variant(run.variant)))

    def _lengths(self, run: Run, lengths: list[int], language: bool) -> tuple[list[int], np.ndarray]:
        def compute(seed):
            return scores_by_length(run, seed, lengths, self.choices.evaluated, self.choices.which)

        key = {"lengths": lengths, "sequences": self.choices.evaluated}
        found = self._over_seeds(run, "lengths", key, compute).values()
        return lengths, np.array([np.exp(x["loss"]) if language else 100 * x["accuracy"] for x in found])

    def _length_figure(self, record: Record, by_length: dict, language: bool) -> None:
        section, task = self.report.section("Length generalisation"), describe_run(record)
        trained = record.config.task.seq_len
        figure = figures.draw_scores_by_length(by_length, trained, language, f"Trained on {task}")
        self.report.add_figure(section, figure, self._stem(record, "lengths"), self._titled(record, "longer sequences"))
        rows, raw = [], []
        for variant, (lengths, values) in by_length.items():
            row = {"variant": variant}
            for length, column in zip(lengths, values.T, strict=True):
                spread = f" ± {column.std(ddof=1):.1f}" if len(column) > 1 else ""
                row[f"length {length}"] = f"{column.mean():.1f}{spread}"
                if not language:
                    row[f"length {length}"] += f" ({np.sum(column >= 100 * CONVERGED_SHARE)}/{len(column)})"
            if trained == 128 and record.config.task.name == "mqar":
                row["the paper at 256"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
            rows.append(row)
            raw += [
                {"variant": variant, "seed_index": i, "length": n, "perplexity" if language else "accuracy": float(x)}
                for i, seed in enumerate(values)
                for n, x in zip(lengths, seed, strict=True)
            ]
        what = "perplexity" if language else f"accuracy %, mean ± std over seeds (seeds at ≥ {CONVERGED_SHARE:.0%})"
        table = Table(f"{task}: {what}", rows, raw)
        self.report.add_table(section, table, self._stem(record, "lengths-table"), self._titled(record, what))

    # --- Measured here ---

    def _complexity(self) -> None:
        machine = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
        lengths = complexity.default_lengths()
        measured = {}
        with progress_bar("complexity", len(lengths) * len(complexity.VARIANTS), unit="length") as bar:
            for variant in complexity.VARIANTS:
                key = {"what": "complexity", "machine": machine, "lengths": lengths, "variant": variant}
                key["settings"] = dataclasses.asdict(complexity.measured_settings())
                measured[variant] = self.cache.get(
                    key, lambda variant=variant: complexity.measure(lengths, variant, bar.update)
                )
        section = self.report.section("Complexity", "Measured on the machine that made this report.")
        self.report.add_table(section, complexity.table(measured, machine), "complexity-table")
        figure = figures.draw_complexity(measured, f"Growth with T, {machine}")
        self.report.add_figure(section, figure, "complexity", "Training time and decoding memory against T")


def num_heads(record: Record) -> int:
    """The number of heads of a run's models."""
    model = variant_config(record.config, record.variants[0]).model
    return model.heads or model.hidden // model.head_dim


def _distinct_names(records: Iterable[Record]) -> dict[Path, str]:
    """A name for each run's files: its folder's, with a number where two are the same."""
    names: dict[Path, str] = {}
    for record in records:
        name, count = slug(record.name) or "run", 1
        while (candidate := name if count == 1 else f"{name}-{count}") in names.values():
            count += 1
        names[record.workdir] = candidate
    return names
