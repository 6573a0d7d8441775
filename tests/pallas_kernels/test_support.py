"""What the kernels refuse, and how they say so."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import UnsupportedError, fenwick_attention
from pallas_kernels.common import support
from tests.ops.inputs import random_inputs

needs_no_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")


def attend(*shape, dtype=jnp.float32, **kwargs):
    q, k, v, log_decay, lam = random_inputs(0, *shape, dtype=np.float32)
    return fenwick_attention(*(x.astype(dtype) for x in (q, k, v)), log_decay, lam, **kwargs)


@needs_no_gpu
def test_no_gpu_and_no_interpreter():
    with pytest.raises(UnsupportedError, match=r"JAX runs on cpu.*need an NVIDIA GPU.*LOGLINEAR_PALLAS_INTERPRET=1"):
        attend(1, 20, 1, 1, 16, 16)


@pytest.mark.parametrize(
    ("capability", "message"),
    [("7.5", "compute capability 7.5: .* need 8.0 or newer"), (None, "no NVIDIA GPU"), ("8.0", None), ("9.0", None)],
)
def test_old_gpus_are_refused(monkeypatch, capability, message):
    device = types.SimpleNamespace(device_kind="a GPU", compute_capability=capability)
    monkeypatch.setattr(support.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(support.jax, "local_devices", lambda backend: [device])
    reason = support.why_no_device()
    assert reason is None if message is None else re.search(message, reason)


def test_a_jax_without_the_lowering_is_named(monkeypatch):
    monkeypatch.setattr(support, "triton", None)
    with pallas_kernels.interpret(), pytest.raises(UnsupportedError, match="has no Triton lowering of Pallas"):
        attend(1, 20, 1, 1, 16, 16)


def test_the_interpreter_is_asked_for_by_variable_or_context(monkeypatch):
    assert not pallas_kernels.interpreting()
    monkeypatch.setenv("LOGLINEAR_PALLAS_INTERPRET", "1")
    assert pallas_kernels.interpreting()
    with pallas_kernels.interpret(False):
        assert not pallas_kernels.interpreting()
    assert attend(1, 20, 1, 1, 16, 16).shape == (1, 20, 1, 16)
    monkeypatch.setenv("LOGLINEAR_PALLAS_INTERPRET", "yes")
    with pytest.raises(ValueError, match="LOGLINEAR_PALLAS_INTERPRET must be 0 or 1, got 'yes'"):
        pallas_kernels.interpreting()


@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        (None, "f32"),  # the tests' default
        ("highest", "f32"),
        ("float32", "f32"),
        (jax.lax.Precision.HIGHEST, "f32"),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3, "f32"),
        ("tensorfloat32", "tf32"),
        (jax.lax.Precision.DEFAULT, "tf32"),
        ((jax.lax.Precision.HIGH, jax.lax.Precision.HIGH), "tf32"),
        ((jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST), None),
        ("bfloat16_3x", None),
    ],
)
def test_precisions(precision, mode):
    assert support.dot_mode(jnp.float32, precision) == mode
    assert support.dot_mode(jnp.bfloat16, precision) == "bf16"
