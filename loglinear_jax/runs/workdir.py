"""What a run writes: config.json, metrics.jsonl, summary.json, TensorBoard events, checkpoints. And how it is read.

    config.json           the config, as started
    corpus.json, tokenizer.json   of a text: what its tokens were made from, and the tokenizer
    processes.jsonl       one line for each variant and process that trained it: when, command, code, device
    metrics.jsonl         one line an evaluation: variant, step, and per-seed lists
    summary.json          outcomes of the variants that are finished, per seed and together
    learning_curves.png   accuracy against step, every seed
    tensorboard/<variant>/
    checkpoints/<variant>/<step>/
    lock                  held by the process that trains
    *.damaged             what could not be read and was made again
    *.earlier             what was recorded before a variant was trained again

Files are replaced whole or appended line by line, so that a kill at any moment leaves something to go on from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, config_differences, read_config, variant_names
from loglinear_jax.files import local_path
from loglinear_jax.runs.lines import check_metrics, check_process, read_lines
from loglinear_jax.runs.lock import is_held, only_process
from loglinear_jax.runs.outcome import RunSummary
from loglinear_jax.runs.writing import (
    CannotWrite,
    append_line,
    free_name,
    keep_aside,
    refusal,
    replace_file,
    to_json,
    write_json,
    writing,
)

if TYPE_CHECKING:
    from loglinear_jax.text import Corpus

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What metrics.jsonl holds. by_variant: the records of each. damaged: the numbers of the lines that are no records."""

    by_variant: dict[str, list[dict[str, Any]]]
    damaged: list[int]


