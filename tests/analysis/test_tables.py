"""Tables of runs, and tables as files."""

import dataclasses

import numpy as np
import pytest
from ml_collections import ConfigDict

from loglinear_jax.analysis import outcomes, paper, rates
from loglinear_jax.analysis.lam import dependence_table
from loglinear_jax.analysis.pages import of_variants
from loglinear_jax.analysis.paper import changed_settings, describe_run, setting_of
from loglinear_jax.analysis.rates import by_rate, chosen_rate
from loglinear_jax.analysis.style import LAM_LOOKS, MIXERS, describe_variant, looks_of
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.config import language_config, released_config, released_language_config, robust_config
from loglinear_jax.mixers import TokenMixer
from loglinear_jax.runs.outcome import RunSummary
from loglinear_jax.tasks import ACCURACY
from tests.analysis.made_runs import made_run, swept


def test_differences_are_paired_by_seed(tmp_path):
    table = outcomes.differences(made_run(tmp_path))
    (row,) = table.raw
    assert (row["A"], row["B"], row["only_a_90"], row["only_b_90"]) == ("linear", "mlp_softplus", 0, 1)
    assert (row["only_a_99"], row["only_b_99"], row["mcnemar_p_99"]) == (0, 0, 1)
    assert row["mean_difference"] == pytest.approx(100 * (0.0 - 0.45 + 0.1) / 3)
    assert outcomes.differences(made_run(tmp_path, accuracies={"linear": [0.1, 0.2, 0.3]})) is None


def test_variants_with_more_seeds_are_compared_on_those_that_both_have(tmp_path):
    """While seeds are added, one variant may have them and another not."""
    more, fewer = {"linear": [0.99, 0.5, 0.3, 0.1], "fixed": [0.9, 0.6]}, {"linear": [0.99, 0.5], "fixed": [0.9, 0.6]}
    tables = [outcomes.differences(made_run(tmp_path, accuracies=x)) for x in (more, fewer)]
    assert tables[0].raw == tables[1].raw
    more, fewer = (
        swept({name: {0.001: x, 0.004: (x * 2)[1 : 1 + num]} for name, x in of.items()})
        for of, num in ((more, 3), (fewer, 2))
    )
    for make in (rates.best_rates_table, rates.differences_at_best_rates):
        assert len(make(made_run(tmp_path, accuracies=more)).rows) == len(
            make(made_run(tmp_path, accuracies=fewer)).rows
        )


def test_the_best_rate_is_chosen_on_other_seeds_than_it_is_reported_on(tmp_path):
    at_rates = {0.004: [0.9, 0.2, 0.8, 0.3], 0.001: [0.5, 1.0, 0.5, 0.9], 0.02: [0.1, 0.1, 0.1, 0.2]}
    accuracies = swept({"linear": at_rates})
    run = made_run(tmp_path, accuracies=accuracies | {"fixed": [0.5] * 4})
    every, best = rates.every_rate(run), rates.best_rates_table(run)
    assert [row["learning_rate"] for row in every.raw] == [0.001, 0.004, 0.02]
    assert every.raw[0]["mean"] == pytest.approx(72.5) and every.raw[0]["variant"] == "linear"
    (row,) = best.raw  # fixed has one rate alone
    assert (row["learning_rate"], row["other_learning_rate"], row["num_seeds"]) == (0.001, 0.004, 4)
    assert (every.raw[1]["share_converged"], every.raw[1]["share_low"]) == (0.25, pytest.approx(0.0456, abs=1e-3))
    assert (row["share_converged"], row["share_low"]) == (0, pytest.approx(0)) and row["share_high"] < 0.5
    assert best.rows[0]["best rate"] == "0.001 and 0.004" and best.rows[0]["seeds"] == "4"
    chosen, shown, *_ = chosen_rate(ACCURACY, by_rate(run)["linear"])
    assert [at.learning_rate for at in chosen] == [0.001, 0.004] and row["mean"] == pytest.approx(shown.mean())
    # Only seeds 0 and 2 together choose 0.004, for seeds 1 and 3; every other half chooses 0.001.
    assert shown[[0, 2]].tolist() == [50, 50] and 20 < shown[1] < 100 and 30 < shown[3] < 90
    assert rates.every_rate(made_run(tmp_path)) is rates.best_rates_table(made_run(tmp_path)) is None


