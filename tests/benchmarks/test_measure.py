"""Times of kernels: what is read of a profile, and that every benchmark profiles what it times."""

import json

import jax
import jax.numpy as jnp
import pytest

from loglinear_jax.benchmarks import measure
from loglinear_jax.benchmarks.measure import KernelTime
from loglinear_jax.commands.main import main

EVENTS = (("sort_0_1_", 1), ("loop_fusion", 4), ("loop_fusion_3", 5), ("gemm_tf32_12_1", 7), ("loop_fusion_", 0))
STREAM = " ".join(f"events {{ metadata_id: {i} duration_ps: {ms}000000000 }}" for i, (_, ms) in enumerate(EVENTS))
NAMES = " ".join(
    f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for i, (name, _) in enumerate(EVENTS)
)
PROFILE = f"""
planes {{ name: "/device:GPU:0" {NAMES}
  lines {{ id: 1 name: "Stream #7(Compute)" {STREAM} }} lines {{ id: 2 name: "XLA Ops" {STREAM} }} }}
planes {{ name: "/host:CPU" {NAMES} lines {{ id: 1 name: "Stream" {STREAM} }} }}"""
FOUND = {"loop_fusion": KernelTime(1.5, 4.5), "gemm_tf32": KernelTime(0.5, 3.5), "sort": KernelTime(0.5, 0.5)}


def test_of_a_profile_the_streams_of_gpus_count_once_and_numbers_of_names_do_not():
    found = measure.of_profile(jax.profiler.ProfileData.from_text_proto(PROFILE), calls=2)
    assert list(found.items()) == list(FOUND.items())


def test_a_profile_holds_what_was_computed():
    """On a CPU, which has no kernels; on a GPU, one at least."""
    add = jax.jit(lambda x: x + 1)
    done = []
    found = measure.profiled(lambda: done.append(1) or add(jnp.ones(3)), 1)
    assert done == [1] and bool(found) == (jax.default_backend() == "gpu")


def test_the_table_adds_up(capsys):
    measure.print_kernels("a step", {"kernels": FOUND})
    lines = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["a step", "launches", "ms"] and cells[2] == ["loop_fusion", "1.5", "4.5000"]
    assert cells[-1] == ["together", "2.5", "8.5000"]


def test_a_rate_is_measured_until_it_is_steady():
    rates = iter([1.0, 1.8, 1.85, 9.0])
    assert measure.steady(lambda: next(rates)) == 1.85
    rising = iter(range(1, 100))
    assert measure.steady(lambda: next(rising), most=5) == 5


def test_the_mixer_runs_with_every_lam_and_the_command_says_where_it_comes_from(tmp_path, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(measure, "median_ms", lambda thunk, calls: timed.append(thunk()) or 2.5)
    arguments = ["benchmark", "lam", "--lams=fixed,content", "--lengths=16", f"--output={tmp_path / 'out'}"]
    assert main(arguments) == 0
    assert len(timed) == 4 and timed[0][0].shape == (4, 16, 2, 32)
    cells = [[c.strip() for c in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()[-2:]]
    assert cells == [["16", "fixed", "2.500", "2.500"], ["16", "content", "2.500", "2.500"]]
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["results"]["content"]["16"] == {"forward_ms": 2.5, "both_ms": 2.5} and record["commit"]


COMMANDS = {
    "attention": ["--lengths=16", "--peers=xla", "--repeats=1"],
    "lam": ["--lengths=16", "--lams=fixed"],
    "language": "--shapes=1x8 --lengths=16 --hidden=64 --layers=1 --vocab=32 --mixers=gated_linear --steps=1".split(),  # noqa
}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("command", ["attention", "lam", "training", "language"])
def test_without_a_gpu_it_is_refused_before_anything_is_timed(command, capsys):
    assert main([command, "--kernels"], command="benchmark") == 2
    out, error = capsys.readouterr()
    assert out == "" and error.endswith("--kernels: expected a GPU, got cpu\n")


@pytest.mark.parametrize(("command", "calls"), [("attention", [6, 6]), ("lam", [3, 3]), ("language", [1, 64])])
@pytest.mark.slow
def test_a_benchmark_profiles_what_it_times(command, calls, capsys, monkeypatch, tmp_path):
    """Inputs that take turns, forward and both ways; or training steps and decoded tokens."""
    computed = []

    def profiled(compute, calls):
        computed.append(jax.block_until_ready(compute()))
        return {"a_kernel": KernelTime(calls, 1.0)}

    for rate in ("copy_bandwidth", "matmul_rate"):
        monkeypatch.setattr(measure, rate, lambda: 1e9)
    monkeypatch.setattr(measure, "check_kernels", lambda args: None)
    monkeypatch.setattr(measure, "profiled", profiled)
    arguments = [command, "--kernels", *COMMANDS[command], f"--output={tmp_path / 'out'}"]
    assert main(arguments, command="benchmark") == 0
    out = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in out.splitlines() if "a_kernel" in line]
    assert len(computed) == 2 and [float(launches) for _, launches, _ in rows] == calls
    assert "kernels" not in out
    assert (tmp_path / "out.json").read_text(encoding="utf-8").count('"a_kernel"') == 2