class Workdir:
    """Paths and records of one run's directory. Of several processes only one `writes`; Orbax sees to checkpoints."""

    def __init__(self, path: str | os.PathLike, writes: bool = True):
        self.path = local_path(path, "workdir").absolute()
        self.writes = writes
        self.config_file = self.path / "config.json"
        self.corpus_file = self.path / "corpus.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.processes_file = self.path / "processes.jsonl"
        self.metrics_file = self.path / "metrics.jsonl"
        self.summary_file = self.path / "summary.json"
        self.curves_file = self.path / "learning_curves.png"
        self.lock_file = self.path / "lock"
        self._moved: list[str] = []

    def checkpoints(self, variant: str) -> Path:
        return self.path / "checkpoints" / variant

    def tensorboard(self, variant: str) -> Path:
        return self.path / "tensorboard" / variant

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the folder, unless it is there, and keeps other processes from training in it while entered.

        Raises ConfigError if it can't be made, holds something else than a run, or another process trains in it.
        """
        if self.path.is_file():
            raise ConfigError(f"workdir {self.path} is a file, expected a folder")
        try:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                others = self.files()
        except CannotWrite as error:
            raise ConfigError(f"workdir {error}") from error
        if others and not self.config_file.exists():
            raise ConfigError(
                f"workdir {self.path} holds no run, as there is no config.json, but {', '.join(sorted(others)[:3])}"
                f"{' and more' if len(others) > 3 else ''}: expected a run, an empty folder or none"
            )
        with only_process(self.lock_file, self.writes):
            yield

    def files(self) -> set[str]:
        """Names in the folder, but for those that are there before its config.json; none without a folder."""
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        return names - {self.lock_file.name, "config.json.partial"}

    def prepare(self, config: ConfigDict) -> bool:
        """Makes the folder ready for a run with this config; True if there is a run of it to go on with.

        A run takes further variants, in any order, if the config still has all of its own.
        Raises ConfigError if it holds a run with another config (naming each differing field), and CannotWrite.
        """
        if self.config_file.exists():
            self._moved = self.differences(config, moved=False)
            # Where a text is may differ: `keep_corpus` compares what was read there.
            if differences := self.differences(config):
                raise ConfigError(
                    f"workdir {self.path} holds a run with another config ({'; '.join(differences)}): "
                    "give the same settings as its config.json, or another --workdir"
                )
            if self.writes and not self._moved and self.differences(config, grown=False):
                write_json(self.config_file, config.to_dict())
            return True
        if self.writes:
            write_json(self.config_file, config.to_dict())
        return False

    def differences(self, config: ConfigDict, moved: bool = True, grown: bool = True) -> list[str]:
        """One "field: old → new" for each field in which the config is another one than that of the run which is here.

        moved: where a text is does not count. grown: nor do further variants. Raises ConfigError if the run's config can't be
        read.
        """
        as_written = ConfigDict(json.loads(to_json(config.to_dict())))
        return config_differences(read_config(self.config_file), as_written, moved=moved, grown=grown)

    def finished_variants(self, config: ConfigDict) -> set[str]:
        """The config's variants whose outcome it holds; none of a run with another config. Raises ConfigError for unreadable
        files."""
        if not self.config_file.exists() or self.differences(config):
            return set()
        summary = self.read_summary()
        return set() if summary is None else set(variant_names(config)) & set(summary.variants)

    def is_in_use(self) -> bool:
        """Whether a process trains in it."""
        return is_held(self.lock_file)

    def make_folders(self, variant: str) -> None:
        """Makes the folders of a variant, so that what is in their way shows before training. Raises CannotWrite."""
        for folder in (self.checkpoints(variant), self.tensorboard(variant)):
            if folder.is_file():
                raise CannotWrite(folder, "it is a file, expected a folder")
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def written_config(self) -> dict[str, Any]:
        """The content of config.json."""
        return json.loads(self.config_file.read_text(encoding="utf-8"))

    def repair(self) -> None:
        """Keeps aside records that can't be read, and goes on with what can; a warning says what is lost of each.

        summary.json is derived again from checkpoints and metrics; corpus.json and tokenizer.json from the text that is given.
        """
        if not self.writes:
            return
        for file, read, then in (
            (self.summary_file, self.read_summary, "outcomes are derived again from checkpoints and metrics"),
            (self.corpus_file, self.read_corpus, "made again from the text that is given"),
        ):
            try:
                read()
            except ConfigError as error:
                log.warning("%s: %s; kept as %s", error, then, keep_aside(file).name)
        for file, check in ((self.metrics_file, check_metrics), (self.processes_file, check_process)):
            try:
                records, damaged = read_lines(file, check)
            except OSError as error:
                log.warning("%s can't be read: %s; kept as %s", file, refusal(error), keep_aside(file).name)
                continue
            if damaged:
                kept = keep_aside(file)
                replace_file(file, lambda out, records=records: out.writelines(to_json(r) + "\n" for r in records))
                log.warning(
                    "%s: line%s %s can't be read and %s left out; the file is kept as %s",
                    file, "s" * (len(damaged) > 1), ", ".join(map(str, damaged[:10])) + ", ..." * (len(damaged) > 10),
                    "are" if len(damaged) > 1 else "is", kept.name,
                )  # fmt: skip

    def keep_corpus(self, corpus: Corpus, config: ConfigDict | None = None) -> None:
        """Writes what a text was made from, and its tokenizer, so that the run can be read without the text.

        config: as given to `prepare`, kept in place of the earlier one if the text is elsewhere now.
        Raises ConfigError if the run was started with another text or tokenizer.
        """
        written = self.read_corpus()
        known = written or next((p["text"] for p in self.read_processes() if "text" in p), None)
        for name, what in (("splits", "the text"), ("tokenizer_sha256", "the tokenizer")):
            if known is not None and known[name] != corpus.manifest[name]:
                raise ConfigError(
                    f"workdir {self.path} holds a run in which {what} was another one: give the same, or another --workdir"
                )
        if self._moved and known is None:
            raise ConfigError(
                f"workdir {self.path} holds a run with another config ({'; '.join(self._moved)}), and nothing says that the "
                "text is the same: give the same settings, or another --workdir"
            )
        if self.writes:
            if self._moved and config is not None:
                write_json(self.config_file, config.to_dict())
            text = corpus.tokenizer.to_str(pretty=True)
            if not _holds(self.tokenizer_file, text):
                replace_file(self.tokenizer_file, lambda file: file.write(text))
            if written is None:
                write_json(self.corpus_file, corpus.manifest)

    def read_corpus(self) -> dict[str, Any] | None:
        """The manifest of the text that the run was started with; None if there is none. Raises ConfigError if it can't be
        read."""
        manifest = self._read_json(self.corpus_file)
        if manifest is None:
            return None
        needed = {"splits": dict, "tokenizer_sha256": str, "vocab_size": int}
        if not isinstance(manifest, dict) or any(type(manifest.get(key)) is not kind for key, kind in needed.items()):
            raise ConfigError(
                f"{self.corpus_file} can't be read: expected an object with {', '.join(needed)} of a tokenised text"
            )
        return manifest

    def read_summary(self) -> RunSummary | None:
        """summary.json, or None while no variant is finished. Raises ConfigError if it can't be read."""
        values = self._read_json(self.summary_file)
        try:
            return None if values is None else RunSummary.from_json(values)
        except ValueError as error:
            raise ConfigError(f"{self.summary_file} can't be read: {error}") from error

    def _read_json(self, path: Path) -> Any:
        """The content of a JSON file; None if there is no file. Raises ConfigError if it can't be read."""
        if not os.path.lexists(path):
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {refusal(error)}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        if value is None:
            raise ConfigError(f"{path} can't be read: it holds null")
        return value

    def has_damaged_summary(self) -> bool:
        """Whether `repair` has ever kept a summary aside."""
        return any(self.path.glob(f"{self.summary_file.name}.damaged*"))

    def write_summary(self, summary: RunSummary) -> None:
        """Raises CannotWrite."""
        if self.writes:
            write_json(self.summary_file, summary.to_json())

    def append_process(self, process: dict[str, Any]) -> None:
        """Adds a line to processes.jsonl, on disk when this returns. Raises CannotWrite."""
        if self.writes:
            append_line(self.processes_file, process)

    def read_processes(self) -> list[dict[str, Any]]:
        """The lines of processes.jsonl, the first process first; none of a run of an earlier version."""
        return read_lines(self.processes_file, check_process)[0]

    def append_metrics(self, record: dict[str, Any], after: int | None = None) -> None:
        """Adds a line to metrics.jsonl, on disk when this returns. Raises CannotWrite.

        after: the step of the checkpoint that the variant goes on from. What was recorded of it past that step is replaced by
        this line, so that nothing is gone before there is something new.
        """
        if not self.writes:
            return
        records = [] if after is None else self.read_metrics()
        kept = [r for r in records if r["variant"] != record["variant"] or r["step"] <= after]
        if len(kept) < len(records):
            lines = [to_json(r) + "\n" for r in (*kept, record)]
            replace_file(self.metrics_file, lambda file: file.writelines(lines))
        else:
            append_line(self.metrics_file, record)

    def read_metrics(self, variant: str | None = None) -> list[dict[str, Any]]:
        """The records in metrics.jsonl, of one variant or of all; lines that are no records are left out."""
        return [record for record in self._metrics_lines()[0] if variant in (None, record["variant"])]

    def read_all_metrics(self) -> Metrics:
        """metrics.jsonl, read once for all variants. Raises ConfigError if it can't be read."""
        records, damaged = self._metrics_lines()
        by_variant: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            by_variant.setdefault(record["variant"], []).append(record)
        return Metrics(by_variant, damaged)

    def _metrics_lines(self) -> tuple[list[dict[str, Any]], list[int]]:
        try:
            return read_lines(self.metrics_file, check_metrics)
        except OSError as error:
            raise ConfigError(f"{self.metrics_file} can't be read: {refusal(error)}") from error

    def keep_copies(self) -> None:
        """Copies metrics.jsonl and summary.json to *.earlier, before something of them is made again. Raises CannotWrite."""
        for path in (self.metrics_file, self.summary_file):
            if self.writes and path.exists():
                copy = free_name(path, "earlier")
                with writing(copy):
                    shutil.copy2(path, copy)


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeError):
        return False
