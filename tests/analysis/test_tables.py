"""Statistics against their definitions, and tables as files."""

import csv
import dataclasses
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict
from scipy.stats import binom

from loglinear_jax.analysis import complexity, paper, tables
from loglinear_jax.analysis.cache import Cache
from loglinear_jax.analysis.figures import colors_of, draw_shares
from loglinear_jax.analysis.tables import Table
from loglinear_jax.config import (
    default_config,
    language_config,
    released_config,
    released_language_config,
    robust_config,
)
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import RunSummary, VariantOutcome
from loglinear_jax.statistics import growth_exponent, mcnemar, mean_difference
from loglinear_jax.tasks import load_task


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_mcnemar_is_a_fair_coin_on_the_discordant_pairs(pairs):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    only_a, only_b, p = mcnemar(a, b)
    assert only_a == sum(x and not y for x, y in pairs) and only_b == sum(y and not x for x, y in pairs)
    n, k = only_a + only_b, min(only_a, only_b)
    assert p == pytest.approx(min(1.0, 2 * binom.cdf(k, n, 0.5)))


def test_mean_difference_has_the_interval_of_the_mean():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1.0, 2.0, 400), rng.normal(0.0, 2.0, 400)
    mean, low, high = mean_difference(a, b)
    half = 1.96 * np.std(a - b, ddof=1) / 20
    assert mean == pytest.approx((a - b).mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.05)
    assert mean_difference(a, b) == (mean, low, high)  # the same each time
    assert np.isnan(mean_difference(a[:9], b[:9])[1])  # too few
    assert mean_difference([2.0] * 10, [1.0] * 10) == (1.0, 1.0, 1.0)


def record(tmp_path, pairs=4, accuracies=None, **train):
    """A run in the paper's setting with three seeds."""
    config = default_config(task="mqar")
    config.task.num_pairs = pairs
    config.train.update(train)
    accuracies = accuracies or {"linear": [0.99, 0.5, 0.3], "mlp_softplus": [0.99, 0.95, 0.2]}
    config.variants = ",".join(accuracies)
    variants = {}
    for name, best in accuracies.items():
        variants[name] = VariantOutcome(
            metric="accuracy", seeds=list(range(len(best))), best_accuracy=best, best_loss=best, best_step=[1] * len(best),
            solved_step=[None] * len(best), diverged_step=[None] * len(best), last_step=2, params=10, lam_params=1, seconds=1.0,
        )  # fmt: skip
    task = load_task(**config.task.to_dict())
    return Run(tmp_path / f"kv{pairs}", config, task, RunSummary(variants))


def test_differences_are_paired_by_seed(tmp_path):
    table = tables.differences(record(tmp_path))
    (row,) = table.raw
    assert (row["A"], row["B"], row["only_a_90"], row["only_b_90"]) == ("linear", "mlp_softplus", 0, 1)
    assert (row["only_a_99"], row["only_b_99"], row["mcnemar_p_99"]) == (0, 0, 1)
    assert row["mean_difference"] == pytest.approx(100 * (0.0 - 0.45 + 0.1) / 3)
    assert tables.differences(record(tmp_path, accuracies={"linear": [0.1, 0.2, 0.3]})) is None


def test_the_paper_stands_beside_ours_where_the_task_is_the_same(tmp_path):
    ours = record(tmp_path)
    assert "35.1 (99.4)" in tables.outcomes(ours).text("github")
    table = tables.as_the_paper([ours, record(tmp_path, pairs=8), record(tmp_path, pairs=16, batch_size=4)])
    (table,) = table  # the last one is another experiment
    text = table.text("github")
    for shown in ("59.7 (99.0)", "1/3 [0.06, 0.79], 0/3", "67.0 (99.7)", "35.8 (99.5)"):
        assert shown in text
    assert "kv=8" in text and "kv=16" not in text
    assert paper.result(ours.config, "lam_hidden=32").startswith("9 of 11 seeds converge")
    language = language_config()
    released_language_config(language)
    assert paper.result(language, "linear") == "224.71"
    for config, change in (
        (ours.config, {"task.seq_len": 256}),
        (ours.config, {"model.norm": "pre"}),
        (ours.config, {"model.layers": 3}),
        (ours.config, {"train.num_steps": 4_000}),
        (ours.config, {"train.patience": 1}),
        (language, {"task.target_offset": 1}),
        (language, {"task.corpus": "wikitext-2-raw"}),
        (language, {"model.layers": 1}),
        (language, {"train.num_steps": 10}),
    ):
        other = ConfigDict(config.to_dict())
        other.update_from_flattened_dict(change)
        assert paper.result(other, "linear") is None


