"""What the GPU extra installs runs a language model's training step, as far as that can be seen without a GPU."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# CUDA's libraries, gigabytes which compiling needs, but not lowering; and the project, which comes from its folder.
LEFT_OUT = "nvidia-", "loglinear_jax"
LOWER = """
import jax
import jax.numpy as jnp
from loglinear_jax.models.language import LanguageModel, LanguageSettings
from pallas_kernels.common.gpu import GPUS, as_if_on

tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
model = LanguageModel(LanguageSettings(vocab_size=5000, max_length=256, hidden=128, layers=2, head_dim=64, key_dim=64))
params = jax.eval_shape(model.init, jax.random.key(0), tokens)
step = jax.jit(jax.value_and_grad(lambda params, tokens: model.apply(params, tokens, tokens, method="summed_loss")))
for name in ("8.0", "9.0"):
    with as_if_on(GPUS[name]):
        print(step.trace(params, tokens).lower(lowering_platforms=("cuda",)).as_text())
"""


def python(version):
    """An interpreter of this version."""
    found = sys.executable if sys.version_info[:2] == version else shutil.which("python{}.{}".format(*version))
    if not found or subprocess.run([found, "--version"], capture_output=True).returncode:
        pytest.skip("there is no Python {}.{}".format(*version))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", [(3, 11), (3, 12)], ids=str)
def test_a_training_step_is_lowered(version):
    """Python 3.11 gets jax-triton 0.3, Python 3.12 has 0.4, whose interfaces differ."""
    with tempfile.TemporaryDirectory() as folder:  # of 2 GB, which a test's own would keep
        text = lowered_in_a_fresh_environment(python(version), pathlib.Path(folder))
    for kernel in ("triton_kernel_call", "chunk_gradients", "causal_conv", "swiglu", "lam_mlp"):
        assert kernel in text, kernel


def lowered_in_a_fresh_environment(python, folder):
    def run(*command):
        environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        environment["JAX_PLATFORMS"] = "cpu"
        done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    run(python, "-m", "venv", "venv")
    fresh, report = folder / "venv/bin/python", folder / "report.json"
    install = fresh, "-m", "pip", "install", "-q"
    run(*install, "--dry-run", "--report", report, f"{ROOT}[cuda13]")
    packages = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    pinned = [f"{x['name']}=={x['version']}" for x in packages if not x["name"].startswith(LEFT_OUT)]
    run(*install, "--no-deps", *pinned, ROOT)
    return run(fresh, "-c", LOWER)
