"""How the kernels run in tests."""

import jax
import pytest

import pallas_kernels
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.common import support

HAS_GPU = jax.default_backend() == "gpu"


@pytest.fixture
def run_kernels():
    """Natively on a GPU, elsewhere in the interpreter."""
    with pallas_kernels.interpret(not HAS_GPU):
        yield


@pytest.fixture
def no_hopper(monkeypatch):
    """The kernels for any GPU since Ampere, on a Hopper GPU too."""
    monkeypatch.setattr(BACKENDS["hopper"], "device", lambda: "these are not wanted here")


@pytest.fixture
def compiling_for_a_gpu(monkeypatch):
    """As on a GPU, but for running what was compiled."""
    monkeypatch.setattr(support, "why_no_device", lambda: None)
    with pallas_kernels.interpret(False):
        if HAS_GPU or jax.__version_info__ < (0, 11):
            yield
        else:
            device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
                yield
