"""What has become of a cell, read from its workdir: nothing else remembers it."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from loglinear_jax.command_line import MOST_BYTES_OF_NAME
from loglinear_jax.config import (
    ConfigError,
    check_effects,
    config_differences,
    named_variants,
    read_config,
    variant_config,
    variant_names,
    variants_at_rates,
)
from loglinear_jax.config.files import read_config_arguments, shell_safe
from loglinear_jax.provenance import config_sha256
from loglinear_jax.runs.errors import RunFailed
from loglinear_jax.runs.lock import one_at_a_time
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome, versions_of_all, with_commits
from loglinear_jax.runs.workdir import Workdir
from loglinear_jax.runs.writing import to_json, write_json, writing
from loglinear_jax.settings import SettingError
from loglinear_jax.sweep.best_rates import best_variants, check_reports, swept_settings
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
    WAITING = "waiting"  # for the run that chooses its variants' rates


@dataclasses.dataclass
class Tracked:
    """A cell, its config and workdir, and what is known of it now; or one variant of a cell, in a workdir of its own.

    whole: set for one variant only: config, command and name of its cell. kept: the folder in which config.json and
    summary.json are left, of one variant those of the cell. num_finished: how many of its variants have their outcome in the
    workdir or there. place: where it runs. why, log: of what failed. restarts: how often it was started again after it was
    killed. A cell that is WAITING has its variants at the first of their rates, until they are chosen.
    """

    cell: Cell
    config: ConfigDict
    workdir: Path
    kept: Path | None
    whole: tuple[ConfigDict, str, str] | None = None
    state: State = State.NOT_STARTED
    num_finished: int = 0
    place: str = ""
    why: str = ""
    log: Path | None = None
    restarts: int = 0
    seconds: float = 0.0

    @property
    def arguments(self) -> list[str]:
        """Of `loglinear_jax train`, or run.py."""
        return [*self.cell.arguments, f"--workdir={self.workdir}"]

    @property
    def command(self) -> str:
        """That of run.py; of a cell that is waiting its name, as its command is not known yet."""
        return self.cell.name if self.state is State.WAITING else shlex.join(["python", "run.py", *self.arguments])

    def is_of(self, name: str) -> bool:
        """Whether it is the cell of this name, or a variant of it that is trained by itself."""
        return name == (self.cell.name if self.whole is None else self.whole[2])

    @property
    def shown_state(self) -> str:
        """ "interrupted, 3 of 10 variants finished": the state, with the number if only some variants are finished."""
        if self.state is State.WAITING:
            return f"{self.state} for {self.cell.best_of}"
        if self.state is State.FINISHED or not self.num_finished:
            return self.state
        return f"{self.state}, {self.num_finished} of {len(variant_names(self.config))} variants finished"

    @property
    def outcome_folder(self) -> Path:
        """Where its outcome can be read: all of it, if that is anywhere."""
        folders = [folder for folder in (self.workdir, self.kept) if folder is not None]
        if self.whole is not None:
            folders.reverse()  # there it stands among the others
        finished = (folder for folder in folders if self._finished_in(folder) == self._names)
        begun = (folder for folder in folders if Workdir(folder).summary_file.exists())
        return next(itertools.chain(finished, begun), self.workdir)

    def look(self) -> None:
        """Sets the state by what is on disk. A cell that is kept unfinished is interrupted, as one in the workdir would be."""
        folders = [folder for folder in (self.workdir, self.kept) if folder is not None]
        finished = [self._finished_in(folder) for folder in folders]
        self.num_finished = len(set().union(*finished))
        run = Workdir(self.workdir)
        if self._names in finished:
            self.state = State.FINISHED
        elif run.is_in_use():
            self.state = State.IN_USE
        elif run.config_file.exists() or self.num_finished:
            self.state = State.INTERRUPTED
        else:
            self.state = State.NOT_STARTED

    def keep(self) -> None:
        """Puts config.json and summary.json of a finished cell where they are kept; what is there stays. What keeps it from
        that is said in `why`."""
        run = Workdir(self.workdir)
        if self.kept is None or self._finished_in(self.kept) == self._names or not run.summary_file.exists():
            return
        try:
            with writing(self.kept):
                self.kept.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(self.kept):
                self._add_to(Workdir(self.kept), run.read_summary())
        except (ConfigError, RunFailed) as error:
            self.why = f"not kept: {error}"

    def _add_to(self, kept: Workdir, ours: RunSummary) -> None:
        """Raises ConfigError and RunFailed."""
        config = self.config if self.whole is None else self.whole[0]
        config, has_ours = ConfigDict(json.loads(to_json(config.to_dict()))), False
        if kept.config_file.exists():
            there = read_config(kept.config_file)
            has_ours = not config_differences(config, there, moved=True, grown=True)
            if not has_ours:
                _check_kept(kept, config)
            config = there if has_ours else config
        summaries = [ours] if (there := kept.read_summary()) is None else [there, ours]
        outcomes = {name: outcome for one in reversed(summaries) for name, outcome in one.variants.items()}
        commits = [commit for one in summaries for commit in one.commits]
        devices = dict.fromkeys(device for one in summaries for device in one.devices)
        if not has_ours:
            write_json(kept.config_file, config.to_dict())
        if self.whole is not None:
            written = json.loads(kept.config_file.read_text(encoding="utf-8"))
            ours = dataclasses.replace(
                ours,
                command=self.whole[1],
                command_today=None,
                provenance=ours.provenance | {"config_sha256": config_sha256(written)},
                device=", ".join(devices) or None,
                seconds_in_this_process=sum(one.seconds_in_this_process or 0.0 for one in summaries),
            )
        variants = {name: outcomes[name] for name in variant_names(config) if name in outcomes}
        provenance = with_commits(ours.provenance, commits)
        versions = versions_of_all(one.versions for one in summaries)
        ours = dataclasses.replace(ours, variants=variants, provenance=provenance, versions=versions)
        kept.write_summary(ours)  # with it, it is kept

    @property
    def _names(self) -> set[str]:
        return set(variant_names(self.config))

    def _finished_in(self, folder: Path) -> set[str]:
        """Its variants whose outcome is there."""
        config = self.config if self.whole is None or folder == self.workdir else self.whole[0]
        try:
            return Workdir(folder).finished_variants(config) & self._names
        except ConfigError:  # the run repairs what it can, or says what is wrong
            return set()

    def take_up(self) -> None:
        """Before the cell is started: copies what is kept of it, if only some of its variants are finished there, to the
        workdir, as far as that has none of its own. The run then trains the others."""
        run, kept = Workdir(self.workdir), None if self.kept is None else Workdir(self.kept)
        try:
            if run.config_file.exists():
                refused = bool(run.differences(self.config))
            else:
                refused = not run.files() <= {run.summary_file.name}
            if refused:  # by the run, which says why
                return
            found = None if kept is None or not kept.config_file.exists() else kept.read_summary()
            there = run.read_summary()
        except (ConfigError, OSError):  # the run that goes on there says so, or makes it again
            return
        if found is not None:
            variants = {} if there is None else there.variants
            added = {name: x for name, x in found.variants.items() if name in self._names and name not in variants}
            if added:
                head = found
                if there is not None:
                    commits = there.commits + found.commits
                    head = dataclasses.replace(there, provenance=with_commits(there.provenance, commits))
                run.path.mkdir(parents=True, exist_ok=True)
                run.write_summary(dataclasses.replace(head, variants=variants | added))
        if not run.config_file.exists() and (found is not None or self.whole is not None):
            # With it, there is a run, whose settings are not asked again whether they have an effect: on one variant of a
            # cell not all need have one.
            run.path.mkdir(parents=True, exist_ok=True)
            write_json(run.config_file, self.config.to_dict())

    def progress(self) -> str:
        """ "2/5 linear: 1,200/5,000": which variant, and its step, as far as they are recorded."""
        record = _last_record(Workdir(self.workdir).metrics_file)
        names = variant_names(self.config)
        if record is None or record.get("variant") not in names:
            return ""
        name = record["variant"]
        steps = variant_config(self.config, name).train.num_steps
        return f"{names.index(name) + 1}/{len(names)} {name}: {record['step']:,}/{steps:,}"


def differing_settings(cells: Sequence[Tracked]) -> list[str]:
    """What each cell is given that not all of them are, such as "config=mqar:kv=4 train.num_steps=10"; nothing of one that is
    waiting, as its variants are not known yet."""
    given = [() if one.state is State.WAITING else one.cell.arguments for one in cells]
    known = [set(arguments) for arguments in given if arguments]
    shared = set.intersection(*known) if known else set()
    return [
        " ".join(
            argument.removeprefix("--").removeprefix("config.") for argument in arguments if argument not in shared
        )
        for arguments in given
    ]


def track(
    grid: Grid, cells: Sequence[Cell], out: Path, changes: Sequence[str] = (), split: bool = False
) -> list[Tracked]:
    """The cells with their configs and states. changes: more arguments, --config.field=value, of each of them. split: each
    variant of a cell in a workdir of its own, NAME--VARIANT, unless the cell has begun in one already.

    A cell with best_of is WAITING until what it names is finished, and its config is tracked again after that.

    Raises ConfigError naming the first cell whose config can't be, or another one than that of its kept outcome.
    """
    tracked = [one for cell in cells for one in _track(grid, cell, out, changes, split)]
    count = Counter(one.workdir for one in tracked)
    for one in tracked:
        if count[one.workdir] > 1:
            raise one.cell.error(
                f"{count[one.workdir]} cells have the workdir {one.workdir}: expected another for each"
            )
        if one.state is not State.WAITING:
            one.look()
    return tracked


def _track(grid: Grid, cell: Cell, out: Path, changes: Sequence[str], split: bool) -> list[Tracked]:
    """A cell, or its variants; not looked at yet. Raises ConfigError naming it."""
    cell = dataclasses.replace(cell, arguments=(*cell.arguments, *changes))
    workdir, kept = out / cell.name, None if grid.keep_in is None else grid.keep_in / cell.name
    try:
        waits = False
        if cell.best_of:
            cell, waits = _with_best_rates(grid, cell, out, changes, split)
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
        if known[0].config_file.exists() and not waits:
            _check_begun(known[0], chosen.config)
        if kept is not None and known[1].config_file.exists():
            _check_kept(known[1], chosen.config, but_variants=waits)
        one = Tracked(cell, chosen.config, workdir, kept, state=State.WAITING if waits else State.NOT_STARTED)
        parts = _variants_of(one, out) if split and not known[0].config_file.exists() else [one]
    except SettingError as error:
        raise cell.error(error) from error
    return [one] if waits else parts


def _with_best_rates(grid: Grid, cell: Cell, out: Path, changes: Sequence[str], split: bool) -> tuple[Cell, bool]:
    """(the cell with the variants that its best_of stands for, and without the rates that these have themselves; whether it
    waits, as what chooses them is not finished: until then each is at its first rate).

    Raises ConfigError.
    """
    read_config_arguments(cell.arguments)  # what is wrong with its own settings has nothing to do with the other run
    try:
        choosing, outcomes = _choosing_run(grid, cell.best_of, out, changes, split)
        swept = swept_settings(choosing)
        if given := sorted(cell.own.intersection(swept)):
            raise ConfigError(f"it chooses {given[0]}: expected no settings.{given[0]} beside it")
        waits = not outcomes.keys() >= set(variant_names(choosing))
        variants = (
            [at_rates[0] for at_rates in variants_at_rates(choosing)] if waits else best_variants(choosing, outcomes)
        )
        kept = [
            argument
            for argument in cell.arguments
            if argument.partition("=")[0] not in {f"--config.{s}" for s in swept}
        ]
        cell = dataclasses.replace(cell, arguments=(*kept, f"--config.variants={','.join(variants)}"))
        check_reports(read_config_arguments(cell.arguments).config, choosing)
    except SettingError as error:
        raise ConfigError(f"best_of={cell.best_of}: {error}") from error
    return cell, waits


def _choosing_run(
    grid: Grid, name: str, out: Path, changes: Sequence[str], split: bool
) -> tuple[ConfigDict, dict[str, VariantOutcome]]:
    """Config and finished outcomes of the cell of this name, or else of the run that is kept or trained under it, all of which
    are finished.

    Raises SettingError.
    """
    named = next((cell for cell in grid.cells if cell.name == name), None)
    if named is None:
        return _finished_run([folder / name for folder in (grid.keep_in, out) if folder is not None])
    if named.best_of:
        raise ConfigError("that cell has a best_of itself: expected one that is trained at several rates")
    parts = track(grid, [named], out, changes, split)
    outcomes: dict[str, VariantOutcome] = {}
    for part in parts:
        if part.state is State.FINISHED and (summary := Workdir(part.outcome_folder).read_summary()) is not None:
            outcomes |= summary.variants
    return parts[0].config if parts[0].whole is None else parts[0].whole[0], outcomes


def _finished_run(folders: Sequence[Path]) -> tuple[ConfigDict, dict[str, VariantOutcome]]:
    """Config and outcomes of the first folder that has all of them. Raises ConfigError if none has."""
    unfinished = []
    for run in map(Workdir, folders):
        if run.config_file.exists():
            config, summary = read_config(run.config_file), run.read_summary()
            names, outcomes = variant_names(config), {} if summary is None else summary.variants
            if outcomes.keys() >= set(names):
                return config, dict(outcomes)
            unfinished.append(
                f"in {run.path} {len(outcomes.keys() & set(names))} of {len(names)} variants are finished"
            )
    raise ConfigError(
        "there is no such cell in the file, and "
        + (", ".join(unfinished) if unfinished else f"no run in {' or '.join(map(str, folders))}")
    )


def _check_begun(run: Workdir, config: ConfigDict) -> None:
    """Raises ConfigError if the workdir has a run of another config."""
    try:
        found = run.differences(config)
    except ConfigError:  # the run says what is wrong with its config.json, or makes it again
        return
    if found:
        raise ConfigError(
            f"{run.path} holds a run with another config ({'; '.join(found)}): give the same settings, or another --out"
        )


def _check_kept(kept: Workdir, config: ConfigDict, but_variants: bool = False) -> None:
    """Raises ConfigError if what is kept is the outcome of another config. but_variants: others of them do not count."""
    found = kept.differences(config)
    if but_variants:
        found = [line for line in found if not line.startswith("variants: ")]
    if found:
        raise ConfigError(
            f"{kept.path} keeps the outcome of another config ({'; '.join(found)}): give the same settings, or another name"
        )


def _variants_of(tracked: Tracked, out: Path) -> list[Tracked]:
    """One for each variant of a cell; at all rates, if it has several. Raises ConfigError."""
    names = named_variants(tracked.config)
    if len(names) == 1:
        return [tracked]
    whole = tracked.config, tracked.command, tracked.cell.name
    parts, arguments = [], [text for text in tracked.cell.arguments if not text.startswith("--config.variants=")]
    for name in names:
        cell = dataclasses.replace(
            tracked.cell,
            name=shell_safe(f"{tracked.cell.name}--{name}"),
            arguments=(*arguments, f"--config.variants={name}"),
        )
        if len(cell.name.encode()) > MOST_BYTES_OF_NAME:
            raise ConfigError(
                f"--split: {cell.name} has {len(cell.name.encode())} bytes: expected a folder's name of no more than "
                f"{MOST_BYTES_OF_NAME}"
            )
        config = read_config_arguments(cell.arguments).config
        if (begun := Workdir(out / cell.name)).config_file.exists():
            _check_begun(begun, config)
        parts.append(dataclasses.replace(tracked, cell=cell, config=config, workdir=out / cell.name, whole=whole))
    return parts


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
