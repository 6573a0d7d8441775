"""The benchmark of the attention at a small size, and what it writes."""

import json
import runpy
import sys

import jax
import numpy as np
import pytest

from loglinear_jax.benchmarks import attention, common, timing
from loglinear_jax.commands.main import main
from pallas_kernels import UnsupportedError

TIMES = ("forward_ms", "both_ms", "forward_bytes", "both_bytes")
SMALL = dict(batch=1, heads=1, groups=1, key_dim=16, value_dim=16, dtype="float32")


@pytest.mark.slow
def test_what_can_run_is_measured_and_the_rest_named(capsys):
    found, well = attention.measure(SMALL, [32], ["xla", "parallel", "flash"], repeats=1, max_scores=100)
    assert found["xla"][32]["forward_ms"] > 0 and found["xla"][32]["both_ms"] > 0
    assert found["parallel"] == {} and found["flash"] == {} and well
    out = capsys.readouterr().out
    assert "T=32 parallel: not measured, too many scores" in out and "T=32 flash: not measured, " in out


@pytest.mark.parametrize("output", ["fla-0.6.0", "bench.json"])
def test_a_record_is_named_as_asked(output, tmp_path):
    assert common.output_file(tmp_path / output, ".json").name == output.removesuffix(".json") + ".json"
    assert common.output_file(tmp_path / output, ".png").name == output.removesuffix(".json") + ".png"


@pytest.mark.slow
def test_the_delta_rule_is_measured(capsys):
    found, well = attention.measure(SMALL | {"delta": True}, [32], ["log_linear_delta", "jla_delta"], repeats=1)
    assert found["log_linear_delta"][32]["both_ms"] > 0
    assert found["jla_delta"] == {} and well and "jla_delta: not measured" in capsys.readouterr().out


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the kernels run, and may be what is chosen")
def test_the_delta_rules_forms_are_told_apart():
    inputs = attention.draw_inputs(SMALL | {"delta": True}, 32, 0)[:-1]
    for name in attention.DEFAULT_PEERS_OF_DELTA:
        chosen, by_xla = (attention.PEERS[peer].call(*inputs) for peer in (name, f"{name}_xla"))
        np.testing.assert_array_equal(chosen, by_xla)
        with pytest.raises(UnsupportedError):
            attention.PEERS[f"{name}_pallas"].call(*inputs)


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory"), UnsupportedError("memory")]
)
def test_a_peer_that_fails_is_left_out_and_that_is_told(error, monkeypatch, capsys):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(attention, "time_jax", fail)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    assert main(["benchmark", "attention", "--lengths=32", "--peers=xla"]) == 1
    assert "T=32 xla: not measured, " in capsys.readouterr().out


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(*arguments):
        raise ValueError("a bug")

    monkeypatch.setattr(attention, "time_jax", fail)
    with pytest.raises(ValueError, match="a bug"):
        attention.measure(SMALL, [32], ["xla"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("language --lam=nope", "model.lam must be one of fixed"),
        ("language --hidden=32", "model.hidden must be a multiple of head_dim"),
        ("language --shapes=8x2147483648", "argument --shapes: expected at most 2147483647, got 2147483648"),
        *((f"language --shapes={shape}", "argument --shapes: expected") for shape in ("8", "8x512x2", "0x4")),
        ("training --variant=nope", "variants: 'nope' is not a λ"),
        (
            "training --tasks=mqar --ways=rates",
            "--ways=rates takes a multiple of 6 seeds, got 32 of mqar: give --tasks or",
        ),
        (
            "attention --preset=delta --peers=xla",
            "--peers: xla is not a peer of --preset=delta: expected some of jla_delta, ",
        ),
        ("attention --peers=jla_delta", "--peers: jla_delta is not a peer of --preset=small: expected some of flash, "),
        ("attention --preset=delta --chunk_size=24", "argument --chunk_size: expected a power of two, got 24"),
        ("lam --lengths=2147483648", "argument --lengths: expected at most 2147483647, got 2147483648"),
        ("attention --output=nowhere/bench", "--output: nowhere can't be written: No such file"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, message, capsys):
    assert main(["benchmark", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"loglinear_jax benchmark: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("preset", "peers"), [("small", ["xla", "parallel"]), ("delta", ["log_linear_delta", "gated_delta"])]
)
def test_what_is_timed_unless_peers_are_named(preset, peers, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(attention, "time_jax", lambda name, *rest: timed.append(name) or dict.fromkeys(TIMES, 1.0))
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    assert main(["benchmark", "attention", f"--preset={preset}", "--lengths=32"]) == 0
    assert timed == peers


def test_bytes_that_must_be_moved():
    q = k = v = output = 32 * 16 * 4
    inputs = q + k + v + 32 * 4 + 32 * 6 * 4  # log decays; λ of 6 levels
    assert attention.moved_bytes(SMALL, 32) == (inputs + output, (inputs + output) + (2 * inputs + output))


def test_a_rate_is_measured_until_it_is_steady():
    rates = iter([1.0, 1.8, 1.85, 9.0])
    assert timing.steady(lambda: next(rates)) == 1.85
    rising = iter(range(1, 100))
    assert timing.steady(lambda: next(rising), most=5) == 5


def test_the_command_keeps_both_bandwidths_and_reports_the_larger(tmp_path, monkeypatch, capsys):
    bandwidths = iter([1e12, 1e12, 4e12, 4e12])
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: next(bandwidths))
    times = {"forward_ms": 1.0, "both_ms": 2.0, "forward_bytes": 1 << 20, "both_bytes": 2 << 20}
    monkeypatch.setattr(attention, "time_jax", lambda *arguments: times)
    arguments = ["benchmark", "attention", "--lengths=256,32", "--peers=xla", f"--output={tmp_path / 'bench'}"]
    assert main(arguments) == 0
    assert "copy 4.00 TB/s" in capsys.readouterr().out
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert record["copy_bytes_per_second"] == record["copy_bytes_per_second_at_end"] == 4e12
    assert record["copy_bytes_per_second_at_start"] == 1e12
    assert record["command"].startswith("loglinear_jax benchmark attention") and record["commit"]
    assert record["results"]["xla"] == {"32": times, "256": times}
    assert (tmp_path / "bench.png").stat().st_size > 5_000


def test_the_short_form_is_the_same_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--preset=small", "--peers=nothing"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("loglinear_jax.benchmark", run_name="__main__")
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("benchmark: argument --peers: expected some of flash")
