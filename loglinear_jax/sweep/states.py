"""What has become of a cell, read from its workdir: nothing else remembers it."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, check_effects, variant_config, variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs.workdir import Workdir
from loglinear_jax.runs.writing import replace_file
from loglinear_jax.settings import SettingError
from loglinear_jax.sweep.grid import Cell, Grid

TAIL = 1 << 20  # bytes of metrics.jsonl in which its last line is looked for


class State(enum.StrEnum):
    FINISHED = "finished"
    RUNNING = "running"
    QUEUED = "queued"
    INTERRUPTED = "interrupted"
    IN_USE = "in use"  # another process trains in its workdir
    FAILED = "failed"
    NOT_STARTED = "not started"


@dataclasses.dataclass
class Tracked:
    """A cell, its config and workdir, and what is known of it now.

    kept: the folder in which its config.json and summary.json are left. num_finished: how many of its variants have their
    outcome in the workdir or there. place: where it runs. why, log: of what failed.
    """

    cell: Cell
    config: ConfigDict
    workdir: Path
    kept: Path | None
    state: State = State.NOT_STARTED
    num_finished: int = 0
    place: str = ""
    why: str = ""
    log: Path | None = None
    seconds: float = 0.0

    @property
    def arguments(self) -> list[str]:
        """Of `loglinear_jax train`, or run.py."""
        return [*self.cell.arguments, f"--workdir={self.workdir}"]

    @property
    def command(self) -> str:
        return shlex.join(["python", "run.py", *self.arguments])

    @property
    def shown_state(self) -> str:
        """ "interrupted, 3 of 10 variants finished": the state, with the number if only some variants are finished."""
        if self.state is State.FINISHED or not self.num_finished:
            return self.state
        return f"{self.state}, {self.num_finished} of {len(variant_names(self.config))} variants finished"

    @property
    def outcome_folder(self) -> Path:
        """Where its outcome can be read: all of it, if that is anywhere."""
        folders = [folder for folder in (self.workdir, self.kept) if folder is not None]
        finished = (folder for folder in folders if _is_finished(Workdir(folder), self.config))
        begun = (folder for folder in folders if Workdir(folder).summary_file.exists())
        return next(itertools.chain(finished, begun), self.workdir)

    def look(self) -> None:
        """Sets the state by what is on disk. A cell that is kept unfinished is interrupted, as one in the workdir would be."""
        folders = [Workdir(folder) for folder in (self.workdir, self.kept) if folder is not None]
        finished = [_finished_variants(folder, self.config) for folder in folders]
        self.num_finished = len(set().union(*finished))
        if set(variant_names(self.config)) in finished:
            self.state = State.FINISHED
        elif folders[0].is_in_use():
            self.state = State.IN_USE
        elif folders[0].config_file.exists() or self.num_finished:
            self.state = State.INTERRUPTED
        else:
            self.state = State.NOT_STARTED

    def keep(self) -> None:
        """Copies config.json and summary.json of a finished cell to where they are kept; what is there stays."""
        run = Workdir(self.workdir)
        if self.kept is None or _is_finished(Workdir(self.kept), self.config) or not run.summary_file.exists():
            return
        _copy(run.config_file, self.kept)
        _add_outcomes(run, Workdir(self.kept))  # with it, it is kept

    def take_up(self) -> None:
        """Before the cell is started: copies what is kept of it, if only some of its variants are finished there, to the
        workdir, as far as that has none of its own. The run then trains the others."""
        run = Workdir(self.workdir)
        if self.kept is not None and Workdir(self.kept).summary_file.exists():
            kept = Workdir(self.kept)
            _add_outcomes(kept, run)
            if not run.config_file.exists():
                _copy(kept.config_file, self.workdir)  # with it, there is a run

    def progress(self) -> str:
        """ "2/5 linear: 1,200/5,000": which variant, and its step, as far as they are recorded."""
        record = _last_record(Workdir(self.workdir).metrics_file)
        names = variant_names(self.config)
        if record is None or record.get("variant") not in names:
            return ""
        name = record["variant"]
        steps = variant_config(self.config, name).train.num_steps
        return f"{names.index(name) + 1}/{len(names)} {name}: {record['step']:,}/{steps:,}"


def track(grid: Grid, cells: Sequence[Cell], out: Path, changes: Sequence[str] = ()) -> list[Tracked]:
    """The cells with their configs and states. changes: more arguments, --config.field=value, of each of them.

    Raises ConfigError naming the first cell whose config can't be, or another one than that of its kept outcome.
    """
    tracked = []
    for cell in cells:
        cell = dataclasses.replace(cell, arguments=(*cell.arguments, *changes))
        workdir, kept = out / cell.name, None if grid.keep_in is None else grid.keep_in / cell.name
        try:
            chosen = read_config_arguments(cell.arguments)
            variant_names(chosen.config)
            known = [Workdir(folder) for folder in (workdir, kept) if folder is not None]
            if kept is not None and known[1].summary_file.exists() and not known[1].config_file.exists():
                raise ConfigError(
                    f"{kept} has a {known[1].summary_file.name} without the {known[1].config_file.name} that it was made with: "
                    "expected both: put that file back, or move the folder away"
                )
            if not any(folder.config_file.exists() for folder in known):
                check_effects(chosen.config, chosen.given)
            elif kept is not None and known[1].config_file.exists() and (found := known[1].differences(chosen.config)):
                raise ConfigError(
                    f"{kept} keeps the outcome of another config ({'; '.join(found)}): give the same settings, or another name"
                )
        except SettingError as error:
            raise cell.error(error) from error
        tracked.append(Tracked(cell, chosen.config, workdir, kept))
        tracked[-1].look()
    return tracked


def _add_outcomes(source: Workdir, target: Workdir) -> None:
    """Adds to the target's summary.json the outcomes that stand in the source's alone.

    If either file can't be read, the target's stays as it is: the run that goes on there says so, or makes it again."""
    try:
        found, there = source.read_summary(), target.read_summary()
    except ConfigError:
        return
    if there is None:
        _copy(source.summary_file, target.path)
    elif found is not None and not set(found.variants) <= set(there.variants):
        variants = there.variants | {name: x for name, x in found.variants.items() if name not in there.variants}
        target.write_summary(dataclasses.replace(found, variants=variants))


def _copy(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / file.name, lambda copied: copied.write(file.read_text()))


def _is_finished(folder: Workdir, config: ConfigDict) -> bool:
    return _finished_variants(folder, config) == set(variant_names(config))


def _finished_variants(folder: Workdir, config: ConfigDict) -> set[str]:
    try:
        return folder.finished_variants(config)
    except ConfigError:  # the run repairs what it can, or says what is wrong
        return set()


def _last_record(metrics: Path) -> dict | None:
    try:
        with metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")
        record = json.loads(lines[-2])
    except (OSError, ValueError, IndexError):  # none yet, or it is longer than that
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
