"""Which Fenwick levels hold a task's answers: each share against what the definition of the task says, and the section."""

import csv
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax import fenwick_level
from loglinear_jax.analysis import answer_levels, levels_of_answers, looks_at_answers
from loglinear_jax.analysis.answers import answer_places, best_heads, found_by_position, levels_table, looks_table
from loglinear_jax.analysis.report import make_report
from loglinear_jax.analysis.section import Choices
from loglinear_jax.fenwick import num_levels, occupied_levels
from loglinear_jax.tasks import BaseTask, Task, load_task
from tests.analysis.made_runs import made_run, made_variant


@pytest.mark.parametrize(("seq_len", "pairs", "level"), [(128, 1, 7), (128, 32, 7), (512, 128, 9)])
def test_in_the_paper_s_mqar_one_level_holds_every_answer(seq_len, pairs, level):
    """Of any number of pairs: also by the places alone, of any value and any query. There level 1 is empty."""
    task = load_task("mqar", seq_len=seq_len, num_pairs=pairs, vocab_size=260)
    shares = answer_levels(task, num=16)
    np.testing.assert_array_equal(shares, np.arange(level + 1) == level)
    queries, values = np.arange(seq_len)[task.scored], np.arange(1, 2 * pairs, 2)
    assert set(fenwick_level(queries[:, None], values).ravel()) == {level}
    assert not occupied_levels(queries, level + 1)[:, 1].any()


def within_sampling_error(shares, expected, answers):
    """Both of them sum to 1, and differ by at most five standard deviations of a count of so many answers."""
    assert len(shares) == len(expected) and abs(shares.sum() - 1) < 1e-9 and abs(sum(expected) - 1) < 1e-9
    p = np.asarray(expected)
    return (np.abs(shares - p) <= 5 * np.sqrt(p * (1 - p) / answers)).all()


def test_interleaved_has_its_answers_at_every_level_that_its_slots_meet_at():
    """Of two of 64 slots, half meet at the highest level, and half as many at each lower one."""
    slots = itertools.combinations(range(64), 2)
    expected = np.bincount([fenwick_level(2 * late, 2 * early + 1) for early, late in slots]) / (64 * 63 / 2)
    np.testing.assert_allclose(np.round(100 * expected), [0, 0, 2, 3, 6, 13, 25, 51])
    assert within_sampling_error(answer_levels(load_task("interleaved")), expected, 1024 * 24)


@dataclasses.dataclass(frozen=True)
class Echo(Task):
    """Say again what came three tokens before."""

    moved: int = 0

    def sample(self, key, num):
        tokens = jax.random.randint(key, (num, self.seq_len), 0, self.vocab_size)
        return tokens, jnp.full_like(tokens, -1).at[:, 3:].set(tokens[:, :-3])

    def sources(self, tokens, targets):
        return np.where(targets >= 0, np.arange(tokens.shape[1]) - 3 + self.moved, -1)


def test_a_task_of_one_s_own_says_where_its_answers_stand():
    expected = np.bincount(fenwick_level(np.arange(3, 16), np.arange(13)), minlength=5) / 13
    np.testing.assert_allclose(answer_levels(Echo(seq_len=16, vocab_size=8), 2), expected)
    with pytest.raises(ValueError, match="Echo.sources returns 4 at position 3: expected 0 to 3, as the position"):
        answer_levels(Echo(seq_len=16, vocab_size=8, moved=4), 2)
    assert answer_levels(load_task("text", corpus="nowhere", cache="nowhere")) is None  # it is not opened


class Silent(Echo):
    def sources(self, tokens, targets):
        return BaseTask.sources(self, tokens, targets)


def test_an_answer_is_pointed_at_where_the_task_says_it_stands():
    """Not wherever its token stands, as in a task that does not say."""
    tokens, targets = np.array([2, 2, 2, 5, 5, 2, 2, 2]), np.array([-1, -1, -1, 2, 2, 2, 5, 5])
    for task, places in ((Echo(8, 8), [2]), (Silent(8, 8), [0, 1, 2, 5])):
        assert answer_places(task, tokens, targets, 5).tolist() == places
        assert answer_places(task, tokens, targets, 2).tolist() == []


def test_the_table_has_the_levels_that_hold_answers_and_rounds_none_of_them_away():
    found = levels_table({"a": np.array([0, 0.0004, 0.9996]), "b": np.array([0, 0, 0, 0, 1.0])})
    assert found.rows[0] == {"task": "a", "level 1": "0.1 %", "level 2": "99.9 %", "level 4": "–"}
    assert found.rows[1] == {"task": "b", "level 1": "–", "level 2": "–", "level 4": "100 %"}


# --- How often λ finds them --------------------------------------------------------------------------------------------

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
    lam = np.ones((1, 3, 4, 1, 3))
    with pytest.raises(ValueError, match=r"levels has shape \(3, 3\): expected \[num, T\] = \(3, 4\), as lam has"):
        looks_at_answers(lam, levels[:, 1:])
    with pytest.raises(ValueError, match="levels has no answer"):
        looks_at_answers(lam, np.full_like(levels, -1))


def test_the_table_leaves_out_seeds_whose_lam_is_not_finite():
    levels, is_answer = answers(4)
    lam = 1.0 + is_answer[None, :, :, None]
    broken = lam.copy()
    broken[0, 0, np.flatnonzero(levels[0] >= 0)[0]] = np.nan
    found = {i: looks_at_answers(x, levels) | {"layers": [3]} for i, x in enumerate((lam, broken))}
    accuracy = {0: 0.9, 1: 0.1}
    table = looks_table({"a": found, "b": {1: found[1]}}, {"a": accuracy, "b": accuracy}, 0.5, "title")
    assert [row["seeds"] for row in table.rows] == ["1, not finite: 1", "0, not finite: 1"]
    first, second = table.rows
    assert (first["answers at the largest λ"], first["layer"]) == ("100.0 %", "3") and "layer" not in second
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
