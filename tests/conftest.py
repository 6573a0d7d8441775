"""Four virtual CPU devices for the sharding tests, and GPU tests skipped where there is no GPU."""

import errno
import gc
import logging
import os
import pathlib
import shutil
import tempfile

import hypothesis
import jax
import pytest

from tests.type_checks import enforce_annotations

enforce_annotations()  # before anything imports the package
if not os.path.exists("/dev/nvidia0"):  # small programs, compiled once and run briefly: compile them fast
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if jax.__version_info__ < (0, 11):  # later XLAs end the process at a flag that they no longer know
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_llvm_disable_expensive_passes=true"]
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
gc.freeze()  # what is there for good
# JAX makes many objects as it traces: to look for garbage among them as often as usual takes a tenth of the time.
gc.set_threshold(200_000, 50, 1000)
# Nor does a test ask where in the source an operation stands: here, nor in the processes that tests start.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
jax.config.update("jax_traceback_in_locations_limit", 0)
hypothesis.settings.register_profile("default", deadline=None)  # the first example compiles
hypothesis.settings.load_profile("default")
if jax.__version_info__ >= (0, 11, 2):  # threads of XLA's: the interpreter of kernels for Hopper blocks one a warpgroup
    os.environ.setdefault("NPROC", "8")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_default_matmul_precision", "highest")  # a GPU's own default is TF32

MOST_MAPS = 30_000
tests_done = []  # by this process

# The same small programs are compiled again and again, also in the workers of pytest-xdist and in the processes that
# tests start, which inherit the environment: keep them for the session.
OWN_CACHE = None if "JAX_COMPILATION_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="loglinear_jax-tests-")
if OWN_CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = OWN_CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_unconfigure():
    if OWN_CACHE:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items):
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def pytest_runtest_logfinish(nodeid):
    """Each compiled program takes regions of the process's memory, of which Linux lets it have 65,530 (vm.max_map_count);
    beyond them XLA ends the process. Under newer JAXs the whole suite in two processes gets there."""
    tests_done.append(nodeid)
    maps = pathlib.Path("/proc/self/maps")
    if len(tests_done) % 20 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def full_disk(monkeypatch):
    """No file that is replaced or appended to gets onto the disk."""

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("loglinear_jax.runs.writing.to_disk", full)


@pytest.fixture(autouse=True)
def own_log():
    """A command that a test calls logs to the standard error of that test, not to a closed one of a test before."""
    log = logging.getLogger("loglinear_jax")
    before = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])
