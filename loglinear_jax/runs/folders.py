"""What a run writes, and how it is read.

    config.json                      every setting; it grows when the run is extended
    corpus.json, tokenizer.json      of a text: what its tokens were made from, and the tokenizer
    summary.json                     the outcomes of all variants, written when every variant is finished
    learning_curves.png              the score in validation against step, every seed
    VARIANT/outcome.json             what became of a variant; it is finished when this file is there
    VARIANT/metrics.jsonl            a line for each evaluation, with per-seed lists
    VARIANT/processes.jsonl          a line for each process that trained it: when, command, code, device
    VARIANT/checkpoints/STEP/        the newest Orbax checkpoints
    VARIANT/tensorboard/             the curves for TensorBoard
    VARIANT/wandb-id, wandb/         of a run that W&B shows: which one there, and what its library writes
    VARIANT/lock                     held by the process that trains it
    VARIANT/seeds-5-63/              the same files for seeds that were added later

Files are replaced whole or appended line by line, so a kill at any moment leaves something to go on from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, config_differences, read_config, variant_config, variant_names, with_none
from loglinear_jax.files import MOST_BYTES_OF_NAME, bytes_of_longest_name, existing_part, local_path
from loglinear_jax.provenance import config_sha256
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome, join_summaries
from loglinear_jax.runs.writing import (
    CannotWrite,
    append_line,
    is_held,
    one_at_a_time,
    replace_file,
    to_json,
    write_json,
    writing,
)
from loglinear_jax.train import TrainSettings

if TYPE_CHECKING:
    from loglinear_jax.text import Corpus


class VariantFolder:
    """The files of some seeds of one variant: those it was first trained with, or some that were added later."""

    def __init__(self, path: Path, writes: bool = True):
        self.path, self.writes = path, writes
        self.outcome_file = path / "outcome.json"
        self.metrics_file = path / "metrics.jsonl"
        self.processes_file = path / "processes.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.wandb_file = path / "wandb-id"
        self.lock_file = path / "lock"

    def make(self) -> None:
        """Makes its folders, so that what is in their way shows before training. Raises CannotWrite."""
        for folder in (self.path, self.checkpoints, self.tensorboard):
            if folder.is_file():
                raise CannotWrite(folder, "it is a file, expected a folder")
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def read_outcome(self) -> RunSummary | None:
        """The outcome and where it comes from, as a summary of this variant alone; None if it is not finished."""
        return _read_summary(self.outcome_file)

    def read_metrics(self, until: int | None = None) -> list[dict[str, Any]]:
        """The records of its evaluations, the first one first, up to a step."""
        return [record for record in read_lines(self.metrics_file) if until is None or record["step"] <= until]

    def cut_metrics(self, step: int) -> None:
        """Drops records past the step of the checkpoint that training goes on from. Raises CannotWrite."""
        if self.writes and self.metrics_file.exists():
            kept = [to_json(record) + "\n" for record in self.read_metrics(step)]
            replace_file(self.metrics_file, lambda file: file.writelines(kept))

    def append(self, file: Path, record: dict[str, Any]) -> None:
        """Adds a record to its metrics or processes, on disk when this returns. Raises CannotWrite."""
        if self.writes:
            append_line(file, record)

    def write_outcome(self, summary: RunSummary) -> None:
        """Makes the variant finished. Raises CannotWrite."""
        if self.writes:
            write_json(self.outcome_file, summary.to_json())


class RunFolder:
    """One run's folder, or the record of a finished run: one file that has its config and outcomes (`write_record`).

    writes: whether this process writes; of several processes of one run only one does."""

    def __init__(self, path: str | os.PathLike, writes: bool = True):
        self.path = local_path(path, "workdir").absolute()
        self.writes = writes
        self.config_file = self.path / "config.json"
        self.corpus_file = self.path / "corpus.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.summary_file = self.path / "summary.json"
        if self.path.suffix == ".json" and self.path.is_file():
            self.config_file = self.summary_file = self.path
        self.curves_file = self.path / "learning_curves.png"

    def variant(self, name: str) -> VariantFolder:
        """The folder of the seeds that a variant was first trained with."""
        return VariantFolder(self.path / name, self.writes)

    def added_seeds(self, name: str) -> dict[range, VariantFolder]:
        """The folders of seeds that were added to a variant later, by these seeds, in the order of their numbers."""
        found = {}
        for path in self.path.joinpath(name).glob("seeds-*-*"):
            if match := re.fullmatch(r"seeds-(\d+)-(\d+)", path.name, re.ASCII):
                found[range(int(match[1]), int(match[2]) + 1)] = VariantFolder(path, self.writes)
        return dict(sorted(found.items(), key=lambda item: item[0].start))

    def _all_seeds(self, name: str) -> list[VariantFolder]:
        return [self.variant(name), *self.added_seeds(name).values()]

    def parts(self, name: str, train: TrainSettings) -> dict[VariantFolder, TrainSettings]:
        """The folders that hold a variant's seeds, or are to hold them, each with its own seeds in its settings.

        The first has those of its outcome; while it has none, all that are not in folders of added seeds.
        """
        added, first = self.added_seeds(name), self.variant(name)
        outcome = first.read_outcome()
        last = train.first_seed + train.num_seeds
        num_first = min((seeds.start for seeds in added), default=last) - train.first_seed
        if outcome is not None:
            num_first = len(outcome.variants[name].seeds)
        found = {first: dataclasses.replace(train, num_seeds=num_first)}
        following = train.first_seed + num_first
        for seeds, folder in added.items():
            found[folder] = dataclasses.replace(train, first_seed=seeds.start, num_seeds=len(seeds))
            following = seeds.stop
        if following < last:
            folder = VariantFolder(first.path / f"seeds-{following}-{last - 1}", self.writes)
            found[folder] = dataclasses.replace(train, first_seed=following, num_seeds=last - following)
        return found

    # --- The config ---------------------------------------------------------------------------------------------------

    def prepare(self, config: ConfigDict, corpus: Corpus | None = None) -> bool:
        """Makes the folder ready for a run with this config, or for the same run extended; True if there is a run of it.

        corpus: the text that the run reads, if any. Raises ConfigError if the folder holds something else, or a run with
        another config, naming each differing field, or with another text; CannotWrite.
        """
        self._check_path(variant_names(config))
        try:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                others = {path.name for path in self.path.iterdir()} - {"config.json.partial"}
        except CannotWrite as error:
            raise ConfigError(f"workdir {error}") from error
        with one_at_a_time(self.path):  # the processes of a sweep train variants of one run
            if not self.config_file.exists():
                if others:
                    raise ConfigError(
                        f"workdir {self.path} holds no run, as there is no config.json, but "
                        f"{', '.join(sorted(others)[:3])}{' and more' if len(others) > 3 else ''}: expected a run, an empty "
                        "folder or none"
                    )
                self._write_inputs(config, corpus)
                return False
            if differences := self.differences(config):
                raise ConfigError(
                    f"workdir {self.path} holds a run with another config ({'; '.join(differences)}): "
                    "give the same settings as its config.json, or another --workdir"
                )
            old = read_config(self.config_file)
            if config.train.num_seeds > old.train.num_seeds:
                self._check_seeds_can_be_added(old)
            if corpus is not None:
                self.check_corpus(corpus)
            self._write_inputs(config, corpus)
            return True

    def _write_inputs(self, config: ConfigDict, corpus: Corpus | None) -> None:
        """Writes the config, and what a text was made from, so that the run can be read without it. Raises CannotWrite."""
        if not self.writes:
            return
        if _read_json(self.config_file) != json.loads(to_json(config.to_dict())):
            write_json(self.config_file, config.to_dict())
        if corpus is not None and not (self.corpus_file.exists() and self.tokenizer_file.exists()):
            text = corpus.tokenizer.to_str(pretty=True)
            replace_file(self.tokenizer_file, lambda file: file.write(text))
            write_json(self.corpus_file, corpus.manifest)

    def differences(self, config: ConfigDict) -> list[str]:
        """One "field: old → new" for each field in which a config is no extension of that of the run which is here; last,
        what more steps need, if they are refused.

        A run takes further variants, further values of a rate that has several, further seeds, and more steps. Where a text is
        does not count. Raises ConfigError if the run's config can't be read.
        """
        old, new = read_config(self.config_file), _as_written(config)
        if new.train.num_seeds > old.train.num_seeds:
            new.train.num_seeds = old.train.num_seeds
        if new.train.num_steps > old.train.num_steps and _can_go_on(old, new):
            new.train.num_steps = old.train.num_steps
        found = config_differences(old, new, moved=True, grown=True)
        if new.train.num_steps > old.train.num_steps:
            found.append("more steps need train.schedule=constant and a multiple of train.eval_every before")
        return found

    def _check_path(self, variants: Sequence[str]) -> None:
        if not (there := existing_part(self.path)).is_dir():
            raise ConfigError(f"workdir {self.path}: {there} is not a folder, expected one")
        for what, name in [("workdir", str(self.path)), *(("the variant", name) for name in variants)]:
            if set(name) & set("[]\\"):  # Orbax loses arrays there, without an error
                raise ConfigError(
                    f"{what} {name}: checkpoints that are saved there can't be read again; expected a path that Orbax takes, "
                    "without [, ] and \\"
                )
        for name in variants:
            if (longest := bytes_of_longest_name(name)) > MOST_BYTES_OF_NAME:
                raise ConfigError(
                    f"the variant {name[:60]}...: its folder's name would have {longest} bytes, expected at most "
                    f"{MOST_BYTES_OF_NAME}"
                )
            if ".." in Path(name).parts:
                raise ConfigError(f"the variant {name}: its folder, of this name, would be outside of the workdir")

    def _check_seeds_can_be_added(self, old: ConfigDict) -> None:
        """Raises ConfigError if seeds of a variant are being trained: which ones, only the config that they have now says."""
        for name in variant_names(old):
            for folder in self._all_seeds(name):
                if folder.processes_file.exists() and not folder.outcome_file.exists():
                    raise ConfigError(
                        f"workdir {self.path}: {name} is not finished: finish it with train.num_seeds={old.train.num_seeds} "
                        "before seeds are added"
                    )

    # --- Outcomes -----------------------------------------------------------------------------------------------------

    def read_summary_file(self) -> RunSummary | None:
        """summary.json; None while it is not written. Raises ConfigError if it can't be read."""
        return _read_summary(self.summary_file)

    def read_summary(self) -> RunSummary | None:
        """The outcomes of the variants that are finished, in the config's order; None while none is.

        They are read from the variants' folders, and from summary.json where a variant has no folder. Raises ConfigError for
        a file that can't be read.
        """
        found = []
        if (written := self.read_summary_file()) is not None:
            alone = {name: one for name, one in written.variants.items() if not self.variant(name).path.exists()}
            found = [dataclasses.replace(written, variants=alone)] if alone else []
        names = variant_names(read_config(self.config_file)) if self.config_file.exists() else []
        for name in names:
            of_seeds = [outcome for folder in self._all_seeds(name) if (outcome := folder.read_outcome()) is not None]
            found += [join_summaries(of_seeds)] if of_seeds else []
        if not found:
            return None
        summary = join_summaries(found)
        order = names or list(summary.variants)
        return dataclasses.replace(
            summary, variants={name: summary.variants[name] for name in order if name in summary.variants}
        )

    def finished_variants(self, experiments: Mapping[str, TrainSettings]) -> set[str]:
        """Those of the variants whose outcome is here for all seeds and steps of their settings."""
        summary = self.read_summary()
        outcomes = {} if summary is None else summary.variants
        return {name for name, train in experiments.items() if name in outcomes and is_finished(outcomes[name], train)}

    def write_summary(self, experiments: Mapping[str, TrainSettings]) -> None:
        """Writes summary.json if all variants are finished and it does not say so already. Raises CannotWrite."""
        if not self.writes or self.finished_variants(experiments) != experiments.keys():
            return
        with one_at_a_time(self.path):
            summary, written = self.read_summary(), self.read_summary_file()
            if written is None or written.variants != summary.variants:
                config = json.loads(self.config_file.read_text(encoding="utf-8"))
                origin = summary.provenance | {"config_sha256": config_sha256(config)}
                write_json(self.summary_file, dataclasses.replace(summary, provenance=origin).to_json())

    def is_in_use(self, variants: Sequence[str]) -> bool:
        """Whether a process trains one of the variants."""
        return any(is_held(folder.lock_file) for name in variants for folder in self._all_seeds(name))

    # --- The text -----------------------------------------------------------------------------------------------------

    def check_corpus(self, corpus: Corpus) -> None:
        """Raises ConfigError if the run was started with another text or tokenizer."""
        known = self.read_corpus()
        for name, what in (("splits", "the text"), ("tokenizer_sha256", "the tokenizer")):
            if known is not None and known.get(name) != corpus.manifest[name]:
                raise ConfigError(
                    f"workdir {self.path} holds a run in which {what} was another one: give the same, or another --workdir"
                )

    def read_corpus(self) -> dict[str, Any] | None:
        """The manifest of the text that the run was started with; None if there is none. Raises ConfigError if it can't be
        read."""
        return _read_json(self.corpus_file)


