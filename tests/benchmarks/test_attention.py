"""The benchmarks at a small size: that they run what they say, and what they write. How fast it is, is for the benchmarks."""

import argparse
import json
import re
from types import SimpleNamespace

import jax
import pytest

from loglinear_jax.benchmarks import attention, measure
from loglinear_jax.benchmarks.language_model import time_decoding, time_training
from loglinear_jax.benchmarks.scaling import MeshShape
from loglinear_jax.commands.main import main
from loglinear_jax.models import LanguageSettings
from pallas_kernels import UnsupportedError

TIMES = {"forward_ms": 1.0, "both_ms": 2.0, "forward_bytes": 1 << 20, "both_bytes": 2 << 20}
SMALL = dict(batch=1, heads=1, groups=1, key_dim=16, value_dim=16, dtype="float32")


def new_record():
    return measure.Record(argparse.Namespace(output=None, called=["benchmark"]))


@pytest.mark.slow
@pytest.mark.parametrize(("delta", "runs", "lacks"), [(False, "xla", "flash"), (True, "log_linear_delta", "jla_delta")])
def test_what_can_run_is_measured_and_the_rest_named(delta, runs, lacks, capsys):
    record = new_record()
    assert attention.measure_peers(record, SMALL | {"delta": delta}, [32], [runs, lacks], repeats=1, documents=3)
    found = record.values["attention"]
    assert [row["peer"] for row in found] == [runs, f"{runs}, 3 documents"]
    assert all(row["forward_ms"] > 0 and row["both_bytes"] > 0 for row in found)
    assert f"T=32 {lacks}: not measured, " in capsys.readouterr().out


def test_the_command_records_its_default_peers_and_the_copy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(attention, "time_jax", lambda *arguments, documents: TIMES)
    assert main(["benchmark", "attention", "--lengths=256,32", f"--output={tmp_path / 'bench.json'}"]) == 0
    out = capsys.readouterr().out
    assert "copy 4.00 TB/s" in out and [line.split("|")[2].strip() for line in out.splitlines()[-2:]] == ["1 / 2"] * 2
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert record["copy_bytes_per_second"] == 4e12 and record["commit"]
    assert record["command"].startswith("loglinear_jax benchmark attention")
    rows = [{"peer": peer, "T": length, **TIMES} for length in (32, 256) for peer in ("xla", "parallel")]
    assert record["attention"][:-2] == rows and [row["peer"] for row in record["attention"][-2:]] == ["copy"] * 2


