"""Every module can be imported, also those that no other test runs without a GPU."""

import importlib
import pkgutil

import pytest

import loglinear_jax
import pallas_kernels

PACKAGES = (loglinear_jax, pallas_kernels)
MODULES = [m.name for package in PACKAGES for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == "triton"  # comes with JAX for a GPU
        pytest.skip("triton is not installed")
