"""That the benchmark of λ runs what it says; how long it takes is for the benchmark."""

import json

from loglinear_jax.benchmarks import timing
from loglinear_jax.commands.main import main


def test_the_mixer_runs_with_every_lam_and_the_command_says_where_it_comes_from(tmp_path, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(timing, "median_ms", lambda thunk, calls: timed.append(thunk()) or 2.5)
    arguments = ["benchmark", "lam", "--lams=fixed,content", "--lengths=16", f"--output={tmp_path / 'out'}"]
    assert main(arguments) == 0
    assert len(timed) == 4 and timed[0][0].shape == (4, 16, 2, 32)
    cells = [[c.strip() for c in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()[-2:]]
    assert cells == [["16", "fixed", "2.500", "2.500"], ["16", "content", "2.500", "2.500"]]
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["results"]["content"]["16"] == {"forward_ms": 2.5, "both_ms": 2.5} and record["commit"]