@pytest.mark.slow
def test_the_mixer_runs_with_every_lam_and_the_command_says_where_it_comes_from(tmp_path, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(measure, "median_ms", lambda thunk, calls: timed.append(thunk()) or 2.5)
    arguments = ["benchmark", "lam", "--lams=fixed,content", "--lengths=16", f"--output={tmp_path / 'out'}"]
    assert main(arguments) == 0
    assert len(timed) == 4 and timed[0][0].shape == (4, 16, 2, 32)
    cells = [[c.strip() for c in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()[-2:]]
    assert cells == [["fixed", "2.5 / 2.5"], ["content", "2.5 / 2.5"]]
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["lam"][1] == {"λ": "content", "T": 16, "forward_ms": 2.5, "both_ms": 2.5} and record["commit"]


def test_kernels_are_counted_whatever_number_xla_gives_them():
    def line(name, *events):
        return SimpleNamespace(name=name, events=[SimpleNamespace(name=n, duration_ns=ns) for n, ns in events])

    gpu = [line("Stream #1", ("fusion_1", 2e6), ("outputs", 5e6), ("fusion_2", 1e6)), line("XLA Ops", ("outputs", 9e6))]
    planes = [SimpleNamespace(name="/device:GPU:0", lines=gpu), SimpleNamespace(name="/host:CPU", lines=gpu)]
    found = measure.kernel_times(SimpleNamespace(planes=planes))
    assert found == [("outputs", 1, 5.0), ("fusion", 2, 1.5)]


def test_kernels_need_a_gpu(capsys):
    assert main(["benchmark", "attention", "--kernels"]) == 2
    assert "--kernels: expected a GPU, got cpu" in capsys.readouterr().err


def test_a_peer_that_fails_is_left_out_and_that_is_told_but_not_a_bug(monkeypatch, capsys):
    def fail(*arguments, documents):
        raise errors.pop()

    errors = [ValueError("a bug"), UnsupportedError("memory"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")]
    monkeypatch.setattr(attention, "time_jax", fail)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 1e12)
    for _ in range(2):
        assert main(["benchmark", "attention", "--lengths=32", "--peers=xla"]) == 1
        assert "T=32 xla: not measured, " in capsys.readouterr().out
    with pytest.raises(ValueError, match="a bug"):
        attention.measure_peers(new_record(), SMALL, [32], ["xla"])


def test_bytes_that_must_be_moved():
    q = k = v = output = 32 * 16 * 4
    inputs = q + k + v + 32 * 4 + 32 * 6 * 4  # log decays; λ of 6 levels
    assert attention.moved_bytes(SMALL, 32) == (inputs + output, (inputs + output) + (2 * inputs + output))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("language --shapes=8x2147483648", "argument --shapes: expected at most 2147483647, got 2147483648"),
        ("training --variant=nope", "variants: 'nope' is not a λ"),
        ("training --tasks=mqar --ways=rates", "--ways=rates takes a multiple of 6 seeds, got 32 of mqar"),
        ("attention --preset=delta --peers=xla", "--peers: xla is not a peer of --preset=delta: expected some of jla_delta"),
        ("attention --output=nowhere/bench", "--output: nowhere can't be written: No such file"),
        ("scaling --meshes=2x4", "argument --meshes: expected data x fsdp x sequence such as 1x4x1, got '2x4'"),
        ("scaling --devices=4096", "--devices: expected at most"),
        (f"attention --output={'a' * 252}", "--output: a name of 257 bytes with .json: expected at most 255"),
        ("attention --output=..", "--output: .. is a folder, expected a file's name"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(arguments, message, capsys):
    assert main(["benchmark", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"loglinear_jax benchmark: {message}") and err.count("\n") == 1


def test_a_folder_is_no_file_to_write(tmp_path, capsys):
    (tmp_path / "bench.json").mkdir()
    assert main(["benchmark", "attention", f"--output={tmp_path / 'bench'}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"--output: {tmp_path / 'bench'} is a folder, expected a file's name without .json" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("attention --devices=1,3 --lengths=64", "--devices: 64 tokens over 3 devices: expected a power of two tokens"),
        ("attention --devices=4 --lengths=24", "--devices: 24 tokens over 4 devices: expected a power of two tokens"),
        (
            "training --meshes=1x1x1,1x1x4 --shape=4x8",
            "--meshes: 1x1x4: 8 tokens over 4 devices: .* at least 4, on each",
        ),
        (
            "training --meshes=3x1x1 --shape=4x8",
            "--meshes: 3x1x1: expected data · fsdp to divide the batch of --shape=4x8",
        ),
    ],
)
def test_what_cannot_be_cut_over_devices_is_one_line(arguments, message, monkeypatch, capsys):
    """Before anything is timed; a smaller mesh is not timed in its place."""
    monkeypatch.setattr(jax, "devices", lambda: [None] * 4)
    assert main(["benchmark", "scaling", *f"--what={arguments}".split()]) == 2
    assert re.match(f"loglinear_jax benchmark: {message}", capsys.readouterr().err)


# --- The language model, on one device or several -----------------------------------------------------------------------

SIZES = dict(hidden=16, layers=1, heads=1, head_dim=16, key_dim=16, lam_hidden=4)
SETTINGS = LanguageSettings(32, 16, **SIZES, dtype="float32")
over_devices = pytest.mark.skipif(jax.device_count() < 4, reason="takes four devices")


def test_decoding_runs_and_counts_its_bytes():
    short, long = (time_decoding(SETTINGS, length)["bytes"] for length in (8, 16))
    assert long - short >= 4 * 16 * 16  # one more level of a K x V state in float32


@over_devices
@pytest.mark.slow
@pytest.mark.parametrize("peer", ["xla", "gated_delta"])
def test_an_attention_over_devices(peer):
    preset = SMALL | {"heads": 2, "key_dim": 8, "value_dim": 8, "delta": peer == "gated_delta"}
    found = attention.time_jax(peer, preset, 64, repeats=1, devices=4)
    assert found["forward_ms"] > 0 and found["both_ms"] > 0


@over_devices
@pytest.mark.slow
def test_training_over_meshes_is_the_same_training():
    meshes = [MeshShape.read(mesh).mesh(2) for mesh in ("1x1x1", "1x2x2")]
    one, four = (time_training(SETTINGS, 2, 16, 1e9, steps=2, mesh=mesh) for mesh in meshes)
    assert one["tokens_per_second"] * one["ms"] == pytest.approx(1e3 * 2 * 16) and one["utilisation"] > 0
    assert one["parameters"] == four["parameters"] and one["last_loss"] < one["first_loss"]
    assert [four["first_loss"], four["last_loss"]] == pytest.approx([one["first_loss"], one["last_loss"]], rel=1e-5)
