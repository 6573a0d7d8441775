"""That what times the models runs them; how long it takes is for the benchmarks."""

import jax
import pytest

from loglinear_jax.benchmarks.model_speed import matmul_flops_per_token, time_decoding, time_training
from loglinear_jax.models import LanguageModel, LanguageSettings

SETTINGS = LanguageSettings(
    32, 16, hidden=16, layers=1, heads=1, head_dim=16, key_dim=16, dtype="float32", lam_hidden=4
)  # fmt: skip


def test_training_runs_and_counts_its_flops():
    measured = time_training(SETTINGS, batch=2, length=16, num_seeds=2, steps=1, repeats=1)
    model = LanguageModel(SETTINGS)
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), int))
    rate = measured["tokens_per_second"]
    assert rate * measured["ms"] == pytest.approx(1e3 * 2 * 2 * 16)
    assert measured["flops"] == pytest.approx(rate * matmul_flops_per_token(params))


def test_decoding_runs_and_counts_its_bytes():
    short, long = (time_decoding(SETTINGS, length, decoded=2)["bytes"] for length in (8, 16))
    assert long - short >= 4 * 16 * 16  # one more level of a K x V state in float32
