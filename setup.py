"""Packages, for setuptools: the folder configs/ is installed as loglinear_jax/configs, so that configs are found by name.

Everything else is in pyproject.toml, which cannot add a folder to the packages that it finds.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["loglinear_jax*", "pallas_kernels*"]), "loglinear_jax.configs"],
    package_dir={"loglinear_jax.configs": "configs"},
)
