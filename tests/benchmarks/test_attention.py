"""The benchmark of the attention at a small size, and what it writes."""

import argparse
import json

import jax
import numpy as np
import pytest

from loglinear_jax.benchmarks import attention, measure
from loglinear_jax.commands.main import main
from pallas_kernels import UnsupportedError

TIMES = {"forward_ms": 1.0, "both_ms": 2.0, "forward_bytes": 1 << 20, "both_bytes": 2 << 20}
SMALL = dict(batch=1, heads=1, groups=1, key_dim=16, value_dim=16, dtype="float32")


def new_record():
    return measure.Record(argparse.Namespace(output=None, called=["benchmark"]))


@pytest.mark.slow
@pytest.mark.parametrize(("delta", "runs", "lacks"), [(False, "xla", "flash"), (True, "log_linear_delta", "jla_delta")])
def test_what_can_run_is_measured_and_the_rest_named(delta, runs, lacks, capsys):
    record = new_record()
    assert attention.measure_peers(record, SMALL | {"delta": delta}, [32], [runs, lacks], repeats=1)
    [found] = record.values["attention"]
    assert found["peer"] == runs and found["forward_ms"] > 0 and found["both_bytes"] > 0
    assert f"T=32 {lacks}: not measured, " in capsys.readouterr().out


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the kernels run, and may be what is chosen")
def test_the_delta_rules_forms_are_told_apart():
    inputs = attention.draw_inputs(SMALL | {"delta": True}, 32, 0)[:-1]
    for name in attention.DEFAULT_PEERS_OF_DELTA:
        chosen, by_xla = (attention.PEERS[peer].call(*inputs) for peer in (name, f"{name}_xla"))
        np.testing.assert_array_equal(chosen, by_xla)
        with pytest.raises(UnsupportedError):
            attention.PEERS[f"{name}_pallas"].call(*inputs)


def test_a_peer_that_fails_is_left_out_and_that_is_told_but_not_a_bug(monkeypatch, capsys):
    def fail(*arguments):
        raise errors.pop()

    errors = [ValueError("a bug"), UnsupportedError("memory"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")]
    monkeypatch.setattr(attention, "time_jax", fail)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 1e12)
    for _ in range(2):
        assert main(["benchmark", "attention", "--lengths=32", "--peers=xla"]) == 1
        assert "T=32 xla: not measured, " in capsys.readouterr().out
    with pytest.raises(ValueError, match="a bug"):
        attention.measure_peers(new_record(), SMALL, [32], ["xla"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("language --lam=nope", "model.lam must be one of fixed"),
        ("language --shapes=8x2147483648", "argument --shapes: expected at most 2147483647, got 2147483648"),
        ("language --shapes=8", "argument --shapes: expected"),
        ("training --variant=nope", "variants: 'nope' is not a λ"),
        ("training --tasks=mqar --ways=rates", "--ways=rates takes a multiple of 6 seeds, got 32 of mqar"),
        ("attention --preset=delta --peers=xla", "--peers: xla is not a peer of --preset=delta: expected some of jla_delta"),
        ("attention --preset=delta --chunk_size=24", "argument --chunk_size: expected a power of two, got 24"),
        ("attention --output=nowhere/bench", "--output: nowhere can't be written: No such file"),
        ("scaling --meshes=2x4", "argument --meshes: expected data x fsdp x sequence such as 1x4x1, got '2x4'"),
        ("scaling --meshes=64x64x1", "--meshes: expected at most"),
        ("scaling --devices=4096", "--devices: expected at most"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(arguments, message, capsys):
    assert main(["benchmark", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"loglinear_jax benchmark: {message}") and err.count("\n") == 1


def test_bytes_that_must_be_moved():
    q = k = v = output = 32 * 16 * 4
    inputs = q + k + v + 32 * 4 + 32 * 6 * 4  # log decays; λ of 6 levels
    assert attention.moved_bytes(SMALL, 32) == (inputs + output, (inputs + output) + (2 * inputs + output))


@pytest.mark.parametrize(
    ("preset", "peers"), [("small", ["xla", "parallel"]), ("delta", ["log_linear_delta", "gated_delta"])]
)
def test_the_command_records_its_default_peers_and_the_copy(preset, peers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(attention, "time_jax", lambda *arguments: TIMES)
    given = ["attention", f"--preset={preset}", "--lengths=256,32", f"--output={tmp_path / 'bench.json'}"]
    assert main(["benchmark", *given]) == 0
    out = capsys.readouterr().out
    assert "copy 4.00 TB/s" in out and [line.split("|")[2].strip() for line in out.splitlines()[-2:]] == ["1 / 2"] * 2
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert record["copy_bytes_per_second"] == 4e12 and record["commit"]
    assert record["command"].startswith("loglinear_jax benchmark attention")
    rows = [{"peer": peer, "T": length, **TIMES} for length in (32, 256) for peer in peers]
    assert record["attention"][:-2] == rows and [row["peer"] for row in record["attention"][-2:]] == ["copy"] * 2
