"""What has become of a cell's variants, read from its workdir: nothing else remembers it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from loglinear_jax.config import (
    ConfigError,
    check_effects,
    named_variants,
    variant_names,
    variants_at_rates,
)
from loglinear_jax.config.files import read_config_arguments, shell_safe
from loglinear_jax.files import MOST_BYTES_OF_NAME
from loglinear_jax.runs.folders import RunFolder, finished_outcomes, write_record
from loglinear_jax.runs.outcome import RunSummary, join_summaries
from loglinear_jax.runs.writing import RunFailed, one_at_a_time, writing
from loglinear_jax.settings import SettingError
from loglinear_jax.sweep.grid import Cell, Grid


class State(enum.StrEnum):
    """What has become of a variant."""

    FINISHED = "finished"
    RUNNING = "running"
    QUEUED = "queued"
    INTERRUPTED = "interrupted"
    IN_USE = "in use"  # another process trains it
    FAILED = "failed"
    NOT_STARTED = "not started"


@dataclasses.dataclass(frozen=True)
class TrackedCell:
    """A cell with its config.

    workdir: where it is trained. kept: the file where its config and outcomes are left once all of it is finished.
    """

    cell: Cell
    config: ConfigDict
    workdir: Path
    kept: Path | None

    @property
    def folders(self) -> list[RunFolder]:
        """The run in its workdir, and the kept one."""
        return [RunFolder(folder, writes=False) for folder in (self.workdir, self.kept) if folder is not None]

    def read_summary(self) -> RunSummary | None:
        """Read the outcomes of its finished variants, from the workdir and where they are kept; None if none is.

        Those of a run with another config, or that can't be read, do not count.
        """
        found = []
        for folder in reversed(self.folders):
            with contextlib.suppress(ConfigError):  # the run itself says what is wrong
                if folder.config_file.exists() and not folder.differences(self.config):
                    found += filter(None, [folder.read_summary()])
        if not found:
            return None
        summary = join_summaries(found)
        return dataclasses.replace(summary, variants=finished_outcomes(summary.variants, self.config))

    @property
    def outcome_folder(self) -> Path:
        """Where all its outcomes are, with its curves if they are here."""
        written = [folder.path for folder in self.folders if folder.summary_file.exists()]
        return written[0] if written else self.workdir

    def keep(self) -> str:
        """Leaves config and outcomes where they are kept, if all variants are finished; returns what prevented it, or ''."""
        summary = self.read_summary()
        if self.kept is None or summary is None or summary.variants.keys() != set(variant_names(self.config)):
            return ""
        try:
            with writing(self.kept.parent):
                self.kept.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(self.kept.parent):
                kept = RunFolder(self.kept)
                _check_kept(kept, self.config)
                there = kept.read_summary()
                if there is None or there.variants != summary.variants:
                    written = RunFolder(self.workdir).read_summary_file() or summary
                    write_record(self.kept, self.config, dataclasses.replace(written, variants=summary.variants))
        except (ConfigError, RunFailed) as error:
            return f"not kept: {error}"
        return ""


@dataclasses.dataclass
class Tracked:
    """One variant of a cell, at all its rates, and what is known of it now.

    variant: as config.variants names it. at_rates: its names at each rate. place: where it runs. why, log: of what failed.
    restarts: how often it was started again after it was killed.
    """

    of: TrackedCell
    variant: str
    at_rates: tuple[str, ...]
    state: State = State.NOT_STARTED
    place: str = ""
    why: str = ""
    log: Path | None = None
    restarts: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """What messages call it: "mqar-kv8 linear"."""
        return f"{self.of.cell.name} {self.variant}"

    @property
    def folder_name(self) -> str:
        """The name of the folder of its logs, which ends in a hash where the whole would be too long for one."""
        name = shell_safe(f"{self.of.cell.name}--{self.variant}")
        if len(encoded := name.encode()) <= MOST_BYTES_OF_NAME:
            return name
        return f"{encoded[:200].decode(errors='ignore')}-{hashlib.sha256(encoded).hexdigest()[:16]}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of `loglinear_jax train`."""
        only = [f"--only={self.variant}"] if len(named_variants(self.of.config)) > 1 else []
        return [*self.of.cell.arguments, f"--workdir={self.of.workdir}", *only]

    def look(self, summary: RunSummary | None) -> None:
        """Sets the state by what is on disk. summary: `TrackedCell.read_summary`."""
        run = RunFolder(self.of.workdir, writes=False)
        if summary is not None and summary.variants.keys() >= set(self.at_rates):
            self.state = State.FINISHED
        elif run.is_in_use(self.at_rates):
            self.state = State.IN_USE
        elif any(run.variant(name).processes_file.exists() for name in self.at_rates):
            self.state = State.INTERRUPTED
        else:
            self.state = State.NOT_STARTED


def track(grid: Grid, cells: Sequence[Cell], out: Path, changes: Sequence[str] = ()) -> list[Tracked]:
    """Find the variants of cells, with their states.

    Args:
        grid: whose cells they are.
        cells: some of them.
        out: folder of the workdirs.
        changes: more arguments, --config.section.setting=value, for each cell.

    Raises:
        ConfigError: naming the first cell with an impossible config, or with another one than that of its workdir or kept
            outcome.
    """
    return [one for cell in cells for one in _track(grid.keep_in, cell, out, changes)]


def _track(keep_in: Path | None, cell: Cell, out: Path, changes: Sequence[str]) -> list[Tracked]:
    cell = dataclasses.replace(cell, arguments=(*cell.arguments, *changes))
    workdir, kept = out / cell.name, None if keep_in is None else keep_in / f"{cell.name}.json"
    try:
        chosen = read_config_arguments(cell.arguments)
        of = TrackedCell(cell, chosen.config, workdir, kept)
        _check_folders(of, chosen.given)
        groups = zip(named_variants(chosen.config), variants_at_rates(chosen.config), strict=True)
        found = [Tracked(of, name, tuple(at_rates)) for name, at_rates in groups]
    except SettingError as error:
        raise cell.error(error) from error
    summary = of.read_summary()
    for one in found:
        one.look(summary)
    return found


def _check_folders(of: TrackedCell, given: frozenset[str]) -> None:
    """Raises ConfigError if a cell's config has a setting without effect, or its folders hold runs of another config."""
    run, *kept = of.folders
    if not any(folder.config_file.exists() for folder in of.folders):
        check_effects(of.config, given)
    if run.config_file.exists() and (found := run.differences(of.config)):
        raise ConfigError(
            f"{run.path} holds a run with another config ({'; '.join(found)}): give the same settings, or another --out"
        )
    if kept:
        _check_kept(kept[0], of.config)


def _check_kept(kept: RunFolder, config: ConfigDict) -> None:
    """Raises ConfigError if what is kept is the outcome of another config."""
    if kept.config_file.exists() and (found := kept.differences(config)):
        raise ConfigError(
            f"{kept.path} keeps the outcome of another config ({'; '.join(found)}): give the same settings, or another name"
        )
