"""Growth with the length, against theory."""

import numpy as np
import pytest

from loglinear_jax.analysis import complexity


def test_memory_grows_as_theory_says(monkeypatch):
    monkeypatch.setattr(complexity, "time_training", lambda settings, batch, length, **_: {"ms": float(length)})
    lengths = [256, 512, 1024]
    measured = {
        variant: complexity.measure(lengths, variant)
        for variant in ("mixer=softmax", "mixer=gated_linear", "mlp_softplus")
    }
    table = complexity.complexity_table(measured, "nowhere")
    exponents = {row["variant"]: row["bytes_exponent"] for row in table.raw}
    assert exponents["mixer=softmax"] == pytest.approx(1, abs=0.01) and abs(exponents["mixer=gated_linear"]) < 1e-9
    steps = np.diff(measured["mlp_softplus"]["bytes"])
    assert (steps == steps[0]).all() and steps[0] > 0  # one more level each time T doubles
    assert "T log T (1.1" in table.text("github")
