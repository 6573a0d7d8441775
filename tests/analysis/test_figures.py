"""Figures fit their column: nothing is clipped, and no tick labels overlap."""

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from loglinear_jax.analysis.answers import draw_answer_levels
from loglinear_jax.analysis.attention_rows import AttentionRow, draw_attention_rows
from loglinear_jax.analysis.best_rates import AtBest
from loglinear_jax.analysis.comparisons import draw_by_task, draw_shares
from loglinear_jax.analysis.complexity import draw_complexity
from loglinear_jax.analysis.curves import draw_convergence, draw_learning_curves
from loglinear_jax.analysis.decays import draw_initial_memory
from loglinear_jax.analysis.dependence import draw_dependence
from loglinear_jax.analysis.lam import Panel, draw_lam_by_head, draw_lam_over_tokens
from loglinear_jax.analysis.lengths import draw_scores_by_length
from loglinear_jax.analysis.looks import draw_looks
from loglinear_jax.analysis.rates import draw_rates
from loglinear_jax.analysis.sizes import AtSize, draw_by_size
from loglinear_jax.analysis.style import FULL_WIDTH, SeedPanel, save
from loglinear_jax.config import language_config
from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.runs.loading import Run
from loglinear_jax.tasks import ACCURACY, PERPLEXITY, load_task
from tests.analysis.made_runs import made_run

LONG = "lam=mlp_softplus+lam_hidden=32+train.learning_rate=0.003+norm=pre"
LONG_LAM = "lam=mlp_softplus+lam_hidden=32+head_dim=16"
VARIANTS = ("fixed", "linear", "mlp_softmax", "mlp_softplus", "mixer=linear", "mixer=softmax", LONG)


