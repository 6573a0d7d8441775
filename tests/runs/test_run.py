"""Runs as a user starts them: real processes that are killed, stopped, resumed, refused; and what they leave behind."""

import shutil
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError, build
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.provenance import config_sha256
from loglinear_jax.runs import load_run, read_run, training
from loglinear_jax.runs.folders import read_lines
from loglinear_jax.train import ManySeeds, SeedTrainer
from loglinear_jax.train.seed_trainer import means
from tests.runs.tiny import ROOT, TINY, assert_same_run, finish, read_json, start, wait_for_lines

VARIANTS = "linear", "mlp_softplus"


def test_what_a_run_writes(undisturbed):
    workdir, out, err = undisturbed
    assert "| linear" in out and "| mlp_softplus" in out and "| test accuracy %" in out and str(workdir) in out
    assert "linear: 100%" in err and "\r" not in err  # the progress bar, as lines
    records = [record for variant in VARIANTS for record in read_lines(workdir / variant / "metrics.jsonl")]
    assert [r["step"] for r in records] == 2 * list(range(5, 65, 5))
    assert all(len(r["val_accuracy"]) == 2 and r["seed_steps_per_second"] > 0 for r in records)
    assert records[0]["tokens_per_second"] == pytest.approx(records[0]["seed_steps_per_second"] * 8 * 16)
    summary = read_json(workdir, "summary.json")
    assert summary["command"].startswith("python run.py --config=") and summary["versions"]["jax"] == jax.__version__
    for variant, s in summary["variants"].items():
        assert s["seconds"] == pytest.approx(sum(r["seconds"] for r in records if r["variant"] == variant))
        assert s["seeds"] == [0, 1] and s["last_step"] == 60
        curves = np.array([r["val_accuracy"] for r in records if r["variant"] == variant])
        np.testing.assert_allclose(s["best_accuracy"], curves.max(axis=0))
        assert s["mean_accuracy"] == pytest.approx(np.mean(s["test_accuracy"])) and len(s["test_loss"]) == 2
        assert any((workdir / variant / "tensorboard").iterdir())
        assert read_json(workdir, variant, "outcome.json") == summary | {"variants": {variant: s}}
        (process,) = read_lines(workdir / variant / "processes.jsonl")
        assert process["from_step"] == 0 and process["command"] == summary["command"]
    assert summary["variants"]["mlp_softplus"]["lam_params"] > summary["variants"]["linear"]["lam_params"]
    config = read_json(workdir, "config.json")
    assert config["train"]["num_steps"] == 60
    assert summary["provenance"].keys() == {"commit", "config_sha256"}
    assert summary["provenance"]["config_sha256"] == config_sha256(config)
    assert (workdir / "learning_curves.png").stat().st_size > 5_000
    assert not list(workdir.rglob("*.partial"))


@pytest.mark.slow
def test_load_run_gives_models_that_score_what_was_recorded(undisturbed):
    workdir, *_ = undisturbed
    run = load_run(workdir, "mlp_softplus")
    assert run.seeds == [0, 1] and run.config.model.lam == "mlp_softplus"
    assert run.metrics["val_accuracy"].shape == (12, 2)
    experiment, outcome = build(run.config, "mlp_softplus"), read_run(workdir).outcomes["mlp_softplus"]
    trainer = SeedTrainer(run.model, run.task, experiment.train)
    for index, seed in enumerate(run.seeds):
        validation, best_params = trainer.data(jnp.int32(seed))["validation"], run.params(seed, "best")
        _, best = means(*trainer.sums_of_parts(best_params, validation))
        _, last = means(*trainer.sums_of_parts(run.params(seed, "last"), validation))
        assert best == pytest.approx(run.metrics["val_accuracy"][:, index].max(), abs=1e-6)
        assert last == pytest.approx(run.metrics["val_accuracy"][-1, index], abs=1e-6)
        pieces = [trainer.sums_of_parts(best_params, piece) for piece in trainer.test_data(jnp.int32(seed))]
        test = means(*map(sum, zip(*pieces, strict=True)))
        np.testing.assert_allclose([[outcome.test_loss[index]], [outcome.test_accuracy[index]]], test, rtol=1e-5)


def test_load_run_of_a_run_that_is_ahead_of_its_checkpoints(copied):
    shutil.rmtree(copied / "linear" / "checkpoints" / "60")
    run = load_run(copied, "linear")
    assert run.metrics["step"][-1] == 50 and run.metrics["val_accuracy"].shape == (10, 2)


