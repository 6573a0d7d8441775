"""What a run writes: config.json, metrics.jsonl, summary.json, TensorBoard events, checkpoints. And how it is read.

    config.json           the config, as started
    corpus.json, tokenizer.json   of a text: what its tokens were made from, and the tokenizer
    processes.jsonl       one line for each variant and process that trained it: when, command, code, device
    metrics.jsonl         one line an evaluation: variant, step, and per-seed lists
    summary.json          outcomes of every variant, per seed and together
    learning_curves.png   accuracy against step, every seed
    tensorboard/<variant>/
    checkpoints/<variant>/<step>/

Files are replaced whole or appended line by line, so that a kill at any moment leaves something to go on from.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from loglinear_jax.config import ConfigError, config_differences, read_config
from loglinear_jax.runs.outcome import RunSummary

if TYPE_CHECKING:
    from loglinear_jax.text import Corpus


class Workdir:
    """Paths and records of one run's directory. Of several processes only one `writes`; Orbax sees to checkpoints."""

    def __init__(self, path: str | os.PathLike, writes: bool = True):
        self.path = Path(path).absolute()
        self.writes = writes
        self.config_file = self.path / "config.json"
        self.corpus_file = self.path / "corpus.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.processes_file = self.path / "processes.jsonl"
        self.metrics_file = self.path / "metrics.jsonl"
        self.summary_file = self.path / "summary.json"
        self.curves_file = self.path / "learning_curves.png"

    def checkpoints(self, variant: str) -> Path:
        return self.path / "checkpoints" / variant

    def tensorboard(self, variant: str) -> Path:
        return self.path / "tensorboard" / variant

    def prepare(self, config: ConfigDict) -> bool:
        """Makes the directory ready for a run with this config; True if there is a run of it to go on with.

        Raises ConfigError if it can't be written, or holds a run with another config (naming each differing field).
        """
        if self.path.is_file():
            raise ConfigError(f"workdir {self.path} is a file, expected a folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ConfigError(f"workdir {self.path} can't be written: {error.strerror or error}") from error
        if self.config_file.exists():
            as_written = ConfigDict(json.loads(to_json(config.to_dict())))
            differences = config_differences(read_config(self.config_file), as_written)
            if differences:
                raise ConfigError(
                    f"workdir {self.path} holds a run with another config ({'; '.join(differences)}): "
                    "give the same settings, or another --workdir"
                )
            return True
        if self.writes:
            write_json(self.config_file, config.to_dict())
        return False

    def written_config(self) -> dict[str, Any]:
        """The content of config.json."""
        return json.loads(self.config_file.read_text())

    def keep_corpus(self, corpus: Corpus) -> None:
        """Writes what a text was made from, and its tokenizer, so that the run can be read without the text.

        Raises ConfigError if the run was started with another text or tokenizer.
        """
        known = self.read_corpus()
        if known is None:
            if self.writes:
                corpus.tokenizer.save(str(self.tokenizer_file))
                write_json(self.corpus_file, corpus.manifest)
            return
        for name, what in (("splits", "the text"), ("tokenizer_sha256", "the tokenizer")):
            if known[name] != corpus.manifest[name]:
                raise ConfigError(
                    f"workdir {self.path} holds a run in which {what} was another one: give the same, or another --workdir"
                )

    def read_corpus(self) -> dict[str, Any] | None:
        """The manifest of the text that the run was started with; None if there is none."""
        if not self.corpus_file.exists():
            return None
        try:
            return json.loads(self.corpus_file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.corpus_file} can't be read: {error}") from error

    def read_summary(self) -> RunSummary | None:
        """summary.json, or None while the run goes on. Raises ConfigError if it can't be read."""
        if not self.summary_file.exists():
            return None
        try:
            return RunSummary.from_json(json.loads(self.summary_file.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.summary_file} can't be read: {error}") from error

    def write_summary(self, summary: RunSummary) -> None:
        if self.writes:
            write_json(self.summary_file, summary.to_json())

    def append_process(self, process: dict[str, Any]) -> None:
        """Adds a line to processes.jsonl, on disk when this returns."""
        self._append(self.processes_file, process)

    def read_processes(self) -> list[dict[str, Any]]:
        """The lines of processes.jsonl, the first process first; none of a run of an earlier version."""
        return self._read_lines(self.processes_file, ("variant", "provenance"))

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl, on disk when this returns."""
        self._append(self.metrics_file, record)

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        """Adds a line to a file, in place of one that a kill cut off."""
        if not self.writes:
            return
        with path.open("a+b") as file:
            if size := file.tell():
                file.seek(size - 1)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write((to_json(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return self._read_lines(self.metrics_file, ("variant", "step"))

    def _read_lines(self, path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
        """The lines of a file, each with these keys; a last line cut off by a kill is left out."""
        if not path.exists():
            return []
        found = []
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    values = json.loads(line)
                    for key in keys:
                        values[key]
                    found.append(values)
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    raise ConfigError(f"{path}, line {number}: not a record of a run") from None
        return found

    def drop_metrics_after(self, variant: str, step: int) -> None:
        """Removes what was recorded of a variant past the checkpoint that its run goes on from."""
        if not self.writes:
            return
        kept = [r for r in self.read_metrics() if r["variant"] != variant or r["step"] <= step]
        _replace(self.metrics_file, lambda file: file.writelines(to_json(record) + "\n" for record in kept))


def to_json(value: Any, **kwargs: Any) -> str:
    """Strict JSON; numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, **kwargs)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file, whole or not at all."""
    _replace(path, lambda file: file.write(to_json(value, indent=2) + "\n"))


def _replace(path: Path, write: Callable) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
