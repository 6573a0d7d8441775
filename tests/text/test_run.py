"""Language-model runs as a user starts them: resumed, over devices and processes, read back, and made to speak."""

import contextlib
import functools
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from loglinear_jax.analysis import load_run
from loglinear_jax.commands.main import main
from loglinear_jax.config import ConfigError, build, language_config, read_config, variant_names
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.hub import load_model
from loglinear_jax.losses import token_losses
from loglinear_jax.models import LanguageModel
from loglinear_jax.runs import loop, training
from loglinear_jax.runs.folders import read_lines
from loglinear_jax.train import ManySeeds, device_mesh
from tests.text.conftest import make_text

ROOT = Path(__file__).parents[2]
SMALL = (
    "--config=configs/wikitext2.py",
    "--config.variants=mlp_softplus",
    "--config.task.seq_len=16",
    *(
        f"--config.model.{name}"
        for name in ("hidden=16", "layers=1", "head_dim=8", "key_dim=8", "implementation=parallel")
    ),
    *(f"--config.train.{name}" for name in ("num_seeds=2", "num_steps=12", "learning_rate=0.01", "warmup_steps=2")),
    *(f"--config.train.{name}" for name in ("eval_every=4", "checkpoint_every=4", "steps_per_dispatch=2")),
    *(f"--config.train.{name}" for name in ("eval_batch_size=16", "precision=float32")),
)


