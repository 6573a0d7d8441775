"""Utilisation, from the parameters of a model and the rate of its training."""

import jax
import jax.numpy as jnp
import pytest

from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.runs import utilisation
from loglinear_jax.runs.utilisation import matmul_flops_per_token, peak_flops


def test_flops_are_six_for_each_weight_of_a_product():
    settings = LanguageSettings(32, 16, hidden=16, layers=1, heads=1, head_dim=16, key_dim=16, lam_hidden=4)
    params = jax.eval_shape(LanguageModel(settings).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32))
    mixer = 16 * (16 + 16 + 16 + 16 + 1 + 5) + 16 * 16  # to q, k, v, gate, step size and λ's 5 levels; and back
    lam, mlp, head = 5 * 4 + 4 * 5, 3 * 16 * 256, 16 * 32  # the embedding is looked up, the convolution is no product
    assert matmul_flops_per_token(params) == 6 * (mixer + lam + mlp + head)


def test_the_peak_is_that_of_the_device_or_unknown():
    for kind, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("cpu", None)):
        assert peak_flops(kind) == peak


def test_utilisation_is_a_share_of_all_devices(monkeypatch):
    params = {"head": jax.ShapeDtypeStruct((8, 50), jnp.float32)}
    for peak, expected in ((None, None), (1e12, pytest.approx(1e8 * 6 * 400 / 4e12))):
        monkeypatch.setattr(utilisation, "peak_flops", lambda kind, peak=peak: peak)
        assert utilisation.utilisation(params, 1e8, 4) == expected