def test_two_runs_of_one_table_are_merged_by_variant(tmp_path):
    halves = [
        record(tmp_path, pairs, {variant: [0.99, 0.5, 0.3]}) for pairs in (4, 8) for variant in ("linear", "rope")
    ]
    again = record(tmp_path / "again", 4, {"rope": [0.1, 0.1, 0.1]})
    (table,) = tables.as_the_paper([*halves, again])
    assert {(row["variant"], row["num_pairs"]) for row in table.raw} == {
        (v, p) for v in ("linear", "rope") for p in (4, 8)
    }
    assert "not shown: rope of kv4" in table.note and all(row["mean_accuracy"] > 0.5 for row in table.raw)
    few = record(tmp_path / "few", 4, {"rope": [0.1, 0.1]})
    (table,) = tables.as_the_paper([few, *halves])
    assert {row["num_seeds"] for row in table.raw} == {3}


def test_settings_of_one_task_stand_below_each_other(tmp_path):
    runs = [record(tmp_path), record(tmp_path, warmup_steps=500, num_seeds=7), record(tmp_path, pairs=8)]
    runs[1].config.model.norm = "pre"
    again = record(tmp_path / "again", accuracies={"rope": [0.99, 0.99, 0.1], "linear": [0.1, 0.1, 0.1]})
    found = tables.by_setting([*runs, again, record(tmp_path / "again", pairs=8)])  # those of 8 pairs are one setting
    (table,) = found.values()
    assert [row["changed"] for row in table.rows] == ["nothing", "norm=pre, warmup_steps=500"]
    assert all(row["mlp_softplus"] == "2/3 [0.21, 0.94], 0/3" for row in table.rows)
    assert table.rows[0]["rope"] == "2/3 [0.21, 0.94], 0/3" and table.rows[0]["linear"] == table.rows[1]["linear"]
    assert "not shown: linear of kv4" in table.note
    figure = draw_shares(
        {"4 pairs": table.raw, "8 pairs": [number for number in table.raw if number["variant"] != "rope"]}
    )
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["nothing", "norm=pre, warmup_steps=500"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a layout that leaves the axes no room
        figure.draw_without_rendering()
    (first, *_) = tables.as_the_paper([*runs, record(tmp_path / "pre", pairs=8, warmup_steps=500)])
    assert first.title == "MQAR, text setting, by key-value pairs, length 128"
    runs[1].config.model.norm = "post"
    titles = [table.title for table in tables.as_the_paper([*runs, record(tmp_path, pairs=8, warmup_steps=500)])]
    assert titles == [first.title, f"{first.title} (warmup_steps=500)"]


def test_presets_are_named_among_changes(tmp_path):
    runs = [record(tmp_path / name) for name in "abc"]
    released_config(runs[1].config)
    runs[1].config.model.dt_max = 0.01
    robust_config(runs[2].config)
    assert tables.changed_settings(runs) == ["", "released setting, dt_max=0.01", "robust"]


def test_a_language_run_that_diverged_has_no_difference(tmp_path):
    run = record(tmp_path)
    outcomes = {name: dataclasses.replace(x, metric="loss") for name, x in run.outcomes.items()}
    outcomes["linear"] = dataclasses.replace(outcomes["linear"], best_loss=[None] * 3)
    task = load_task(**language_config().task.to_dict())
    run = dataclasses.replace(run, task=task, summary=RunSummary(outcomes))
    (row,) = tables.differences(run).rows
    assert row["seeds"] == "0" and row["perplexity A − B [95 % interval]"] == "–"


def test_a_seed_that_is_not_finite_is_counted_and_left_out():
    good = dict(mean=np.ones((1, 1, 2)), std=np.full((1, 1, 2), 0.5), min=np.zeros((1, 1, 2)), max=np.ones((1, 1, 2)))
    good |= dict(role_share=np.full((1, 1, 2), 0.25), entropy=np.ones((1, 1)))
    bad = {name: np.full_like(value, np.nan) for name, value in good.items()}
    table = tables.dependence({"linear": {3: good, 7: bad}}, {"linear": {3: True, 7: False}}, "λ")
    assert [row["seeds"] for row in table.rows] == ["all (1)", "not finite: 1 (0)"]
    assert (
        table.rows[0]["Σ std over tokens / Σ mean of λ"] == "50.0 %"
        and table.rows[0]["of the variance between roles"] == "25 %"
    )
    assert {row["seed"] for row in table.raw} == {3, 7}
    flags = dict(zip((3, 4, 5), np.array([True, False, True]), strict=True))
    table = tables.dependence({"linear": dict.fromkeys(flags, good)}, {"linear": flags}, "λ")
    assert [row["seeds"] for row in table.rows] == ["all (3)", "converged (2)", "others (1)"]


def test_every_variant_has_its_own_colour():
    variants = ["lam_hidden=32", "linear", "mlp_softplus", "a=1", "b=2"]
    assert len(set(colors_of(variants).values())) == len(variants)


def test_outcomes_by_seed(tmp_path):
    table = tables.by_seed(record(tmp_path))
    assert table.rows[1] == {"seed": "1", "linear": "50.0", "mlp_softplus": "95.0"}


def test_tables_as_files(tmp_path):
    table = Table("λ & more", [{"a_b": "1 ± 2", "λ": "≥ 3"}], [{"a_b": 1.5, "λ": None}], note="A note.")
    paths = table.write(tmp_path / "t")
    assert [path.suffix for path in paths] == [".md", ".csv", ".tex"]
    markdown, _, tex = (path.read_text() for path in paths)
    assert "| 1 ± 2 | ≥ 3 |" in markdown and "A note." in markdown
    assert r"a\_b" in tex and r"$\pm$" in tex and r"$\lambda$" in tex and r"\toprule" in tex
    assert list(csv.DictReader(paths[1].open())) == [{"a_b": "1.5", "λ": ""}]


def test_cache_computes_once(tmp_path):
    cache, calls = Cache(tmp_path / "cache"), []

    def compute():
        calls.append(1)
        return {"x": np.arange(3)}

    key = {"checkpoint": "a", "seed": 1}
    for _ in range(2):
        np.testing.assert_array_equal(cache.get(key, compute)["x"], np.arange(3))
    assert len(calls) == 1
    cache.get(key | {"checkpoint": "b"}, compute)
    assert len(calls) == 2
    for path in (tmp_path / "cache").glob("*.npz"):
        path.write_bytes(path.read_bytes()[:20])
    np.testing.assert_array_equal(cache.get(key, compute)["x"], np.arange(3))
    assert len(calls) == 3


@given(st.floats(0.1, 3), st.floats(0.01, 100))
def test_growth_exponents(power, factor):
    lengths = 2.0 ** np.arange(4, 9)
    assert growth_exponent(lengths, factor * lengths**power) == pytest.approx(power, rel=1e-6)


def test_memory_grows_as_theory_says(monkeypatch):
    monkeypatch.setattr(complexity, "time_training", lambda settings, batch, length, **_: {"ms": float(length)})
    lengths = [256, 512, 1024, 2048]
    measured = {variant: complexity.measure(lengths, variant) for variant in complexity.VARIANTS}
    table = complexity.table(measured, "nowhere")
    exponents = {row["variant"]: row["bytes_exponent"] for row in table.raw}
    assert exponents["mixer=softmax"] == pytest.approx(1, abs=0.01) and abs(exponents["mixer=linear"]) < 1e-9
    steps = np.diff(measured["mlp_softplus"]["bytes"])
    assert (steps == steps[0]).all() and steps[0] > 0  # one more level each time T doubles
    assert "T log T (1.1" in table.text("github")
