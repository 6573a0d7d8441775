"""What Triton makes of the kernels for GPUs that are not here."""

import dataclasses
import functools
import sys

import jax
import pytest

from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.common.gpu import GPUS, as_if_on

needs_triton = pytest.mark.skipif(
    jax.__version_info__ < (0, 12) or sys.version_info < (3, 12), reason="needs JAX 0.12, which needs Python 3.12"
)


def rows(operation, mode, gpus, part_of_shape="", **more):
    """Of kernels as tests change them by arguments."""
    pytest.importorskip("jax_triton")
    from pallas_kernels import compile_table

    cases = [case for case in compile_table.cases() if case.operation == operation and part_of_shape in case.shape]
    cases = [dataclasses.replace(case, function=functools.partial(case.function, **more)) for case in cases]
    return list(compile_table.table(cases, [GPUS[gpu] for gpu in gpus], [mode]))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("operation", "mode", "gpus", "shape"),
    [
        ("log_linear_attention", "bf16", ("8.0", "10.0", "12.0"), "K=128 V=64"),
        ("log_linear_attention", "f32", ("8.0",), "K=128 V=64"),
        ("log_linear_attention", "bf16", ("8.0", "8.6"), "K=256"),
        ("log_linear_attention", "f32", ("8.6",), "K=256"),
        ("delta", "tf32", ("8.0",), "all levels K=V=64"),
        ("bucket_scores", "f32", ("8.0",), "K=128"),
        ("lam_mlp", "tf32", ("8.0",), "L=14"),
        ("cross_entropy", "bf16", ("8.0", "12.0"), ""),
    ],
)
def test_kernels_fit_and_keep_their_numbers_in_registers(operation, mode, gpus, shape):
    from pallas_kernels.compile_table import MOST_SPILLED

    for row in rows(operation, mode, gpus, shape):
        assert row.fits, (row.kernel.name, row.gpu, row.needs)
        assert row.needs.spilled <= MOST_SPILLED, (row.kernel.name, row.gpu, row.needs)


@pytest.mark.slow
@needs_triton
def test_chunks_that_are_asked_for_and_too_large_for_a_gpu_are_cut():
    for row in rows("log_linear_attention", "bf16", ("8.6",), "K=256", chunk_size=128):
        assert row.fits, (row.kernel.name, row.needs)


@pytest.mark.parametrize(
    ("gpu", "key_dim", "dtype", "chunk", "expected"),
    [
        ("8.6", 256, "bfloat16", 128, 64),
        ("8.6", 128, "bfloat16", 128, 128),
        ("8.6", 256, "float32", 64, 32),
        ("8.0", 256, "bfloat16", 128, 128),
        ("9.0", 256, "float32", 64, 64),
    ],
)
def test_chunks_fit_shared_memory(gpu, key_dim, dtype, chunk, expected):
    with as_if_on(GPUS[gpu]):
        assert Tiles().with_chunk(chunk).in_shared_memory(key_dim, dtype).chunk == expected
