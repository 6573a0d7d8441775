"""Runs to analyse: one trained for a few steps by the project itself, and models as they start."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from loglinear_jax.analysis import TrainedVariant, section
from loglinear_jax.analysis.report import make_report
from loglinear_jax.analysis.section import Choices
from loglinear_jax.analysis.style import save
from loglinear_jax.config import build, default_config
from loglinear_jax.runs import run


def tiny_config(**task):
    config = default_config(task="mqar")
    config.task.update({"seq_len": 16, "vocab_size": 16, "num_pairs": 2} | task)
    config.model.update(hidden=16, head_dim=8, key_dim=8, layers=2, max_length=32, implementation="parallel")
    config.train.update(
        num_seeds=2, num_steps=6, batch_size=8, num_train=50, num_validation=50, num_test=50, eval_every=2, checkpoint_every=2,
        steps_per_dispatch=2,
    )  # fmt: skip
    return config


@pytest.fixture
def make_trained():
    """A TrainedVariant of a model with drawn parameters, for which nothing is compiled, without a workdir."""

    def make(variant="mlp_softplus", **model):
        config = tiny_config()
        config.model.update(model)
        built = build(config, variant)
        tokens = np.zeros((1, config.task.seq_len), np.int32)
        shapes = {"params": jax.eval_shape(built.model.init, jax.random.key(0), tokens)["params"]}
        rng, seeds = np.random.default_rng(0), len(built.train.seeds)

        def drawn(path, x):
            """Norms scale by about 1, and memories are long."""
            middle = {"scale": 1.0, "dt_bias": -4.0}.get(path[-1].key, 0.0)
            return np.float32(middle + 0.3 * rng.normal(size=(seeds, *x.shape)))

        params = jax.tree_util.tree_map_with_path(drawn, shapes)
        score = np.zeros(seeds)
        return TrainedVariant(
            workdir=None, variant=variant, config=built.config, model=built.model, task=built.task, step=0,
            seeds=built.train.seeds, metrics={}, best=params, last=params, best_accuracy=score, best_loss=score,
            diverged_step=score - 1,
        )  # fmt: skip

    return make


@pytest.fixture
def blank_figures(monkeypatch):
    """Figures of reports are saved empty: where none is looked at, rendering takes most of the time."""
    monkeypatch.setattr(section, "save", lambda figure, stem: save(Figure(figsize=(0.1, 0.1)), stem))


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
    """Of a finished run with two variants."""
    config = tiny_config()
    config.variants = "mlp_softplus,mixer=softmax"
    path = tmp_path_factory.mktemp("analysis") / "tiny"
    run(config, path, ["python", "run.py"])
    return path


@pytest.fixture(scope="session")
def report(workdir, tmp_path_factory):
    """The default report of that run: the folder, report.html, problems, and figures by name."""
    out, drawn = tmp_path_factory.mktemp("report"), {}

    def save_and_keep(figure, stem):
        drawn[stem.name] = figure
        return save(figure, stem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(section, "save", save_and_keep)
        path, problems = make_report([workdir], out, Choices(sequences=4, evaluated=8))
    return SimpleNamespace(out=out, html=path.read_text(encoding="utf-8"), problems=problems, figures=drawn)
