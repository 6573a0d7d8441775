"""How often λ finds the answers: against a λ that was planted, rules by position, and the section of the report."""

import csv

import numpy as np
import pytest

from loglinear_jax.analysis import levels_of_answers, looks_at_answers
from loglinear_jax.analysis.answers import best_heads, found_by_position, looks_table
from loglinear_jax.analysis.report import make_report
from loglinear_jax.analysis.section import Choices
from loglinear_jax.fenwick import num_levels, occupied_levels
from loglinear_jax.tasks import load_task
from tests.analysis.made_runs import made_run, made_variant

TASK = load_task("interleaved", seq_len=32, vocab_size=16, num_pairs=7)


def answers(num=64):
    """(positions' levels [num, T] of sequences of TASK, which occupied level is the answer's [num, T, L])."""
    levels = levels_of_answers(TASK, *TASK.inspection_sequences(num))
    return levels, levels[..., None] == np.arange(num_levels(TASK.seq_len))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_planted_share_is_found(share):
    """λ of head 1 in layer 1 is 3 at the answer's bucket in that share of the queries, at the token itself in the others, and 1
    elsewhere; at empty levels it is larger, where it has no effect."""
    levels, is_answer = answers()
    queries = np.argwhere(levels >= 0)
    chosen = np.random.default_rng(0).permutation(len(queries))[: round(share * len(queries))]
    lam = np.ones((2, *levels.shape, 2, is_answer.shape[-1]), np.float32)
    lam[1, ..., 1, 0] = 3
    for row, column in queries[chosen]:
        lam[1, row, column, 1] = np.where(is_answer[row, column], 3, 1)
    lam[:, :, ~occupied_levels(np.arange(TASK.seq_len), lam.shape[-1])[:, None].repeat(2, 1)] = 99
    found = looks_at_answers(lam, levels)
    assert found["largest"][1, 1] == len(chosen) / len(queries)
    occupied = occupied_levels(queries[:, 1], lam.shape[-1]).sum(1)
    there = np.where(np.isin(np.arange(len(queries)), chosen), 3, 1) / (occupied + 2)
    np.testing.assert_allclose(found["weight"][1, 1], there.mean())
    assert found["largest"][0].tolist() == [0, 0]  # a λ that is the same everywhere picks nothing
    np.testing.assert_allclose(found["weight"][0], (1 / occupied).mean())
    seeds, best = best_heads({7: found})
    assert seeds == [7] and best["largest"].tolist() == [[0, len(chosen) / len(queries)]]


def test_a_rule_by_position_finds_what_most_sequences_have_there():
    levels = np.array([[-1, 1, 2, -1], [-1, 1, 0, 1], [-1, 0, 2, -1]])
    assert found_by_position(levels, levels) == 5 / 7
    other = np.array([[-1, -1, 2, 2]])
    assert found_by_position(levels, other) == 3 / 7  # at position 1 nothing was seen, and level 0 is picked


def test_what_cannot_be_looked_at_is_named():
    levels, is_answer = answers(4)
    lam = np.ones((1, *levels.shape, 1, is_answer.shape[-1]))
    with pytest.raises(ValueError, match=r"levels has shape \(4, 31\): expected \[num, T\] = \(4, 32\), as lam has"):
        looks_at_answers(lam, levels[:, 1:])
    wrong = np.full_like(levels, -1)
    with pytest.raises(ValueError, match="levels has no answer"):
        looks_at_answers(lam, wrong)
    wrong[0, 2] = 1
    with pytest.raises(ValueError, match="levels has 1 at position 2: no bucket is there"):
        looks_at_answers(lam, wrong)


def test_the_table_leaves_out_seeds_whose_lam_is_not_finite():
    levels, is_answer = answers(4)
    lam = 1.0 + is_answer[None, :, :, None]
    broken = lam.copy()
    broken[0, 0, np.flatnonzero(levels[0] >= 0)[0]] = np.nan
    found = {i: looks_at_answers(x, levels) | {"layers": [3]} for i, x in enumerate((lam, broken))}
    accuracy = {0: 0.9, 1: 0.1}
    table = looks_table({"a": found, "b": {1: found[1]}}, {"a": accuracy, "b": accuracy}, 0.5, "title")
    assert [row["seeds"] for row in table.rows] == ["1, not finite: 1", "0, not finite: 1"]
    assert (
        table.rows[0]["answers at the largest λ"] == "100.0 %"
        and table.rows[0]["layer"] == "3"
        and "layer" not in table.rows[1]
    )
    assert len(table.raw) == 3 and "finds 50.0 %" in table.note


def test_the_section_has_every_seed_its_test_accuracy_and_the_rule_by_position(tmp_path, monkeypatch):
    """Of a run of MQAR, where every answer is at level 7: in seed s, λ of layer 1 is largest there in s of 4 sequences."""
    run = made_run(tmp_path, accuracies={"fixed": [0.99, 0.9, 0.5], "mixer=linear": [0.1] * 3}, num_seeds=3,
                   test={"fixed": [0.98, 0.88, 0.48], "mixer=linear": [0.1] * 3})  # fmt: skip

    def planted(trained, seed, tokens, which):
        assert tokens.shape == (4, 128) and which == "best"
        lam = np.ones((2, *tokens.shape, 2, 8), np.float32)
        lam[1, :seed, :, 0, 7] = 9
        return {layer: {"lam_value": of_layer} for layer, of_layer in enumerate(lam)}

    report = "loglinear_jax.analysis.report"
    monkeypatch.setattr(f"{report}.read_run", lambda workdir: run)
    monkeypatch.setattr(f"{report}.load_run", lambda workdir, variant: made_variant(run, variant))
    monkeypatch.setattr("loglinear_jax.analysis.section.mixer_values", planted)
    path, problems = make_report([run.workdir], tmp_path / "out", Choices(sections=("looks",), sequences=4))
    assert problems == []
    with (tmp_path / f"out/looks-table-{run.name}.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["layer"], row["head"]) == ("1", "0")]
    assert [(row["variant"], row["accuracy"], row["largest"]) for row in rows] == [
        ("fixed", "0.98", "0.0"), ("fixed", "0.88", "0.25"), ("fixed", "0.48", "0.5")
    ]  # fmt: skip
    assert {row["by_position"] for row in rows} == {"1.0"}
    shown = (tmp_path / f"out/looks-table-{run.name}.md").read_text(encoding="utf-8")
    assert "25.0 ± 25.0 %" in shown and "finds 100.0 %" in shown
    assert f"looks-{run.name}.png" in path.read_text(encoding="utf-8")