def test_differences_at_best_rates_are_paired_by_seed(tmp_path):
    rng = np.random.default_rng(0)
    seeds = rng.uniform(0.3, 0.6, 16)
    linear = {0.001: seeds, 0.004: seeds + 0.3, 0.016: seeds - 0.2}
    fixed = {0.001: seeds + 0.2, 0.004: seeds, 0.016: seeds - 0.2}
    variants = swept({"linear": linear, "fixed": fixed}) | {"rope": seeds}
    run = made_run(tmp_path, accuracies={name: list(x) for name, x in variants.items()}, learning_rate=0.001)
    pairs = {(row["A"], row["B"]): row for row in rates.differences_at_best_rates(run).raw}
    assert set(pairs) == {("linear", "fixed"), ("linear", "rope"), ("fixed", "rope")}
    found = pairs["linear", "fixed"]
    assert [found[x] for x in ("mean_difference", "low", "high")] == pytest.approx([10] * 3)
    assert found["seeds"] == "16" and found["p"] < 2e-4
    table = outcomes.differences(run)
    of_same = {(row["A"].split("=")[-1], row["B"].split("=")[-1]) for row in table.raw}
    assert of_same == {(rate, rate) for rate in ("0.001", "0.004", "0.016")} | {("0.001", "rope")}
    assert "different learning rates" in table.note and len(table.rows) == 5
    assert rates.differences_at_best_rates(made_run(tmp_path)) is None
    alone = swept({"linear": {0.001: [0.1], 0.004: [0.2]}})
    assert outcomes.differences(made_run(tmp_path, accuracies=alone)) is None
    own = {"linear+train.learning_rate=0.001": [0.1], "fixed+train.learning_rate=0.004": [0.2]}
    assert len(outcomes.differences(made_run(tmp_path, accuracies=own)).rows) == 1  # each has one rate alone


def test_the_paper_stands_beside_ours_where_the_task_is_the_same(tmp_path):
    ours = made_run(tmp_path)
    assert "35.1 (99.4)" in outcomes.outcomes(ours).text("github")
    table = outcomes.as_the_paper([ours, made_run(tmp_path, pairs=8), made_run(tmp_path, pairs=16, batch_size=4)])
    (table,) = table  # the last one is another experiment
    text = table.text("github")
    for shown in ("59.7 (99.0)", "1/3 [0.06, 0.79], 0/3", "67.0 (99.7)", "35.8 (99.5)"):
        assert shown in text
    assert "kv=8" in text and "kv=16" not in text
    assert paper.result(ours.config, "lam_hidden=32").startswith("9 of 11 seeds converge")
    language = language_config()
    released_language_config(language)
    assert paper.result(language, "linear") == "224.71"
    changes = [{"task.seq_len": 256}, {"model.norm": "pre"}, {"train.num_steps": 4_000}, {"train.patience": 1}]
    every = [(ours.config, change) for change in changes]
    for config, change in (*every, (language, {"task.target_offset": 1}), (language, {"model.layers": 1})):
        other = ConfigDict(config.to_dict())
        other.update_from_flattened_dict(change)
        assert paper.result(other, "linear") is None


