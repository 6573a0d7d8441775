"""What goes into a report: each section is computed and drawn here from runs; what a run lacks is named, and left out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from loglinear_jax.analysis import complexity, figures, paper, tables
from loglinear_jax.analysis.attention_rows import attention_row
from loglinear_jax.analysis.cache import Cache
from loglinear_jax.analysis.decays import initial_memory
from loglinear_jax.analysis.figures import Panel, describe_run, describe_variant
from loglinear_jax.analysis.lam_values import input_dependence, lam_values, sample_tokens, static_lam
from loglinear_jax.analysis.lengths import lengths_to_test, scores_by_length
from loglinear_jax.analysis.report import Report, slug
from loglinear_jax.analysis.tables import Table
from loglinear_jax.config import differing_names, flat_settings, variant_config
from loglinear_jax.fenwick import used_levels
from loglinear_jax.mixers import DECAYING_MIXERS
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.loading import Run, TrainedVariant, load_run, read_run
from loglinear_jax.tasks import CONVERGED_ACCURACY

SECTIONS = ("tables", "curves", "decays", "lam", "dependence", "rows", "lengths", "complexity")
FROM_CHECKPOINTS = ("lam", "dependence", "rows", "lengths")
FEW_SEEDS = 3
MANY_ROWS = 12  # layers · heads from which each variant has a figure of its own


@dataclasses.dataclass(frozen=True)
class Choices:
    """What to show; the fields are the command line's flags.

    Raises ValueError for an unknown section, or a number that can't be.
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
        for name in ("sequences", "evaluated", "max_seeds"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
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
            records.append(read_run(workdir))
        except ValueError as error:  # a ConfigError is one
            problems.append(str(error))
    if not records:
        raise ValueError("; ".join(problems) or "workdir: give at least one")
    same = Counter(describe_run(record) for record in records)
    records = [dataclasses.replace(r, label=r.name if same[describe_run(r)] > 1 else "") for r in records]
    maker = _Maker(records, Report(Path(out)), choices)
    maker.report.problems += problems
    maker.make()
    path = maker.report.write(_title(records), _runs(records), _settings(records), _commands(records))
    return path, maker.report.problems


def _title(records: Sequence[Run]) -> str:
    return describe_run(records[0]) if len(records) == 1 else f"Log-linear attention: {len(records)} runs"


def _commands(records: Sequence[Run]) -> list[str]:
    return [record.summary.command for record in records if record.summary and record.summary.command]


def _runs(records: Sequence[Run]) -> Table:
    rows = []
    for record in records:
        model, train, summary = record.config.model, record.config.train, record.summary
        variants = record.outcomes
        seconds = [s.seconds for s in variants.values() if s.seconds is not None]
        rates = [s.seed_steps_per_second for s in variants.values() if s.seed_steps_per_second]
        rows.append(
            {
                "run": record.name,
                "task": record.task.describe(),
                "model": f"{model.layers} × {model.hidden}, {model.init_scheme} setting",
                "seeds": str(train.num_seeds),
                "steps": f"{train.num_steps:,} of {train.batch_size}, rate {train.learning_rate:g}, {train.precision}",
                "machine": (summary and summary.device) or "–",
                "JAX": (summary and summary.versions.get("jax")) or "–",
                "time": f"{sum(seconds) / 60:.1f} min" if seconds else "–",
                "seed-steps/s": f"{np.median(rates):,.0f}" if rates else "–",
            }
        )
    note = (
        "Time: training and evaluation of all variants, compilation included. seed-steps/s: the median over variants of "
        "optimiser steps of one seed in a second, of seeds that stopped too as long as they are computed along. Numbers "
        "called “the paper” are those that Amin, Li, Zhang and Ayhan print; all others were computed from these runs."
    )
    return Table("Runs", rows, note=note)


def _settings(records: Sequence[Run]) -> list[Table]:
    """In which settings the runs differ, and all that they share."""
    flat = [flat_settings(record.config) for record in records]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    differing = differing_names(flat)
    shared = Table("All settings" if len(records) == 1 else "Settings that the runs share", [
        {"setting": n, "value": str(flat[0][n])} for n in names if n not in differing
    ])  # fmt: skip
    rows = [
        {"run": record.name} | {n: str(settings.get(n, "–")) for n in differing}
        for record, settings in zip(records, flat, strict=True)
    ]
    return [*([Table("Settings that differ", rows)] if differing else []), shared]


class _Maker:
    """Goes through the runs, one variant's parameters in memory at a time."""

    def __init__(self, records: list[Run], report: Report, choices: Choices):
        self.records, self.report, self.choices = records, report, choices
        self.cache = Cache(report.out / "cache")
        self._names = _distinct_names(records)
        # Of all runs, for figures of several: variant -> what is drawn of each run.
        self._over_tokens: dict[str, list[tuple[Run, list[Panel]]]] = {}
        self._means: dict[str, list[tuple[Run, list[Panel]]]] = {}

    def make(self) -> None:
        wanted = self.choices.sections
        if "tables" in wanted:
            self._tables()
        if "curves" in wanted:
            self._curves()
        if "decays" in wanted:
            self._decays()
        if any(name in wanted for name in FROM_CHECKPOINTS):
            # Begun here, so that the report has them in this order.
            for name in ("λ over tokens", "λ by head and level", "How input-dependent is λ?", "What a head draws on"):
                self.report.section(name)
            for record in self.records:
                self._from_checkpoints(record)
            if "lam" in wanted:
                self._lam_of_several_runs()
        if "complexity" in wanted:
            with self._named("this machine", "complexity"):
                self._complexity()

    @contextlib.contextmanager
    def _named(self, where: Any, what: str) -> Iterator[None]:
        """Whatever goes wrong inside is told in the report, and ends nothing else: a run may hold anything."""
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            known = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("loglinear_jax")
            self.report.problems.append(
                f"{where}: {what}: {text if known else f'{type(error).__name__}: {text}'}"[:500]
            )

    def _stem(self, record: Run, what: str) -> str:
        return f"{what}-{self._names[record.workdir]}"

    def _titled(self, record: Run, what: str) -> str:
        """A title in the report: which run, if there are several, and what is shown."""
        return f"{describe_run(record)}: {what}" if len(self.records) > 1 else what[0].upper() + what[1:]

    # --- From summaries and metrics ---

    def _tables(self) -> None:
        section = self.report.section("Results")
        with self._named("all runs", "the paper's tables"):
            for index, table in enumerate(tables.as_the_paper(self.records)):
                self.report.add_table(section, table, f"as-the-paper-{index + 1}")
        with self._named("all runs", "the table by setting"):
            by_setting = tables.by_setting(self.records)
            if by_setting:
                shares = {task: table.raw for task, table in by_setting.items()}
                self.report.add_figure(
                    section, figures.draw_shares(shares), "by-setting", "Seeds that converge, by setting"
                )
            for index, table in enumerate(by_setting.values()):
                self.report.add_table(section, table, f"by-setting-{index + 1}")
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
                with self._named(record.workdir, stem):
                    table = make(record)
                    if table is not None:
                        shown = self._titled(record, table.title.removeprefix(f"{describe_run(record)}: "))
                        self.report.add_table(section, table, self._stem(record, stem), shown, folded)

    def _curves(self) -> None:
        section = self.report.section("Learning curves")
        for record in self.records:
            with self._named(record.workdir, "learning curves"):
                if not any(len(record.metrics(variant)["step"]) for variant in record.variants):
                    self.report.problems.append(
                        f"{record.workdir}: no learning curves: metrics.jsonl is empty or not here"
                    )
                else:
                    title = self._titled(record, "learning curves")
                    self.report.add_figure(
                        section, figures.draw_learning_curves(record), self._stem(record, "curves"), title
                    )
                title = self._titled(record, "when seeds converge")
                self.report.add_figure(
                    section, figures.draw_convergence(record), self._stem(record, "convergence"), title
                )

    def _decays(self) -> None:
        """Of recall runs that are finished: whether the initial decays decide which seeds converge."""
        asked = [
            (record, variant)
            for record in self.records
            if record.summary is not None and record.task.score.thresholds
            for variant in record.variants
            if variant_config(record.config, variant).model.mixer in DECAYING_MIXERS
        ]
        if not asked:
            return
        found = []
        with progress_bar("initial decays", len(asked), unit="variant") as bar:
            for record, variant in asked:
                with self._named(record.workdir, f"{variant}: initial decays"):
                    found.append((record, variant, initial_memory(record, variant)))
                bar.update()
        if not found:
            return
        section = self.report.section("Which seeds converge")
        with self._named("all runs", "initial decays"):
            changed = tables.changed_settings([record for record, *_ in found])
            drawn: dict[str, tuple[str, int, dict]] = {}
            for (record, variant, tokens), changes in zip(found, changed, strict=True):
                title = record.task.describe() + (f"; {changes}" if changes else "")
                panel = drawn.setdefault(record.workdir, (title, record.config.task.seq_len, {}))
                accuracy = np.array(record.outcomes[variant].best_accuracy, float)
                panel[2][variant] = (tokens[:, self.choices.layer].max(1), accuracy)
            layer = "the last layer" if self.choices.layer == -1 else f"layer {self.choices.layer}"
            figure = figures.draw_initial_memory(
                list(drawn.values()), f"longest memory in {layer} at the start (tokens)"
            )
            shown = "Every seed's outcome, by how far back it remembers at the start"
            self.report.add_figure(section, figure, "initial-memory", shown)
            self.report.add_table(section, tables.initial_memory(found), "initial-memory-table")

    # --- From checkpoints ---

    def _from_checkpoints(self, record: Run) -> None:
        wanted, where = self.choices.sections, record.workdir
        dependence: dict[str, dict[int, dict]] = {}
        converged: dict[str, dict[int, bool]] = {}
        by_length: dict[str, tuple[list[int], list[int], np.ndarray]] = {}
        over_tokens, means, statics = [], [], []
        for variant in record.variants:
            run = None
            with self._named(where, variant):
                run = load_run(where, variant)
            if run is None:
                continue
            if run.model.settings.has_lam:
                if "lam" in wanted:
                    with self._named(where, f"{variant}: static part of λ"):
                        statics.append(self._static_panels(run))
                    with self._named(where, f"{variant}: λ over tokens"):
                        over_tokens.append(self._token_panels(run))
                        self._over_tokens.setdefault(variant, []).append((record, over_tokens[-1]))
                    with self._named(where, f"{variant}: mean of λ"):
                        means.append(self._mean_panels(run))
                        self._means.setdefault(variant, []).append((record, means[-1]))
                if "dependence" in wanted:
                    with self._named(where, f"{variant}: variation of λ"):
                        dependence[variant] = self._dependence(run, run.seeds[: self.choices.max_seeds])
                        accuracy = dict(zip(run.seeds, run.scores(self.choices.which)[0], strict=True))
                        converged[variant] = {
                            seed: accuracy[seed] >= CONVERGED_ACCURACY for seed in dependence[variant]
                        }
            if "rows" in wanted and run.model.settings.has_decays:
                with self._named(where, f"{variant}: what a head draws on"):
                    self._rows(run, record)
            longest = record.config.model.max_length or None
            if "lengths" in wanted and len(lengths := lengths_to_test(run, longest)) > 1:
                with self._named(where, f"{variant}: longer sequences"):
                    by_length[variant] = self._lengths(run, lengths)
        if over_tokens or means or statics:
            with self._named(where, "figures of λ"):
                self._lam_of_a_run(record, over_tokens, means, statics)
        if dependence:
            with self._named(where, "variation of λ"):
                self._dependence_of_a_run(record, dependence, converged)
        if by_length:
            with self._named(where, "longer sequences"):
                self._length_figure(record, by_length)

    def _seeds(self, run: TrainedVariant) -> list[int]:
        """Seeds to draw. Raises ValueError if the run has none of those that were asked for."""
        if self.choices.seeds is None:
            return run.seeds[:FEW_SEEDS]
        chosen = [seed for seed in self.choices.seeds if seed in run.seeds]
        if not chosen:
            raise ValueError(f"seeds={self.choices.seeds}: this run has {run.seeds[0]} to {run.seeds[-1]}")
        return chosen

    def _score(self, run: TrainedVariant, seed: int) -> str:
        index = run.seeds.index(seed)
        accuracy, loss = (x[index] for x in run.scores(self.choices.which))
        shown = run.task.score
        score = ("" if shown.unit else f"{shown.name} ") + shown.text(float(shown.of(loss, accuracy)))
        diverged = f", diverged at step {run.diverged_step[index]}" if run.diverged_step[index] >= 0 else ""
        last = " at the last step" if self.choices.which == "last" else ""
        return f"seed {seed}, {score}{last}{diverged}"

    def _layer_and_head(self, run: TrainedVariant) -> tuple[int, int]:
        settings = run.model.settings
        for name, value, size in (
            ("layer", self.choices.layer, settings.layers),
            ("head", self.choices.head, settings.heads),
        ):
            if not -size <= value < size:
                raise ValueError(f"{name}={value}: expected -{size} to {size - 1}")
        return self.choices.layer % settings.layers, self.choices.head % settings.heads

    def _example(self, run: TrainedVariant) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) [T] of the sequence to draw."""
        tokens, targets = sample_tokens(run, self.choices.sequences)
        if self.choices.example >= len(tokens):
            raise ValueError(f"example={self.choices.example}: there are {len(tokens)} sequences")
        return tokens[self.choices.example], targets[self.choices.example]

    def _over_seeds(
        self, run: TrainedVariant, what: str, key: Mapping[str, Any], seeds: list[int], compute: Callable[[int], dict]
    ) -> dict[int, dict]:
        """compute(seed) for these seeds, from the cache where it was computed before."""
        key = {"checkpoint": run.checkpoint, "what": what, "which": self.choices.which, **key}
        found = {}
        with progress_bar(f"{run.workdir.name} {run.variant}: {what}", len(seeds), unit="seed") as bar:
            for seed in seeds:
                found[seed] = self.cache.get(key | {"seed": seed}, lambda seed=seed: compute(seed))
                bar.update()
        return found

    # --- λ ---

    def _dependence(self, run: TrainedVariant, seeds: list[int]) -> dict[int, dict[str, np.ndarray]]:
        tokens, _ = sample_tokens(run, self.choices.sequences)
        roles, num_roles = run.task.roles(tokens), len(run.task.ROLES)

        def compute(seed):
            return input_dependence(lam_values(run, seed, tokens, self.choices.which), roles, num_roles)

        sample = hashlib.sha256(np.ascontiguousarray([tokens, roles]).tobytes()).hexdigest()[:16]
        return self._over_seeds(run, "dependence", {"sample": sample}, seeds, compute)

    def _dependence_of_a_run(self, record: Run, dependence: dict, converged: dict) -> None:
        section, title = self.report.section("How input-dependent is λ?"), f"{describe_run(record)}: variation of λ"
        table, shown = tables.dependence(dependence, converged, title), self._titled(record, "variation of λ")
        self.report.add_table(section, table, self._stem(record, "lam-dependence"), shown)
        figure, shown = figures.draw_dependence(dependence, title), self._titled(record, "variation of λ by level")
        self.report.add_figure(section, figure, self._stem(record, "lam-variation"), shown)

    def _token_panels(self, run: TrainedVariant) -> list[Panel]:
        """λ [levels, positions] of one example at the chosen layer and head, for each seed to draw."""
        tokens, _ = self._example(run)
        layer, head = self._layer_and_head(run)
        panels = []
        for seed in self._seeds(run):
            lam = lam_values(run, seed, tokens[None], self.choices.which)[layer, 0, :, head]
            title = f"{describe_variant(run.variant)}; {self._score(run, seed)}; layer {layer}, head {head}"
            panels.append(Panel(lam.T, title, used_levels(*lam.shape).T, run.task.marks()))
        return panels

    def _mean_panels(self, run: TrainedVariant) -> list[Panel]:
        found = self._dependence(run, self._seeds(run))
        name = describe_variant(run.variant)
        return [Panel(d["mean"], f"{name}; {self._score(run, seed)}") for seed, d in found.items()]

    def _static_panels(self, run: TrainedVariant) -> list[Panel]:
        panels = []
        for seed in self._seeds(run):
            values, what = static_lam(run, seed, self.choices.which)
            panels.append(Panel(values, f"{what}\n{describe_variant(run.variant)}; {self._score(run, seed)}"))
        return panels

    def _lam_of_a_run(self, record: Run, over_tokens: list, means: list, statics: list) -> None:
        task = describe_run(record)
        if over_tokens:
            figure = figures.draw_lam_over_tokens(over_tokens, f"λ over the tokens of one sequence; {task}")
            title = self._titled(record, "λ over tokens")
            self.report.add_figure(
                self.report.section("λ over tokens"), figure, self._stem(record, "lam-tokens"), title
            )
        note = (
            "For linear (the paper's baseline): the weights Λ, as in the paper's figures of it; otherwise λ where its "
            "input is 0."
        )
        of_mean = f"Mean of λ over {self.choices.sequences} sequences, where the level is used; {task}"
        of_static = f"What λ has learned apart from its input; {task}"
        for what, stem, panels, title, below in (
            ("mean of λ", "lam-mean", means, of_mean, ""),
            ("static part of λ", "lam-static", statics, of_static, note),
        ):
            if not panels:
                continue
            large = max(p.values.shape[0] * p.values.shape[1] for row in panels for p in row) > MANY_ROWS
            for index, rows in enumerate([[row] for row in panels] if large else [panels]):
                figure = figures.draw_lam_by_head(rows, title)
                ending = f"-{index + 1}" if large else ""
                shown = self._titled(record, what) + (f", {index + 1} of {len(panels)}" if large else "")
                section = self.report.section("λ by head and level")
                self.report.add_figure(section, figure, self._stem(record, stem + ending), shown, below)

    def _lam_of_several_runs(self) -> None:
        """Runs below each other, seeds beside each other, for each variant that several runs have."""
        for section, what, found, draw in (
            ("λ over tokens", "λ over tokens", self._over_tokens, figures.draw_lam_over_tokens),
            ("λ by head and level", "mean of λ where the level is used", self._means, figures.draw_lam_by_head),
        ):
            for variant, of_runs in found.items():
                if len(of_runs) < 2:
                    continue
                with self._named("all runs", f"{variant}: {what}"):
                    rows = [
                        [dataclasses.replace(p, title=f"{describe_run(record)}\n{p.title}") for p in panels]
                        for record, panels in of_runs
                    ]
                    stem = f"all-runs-{slug(what)}-{slug(variant)}"
                    shown = f"All runs: {what}, {describe_variant(variant)}"
                    figure = draw(rows, f"{describe_variant(variant)}: {what}")
                    self.report.add_figure(self.report.section(section), figure, stem, shown)

    # --- What a head draws on ---

    def _rows(self, run: TrainedVariant, record: Run) -> None:
        section = self.report.section("What a head draws on")
        section.intro = (
            "One row of the attention matrix: the weight λ · decay · (q · k) that a position gives to the value of each "
            "earlier token, by the Fenwick bucket that the token lies in. Diamonds: where the right answer stands. "
            "Triangle: the position."
        )
        tokens, targets = self._example(run)
        layer, head = self._layer_and_head(run)
        scored = np.flatnonzero(targets >= 0)
        positions = self.choices.positions or [int(scored[i]) for i in (0, len(scored) // 2, len(scored) - 1)]
        accuracy, loss = run.scores(self.choices.which)
        value = run.task.score.of(loss, accuracy) * (1 if run.task.score.higher_is_better else -1)
        seed = max(self._seeds(run), key=lambda seed: np.nan_to_num(value[run.seeds.index(seed)], nan=-np.inf))
        roles, names = run.task.roles(tokens[None])[0], run.task.ROLES
        answers = np.isin(roles, [names.index(name) for name in run.task.ANSWERS])
        rows = []
        for position in dict.fromkeys(positions):
            row = attention_row(run, seed, tokens, layer=layer, head=head, position=position, which=self.choices.which)
            if not np.isfinite(row.weight).all():
                raise ValueError(f"seed {seed}: weights are not finite")
            at = row.position
            pointed = np.flatnonzero((tokens == targets[at]) & answers & (np.arange(len(tokens)) <= at))
            what = f"position {at}, {names[roles[at]]} (token {run.task.shown(tokens[at])})"
            rows.append(
                (row, what + (f", to predict: {run.task.shown(targets[at])}" if targets[at] >= 0 else ""), pointed)
            )
        place = f"layer {layer}, head {head}"
        title = f"{describe_variant(run.variant)}; {self._score(run, seed)}; {describe_run(record)}; {place}"
        figure = figures.draw_attention_rows(rows, run.task.marks(), len(tokens), title)
        stem = self._stem(record, f"rows-{slug(run.variant)}")
        self.report.add_figure(section, figure, stem, self._titled(record, describe_variant(run.variant)))

    # --- Longer sequences ---

    def _lengths(self, run: TrainedVariant, lengths: list[int]) -> tuple[list[int], list[int], np.ndarray]:
        """(lengths [N], seeds [S], perplexity or accuracy in % [S, N])."""

        def compute(seed):
            return scores_by_length(run, seed, lengths, self.choices.evaluated, self.choices.which)

        key = {"lengths": lengths, "sequences": self.choices.evaluated}
        found = self._over_seeds(run, "lengths", key, run.seeds[: self.choices.max_seeds], compute)
        values = [run.task.score.of(x["loss"], x["accuracy"]) for x in found.values()]
        return lengths, list(found), np.array(values)

    def _length_figure(self, record: Run, by_length: dict[str, tuple[list[int], list[int], np.ndarray]]) -> None:
        section, task = self.report.section("Length generalisation"), describe_run(record)
        trained, text = record.config.task.seq_len, not record.task.score.thresholds
        drawn = {variant: (lengths, values) for variant, (lengths, _, values) in by_length.items()}
        figure = figures.draw_scores_by_length(drawn, trained, text, f"Trained on {task}")
        self.report.add_figure(section, figure, self._stem(record, "lengths"), self._titled(record, "longer sequences"))
        rows, raw = [], []
        for variant, (lengths, seeds, values) in by_length.items():
            row = {"variant": variant}
            for length, column in zip(lengths, values.T, strict=True):
                spread = f" ± {column.std(ddof=1):.1f}" if len(column) > 1 else ""
                row[f"length {length}"] = f"{column.mean():.1f}{spread}"
                if not text:
                    row[f"length {length}"] += f" ({np.sum(column >= 100 * CONVERGED_ACCURACY)}/{len(column)})"
            if trained == 128 and record.config.task.name == "mqar":
                row["the paper at 256 (pairs not given)"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
            rows.append(row)
            raw += [
                {"variant": variant, "seed": seed, "length": n, "perplexity" if text else "accuracy": float(x)}
                for seed, of_seed in zip(seeds, values, strict=True)
                for n, x in zip(lengths, of_seed, strict=True)
            ]
        what = "perplexity" if text else f"accuracy %, mean ± std over seeds (seeds at ≥ {CONVERGED_ACCURACY:.0%})"
        table = Table(f"{task}: {what}", rows, raw)
        self.report.add_table(section, table, self._stem(record, "lengths-table"), self._titled(record, what))

    # --- Measured here ---

    def _complexity(self) -> None:
        machine = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
        lengths = complexity.default_lengths()
        measured = {}
        key = {"what": "complexity", "machine": machine, "host": platform.node(), "lengths": lengths}
        key["settings"] = dataclasses.asdict(complexity.measured_settings())
        with progress_bar("complexity", len(lengths) * len(complexity.VARIANTS), unit="length") as bar:
            for variant in complexity.VARIANTS:
                measured[variant] = self.cache.get(
                    key | {"variant": variant}, lambda variant=variant: complexity.measure(lengths, variant, bar.update)
                )
        section = self.report.section("Complexity", "Measured on the machine that made this report.")
        self.report.add_table(section, complexity.table(measured, machine), "complexity-table")
        figure = figures.draw_complexity(measured, f"Growth with T, {machine}")
        self.report.add_figure(section, figure, "complexity", "Training time and decoding memory against T")


def _distinct_names(records: Iterable[Run]) -> dict[Path, str]:
    """A name for each run's files: its folder's, with a number where two are the same."""
    names: dict[Path, str] = {}
    for record in records:
        name, count = slug(record.name) or "run", 1
        while (candidate := name if count == 1 else f"{name}-{count}") in names.values():
            count += 1
        names[record.workdir] = candidate
    return names