def test_load_run_says_what_is_missing(undisturbed, tmp_path):
    workdir, *_ = undisturbed
    for arguments, message in [
        ((tmp_path,), "holds no run"),
        ((workdir,), "several variants .linear, mlp_softplus.: name one as variant"),
        ((workdir, "rope"), "no variant 'rope': there are linear, mlp_softplus"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_run(*arguments)
    with pytest.raises(ConfigError, match="run holds no variant 'fixed': there are linear, mlp_softplus"):
        read_run(workdir).metrics("fixed")
    for seed in (7, "0"):
        with pytest.raises(KeyError, match=f"seed {seed!r} is not in this run"):
            load_run(workdir, "linear").params(seed)


def test_a_finished_run_only_shows_its_table_again(undisturbed, train):
    workdir, out, _ = undisturbed
    files = sorted(path for path in workdir.rglob("*") if path.is_file() and path.name != "lock")
    before = [path.read_bytes() for path in files]
    assert train(workdir)[:2] == (0, out)
    assert [path.read_bytes() for path in files] == before


@pytest.mark.slow
def test_a_signal_saves_says_where_and_exits(tmp_path):
    """A run that is stopped goes on, and ends as if it never had been. (Ctrl-C: tests/sweep. `kill -9`:
    tests/runs/test_faults.py.)

    The signal comes between evaluations: what a period had come to before is in its record when the run goes on.
    """
    rarely = [f"--config.train.{name}=100" for name in ("eval_every", "checkpoint_every")]
    rarely += ["--config.train.num_steps=400", "--config.variants=linear", "--config.train.steps_per_dispatch=1"]
    code, _, err = finish(start(tmp_path / "whole", *rarely))
    assert code == 0, err
    workdir = tmp_path / "run"
    process = start(workdir, *rarely)
    wait_for_lines(workdir / "linear" / "metrics.jsonl", 1, process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in err and "| linear" not in out
    assert f"Stopped. Saved to {workdir}/linear; the same command goes on from there." in err
    saved = max(int(path.name) for path in (workdir / "linear" / "checkpoints").iterdir() if path.name.isdecimal())
    assert 100 <= saved < 400 and f"linear: stopping at step {saved}" in err
    assert (workdir / "linear" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == saved // 100
    code, _, err = finish(start(workdir, *rarely))
    assert code == 0 and f"linear: going on from step {saved}" in err
    processes = read_lines(workdir / "linear" / "processes.jsonl")
    assert [process["from_step"] for process in processes] == [0, saved]
    assert_same_run(workdir, tmp_path / "whole", ["linear"])


def test_a_folder_with_another_run_is_refused(undisturbed, train):
    code, out, err = train(undisturbed[0], "--config.train.learning_rate=0.5", "--config.model.layers=2")
    assert code == 2 and out == ""
    assert "model.layers: 1 → 2; train.learning_rate: 0.001 → 0.5" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--config=configs/nothing.py", "there is no config file configs/nothing.py"),
        ("--config=mqra", ": did you mean mqar?"),
        ("--config=README.md", "the config README.md can't be read"),
        ("--config=mqar:kv=32,seq=100", "task.seq_len=100 is too short for num_pairs=32"),
        ("--config=mqar --config.variants=linear --config.model.lam=rope", "model.lam=rope has no effect"),
        ("--config=mqar --config.model.key_dim=8 --config.model.implementation=pallas", "=pallas: K, the key dim, is 8: "),
        ("--config=mqar --wrokdir=x", "unrecognized argument --wrokdir=x: did you mean --workdir?"),
        ("--config=mqar --process_id=1", "--num_processes and --process_id go together"),
        ("--config=mqar extra", "unexpected argument 'extra'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    arguments = [*arguments.split(), f"--workdir={tmp_path / 'run'}"]
    assert main(arguments, command="train", called="python run.py") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("run.py: ")
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_seeds_that_stopped_are_left_out(tmp_path, monkeypatch):
    changes = "num_seeds=8", "num_steps=40", "num_test=50", "stop_at=0.12"
    changed = [*TINY, "--config.variants=linear", *(f"--config.train.{change}" for change in changes)]
    config = read_config_arguments(changed).config
    sizes = []
    rows_to_train = ManySeeds.rows_to_train
    monkeypatch.setattr(ManySeeds, "rows_to_train", lambda *a: sizes.append(rows_to_train(*a)) or sizes[-1])
    every, some = tmp_path / "every", tmp_path / "some"
    training.run(config, every)
    assert not sizes  # so short a run does not compile again
    monkeypatch.setattr("loglinear_jax.runs.loop.steps_worth_compiling", lambda: 5)
    training.run(config, some)
    curves = [read_run(path).metrics("linear") for path in (every, some)]
    stopped = np.isnan(curves[0]["train_loss"][-1])
    assert 0 < stopped.sum() < 8 and any(rows is not None and rows.size <= 4 for rows in sizes)
    for name in curves[0]:
        np.testing.assert_allclose(curves[1][name], curves[0][name], rtol=1e-4)
    # Gone on with from the middle, the same rows are computed, and so the same bits come out.
    resumed, chosen = tmp_path / "resumed", [None if rows is None else np.asarray(rows).tolist() for rows in sizes]
    shutil.copytree(some, resumed)
    (resumed / "linear" / "outcome.json").unlink()
    for step in (30, 40):
        for path in (resumed / "linear" / "checkpoints").glob(f"{step}*"):
            shutil.rmtree(path)
    sizes.clear()
    training.run(config, resumed)
    assert [None if rows is None else np.asarray(rows).tolist() for rows in sizes] == chosen
    assert_same_run(some, resumed, ["linear"])


@pytest.mark.parametrize("name", ["w[lab]", "a\\b"])
def test_a_path_whose_checkpoints_could_not_be_read_is_refused_before_training(name, train, tmp_path):
    workdir = tmp_path / name / "run"
    code, _, err = train(workdir)
    assert code == 2 and f"workdir {workdir}: checkpoints that are saved there can't be read again" in err
    assert not workdir.exists()


@pytest.mark.parametrize("name", ["file", "file/below", "dangling"])
def test_what_is_no_folder_is_refused_before_training(name, train, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    code, _, err = train(tmp_path / name)
    assert code == 2 and err.endswith(f"{tmp_path / name.partition('/')[0]} is not a folder, expected one\n")


class Buggy(nn.Module):
    @nn.compact
    def __call__(self, d):
        raise NameError("a bug of the user's")


def test_a_bug_in_a_variant_stops_that_one_alone():
    """As in a sweep, which trains each variant by itself."""
    both = read_config_arguments([*TINY, f"--config.variants=linear,{__name__}:Buggy"]).config
    experiments, sizes = training.checked_experiments(both, ["linear"])
    assert len(experiments) == 2 and list(sizes) == ["linear"]
    with pytest.raises(NameError, match="a bug of the user's"):
        training.checked_experiments(both)