def write_record(path: Path, config: ConfigDict, summary: RunSummary) -> None:
    """Replaces the record of a finished run: its config and outcomes in one file, each list in one line. Raises CannotWrite."""
    text = to_json({"config": config.to_dict(), **summary.to_json()}, indent=2)
    lists = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")
    text = lists.sub(lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]", text)
    replace_file(path, lambda file: file.write(text + "\n"))


def train_settings(config: ConfigDict, variant: str) -> TrainSettings:
    """How a variant of a config is trained. Nothing is checked."""
    return TrainSettings(**with_none(variant_config(config, variant).train.to_dict(), TrainSettings))


def finished_outcomes(outcomes: Mapping[str, VariantOutcome], config: ConfigDict) -> dict[str, VariantOutcome]:
    """The outcomes of a config's variants that have all seeds and steps, in the order of the variants."""
    names = [name for name in variant_names(config) if name in outcomes]
    return {name: outcomes[name] for name in names if is_finished(outcomes[name], train_settings(config, name))}


def is_finished(outcome: VariantOutcome, train: TrainSettings) -> bool:
    """Whether an outcome has all seeds of the settings, trained for their steps or until each of them had stopped."""
    asked = train.num_steps if outcome.num_steps is None else outcome.num_steps
    return set(train.seeds) <= set(outcome.seeds) and (asked >= train.num_steps or outcome.last_step < asked)


def _can_go_on(old: ConfigDict, new: ConfigDict) -> bool:
    """Whether each variant's steps so far are those that it takes with more: by its schedule, and its last evaluation."""
    shared = set(variant_names(old)) & set(variant_names(new))
    trained = [variant_config(old, name).train for name in shared]
    return all(train.schedule == "constant" and train.num_steps % train.eval_every == 0 for train in trained)


def _as_written(config: ConfigDict) -> ConfigDict:
    return ConfigDict(json.loads(to_json(config.to_dict())))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of one JSON object a line; none if there is no file. A last line that a kill cut off is dropped.

    Raises ConfigError for any other line that is no record, and for a file that can't be read.
    """
    with _reading(path):
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def _read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is no file. Raises ConfigError if it can't be read."""
    with _reading(path):
        return json.loads(path.read_text(encoding="utf-8")) if os.path.lexists(path) else None


def _read_summary(path: Path) -> RunSummary | None:
    values = _read_json(path)
    with _reading(path):
        return None if values is None else RunSummary.from_json(values)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
