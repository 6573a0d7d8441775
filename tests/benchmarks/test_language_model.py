"""That what times the language model runs it; how long it takes is for the benchmark."""

import numpy as np
import pytest

from loglinear_jax.benchmarks.language_model import time_decoding, time_training
from loglinear_jax.models import LanguageSettings

SETTINGS = LanguageSettings(
    32, 16, hidden=16, layers=1, heads=1, head_dim=16, key_dim=16, dtype="float32", lam_hidden=4
)  # fmt: skip


@pytest.mark.slow
def test_training_counts_the_tokens_of_all_seeds():
    measured = time_training(SETTINGS, batch=2, length=16, num_seeds=2, steps=1, repeats=1)
    rate = measured["tokens_per_second"]
    assert rate * measured["ms"] == pytest.approx(1e3 * 2 * 2 * 16)
    assert measured["devices"] >= 1 and np.isfinite(measured["flops"])


def test_decoding_runs_and_counts_its_bytes():
    short, long = (time_decoding(SETTINGS, length, decoded=2)["bytes"] for length in (8, 16))
    assert long - short >= 4 * 16 * 16  # one more level of a K x V state in float32
