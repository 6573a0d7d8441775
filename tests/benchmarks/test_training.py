"""That the benchmark of recall training runs what it says; how long it takes is for the benchmark."""

import json

import jax
import pytest

from loglinear_jax.benchmarks import training
from loglinear_jax.commands.main import main
from loglinear_jax.config import build
from loglinear_jax.config.files import read_config_arguments

SMALL = ["--config=mqar:smoke", "--config.model.hidden=16", "--config.model.layers=1"]
SMALL += [f"--config.train.{name}" for name in ("batch_size=2", "num_train=4", "num_validation=2")]
SMALL += ["--config.train.steps_per_dispatch=3", "--config.train.eval_every=50"]


@pytest.mark.slow
def test_a_step_and_an_evaluation_are_timed_apart(monkeypatch):
    steps, replicas = [], []
    train_steps = training.ManySeeds.train_steps

    def counted(many, state, data, num_steps):
        replicas.append(many.numbers)
        steps.append(num_steps)
        return train_steps(many, state, data, num_steps)

    monkeypatch.setattr(training.ManySeeds, "train_steps", counted)
    experiment = build(read_config_arguments(SMALL).config, "linear")
    measured = training.time_training(experiment, steps=4, rates=2)
    assert replicas[0] == [0, 1, 0, 1]  # as many as the seeds
    assert steps == [3] * 3  # to compile, and four steps in two
    both = (measured["step_ms"] + measured["evaluation_ms"] / 50) / 4  # four seeds
    assert measured["ms_per_seed_and_step"] == pytest.approx(both) and both > 0


def test_the_command_writes_a_table_and_where_it_comes_from(tmp_path, monkeypatch, capsys):
    measured = {"step_ms": 32.0, "evaluation_ms": 64.0, "ms_per_seed_and_step": 0.75}
    asked = []
    monkeypatch.setattr(training, "time_training", lambda *experiment: asked.append(experiment) or measured)
    arguments = "benchmark", "training", "--tasks=mqar", "--seeds=30", "--ways=float32,xla,rates"
    arguments = [*arguments, f"--output={tmp_path / 'out'}"]
    assert main(arguments) == 0
    given = [(e.train.num_seeds, e.train.batch_size, e.train.precision, rates) for e, _, rates in asked]
    assert given == [(30, 64, "float32", 1), (30, 64, "float32", 1), (30, 64, "tf32", 6)]
    assert [e.config.model.implementation for e, *_ in asked] == [None, "xla", None]
    line = capsys.readouterr().out.splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == ["MQAR, length 128, 32 pairs, 30 seeds", *["0.75"] * 3]
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["command"] == " ".join(["loglinear_jax", *arguments])
    assert record["commit"] and record["versions"]["jax"] and record["training"][0]["ms_per_seed_and_step"] == 0.75


def test_what_the_device_cannot_compute_is_left_out(tmp_path, monkeypatch, capsys):
    def measured(experiment, steps, rates):
        if experiment.train.precision == "float32":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand where")
        return {"step_ms": 32.0, "evaluation_ms": 64.0, "ms_per_seed_and_step": 0.75}

    monkeypatch.setattr(training, "time_training", measured)
    arguments = "benchmark", "training", "--tasks=mqar", "--ways=float32,tf32", f"--output={tmp_path / 'out'}"
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "way=float32: not measured, RESOURCE_EXHAUSTED: out of memory" in out and "| 0.75" in out
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["way"] for row in record["training"]] == [training.WAYS["tf32"][0]]
