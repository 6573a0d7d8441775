"""A run small enough for tests, started as users start it, and what it is compared by."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from loglinear_jax.runs import load_run
from loglinear_jax.runs.folders import read_lines

ROOT = Path(__file__).parents[2]
TINY = (
    "--config=configs/mqar.py",
    "--config.variants=linear,mlp_softplus",
    *(f"--config.task.{name}" for name in ("seq_len=16", "vocab_size=16", "num_pairs=2")),
    *(
        f"--config.model.{name}"
        for name in ("hidden=16", "head_dim=8", "key_dim=8", "layers=1", "implementation=parallel")
    ),
    *(f"--config.train.{name}" for name in ("num_seeds=2", "num_steps=60", "batch_size=8", "num_train=100")),
    *(f"--config.train.{name}" for name in ("num_validation=50", "num_test=40", "eval_every=5", "checkpoint_every=10")),
    "--config.train.steps_per_dispatch=5",
)


def start(workdir, *overrides, env=None, within=()):
    """within: a command that runs the command line which follows it."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONUNBUFFERED": "1"} | (env or {})
    command = [*within, sys.executable, "run.py", *TINY, *overrides, f"--workdir={workdir}"]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def read_json(*parts):
    return json.loads(Path(*parts).read_text(encoding="utf-8"))


def wait_for_lines(path, count, process):
    """Until a file has `count` lines, or the process has ended."""
    deadline = time.monotonic() + 240
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        assert time.monotonic() < deadline, f"no {count} lines in {path}"
        time.sleep(0.002)


def assert_same_run(a, b, variants=("linear", "mlp_softplus")):
    """Bit-identical parameters, optimizer outcomes and metrics; only the throughput may differ."""
    for variant in variants:
        x, y = load_run(a, variant), load_run(b, variant)
        jax.tree.map(np.testing.assert_array_equal, (x.best, x.last, x.metrics), (y.best, y.last, y.metrics))

    def records(workdir):
        lines = [line for variant in variants for line in read_lines(Path(workdir, variant, "metrics.jsonl"))]
        return [{key: value for key, value in line.items() if "second" not in key} for line in lines]

    assert records(a) == records(b)
    for variant in variants:
        outcomes = [read_json(w, variant, "outcome.json")["variants"][variant] for w in (a, b)]
        for outcome in outcomes:
            del outcome["seconds"], outcome["seed_steps_per_second"], outcome["tokens_per_second"]
        assert outcomes[0] == outcomes[1]