def test_settings_of_one_task_stand_below_each_other(tmp_path):
    runs = [made_run(tmp_path), made_run(tmp_path, warmup_steps=500, num_seeds=7), made_run(tmp_path, pairs=8)]
    runs[1].config.model.norm = "pre"
    again = made_run(tmp_path / "again", accuracies={"rope": [0.99, 0.99, 0.1], "linear": [0.1, 0.1, 0.1]})
    # Those of 8 pairs are one setting.
    (table,) = outcomes.by_setting([*runs, again, made_run(tmp_path / "again", pairs=8)])
    assert [row["changed"] for row in table.rows[::2]] == ["nothing", "norm=pre, warmup_steps=500"]
    assert [row["changed"] for row in table.rows[1::2]] == ["nothing", "norm=pre, warmup_steps=500"]
    means, shares = table.rows[::2], table.rows[1::2]
    assert all(row["mlp_softplus"] == "71.3 ± 44.5" for row in means) and means[0]["linear"] == "59.7 ± 35.5"
    assert all(row["mlp_softplus"] == "2/3 [0.21, 0.94], 0/3" for row in shares)
    assert shares[0]["rope"] == "2/3 [0.21, 0.94], 0/3" and shares[0]["linear"] == shares[1]["linear"]
    assert "not shown: linear of kv4" in table.note
    (first, *_) = outcomes.as_the_paper([*runs, made_run(tmp_path / "pre", pairs=8, warmup_steps=500)])
    assert first.title == "MQAR, setting text: best validation accuracy, by key-value pairs, length 128"
    runs[1].config.model.norm = "post"
    titles = [table.title for table in outcomes.as_the_paper([*runs, made_run(tmp_path, pairs=8, warmup_steps=500)])]
    assert titles == [first.title, f"{first.title} (warmup_steps=500)"]


class OwnMixer(TokenMixer):
    """A mixer that does not say how many numbers it keeps: it is left out of tables by size."""

    def mix(self, q, k, v, *, cache, max_length):
        return v


def of_states(folder, width, accuracy, seeds=3, **train):
    """A run of MQAR of length 128, with two heads of so wide keys and values."""
    variants = ("mixer=linear", "fixed", "content", f"mixer={__name__}:OwnMixer", "mixer=softmax")
    run = made_run(folder, accuracies=dict.fromkeys(variants[: 4 if width == 8 else 5], [accuracy] * seeds), **train)
    run.config.model.key_dim = run.config.model.head_dim = width
    return run


def test_runs_that_differ_in_the_size_of_their_states_alone_stand_together(tmp_path):
    states = [(16, 0.4, 3), (16, 0.6, 4), (8, 0.2, 3)]  # one width twice: the run with more seeds counts
    runs = [of_states(tmp_path / f"{width}-{n}", width, accuracy, n) for width, accuracy, n in states]
    other = of_states(tmp_path / "warm", 16, 0.9, warmup_steps=500)
    (table,) = outcomes.tables_by_size([*runs, other])
    assert table.title.endswith("pairs 4: best validation accuracy, by the size of the states")
    kept = {  # by variant of states of 8 × 8 and 16 × 16; there are 8 levels, and softmax has one size
        "mixer=linear": (2 * 8 * 8, 2 * 16 * 16), "fixed": (2 * 8 * 8 * 8, 2 * 8 * 16 * 16),
        "content": (2 * 8 * 8 * (8 + 1), 2 * 8 * 16 * (16 + 1)),
    }  # fmt: skip
    assert table.rows == [
        {"variant": variant, "2 × 8 × 8": f"20.0 with {small:,}", "2 × 16 × 16": f"60.0 with {large:,}"}
        for variant, (small, large) in kept.items()
    ]
    rates = swept({"fixed": {0.001: [0.3] * 4, 0.01: [0.5] * 4}})
    at_rates = [made_run(tmp_path / f"rates-{width}", accuracies=rates) for width in (8, 16)]
    for run, width in zip(at_rates, (8, 16), strict=True):
        run.config.model.key_dim = run.config.model.head_dim = width
        run.config.train.learning_rate = (0.001, 0.01)
    (table,) = outcomes.tables_by_size(at_rates)
    assert table.rows == [{"variant": "fixed", "2 × 8 × 8": "50.0 with 1,024", "2 × 16 × 16": "50.0 with 4,096"}]


