"""A run on a mixture of sequences: cut short, it goes on to the same bits; a seed alone is the seed among others."""

import numpy as np
import pytest

from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.runs import load_run, read_run, training
from loglinear_jax.train import ManySeeds
from tests.runs.tiny import TINY, assert_same_run

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


@pytest.mark.slow
def test_a_mixture_goes_on_to_the_same_bits_and_keeps_its_seeds_apart(tmp_path, monkeypatch):
    outcome = train(tmp_path / "whole")
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
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole", ["fixed"])
    assert set(outcome.test_accuracy_of_parts) == {"8/1", "16/3"}

    alone = train(tmp_path / "alone", "--config.train.num_seeds=1", "--config.train.first_seed=1")
    np.testing.assert_allclose(alone.best_loss, outcome.best_loss[1:], rtol=1e-5)
    np.testing.assert_allclose(alone.test_loss, outcome.test_loss[1:], rtol=1e-5)
    metrics = [load_run(tmp_path / name, "fixed").metrics["train_loss"] for name in ("alone", "whole")]
    np.testing.assert_allclose(metrics[0][:, 0], metrics[1][:, 1], rtol=1e-5)
