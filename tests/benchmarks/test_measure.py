"""What the benchmarks share: a mixer is timed with every λ, and the record says where it comes from."""

import json

from loglinear_jax.benchmarks import measure
from loglinear_jax.commands.main import main


def test_the_mixer_runs_with_every_lam_and_the_command_says_where_it_comes_from(tmp_path, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(measure, "median_ms", lambda thunk, calls: timed.append(thunk()) or 2.5)
    arguments = ["benchmark", "lam", "--lams=fixed,content", "--lengths=16,32", f"--output={tmp_path / 'out'}"]
    assert main(arguments) == 0
    assert len(timed) == 8 and timed[0][0].shape == (4, 16, 2, 32)
    cells = [[c.strip() for c in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()[-4:]]
    assert cells[0] == ["", "T=16", "T=32"] and cells[2:] == [[lam, *["2.5 / 2.5"] * 2] for lam in ("fixed", "content")]
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["lam"][1] == {"λ": "content", "T": 16, "forward_ms": 2.5, "both_ms": 2.5} and record["commit"]
