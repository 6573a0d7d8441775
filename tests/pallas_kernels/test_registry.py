"""What each kernel says that it cannot run, and which are chosen."""

import re
import types

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import KERNELS, registry
from pallas_kernels.attention.backends import choose_backend
from pallas_kernels.common import support
from pallas_kernels.common.gpu import GPUS, as_if_on

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
RUNS = {
    "log_linear_attention": (16, 16, F32),
    "gated_linear_attention": (16, 16, F32),
    "bucket_scores": (16, F32),
    "delta": (16, 16, 16, F32),
    "fenwick_step": (32, 64, 64, F32),
    "causal_conv": (4, BF16),
    "swiglu": (8, BF16),
    "lam_mlp": (8, 64, "softplus", "gelu"),
    "content_lam": (31, F32),
}
REFUSED = [
    ("log_linear_attention", (8, 16, F32), "K, the key dim, is 8: the Pallas kernels take 16 to 256"),
    ("log_linear_attention", (16, 16, F16), "dtype float16: the Pallas kernels take float32 and bfloat16"),
    ("log_linear_attention", (16, 16, F32, 128), "chunk_size is 128: .* powers of two from 16 to 64 for float32"),
    ("log_linear_attention", (16, 16, F32, None, "bfloat16"), "precision is 'bfloat16': .* full precision or TF32"),
    ("delta", (16, 160, 16, F32), "K, the key dim, is 160: the kernels of the delta rule take up to 64 for float32"),
    ("delta", (8, 16, 16, F32), "chunk_size is 8: the kernels of the delta rule take powers of two from 16"),
    ("fenwick_step", (2, 16, 24, F32), "V, the value dim, is 24: .* powers of two from 16 to 256"),
    ("causal_conv", (9, F32), "W, the width of the convolution, is 9: .* takes 1 to 8"),
    ("swiglu", (0, F32), "gate has 0 numbers: the kernel of SwiGLU takes 1 to 2147481599"),
    ("lam_mlp", (32, 8, "softplus", "gelu"), "L, the number of levels, is 32: .* takes 1 to 31"),
    ("lam_mlp", (8, 8, "softplus", "relu"), "activation is 'relu': .* takes gelu and identity"),
    ("content_lam", (32, F32), "L, the number of levels, is 32: .* takes 1 to 31"),
    ("cross_entropy", (), "Pallas's interpreter was asked for"),
]


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_runs_somewhere(name):
    with pallas_kernels.interpret():
        assert name == "cross_entropy" or KERNELS[name].why_not(*RUNS[name]) is None


@pytest.mark.parametrize(("name", "problem", "message"), REFUSED)
def test_what_a_kernel_cannot_run_is_named(name, problem, message):
    with pallas_kernels.interpret(), pytest.raises(pallas_kernels.UnsupportedError, match=message):
        KERNELS[name].require(*problem)


def test_what_would_crawl_on_an_a100_is_left_to_plain_jax(monkeypatch, caplog):
    registry.tell_once.cache_clear()
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    for gpu, expected in (("8.0", False), ("9.0", True)):
        with as_if_on(GPUS[gpu]):
            assert KERNELS["lam_mlp"].is_best(31, 128, "softplus", "gelu", "highest") is expected
            assert KERNELS["bucket_scores"].is_best(256, F32, None, "highest") is expected
            assert KERNELS["lam_mlp"].is_best(14, 64, "softplus", "gelu", "highest")
            assert KERNELS["bucket_scores"].is_best(128, F32, None, "highest")
    assert len(caplog.messages) == 2 and all("on an A100" in message for message in caplog.messages)


def test_what_is_chosen(monkeypatch, caplog):
    conv = KERNELS["causal_conv"]
    with pallas_kernels.interpret():  # in which a kernel has to be asked for
        assert [conv.is_chosen(how, 4, F32) for how in ("pallas", "xla", None)] == [True, False, False]
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    monkeypatch.setattr(support, "why_no_device", lambda: None)
    registry.tell_once.cache_clear()
    assert conv.is_best(4, F32)
    assert not conv.is_best(9, F32) and not conv.is_best(9, F32)
    assert not KERNELS["delta"].is_best(16, 16, 16, F32, "highest")  # where it does not pay
    assert not KERNELS["fenwick_step"].is_best(33, 16, 16, F32)  # which costs too little to be told
    assert [message.partition(", which is slower: ")[::2] for message in caplog.messages] == [
        (
            "the short convolution falls back to implementation='xla'",
            "W, the width of the convolution, is 9: its kernel takes 1 to 8",
        ),
        (
            "the delta rule falls back to implementation='xla'",
            "in full float32 the kernels take longer; they pay in bfloat16 and TF32 (precision='tensorfloat32')",
        ),
    ]


@pytest.mark.parametrize(
    ("gpu", "dims", "dtype", "told"),
    [
        ("8.0", (96, 96), BF16, "K, V = 96, 96 takes as long as with K, V = 128, 128"),
        ("8.0", (96, 72), F32, None),  # V in blocks of 16
        ("8.0", (96, 128), BF16, None),
        ("9.0", (128, 64), F32, "twice as slow as those for Hopper or more: .* float32"),
        ("9.0", (16, 16), F32, None),
    ],
)
def test_a_gpu_is_told_what_is_slow(gpu, dims, dtype, told, caplog):
    """Once."""
    registry.tell_once.cache_clear()
    with as_if_on(GPUS[gpu]):
        assert [choose_backend(None, *dims, dtype) for _ in range(2)] == ["triton"] * 2
    assert len(caplog.messages) == (told is not None)
    assert told is None or re.search(told, caplog.text)


# --- GPUs, JAX and precisions ---------------------------------------------------------------------------------------


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


def test_the_interpreter_is_asked_for_by_variable_or_context(monkeypatch):
    assert not pallas_kernels.interpreting()
    monkeypatch.setenv("LOGLINEAR_PALLAS_INTERPRET", "1")
    assert pallas_kernels.interpreting()
    with pallas_kernels.interpret(False):
        assert not pallas_kernels.interpreting()
    monkeypatch.setenv("LOGLINEAR_PALLAS_INTERPRET", "yes")
    with pytest.raises(ValueError, match="LOGLINEAR_PALLAS_INTERPRET must be 0 or 1, got 'yes'"):
        pallas_kernels.interpreting()


@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        (None, "f32"),  # the tests' default
        ("float32", "f32"),
        (jax.lax.Precision.HIGHEST, "f32"),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3, "f32"),
        ("tensorfloat32", "tf32"),
        ((jax.lax.Precision.HIGH, jax.lax.Precision.HIGH), "tf32"),
        ((jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST), None),
        ("bfloat16_3x", None),
    ],
)
def test_precisions(precision, mode):
    assert support.dot_mode(jnp.float32, precision) == mode
    assert support.dot_mode(jnp.bfloat16, precision) == "bf16"