def made_text(tmp_path, losses, variants=None):
    """A finished run of a language model with these best losses of every variant; None: the seed never had a finite one."""
    run = made_run(tmp_path, task="text", accuracies=dict.fromkeys(variants or ["linear"], [0.1] * len(losses)))
    steps = {"best_step": [None if loss is None else 2 for loss in losses], "best_loss": losses}
    by_position = {"1": [4.0] * len(losses), "2": [None] * len(losses)}
    diverged = [1 if loss is None else None for loss in losses]
    steps |= {"test_loss": [3.0] * len(losses), "test_loss_from_position": by_position, "diverged_step": diverged}
    made = {name: dataclasses.replace(outcome, **steps) for name, outcome in run.outcomes.items()}
    return dataclasses.replace(run, summary=RunSummary(made))


def test_a_seed_without_a_finite_evaluation_has_no_perplexity(tmp_path):
    run = made_text(tmp_path, [1.0, None, 1.2])
    table = outcomes.outcomes(run)
    (row,), (numbers,) = table.rows, table.raw
    assert row["seeds"] == "2 of 3; 1 diverged" and row["validation perplexity, mean ± std"] == "3.02 ± 0.43"
    assert numbers["mean_perplexity"] == pytest.approx(np.exp([1.0, 1.2]).mean()) and numbers["num_perplexity"] == 2
    assert numbers["mean_test_perplexity"] == pytest.approx(np.exp(3)) and "share_low" not in numbers
    columns = ["validation", "test"]
    (row,) = of_variants(lambda _: [run], "", columns)
    assert row["validation"] == "3.02 ± 0.43"
    run = made_text(tmp_path, [None, None])
    (row,) = of_variants(lambda _: [run], "", columns)
    assert {row[name] for name in columns} == {"–"}
    (row,), (numbers,) = outcomes.outcomes(run).rows, outcomes.outcomes(run).raw
    assert row["test perplexity"] == "–" and "mean_test_perplexity" not in numbers


def test_a_seed_that_is_not_finite_is_counted_and_left_out():
    good = dict(mean=np.ones((1, 1, 2)), std=np.full((1, 1, 2), 0.5), min=np.zeros((1, 1, 2)), max=np.ones((1, 1, 2)))
    good |= dict(role_share=np.full((1, 1, 2), 0.25), role_mean=np.full((2, 1, 1, 2), 3.0), entropy=np.ones((1, 1)))
    names = {"layers": np.array([2]), "roles": np.array(["key", "query"])}
    bad = {name: np.full_like(value, np.nan) for name, value in good.items()} | names
    good |= names
    table = dependence_table({"linear": {3: good, 7: bad}}, {"linear": {3: True, 7: False}}, "test accuracy", "λ")
    assert [row["seeds"] for row in table.rows] == ["all (1)", "not finite: 1 (0)"]
    shares = [table.rows[0][name] for name in ("Σ std over tokens / Σ mean of λ", "of the variance between roles")]
    assert shares == ["50.0 %", "25 %"]
    assert table.raw[0]["mean at query"] == 3.0
    assert {row["seed"] for row in table.raw} == {3, 7} and {row["layer"] for row in table.raw} == {2}
    flags = dict(zip((3, 4, 5), np.array([True, False, True]), strict=True))
    assert "Converged" not in table.note
    table = dependence_table({"linear": dict.fromkeys(flags, good)}, {"linear": flags}, "test accuracy", "λ")
    assert [row["seeds"] for row in table.rows] == ["all (3)", "converged (2)", "others (1)"]
    assert table.note.endswith("Converged: test accuracy of at least 90 %.")
    # Level 1 of one head is larger than any other, but level 2 is on average over both; level 0 is never used.
    moved = good | {name: np.zeros((1, 2, 3)) for name in ("std", "min", "max", "role_share")}
    moved |= dict(
        mean=np.array([[[np.nan, 5.0, 4.0], [np.nan, 1.0, 4.0]]]),
        role_mean=np.zeros((2, 1, 2, 3)),
        entropy=np.ones((1, 2)),
    )
    table = dependence_table({"linear": {3: good, 4: good, 5: moved}}, {"linear": flags}, "test accuracy", "λ")
    assert table.rows[0]["level of the largest mean (seeds)"] == "layer 2: 0 (2), 2 (1)"


