"""Where a result comes from: the code, the command, the config and the machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("loglinear_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def provenance(config: dict[str, Any]) -> dict[str, str]:
    """{"commit": of the code that runs, "config_sha256": of the config as it is written to config.json}."""
    return {"commit": commit(), "config_sha256": config_sha256(config)}


def commit() -> str:
    """`git describe --always --dirty` of the checkout that this code is in; without one, the installed version."""
    checkout = Path(__file__).parents[1]
    if (checkout / ".git").exists():
        try:
            described = subprocess.run(
                ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"],
                capture_output=True,
                encoding="utf-8",
                timeout=30,
                check=True,
            )
            return described.stdout.strip()
        except (OSError, subprocess.SubprocessError):  # no git here, or another user's checkout
            return "not known: git does not describe this checkout"
    return f"version {package_version('loglinear_jax')}"


def config_sha256(config: dict[str, Any]) -> str:
    """The SHA-256 of a config's canonical JSON: sorted keys, no spaces. config: the content of config.json."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def device() -> str:
    """ "1 × NVIDIA H200"."""
    devices = jax.devices()
    return f"{len(devices)} × {devices[0].device_kind}"


def machine() -> str:
    """ "1 × NVIDIA H200, JAX 0.11.2"."""
    return f"{device()}, JAX {jax.__version__}"


def origin(command: Sequence[str]) -> dict[str, Any]:
    """Machine, code and command, for a record of what was measured."""
    return {"machine": machine(), "commit": commit(), "versions": versions(), "command": shlex.join(command)}


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what is computed."""
    return {"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES}


def package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout in PYTHONPATH
        return "not installed"