def misfits(figure):
    """What is wider than the report's column, lies outside of its figure, or overlaps, in words."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = ["too wide"] if figure.get_figwidth() > FULL_WIDTH else []
    inside = figure.bbox.padded(1)
    shown = [*figure.legends, *figure.texts, *([figure._suptitle] if figure._suptitle else [])]
    axes = [axis for axis in figure.axes if axis.axison]
    for axis in axes:
        shown += [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
    for artist in shown:
        box = artist.get_window_extent(renderer)
        text = getattr(artist, "get_text", lambda: "a legend")()
        if text and not (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)):
            found.append(f"outside: {text!r}")
    for legend, axis in itertools.product(figure.legends, axes):
        if legend.get_window_extent(renderer).overlaps(axis.get_tightbbox(renderer)):
            found.append("a legend over an axis")
    for axis in (ticked for panel in axes for ticked in (panel.xaxis, panel.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [t for t in (*axis.get_major_ticks(), *axis.get_minor_ticks()) if low <= t.get_loc() <= high]
        labels = [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
        for a, b in itertools.combinations(labels, 2):
            if a.get_window_extent(renderer).padded(-0.5).overlaps(b.get_window_extent(renderer).padded(-0.5)):
                found.append(f"tick labels overlap: {a.get_text()!r} and {b.get_text()!r}")
    return found


class Measured(Run):
    """A run whose curves are given, not read."""

    def metrics(self, variant):
        rng = np.random.default_rng(0)
        steps, seeds = np.arange(0, 100_001, 2_000), self.config.train.num_seeds
        speed = 1 + self.variants.index(variant) % 6
        loss = np.exp(-steps[:, None] * speed / 2e4) * rng.uniform(3, 11, seeds) + 1
        return {"step": steps, "train_loss": loss, "val_loss": loss, "val_accuracy": 1 / (1 + loss)}


def learning_curves_of_accuracy(tmp_path):
    run = made_run(tmp_path, accuracies={variant: [0.99, 0.5, 0.1] for variant in VARIANTS}, num_seeds=3)
    return draw_learning_curves(Measured(**vars(run)))


def learning_curves_of_perplexity(tmp_path):
    run = made_run(tmp_path, accuracies={variant: [0.99] for variant in VARIANTS[:2]}, num_seeds=1)
    return draw_learning_curves(Measured(**vars(run) | {"task": load_task(**language_config().task.to_dict())}))


def swept_run(tmp_path, rates, seeds, decays=(None,), variants=VARIANTS[:6], task="mqar"):
    """At these rates, the middle one of which is best."""
    rng, accuracies = np.random.default_rng(0), {}
    for shift, variant in enumerate(variants):
        for decay, (index, rate) in itertools.product(decays, enumerate(rates)):
            name = f"{variant}+train.learning_rate={rate}" + (
                f"+train.weight_decay={decay}" if decay is not None else ""
            )
            chance = 0.98 - 0.25 * abs(index - len(rates) / 2) - 0.05 * shift - (decay or 0)
            accuracies[name] = np.where(rng.random(seeds) < chance, 0.97, 0.1 + 0.3 * rng.random(seeds)).tolist()
    return made_run(tmp_path, accuracies=accuracies, num_seeds=seeds, task=task)


def swept_learning_curves(tmp_path, decays=(None,), task="mqar"):
    run = swept_run(tmp_path, (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016), 16, decays, (*VARIANTS[:5], LONG_LAM), task)
    return draw_learning_curves(Measured(**vars(run)))


def convergence(tmp_path):
    accuracies = {variant: [0.99, 0.5, 0.1] for variant in VARIANTS}
    solved = {variant: [7, None, None] for variant in VARIANTS}
    return draw_convergence(made_run(tmp_path, accuracies=accuracies, solved=solved))


def shares(tmp_path):
    def numbers(changed):
        return [
            {"changed": changed, "variant": v, "shown": "best validation accuracy", "num_seeds": 64, "num_converged": 32,
             "num_solved": 9, "share_low": 0.4, "share_high": 0.6} for v in VARIANTS
        ]  # fmt: skip

    changes = ("", "robust", "setting released, dt_max=0.01, warmup_steps=500, schedule=cosine, learning_rate=0.003")
    return draw_shares(
        {
            f"MQAR, length 128, vocabulary 128, pairs {2**i}": [
                number for changed in changes for number in numbers(changed)
            ]
            for i in range(3)
        }
    )


def at_best(values):
    return AtBest(values, values.mean(), values.mean() - 2, values.mean() + 3)


def by_task(tmp_path):
    values = np.random.default_rng(0).uniform(20, 100, (5, 64))
    name = "Forgetting MQAR, length 128, vocabulary 128, pairs 16, updates 8, filler random; head_dim=16, key_dim=16"
    delta = ("mixer=log_linear_delta+lam=content+beta_max=2", "mixer=gated_delta")
    panels = {f"{name} {i}": dict.fromkeys((*VARIANTS[i:], *delta), at_best(x)) for i, x in enumerate(values)}
    return draw_by_task(panels, "test accuracy")


def by_size(_):
    values = np.random.default_rng(0).uniform(20, 100, (3, 64))
    name = "Forgetting MQAR, length 128, vocabulary 128, pairs 16, updates 8, filler random; norm=pre, conv_width=4"
    sizes = [AtSize(8 * n * n, f"1 × {n} × {n}", at_best(x)) for n, x in zip((8, 16, 128), values, strict=True)]
    drawn = dict.fromkeys((*VARIANTS, "mixer=log_linear_delta+lam=content+beta_max=2"), sizes)
    return draw_by_size({f"{name} {i}": drawn for i in range(3)}, "best validation accuracy")


def test_a_line_of_sizes_goes_through_the_means():
    sizes = [AtSize(n, str(n), at_best(np.full(16, float(n)))) for n in (10, 60)]
    figure = draw_by_size({"A": {"fixed": sizes, "linear": sizes}}, "test accuracy")
    axis = figure.axes[0]
    assert len(axis.lines) == 2 and axis.lines[0].get_xydata().tolist() == [[10, 10], [60, 60]]
    assert [segment[:, 1].tolist() for segment in axis.collections[0].get_segments()] == [[8, 13], [58, 63]]


def initial_memory(low, high, panels=1, variants=VARIANTS[1:4]):
    tokens = np.geomspace(low, high, 8)
    drawn = {variant: (tokens, np.linspace(0.1, 1, 8)) for variant in variants}
    name = "MQAR, length 128, vocabulary 128, pairs 4; setting released, dt_max=0.01"
    return draw_initial_memory(
        [SeedPanel(name, 128, drawn)] * panels,
        "longest memory in the last layer (tokens)",
        "best validation accuracy",
        name,
    )


def lam_over_tokens(tmp_path):
    panel = Panel(
        np.random.default_rng(0).random((11, 1024)), "λ: mlp_softplus; seed 0, accuracy 97.1 %; layer 1, head 0",
        marks={"pairs end": 64, "queries": 960},
    )  # fmt: skip
    return draw_lam_over_tokens([[panel] * 4], "λ over the tokens of one sequence")


def lam_by_head(layers, heads, levels, seeds):
    panel = Panel(np.random.default_rng(0).random((layers, heads, levels)), "λ: mlp_softplus; seed 0, accuracy 97.1 %")
    return draw_lam_by_head([[panel] * seeds], "Mean of λ")


def dependence(tmp_path):
    rng = np.random.default_rng(0)
    found = {"mean": np.ones((2, 2, 15)), "std": rng.random((2, 2, 15)), "role_share": rng.random((2, 2, 15))}
    return draw_dependence({v: {0: found, 1: found} for v in VARIANTS}, "Variation", "MQAR")


def attention_rows(tmp_path):
    rows = []
    for position in (1023, 1000):
        level = fenwick_level(np.array(position), np.arange(position + 1))
        row = AttentionRow(position, np.random.default_rng(0).normal(size=position + 1) * 1e-4, level, np.ones(11))
        rows.append((row, f"position {position}, query (token 5), to predict: 77; 12 % where the answer stands", [5]))
    return draw_attention_rows(rows, {"queries": 960}, 1024, "λ: mlp_softplus; seed 0; layer 1, head 0")


def answer_levels(tasks):
    rng = np.random.default_rng(0)
    name = "Forgetting MQAR, length 2048, vocabulary 8192, pairs 256, updates 128, filler random"
    shares = {f"{name} {i}": rng.dirichlet(np.ones(4 + 2 * (i % 5))) for i in range(tasks)}
    return draw_answer_levels(shares, "Tasks with all their answers at one Fenwick level: 0 of 24")


def looks(layers):
    rng = np.random.default_rng(0)
    by_variant = {variant: (rng.random((64, layers)), rng.random(64)) for variant in VARIANTS}
    return draw_looks(by_variant, 0.51, "best validation accuracy", f"Answers at the largest λ: {', '.join(VARIANTS)}")


def scores_by_length(score, seeds=3):
    lengths = [2**i for i in range(5, 15)]
    values = score.of(np.linspace(1, 9, 10)[None], np.linspace(1, 0, 10)[None])
    by_variant = dict.fromkeys(VARIANTS, (lengths, np.repeat(values, seeds, 0)))
    by_variant |= {f"{variant}, higher levels as 5": found for variant, found in by_variant.items()}
    return draw_scores_by_length(by_variant, 32, score, "MQAR, length 32, vocabulary 16, pairs 7")


def complexity(tmp_path):
    lengths = 2 ** np.arange(9, 16)
    found = {"length": lengths, "ms": lengths**2, "bytes": lengths}
    return draw_complexity(dict.fromkeys(VARIANTS, found), "Growth with T")


DRAWN = {
    "learning curves of accuracy": learning_curves_of_accuracy,
    "learning curves of perplexity": learning_curves_of_perplexity,
    "learning curves at several rates": swept_learning_curves,
    "learning curves at several rates and weight decays": lambda path: swept_learning_curves(path, (0, 0.1)),
    "learning curves of perplexity at several rates": lambda path: swept_learning_curves(path, task="text"),
    "convergence": convergence,
    "rates": lambda path: draw_rates(swept_run(path, (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016), 16)),
    "two rates": lambda path: draw_rates(swept_run(path, (0.001, 0.03162), 3)),
    "many rates and weight decays": lambda path: draw_rates(
        swept_run(
            path, [float(f"{rate:.3g}") for rate in np.geomspace(1e-4, 0.05, 16)], 16, (0, 0.01, 0.1), VARIANTS[:3]
        )
    ),
    "rates of perplexity": lambda path: draw_rates(swept_run(path, (0.001, 0.002, 0.004), 16, task="text")),
    "shares": shares,
    "by task": by_task,
    "by size": by_size,
    "initial memory in a part of a decade": lambda _: initial_memory(101, 130),
    "initial memory over many decades": lambda _: initial_memory(0.02, 3e6),
    "initial memory of several runs": lambda _: initial_memory(5, 900, 4, VARIANTS),
    "λ over tokens": lam_over_tokens,
    "λ by head": lambda _: lam_by_head(2, 2, 8, 3),
    "λ by many heads and levels": lambda _: lam_by_head(3, 8, 15, 1),
    "dependence": dependence,
    "attention rows": attention_rows,
    "levels of the answers of one task": lambda _: answer_levels(1),
    "levels of the answers of many tasks": lambda _: answer_levels(24),
    "answers that λ finds": lambda _: looks(2),
    "answers that λ finds in many layers": lambda _: looks(7),
    "accuracy by length": lambda _: scores_by_length(ACCURACY),
    "accuracy of many seeds by length": lambda _: scores_by_length(ACCURACY, 64),
    "perplexity by length": lambda _: scores_by_length(PERPLEXITY),
    "complexity": complexity,
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_a_figure_fits_its_column(draw, tmp_path):
    assert misfits(draw(tmp_path)) == []


def test_figures_of_the_report_fit(report):
    assert len(report.figures) == 10
    for name, figure in report.figures.items():
        assert misfits(figure) == [], name


def test_the_title_says_what_solves_the_task(tmp_path):
    accuracies = {"linear": [0.99, 0.5, 0.1], "mlp_softplus": [0.1, 0.2, 0.3]}
    for solved, title in (
        ({"linear": [7, None, None]}, "Most seeds reach 99 % with λ: linear: 1 of 3"),
        ({variant: [7, 8, None] for variant in accuracies}, "2 seeds reach 99 % with every variant"),
    ):
        figure = draw_convergence(made_run(tmp_path, accuracies=accuracies, solved=solved))
        assert figure.get_suptitle().split("\n")[0].replace("\N{NO-BREAK SPACE}", " ") == title
    assert draw_convergence(made_run(tmp_path, accuracies=accuracies)) is None  # it would be empty


def test_saving_keeps_the_layout(tmp_path):
    figure = initial_memory(5, 900)
    paths = save(figure, tmp_path / "memory")
    assert [path.suffix for path in paths] == [".png", ".svg"] and all(path.stat().st_size for path in paths)
    first = paths[1].read_bytes()
    save(initial_memory(5, 900), tmp_path / "memory")
    assert paths[1].read_bytes() == first  # no date, no random names


def test_rates_are_ticked_where_they_were_tried(tmp_path):
    figure = draw_rates(swept_run(tmp_path, (0.0005, 0.003, 0.016), 16, (0, 0.1)))
    accuracy, converged = figure.axes
    for axis in (accuracy, converged):
        assert axis.get_xticks().tolist() == [0.0005, 0.003, 0.016]
        assert len(axis.lines) == 2 * 6
    assert converged.get_ylabel() == "seeds at ≥ 90 % (%)"
    legend = dict(
        zip((text.get_text() for text in figure.legends[0].get_texts()), figure.legends[0].get_lines(), strict=True)
    )
    styles = [legend[f"weight decay {decay}"].get_linestyle() for decay in ("0", "0.1")]
    assert styles == ["-", "--"] and len(legend) == 6 + 2
