"""The curves of a run whose variants were trained in workdirs of their own."""

import dataclasses
import json

import numpy as np

from tests.analysis.made_runs import made_run


def record(variant, step):
    values = dict.fromkeys(("train_loss", "val_loss", "val_accuracy"), [step / 10] * 3)
    rates = dict.fromkeys(("seconds", "seed_steps_per_second", "tokens_per_second"), 1.0)
    return {"variant": variant, "step": step, "active": [True] * 3} | values | rates


def write(folder, *records):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_curves_come_from_where_each_variant_was_trained(tmp_path):
    run = made_run(tmp_path, eval_every=1, num_steps=2, num_seeds=3)
    folders = tuple(tmp_path / f"kv4@{variant}" for variant in run.variants)
    write(folders[0], record("linear", 1), record("linear", 2))
    run = dataclasses.replace(run, curves_in=folders)
    np.testing.assert_array_equal(run.metrics("linear")["val_loss"], [[0.1] * 3, [0.2] * 3])
    assert run.metrics("mlp_softplus")["val_loss"].shape == (0, 3)  # its workdir is gone
    assert run.problems == []

    write(folders[1], record("mlp_softplus", 2))
    run = dataclasses.replace(run)  # reads again
    np.testing.assert_array_equal(run.metrics("mlp_softplus")["step"], [2])
    (problem,) = run.problems
    assert problem.startswith(f"{folders[1]}: mlp_softplus: metrics.jsonl lacks the evaluations at step 1 ")


def test_damage_is_said_of_the_file_that_has_it(tmp_path):
    run = made_run(tmp_path)
    folders = tuple(tmp_path / name for name in ("a", "b"))
    write(folders[0])
    write(folders[1], record("linear", 1), {"variant": "linear"}, record("linear", 2))
    (damaged, *_) = dataclasses.replace(run, curves_in=folders).problems
    assert damaged == f"{folders[1] / 'metrics.jsonl'}, line 2: not a record of a run"
