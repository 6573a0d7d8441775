"""Figures fit their column: nothing is clipped, and no tick labels overlap."""

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from loglinear_jax.analysis.curves import draw_learning_curves
from loglinear_jax.analysis.lengths import ByLength, draw_scores_by_length
from loglinear_jax.analysis.rates import draw_rates
from loglinear_jax.analysis.style import FULL_WIDTH, save
from loglinear_jax.runs.loading import Run
from loglinear_jax.tasks import PERPLEXITY
from tests.analysis.made_runs import made_run

LONG = "lam=mlp_softplus+lam_hidden=32+train.learning_rate=0.003+norm=pre"
LONG_LAM = "lam=mlp_softplus+lam_hidden=32+head_dim=16"
VARIANTS = ("fixed", "linear", "mlp_softmax", "mlp_softplus", "mixer=linear", "mixer=softmax", LONG)
SIX_RATES = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)


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


def swept(tmp_path, rates=SIX_RATES, seeds=16, decays=(None,), variants=(*VARIANTS[:5], LONG_LAM), task="mqar"):
    """A run at these rates, the middle one of which is best."""
    rng, accuracies = np.random.default_rng(0), {}
    for shift, variant in enumerate(variants):
        for decay, (index, rate) in itertools.product(decays, enumerate(rates)):
            name = f"{variant}+train.learning_rate={rate}"
            name += f"+train.weight_decay={decay}" if decay is not None else ""
            chance = 0.98 - 0.25 * abs(index - len(rates) / 2) - 0.05 * shift - (decay or 0)
            accuracies[name] = np.where(rng.random(seeds) < chance, 0.97, 0.1 + 0.3 * rng.random(seeds)).tolist()
    return made_run(tmp_path, accuracies=accuracies, num_seeds=seeds, task=task)


def scores_by_length(score=PERPLEXITY, seeds=3):
    lengths = [2**i for i in range(5, 15)]
    values = np.repeat(score.of(np.linspace(1, 9, 10)[None], np.linspace(1, 0, 10)[None]), seeds, 0)
    changes = ("", "higher levels as 5")
    found = [ByLength(variant, lengths, range(seeds), values, changed) for changed in changes for variant in VARIANTS]
    return draw_scores_by_length(found, 32, score, "MQAR, length 32, vocabulary 16, pairs 7")


MANY_RATES = [float(f"{rate:.3g}") for rate in np.geomspace(1e-4, 0.05, 16)]
DRAWN = {
    "curves at several rates": lambda path: draw_learning_curves(Measured(**vars(swept(path, decays=(0, 0.1))))),
    "many rates and decays": lambda path: draw_rates(swept(path, MANY_RATES, 16, (0, 0.01, 0.1), VARIANTS[:3])),
    "perplexity by length": lambda _: scores_by_length(),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
@pytest.mark.slow
def test_a_figure_fits_its_column(draw, tmp_path):
    assert misfits(draw(tmp_path)) == []


@pytest.mark.slow
def test_figures_of_the_report_fit(report):
    assert len(report.figures) == 7 and not any(map(misfits, report.figures.values()))


def test_rates_are_ticked_where_they_were_tried_and_saved_the_same_again(tmp_path):
    figure = draw_rates(swept(tmp_path, (0.0005, 0.003, 0.016), 16, (0, 0.1)))
    for axis in figure.axes:
        assert axis.get_xticks().tolist() == [0.0005, 0.003, 0.016] and len(axis.lines) == 2 * 6
    (legend,) = figure.legends
    lines = dict(zip((text.get_text() for text in legend.get_texts()), legend.get_lines(), strict=True))
    assert [lines[f"weight decay {decay}"].get_linestyle() for decay in ("0", "0.1")] == ["-", "--"] and len(lines) == 8
    png, svg = save(figure, tmp_path / "rates")
    first = svg.read_bytes()
    save(figure, tmp_path / "rates")
    assert png.stat().st_size and svg.read_bytes() == first  # no date, no random names
