"""A run on a mixture of sequences: cut short, it goes on as if it had not been; a seed alone is the seed among others."""

import numpy as np
import pytest

from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import load_run, read_run, training
from loglinear_jax.train import ManySeeds
from tests.runs.tiny import TINY

MIXTURE = (
    "--config=configs/zoology_mqar.py:state=8,width=16",
    *(
        argument
        for argument in TINY[1:]
        if not argument.startswith(("--config.task", "--config.variants", "--config.model"))
    ),
    "--config.task.mixture=8/1*2,12/2",
    "--config.task.tests=8/1,16/3",
    "--config.task.vocab_size=16",
    "--config.variants=fixed",
    "--config.model.layers=1",
    "--config.model.implementation=parallel",
    "--config.train.num_steps=30",
)


def train(workdir, *more):
    training.run(read_config_arguments([*MIXTURE, *more]).config, workdir)
    return read_run(workdir).outcomes["fixed"]


def test_a_seed_of_a_mixture_that_was_cut_short_is_the_seed_alone(tmp_path, monkeypatch):
    evaluate, calls = ManySeeds.evaluate_and_record, []

    def dies(self, *args):
        calls.append(args)
        if len(calls) == 4:  # after the checkpoint of step 10
            raise RuntimeError("killed")
        return evaluate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ManySeeds, "evaluate_and_record", dies)
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path / "run")
    outcome = train(tmp_path / "run")
    assert set(outcome.test_accuracy_of_parts) == {"8/1", "16/3"}

    alone = train(tmp_path / "alone", "--config.train.num_seeds=1", "--config.train.first_seed=1")
    np.testing.assert_allclose(alone.best_loss, outcome.best_loss[1:], rtol=1e-5)
    np.testing.assert_allclose(alone.test_loss, outcome.test_loss[1:], rtol=1e-5)
    one, both = (load_run(tmp_path / name, "fixed").metrics for name in ("alone", "run"))
    np.testing.assert_array_equal(one["step"], both["step"])
    np.testing.assert_allclose(one["train_loss"][:, 0], both["train_loss"][:, 1], rtol=1e-5)