@pytest.fixture(scope="module")
def corpus(bpe, tmp_path_factory):
    """Flags that name a small text, its tokeniser and where to keep its tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    path = folder / "birds.txt"
    path.write_text(make_text(150), encoding="utf-8")
    return f"--config.task.corpus={path}", f"--config.task.tokenizer={bpe}", f"--config.task.cache={folder / 'cache'}"


def start(workdir, *flags, devices=1, **env):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)} | env
    command = [sys.executable, "run.py", *SMALL, *flags, f"--workdir={workdir}"]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    outputs = [process.communicate(timeout=240) for process in processes]
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return outputs[0]


def curves(workdir):
    records = read_lines(Path(workdir) / "mlp_softplus" / "metrics.jsonl")
    return np.array([[r["train_loss"], r["val_loss"]] for r in records])


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """(Its folder, standard output, standard error), of a run on four devices: two over the seeds, two over each batch."""
    workdir, out, err = tmp_path_factory.mktemp("run") / "run", io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["train", *SMALL, *corpus, f"--workdir={workdir}"]) == 0, err.getvalue()
    return workdir, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_what_a_run_says_and_writes(run):
    """Its perplexity is over every token once: from the checkpoint, window by window, without the code that trains."""
    workdir, out, err = run
    assert "are λ's" in err and "2 seed(s) on 4 device(s)" in err
    loss = curves(workdir)
    assert loss.shape == (3, 2, 2) and (loss[-1] < loss[0]).all()
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))["variants"]["mlp_softplus"]
    np.testing.assert_allclose(summary["best_loss"], loss[:, 1].min(axis=0), rtol=1e-6)
    by_position = summary["test_loss_from_position"]
    assert list(by_position) == ["0", "1", "2", "4", "8"]
    mean = np.average(list(by_position.values()), axis=0, weights=[1, 1, 2, 4, 8])
    np.testing.assert_allclose(mean, summary["test_loss"], rtol=1e-2)
    assert "validation perplexity" in out and f"{np.exp(summary['best_loss']).mean():.2f}" in out
    loaded = load_run(workdir)
    tokens = np.asarray(loaded.task.data.validation, np.int32)
    losses, apply = [], jax.jit(loaded.model.apply)
    for first in range(0, len(tokens) - 1, 16):
        window = tokens[first : first + 17]
        logits = apply(loaded.params(1, "last"), window[None, :-1])
        losses.append(np.asarray(token_losses(logits, window[None, 1:])[0][0]))
    losses = np.concatenate(losses)
    assert len(losses) == len(tokens) - 1
    np.testing.assert_allclose(losses.mean(), loss[-1, 1, 1], rtol=1e-4)


@pytest.mark.slow
def test_going_on_is_exact_to_the_batch(run, corpus, tmp_path):
    """Another process goes on where one was stopped early: it must read the batches that come next, and no other."""
    workdir, *_ = run
    again = tmp_path / "again"
    process = start(again, *corpus, devices=4)
    next(line for line in process.stderr if "mlp_softplus:   0%" in line)  # the first steps are compiled then
    process.terminate()
    process.communicate(timeout=240)
    assert not (again / "summary.json").exists()
    training.run(read_config_arguments([*SMALL, *corpus]).config, again)
    np.testing.assert_array_equal(curves(again), curves(workdir))


@pytest.mark.slow
def test_a_run_goes_on_over_other_devices(run, corpus, tmp_path, monkeypatch):
    """Four devices, two along each of the axes fsdp and sequence; from step 4 on, one."""
    over = "--config.train.fsdp_devices=2", "--config.train.sequence_devices=2"
    evaluate, meshes = ManySeeds.evaluate_and_record, []

    def dies_at_step_8(many, *args):
        meshes.append(tuple(many.mesh.shape.values()))
        if len(meshes) == 2:
            raise RuntimeError("killed")
        return evaluate(many, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ManySeeds, "evaluate_and_record", dies_at_step_8)
        with pytest.raises(RuntimeError, match="killed"):
            training.run(read_config_arguments([*SMALL, *corpus, *over]).config, tmp_path)
    assert set(meshes) == {(1, 1, 2, 2)}
    monkeypatch.setattr(loop, "device_mesh", functools.partial(device_mesh, devices=jax.devices()[:1]))
    training.run(read_config_arguments([*SMALL, *corpus]).config, tmp_path)
    np.testing.assert_allclose(curves(tmp_path), curves(run[0]), rtol=1e-5)


@pytest.mark.slow
def test_eight_devices_give_the_curve_of_four(run, corpus, tmp_path):
    """Two along each of the axes data, fsdp and sequence."""
    over = "--config.train.fsdp_devices=2", "--config.train.sequence_devices=2", "--config.train.num_seeds=1"
    finish(start(tmp_path / "eight", *corpus, *over, devices=8))
    np.testing.assert_allclose(curves(tmp_path / "eight"), curves(run[0])[..., :1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("over", [(), ("--config.train.fsdp_devices=2", "--config.train.sequence_devices=2")], ids=str)
def test_two_processes_give_the_curve_of_one(over, run, corpus, tmp_path):
    """One seed, shared out by its batch, or each with a half of its parameters and two devices for each sequence. (By seed:
    four devices, in one process.)"""
    workdir, *_ = run
    flags = *corpus, *over, "--distributed", "--config.train.num_seeds=1"
    if over:  # as SLURM starts them; the port follows from the job's number
        slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
        places = [slurm | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} for index in range(2)]
        processes = [start(tmp_path / "two", *flags, devices=2, **place) for place in places]
    else:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            by_hand = f"--coordinator=localhost:{free.getsockname()[1]}", "--num_processes=2"
        processes = [start(tmp_path / "two", *flags, *by_hand, f"--process_id={index}") for index in range(2)]
    out, _ = finish(*processes)
    assert "validation perplexity" in out
    np.testing.assert_allclose(curves(tmp_path / "two"), curves(workdir)[..., :1], rtol=1e-5)
    one, two = (load_run(path).params(0, "last") for path in (workdir, tmp_path / "two"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one, two)


@pytest.mark.slow
def test_a_run_becomes_a_folder_of_others(run, tmp_path, capsys):
    config = read_config(run[0] / "config.json")
    config.variants = "mixer=gated_delta+conv_bias=False,mlp_softplus"
    config.train.num_steps = 4
    workdir, out = tmp_path / "run", tmp_path / "out"
    training.run(config, workdir)
    first, second = variant_names(config)
    config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    config["task"] |= {
        "corpus": "none.txt",
        "tokenizer": "none",
        "cache": str(tmp_path / "none"),
    }  # as where no text is
    (workdir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    export = ["export", f"--workdir={workdir}", "--model_seed=1"]
    assert main([*export, f"--variant={first}", f"--out={out}"]) == 0
    trained = load_run(workdir, first)
    settings, params = load_model(out)
    tokens = np.arange(12)[None]
    expected = trained.model.apply(trained.params(1), tokens)
    np.testing.assert_allclose(LanguageModel(settings).apply(params, tokens), expected, atol=1e-5)
    capsys.readouterr()
    texts = []
    for model in ([f"--model={out}"], [f"--workdir={workdir}", f"--variant={first}", "--model_seed=1"]):
        assert main(["generate", *model, "--prompt= the heron", "--num_tokens=5", "--temperature=0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith(" the heron") and len(texts[0]) > 12
    assert main(["generate", f"--workdir={workdir}", f"--variant={second}", "--prompt=a", "--num_tokens=50"]) == 2
    assert "has levels for 16;" in capsys.readouterr().err
    other = tmp_path / "other"
    for arguments, message in (
        ([f"--variant={second}", f"--out={other}"], "settings have mixer='log_linear', lam='mlp_softplus'"),
        ([f"--variant={first}", "--architecture=Llama", f"--out={other}"], "architecture is 'Llama': expected"),
        ([f"--variant={first}", f"--out={workdir}"], "run holds a config.json already: expected another folder"),
    ):
        assert main([*export, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and not other.exists()


@pytest.mark.slow
def test_a_run_goes_on_when_its_text_has_moved(run, corpus, tmp_path):
    """To another folder, under another name, with the tokenizer and the cache, where the locale has ASCII alone; the run can be
    read from there afterwards."""
    workdir, *_ = run
    again = tmp_path / "again"
    shutil.copytree(workdir, again)
    text, tokenizer = (Path(flag.partition("=")[2]) for flag in corpus[:2])
    shutil.copy(text, tmp_path / "other.txt")
    shutil.copytree(tokenizer, tmp_path / "other")
    shutil.rmtree(again / "mlp_softplus" / "checkpoints" / "12")
    (again / "mlp_softplus" / "outcome.json").unlink()
    moved = (f"--config.task.corpus={tmp_path / 'other.txt'}", f"--config.task.tokenizer={tmp_path / 'other'}")
    (again / "tokenizer.json").unlink()
    moved += (f"--config.task.cache={tmp_path / 'cache'}",)
    out, _ = finish(start(again, *moved, devices=4, LC_ALL="C", PYTHONUTF8="0"))
    assert "validation perplexity, mean ? std" in out
    assert (again / "tokenizer.json").read_bytes() == (workdir / "tokenizer.json").read_bytes()
    np.testing.assert_array_equal(curves(again), curves(workdir))
    assert load_run(again).task.data.train.filename.is_relative_to(tmp_path / "cache")
    with pytest.raises(ConfigError, match="task.seq_len: 16 → 8"):
        config = read_config(again / "config.json")
        config.task.seq_len = 8
        training.run(config, again)
    (tmp_path / "another.txt").write_text(make_text(150, seed=1), encoding="utf-8")
    config.task.update(seq_len=16, corpus=str(tmp_path / "another.txt"))
    with pytest.raises(ConfigError, match=r"holds a run in which the text was another one"):
        training.run(config, again)


def test_settings_are_checked_before_the_text_is_read(tmp_path):
    config = language_config()
    config.task.update(corpus=str(tmp_path / "none.txt"))
    config.train.patience = -1
    with pytest.raises(ConfigError, match="train.patience must not be negative"):
        build(config, "linear")


def test_a_text_too_short_for_a_batch_is_named_before_training(bpe, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(make_text(150), encoding="utf-8")
    config = language_config()
    config.task.update(corpus=str(path), tokenizer=bpe, cache=str(tmp_path), seq_len=5_000)
    with pytest.raises(ConfigError, match=r"seq_len=5000: \d+ tokens make \d windows .* fewer than batch_size=8"):
        build(config, "linear")
    config.task.target_offset = 3
    with pytest.raises(ConfigError, match=r"task.target_offset must be 1 \(next token\) or 2 \(the one after\), got 3"):
        build(config, "linear")


@pytest.mark.slow
def test_a_run_whose_test_split_is_shorter_than_the_window(bpe, tmp_path, monkeypatch, capsys):
    """It has no losses at the later positions; the run is finished, stays so, and is read back."""
    monkeypatch.chdir(ROOT)
    text, workdir = make_text(150), tmp_path / "run"
    for split, part in (("train", text), ("valid", text), ("test", text[:60])):
        (tmp_path / f"{split}.txt").write_text(part, encoding="utf-8")
    given = f"--config.task.tokenizer={bpe}", f"--config.task.cache={tmp_path / 'cache'}", "--config.train.num_steps=4"
    given += "--config.task.seq_len=64", f"--config.task.corpus={tmp_path}"
    for _ in range(2):
        assert main(["train", *SMALL, *given, f"--workdir={workdir}"]) == 0
        out, err = capsys.readouterr()
        assert "validation perplexity" in out
    outcome = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))["variants"]["mlp_softplus"]
    assert list(outcome["test_loss_from_position"]) == ["0", "1", "2", "4", "8", "16"]
    assert all(np.isfinite(losses).all() for losses in outcome["test_loss_from_position"].values())
    np.testing.assert_allclose(outcome["best_loss"], curves(workdir)[:, 1].min(axis=0), rtol=1e-6)
    assert load_run(workdir).params(1, "last").keys() == {"params"}
