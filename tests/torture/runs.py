"""Small runs for the campaign: their command lines, how they are made, and what makes two of them the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "model.hidden": 16, "model.head_dim": 8, "model.key_dim": 8, "model.layers": 1, "model.implementation": "parallel",
    "train.num_seeds": 2, "train.batch_size": 8, "train.precision": "float32",
}  # fmt: skip
RECALL = SETTINGS | {
    "variants": "linear,mlp_softplus", "task.seq_len": 16, "task.vocab_size": 16, "task.num_pairs": 2,
    "train.num_steps": 60, "train.num_train": 100, "train.num_validation": 50, "train.num_test": 50, "train.eval_every": 5,
    "train.checkpoint_every": 10, "train.steps_per_dispatch": 5,
}  # fmt: skip
TEXT = SETTINGS | {
    "variants": "mlp_softplus", "task.seq_len": 16, "train.num_steps": 24, "train.learning_rate": 0.01,
    "train.warmup_steps": 2, "train.eval_every": 4, "train.checkpoint_every": 4, "train.steps_per_dispatch": 2,
    "train.eval_batch_size": 16,
}  # fmt: skip


def make_text_flags(folder: Path) -> None:
    """Writes a small text and a tokenizer learned from it, where `text_flags` names them."""
    from tokenizers import ByteLevelBPETokenizer

    from tests.text.conftest import make_text

    own = folder / "corpus"
    own.mkdir()
    (own / "birds.txt").write_text(make_text(400), encoding="utf-8")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([make_text(50)], vocab_size=300, show_progress=False)
    tokenizer.save_model(str(own))


def text_flags(folder: Path) -> tuple[str, ...]:
    own = folder / "corpus"
    return (
        f"--config.task.corpus={own / 'birds.txt'}",
        f"--config.task.tokenizer={own}",
        f"--config.task.cache={own / 'cache'}",
    )


def run_flags(task: str, folder: Path, changed: Mapping[str, Any] | None = None) -> list[str]:
    """The command line of a small run, without its workdir. task: "recall" or "text"; changed: settings by their names."""
    settings = (RECALL if task == "recall" else TEXT) | (changed or {})
    config = ["--config=mqar"] if task == "recall" else ["--config=wikitext2", *text_flags(folder)]
    return config + [f"--config.{name}={value}" for name, value in settings.items()]


def make_run(flags: Sequence[str], workdir: Path, evaluations: int | None = None) -> None:
    """Trains in this process; stopped, as by a person, after so many evaluations in all."""
    from loglinear_jax.commands.main import main
    from loglinear_jax.runs.workdir import Workdir
    from tests.torture.judge import command_ending

    append, count = Workdir.append_metrics, 0

    def counted(self, *arguments):
        nonlocal count
        append(self, *arguments)
        count += 1
        if count == evaluations:
            os.kill(os.getpid(), signal.SIGTERM)

    Workdir.append_metrics = counted
    try:
        ending = command_ending(lambda: main([*flags, f"--workdir={workdir}"], command="train", called="python run.py"))
    finally:
        Workdir.append_metrics = append
    stopped = evaluations is not None
    if ending.code != (130 if stopped else 0) or stopped != ("Stopped. Saved to" in ending.err):
        raise RuntimeError(f"{workdir} is not as it should be: {ending.error!r} {ending.err}")


def records(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole, without times."""
    return [record for line in lines(workdir / "metrics.jsonl") if (record := timeless_record(line)) is not None]


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n") if path.is_file() else []


def timeless_record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl without times; None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and {"variant", "step", "val_loss"} <= record.keys()
    return {name: value for name, value in record.items() if "second" not in name} if is_record else None


def outcomes(workdir: Path) -> dict[str, Any]:
    """By variant, what summary.json says without times."""
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    return {
        variant: {name: value for name, value in outcome.items() if "second" not in name}
        for variant, outcome in summary["variants"].items()
    }


def parameters(workdir: Path, variant: str) -> list[bytes]:
    """Every array of the best and last parameters, bit for bit."""
    import jax
    import numpy as np

    from loglinear_jax.runs import load_run

    run = load_run(workdir, variant)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((run.best, run.last, run.best_loss, run.diverged_step))]


def difference(workdir: Path, reference: Path) -> str | None:
    """The first thing in which two finished runs are not the same, times apart; None if they are."""
    if records(workdir) != records(reference):
        return f"metrics differ: {len(records(workdir))} records, {len(records(reference))} undisturbed"
    if outcomes(workdir) != outcomes(reference):
        return "outcomes differ: summary.json"
    for variant in outcomes(reference):
        if parameters(workdir, variant) != parameters(reference, variant):
            return f"parameters differ: {variant}"
    return None
