"""Runs Triton's kernels as they are built for another GPU, on this one, beside those that are built for this one.

    python -m pallas_kernels.run_table --gpu=8.0 --batch=16

The driver of a newer GPU compiles the PTX of an older one. So the instructions of an A100 run on a Hopper GPU: the results
show that they are right, and the times what they give. Needs a GPU, JAX from 0.11 on, and Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.benchmarks import measure
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.common.gpu import GPUS, Gpu, assumed_to_be
from pallas_kernels.compile_table import MODES, Case, Kernel, cases, ptx_of, text_of_module

NOT_HERE = ("cross_entropy",)  # whose kernel jax-triton builds


class Run(NamedTuple):
    """How far results and gradients lie apart, ‖difference‖ / ‖native‖ of the worst; and milliseconds, forward + backward."""

    apart: float
    native_ms: float
    built_ms: float


@contextlib.contextmanager
def built_for(gpu: Gpu) -> Iterator[None]:
    """Within it, Triton's kernels that are lowered become PTX for this GPU, with the tiles that it gets."""
    from jax._src.pallas.triton import pallas_call_registration as registration

    original = registration.mlir.custom_call

    def custom_call(call_target_name, *, operands, backend_config=None, **kwargs):
        if call_target_name == registration.CUSTOM_CALL_TARGET_NAME:
            call_target_name = "__gpu$xla.gpu.ptx"
            backend_config = _as_ptx(backend_config, len(operands), len(kwargs["result_types"]), gpu)
        return original(call_target_name, operands=operands, backend_config=backend_config, **kwargs)

    jax.clear_caches()  # what was lowered for another GPU
    try:
        with assumed_to_be(gpu), mock.patch.object(registration.mlir, "custom_call", custom_call):
            yield
    finally:
        jax.clear_caches()


def _as_ptx(config: dict, operands: int, results: int, gpu: Gpu) -> dict:
    """What XLA wants to know of a kernel that is PTX, from what it wants to know of one that is Triton's IR."""
    from jax.interpreters.mlir import i32_attr
    from jaxlib.mlir import ir

    name, warps, stages = config["name"].value, config["num_warps"].value, config["num_stages"].value
    ptx, metadata = ptx_of(Kernel(name, warps, stages, text_of_module(config["ir"].value_bytes)), gpu.capability)
    parameters = operands + results
    return dict(
        name=config["name"],
        kernel_type=ir.StringAttr.get("ptx"),
        kernel_data=ir.StringAttr.get(_with_parameters(ptx, parameters)),
        **{f"grid_{axis}": config[f"grid_{axis}"] for axis in "xyz"},
        block_x=i32_attr(32 * warps),
        block_y=i32_attr(1),
        block_z=i32_attr(1),
        shared_mem_bytes=i32_attr(metadata["shared"]),
        output_indices=ir.ArrayAttr.get([i32_attr(index) for index in range(operands, parameters)]),
    )


def _with_parameters(ptx: str, number: int) -> str:
    """PTX whose entry has so many parameters: Triton's own come last, and are not used."""

    def cut(match):
        return "(" + ",".join(match.group(1).split(",")[:number]) + "\n)"

    return re.sub(r"(?<=\w)\(\n(\s*\.param[^)]*)\)", cut, ptx, count=1)


def arguments_of(case: Case, mode: str, batch: int) -> tuple:
    """Random arguments of unit length along their last axis, of `batch` sequences where the case has one."""
    random = np.random.default_rng(0)

    def draw(x):
        shape = (batch, *x.shape[1:]) if x.ndim > 1 and x.shape[0] == 1 else x.shape
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full(x.shape, 5, x.dtype)
        return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-1]), x.dtype)

    return tuple(draw(x) for x in case.arguments(MODES[mode][0]))


def compared(case: Case, mode: str, gpu: Gpu, batch: int, timed: bool = True) -> Run:
    """A case on this GPU, by kernels that are built for it and for `gpu`."""
    arguments = arguments_of(case, mode, batch)
    cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype),
                             jax.eval_shape(case.function, *arguments))  # fmt: skip

    def run():
        call = measure.passes_of(case.function)["both" if case.gradient else "forward"]
        results = jax.tree.map(np.asarray, jax.jit(call)(*arguments, cotangent))
        return results, measure.median_ms(measure.compile_over(call, [(*arguments, cotangent)]), 1) if timed else 0.0

    no_hopper = mock.patch.object(BACKENDS["hopper"], "device", lambda: "Triton's kernels are wanted")
    with no_hopper, jax.default_matmul_precision(MODES[mode][1]):
        native, native_ms = run()
        with built_for(gpu):
            built, built_ms = run()
    pairs = [
        (x, y)
        for x, y in zip(jax.tree.leaves(native), jax.tree.leaves(built), strict=True)
        if x.dtype != jax.dtypes.float0
    ]
    return Run(max(_distance(*pair) for pair in pairs), native_ms, built_ms)


def _distance(native, built) -> float:
    native, built = (np.asarray(x, np.float64) for x in (native, built))
    return float(np.linalg.norm(built - native) / max(np.linalg.norm(native), 1e-30))


def main() -> None:
    warnings.simplefilter("ignore")
    names = [name for name in dict.fromkeys(case.operation for case in cases()) if name not in NOT_HERE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gpu", default="8.0", choices=list(GPUS), help="compute capability that kernels are built for"
    )
    parser.add_argument("--only", action="append", choices=names, help="operation; all of them by default")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="arithmetic; all by default")
    parser.add_argument("--shape", default="", help="part of the shape's name")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    arguments = parser.parse_args()
    heads = "operation", "shape", "mode", "apart", "native ms", f"built for {arguments.gpu} ms"
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for case in cases():
        if case.operation not in (arguments.only or names) or arguments.shape not in case.shape:
            continue
        for mode in (mode for mode in case.modes if mode in (arguments.mode or MODES)):
            run = compared(case, mode, GPUS[arguments.gpu], arguments.batch)
            cells = f"{run.apart:.1e}", f"{run.native_ms:.3f}", f"{run.built_ms:.3f}"
            print(f"| {case.operation} | {case.shape} | {mode} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