def test_tables_show_the_test_where_all_runs_have_one_and_say_so(tmp_path):
    test = {"linear": [0.98, 0.4, 0.2], "mlp_softplus": [0.97, 0.93, 0.1]}
    tested = made_run(tmp_path, test=test)
    every, differences = (make(tested) for make in (outcomes.outcomes, outcomes.differences))
    assert all("test accuracy" in table.title for table in (every, differences))
    assert "52.7 ± 40.5" in every.text("github")
    assert differences.raw[0]["mean_difference"] == pytest.approx(100 * (0.01 - 0.53 + 0.1) / 3)

    def of_several(old):
        """Tables of 4 and 8 pairs, each in two settings. old: whether one of the runs has no test."""
        others = [(4, 9, test), (8, 0, test), (8, 9, None if old else test)]
        others = [made_run(tmp_path, pairs, test=of_one, warmup_steps=steps) for pairs, steps, of_one in others]
        return outcomes.as_the_paper([tested, *others]), outcomes.by_setting([tested, *others])

    axis, settings = of_several(old=False)
    assert ["test accuracy" in table.title for table in (*axis, *settings)] == [True] * 4
    assert all("52.7 (98.0)" in table.text("github") for table in axis)
    axis, settings = of_several(old=True)  # which stands in the second table, and in the figure of all settings
    assert ["test accuracy" in table.title for table in (*axis, *settings)] == [True, False, False, False]
    assert "best validation accuracy" in axis[1].title and axis[1].text("github").count("59.7 (99.0)") == 2
    assert "each seed's best in validation" in axis[1].note


def test_tables_as_files(tmp_path):
    row = {"a_b": Cell("1 ± 2", mean=1, std=2), "λ": Cell("≥ 3", mean=3, least=None)}
    table = Table("λ & more", [row], "A note.")
    paths = table.write(tmp_path / "t")
    assert [path.suffix for path in paths] == [".md", ".csv", ".tex"]
    markdown, _, tex = (path.read_text(encoding="utf-8") for path in paths)
    assert "| 1 ± 2 | ≥ 3 |" in markdown and "A note." in markdown
    assert r"a\_b" in tex and r"$\pm$" in tex and r"$\lambda$" in tex and r"\toprule" in tex
    assert paths[1].read_text(encoding="utf-8").splitlines() == ["a_b: mean,std,λ: mean,least", "1,2,3,"]


def test_settings_and_variants_in_words(tmp_path):
    runs = [made_run(tmp_path / name) for name in "abc"]
    assert setting_of(runs[0].config) == "text" and "setting" not in describe_run(runs[0])
    runs[0].config.model.max_length = 256  # for evaluation at other lengths, and no other model
    assert setting_of(runs[0].config) == "text"
    runs[0].config.model.max_length = None
    released_config(runs[1].config)
    assert describe_run(runs[1]).endswith(", released-code configuration")
    runs[1].config.model.dt_max = 0.01
    assert setting_of(runs[1].config) == ""
    robust_config(runs[2].config)
    assert changed_settings(runs) == ["", "released-code configuration, dt_max=0.01", "robust"]
    delta = describe_variant("mixer=log_linear_delta+lam=content+beta_max=2")
    assert delta == "log-linear Gated DeltaNet, λ: content, beta_max=2" and describe_variant("linear") == "λ: linear"


def test_every_mixer_and_lam_has_one_look_in_every_figure():
    known = [*LAM_LOOKS, *(f"mixer={name}" for name in MIXERS)]
    known += [f"mixer=log_linear_delta+lam={lam}" for lam in LAM_LOOKS]
    looks = looks_of(known)
    assert len(known) >= 14 and len(set(looks.values())) == len({look.color for look in looks.values()}) == len(known)
    assert all(looks_of([variant]) == {variant: look} for variant, look in looks.items())
    assert looks_of(["mixer=linear"]) == {"mixer=linear": looks["mixer=gated_linear"]}
    others = looks_of([*(f"lam_hidden={n}" for n in range(16)), *known])
    assert len(set(others.values())) == 16 + len(known) and looks.items() <= others.items()
