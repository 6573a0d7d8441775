"""What every Triton kernel needs of a GPU: shared memory, registers, and bytes of registers spilled to memory.

    python -m pallas_kernels.compile_table --gpu=8.0 --only=log_linear_attention

No GPU is needed, but JAX from 0.12 on with its CUDA plugin (Python 3.12), and jax-triton, which brings Triton. The kernels are
lowered to Triton's IR as for the GPU, which Triton and its ptxas compile. JAX on a GPU brings other versions of both, so that
its numbers may differ a little.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_kernels
from loglinear_jax import (
    bucket_scores,
    gated_delta_attention,
    gated_linear_attention,
    log_linear_attention,
    log_linear_delta_attention,
    num_levels,
    occupied_levels,
)
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.common.gpu import GPUS, Gpu, as_if_on

MODES = {"bf16": (jnp.bfloat16, "default"), "tf32": (jnp.float32, "default"), "f32": (jnp.float32, "highest")}
MOST_SPILLED = 512  # bytes a thread: more is printed with a mark


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays whose kernels are compiled, forward and, where `gradient` says so, backward."""

    operation: str  # of KERNELS
    shape: str
    function: Callable
    arguments: Callable  # of a dtype
    modes: tuple[str, ...] = tuple(MODES)
    gradient: bool = True


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as Triton gets it."""

    name: str
    warps: int
    stages: int
    ir: str


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a compiled kernel needs: bytes of shared memory a program; registers, and bytes of them spilled, a thread."""

    shared: int
    registers: int
    spilled: int


@dataclasses.dataclass(frozen=True)
class Row:
    case: Case
    mode: str
    gpu: Gpu
    kernel: Kernel
    needs: Needs

    @property
    def fits(self) -> bool:
        return self.needs.shared <= self.gpu.shared_memory


def array(*shape: int, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def by_kernels(operation: Callable) -> Callable:
    return functools.partial(operation, implementation="pallas")


def _attention_cases() -> Iterator[Case]:
    length = 1024
    shapes = (
        (128, 64, 1, 8), (16, 16, 1, 8), (32, 32, 4, 4), (64, 64, 4, 4), (64, 128, 1, 8), (128, 128, 4, 4), (256, 256, 1, 4),
    )  # fmt: skip
    for operation, of_operation in ((log_linear_attention, shapes), (gated_linear_attention, shapes[:1])):
        for key_dim, value_dim, groups, heads in of_operation:

            def arguments(dtype, key_dim=key_dim, value_dim=value_dim, groups=groups, heads=heads, operation=operation):
                keys = array(1, length, groups, key_dim, dtype=dtype)
                of_heads = array(1, length, heads, value_dim, dtype=dtype), array(1, length, heads)
                lam = [array(1, length, heads, num_levels(length))] if operation is log_linear_attention else []
                return keys, keys, *of_heads, *lam

            shape = f"K={key_dim} V={value_dim} H={heads} G={groups}"
            yield Case(operation.__name__, shape, by_kernels(operation), arguments)


def _score_cases() -> Iterator[Case]:
    length = 1024
    for key_dim, groups, heads in ((128, 1, 48), (64, 1, 8), (32, 2, 2), (256, 2, 4)):

        def arguments(dtype, key_dim=key_dim, groups=groups, heads=heads):
            keys = array(1, length, groups, key_dim, dtype=dtype)
            return keys, keys, array(1, length, heads)

        yield Case("bucket_scores", f"K={key_dim} H={heads} G={groups}", by_kernels(bucket_scores), arguments)


def _delta_cases() -> Iterator[Case]:
    length, heads = 512, 2
    for operation, states in ((log_linear_delta_attention, "all levels"), (gated_delta_attention, "one state")):
        for dim in (16, 32, 64, 128):

            def arguments(dtype, dim=dim, has_lam=operation is log_linear_delta_attention):
                keys = array(1, length, heads, dim, dtype=dtype)
                gates = array(1, length, heads), array(1, length, heads)
                return keys, keys, keys, *gates, *([array(1, length, heads, num_levels(length))] if has_lam else [])

            modes = ("bf16",) if dim == 128 else tuple(MODES)
            yield Case("delta", f"{states} K=V={dim}", by_kernels(operation), arguments, modes)


def _step_cases() -> Iterator[Case]:
    heads, levels = 4, 16
    for key_dim, value_dim in ((16, 16), (128, 64), (256, 256)):
        operands = (
            array(1, heads, levels, key_dim, value_dim), array(1, dtype=jnp.int32), array(1, 1, key_dim), array(1, 1, key_dim),
            array(1, heads, value_dim), array(1, heads), array(1, heads, levels),
        )  # fmt: skip
        function = lambda *arguments: pallas_kernels.fenwick_step(*arguments)  # noqa: E731
        yield Case(
            "fenwick_step", f"K={key_dim} V={value_dim} L={levels}", function, lambda _, x=operands: x, ("f32",), False
        )


def _conv_of_packs(x, kernel, bias):
    return pallas_kernels.causal_conv(x, kernel, bias, jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % 3)


def _pointwise_cases() -> Iterator[Case]:
    length, heads, levels = 1024, 8, 14
    low, high = ("bf16", "tf32"), ("tf32", "f32")
    for width in (4, 8):

        def convolved(dtype, width=width):
            return array(2, length, 256, dtype=dtype), array(width, 256), array(256)

        yield Case("causal_conv", f"W={width} C=256", pallas_kernels.causal_conv, convolved, low)
        yield Case("causal_conv", f"packed W={width} C=256", _conv_of_packs, convolved, low)
    gates = lambda dtype: [array(2, length, 256, dtype=dtype)] * 2  # noqa: E731
    yield Case("swiglu", "F=256", pallas_kernels.swiglu, gates, low)
    for levels, hidden in ((9, 64), (14, 64), (31, 128)):
        for out in ("softplus", "softmax"):

            def mlp(_, levels=levels, hidden=hidden):
                return (
                    array(1, length, heads, levels),
                    array(levels, hidden),
                    array(hidden),
                    array(hidden, levels),
                    array(levels),
                )

            function = functools.partial(pallas_kernels.lam_mlp, out=out)
            yield Case("lam_mlp", f"L={levels} d_h={hidden} {out}", function, mlp, high)
    for levels in (9, 14, 31):

        def content(scores, scale, levels=levels):
            return pallas_kernels.content_lam(scores, scale, occupied_levels(jnp.arange(length), levels)[:, None])

        arguments = lambda _, levels=levels: (array(1, length, heads, levels), array(heads))  # noqa: E731
        yield Case("content_lam", f"L={levels} H={heads}", content, arguments, ("tf32",))
    for vocab, columns in ((5000, 5120), (50_257, 50_304)):  # of short and long rows

        def scored(dtype, columns=columns):
            return array(64, columns, dtype=dtype), array(64, dtype=jnp.int32)

        function = functools.partial(pallas_kernels.cross_entropy, vocab=vocab)
        yield Case("cross_entropy", f"vocab={vocab}", function, scored, low, False)


def cases() -> list[Case]:
    return [*_attention_cases(), *_score_cases(), *_delta_cases(), *_step_cases(), *_pointwise_cases()]


# --- Lowering ---------------------------------------------------------------------------------------------------------


def lowered(case: Case, mode: str, gpu: Gpu) -> str:
    """The module that this GPU runs, lowered without it."""

    def both(*arguments):
        out, pull = jax.vjp(case.function, *arguments)
        return out, pull(out)

    dtype, precision = MODES[mode]
    jax.clear_caches()  # what was traced for another GPU
    no_hopper = mock.patch.object(BACKENDS["hopper"], "device", lambda: "Triton's kernels are wanted")
    with no_hopper, as_if_on(gpu), jax.default_matmul_precision(precision):
        traced = jax.jit(both if case.gradient else case.function).trace(*case.arguments(dtype))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels_of(case: Case, mode: str, gpu: Gpu) -> list[Kernel]:
    """The Triton kernels in it, each once."""
    with _kernels_of_jax_triton() as found:
        text = lowered(case, mode, gpu)
    return list(dict.fromkeys([*_kernels_in(text), *found]))


@contextlib.contextmanager
def _kernels_of_jax_triton() -> Iterator[list[Kernel]]:
    """A list of the kernels that jax-triton compiles within it, none of which it takes from its cache."""
    from jax_triton import triton_lib

    found, compile_ttir = [], triton_lib.compile_ttir_inplace

    def recording(ttir, backend, options, target):
        ir = str(ttir)
        name = re.search(r"tt\.func public @(\w+)", ir).group(1)
        found.append(Kernel(name, options.num_warps, options.num_stages, ir))
        return compile_ttir(ttir, backend, options, target)

    uncached = mock.patch.object(triton_lib.TritonFunction, "_kernel_cache", {})
    with uncached, mock.patch.object(triton_lib, "compile_ttir_inplace", recording):
        yield found


def _kernels_in(module: str) -> Iterator[Kernel]:
    for match in re.finditer(r'mhlo\.backend_config = \{([^}]*?)ir = "((?:[^"\\]|\\.)*)"([^}]*)\}', module):
        about = match.group(1) + match.group(3)
        warps, stages = (int(re.search(field + r" = (\d+)", about).group(1)) for field in ("num_warps", "num_stages"))
        name = re.search(r'name = "([^"]*)"', about).group(1)
        yield Kernel(name, warps, stages, text_of_module(_unescaped(match.group(2))))


def text_of_module(module: bytes) -> str:
    """A kernel's module, as Triton reads it."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, math, scf  # noqa: F401
    from jaxlib.triton import dialect

    context = ir.Context()
    dialect.register_dialect(context)
    with context:
        return ir.Module.parse(module).operation.get_asm(enable_debug_info=False)


def _unescaped(text: str) -> bytes:
    """The bytes of an MLIR string literal."""

    def one(match):
        found = match.group(1)
        return {"\\": "\\", '"': '"', "n": "\n", "t": "\t"}.get(found) or chr(int(found, 16))

    return re.sub(r'\\(\\|"|n|t|[0-9A-Fa-f]{2})', one, text).encode("latin1")


# --- Compiling --------------------------------------------------------------------------------------------------------


def ptx_of(kernel: Kernel, capability: tuple[int, int]) -> tuple[str, dict]:
    """What Triton makes of a kernel, and what it says of it ("shared": bytes of shared memory)."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", _arch(capability), 32))
    options = backend.parse_options(dict(num_warps=kernel.warps, num_stages=kernel.stages, enable_fp_fusion=True))
    metadata, stages = dict(options.__dict__, target=backend.target), {}
    backend.add_stages(stages, options, Language.TRITON)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ttir")
        path.write_text(kernel.ir, encoding="utf-8")
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    return module, metadata


def compiled(kernel: Kernel, capability: tuple[int, int]) -> Needs:
    """What Triton and its ptxas make of a kernel."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    ptx, metadata = ptx_of(kernel, capability)
    arch = _arch(capability)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(arch).path, "-v", f"-arch={sm_arch_from_capability(arch)}", path, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return Needs(metadata["shared"], int(registers.group(1)), int(spilled.group(1)))


def _arch(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def table(wanted: list[Case], gpus: list[Gpu], modes: list[str], processes: int = 2) -> Iterator[Row]:
    """A row for every kernel of every case, mode and GPU, as they are compiled."""
    submitted, waiting = {}, []
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for case in wanted:
            rows = []
            for mode in (mode for mode in case.modes if mode in modes):
                for gpu in gpus:
                    for kernel in kernels_of(case, mode, gpu):
                        key = kernel, gpu.capability
                        submitted[key] = submitted.get(key) or pool.submit(compiled, *key)
                        rows.append((case, mode, gpu, kernel, submitted[key]))
            for *row, future in waiting:
                yield Row(*row, future.result())
            waiting = rows
        for *row, future in waiting:
            yield Row(*row, future.result())


def main() -> None:
    warnings.simplefilter("ignore")
    names = list(dict.fromkeys(case.operation for case in cases()))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="append", choices=list(GPUS), help="compute capability; all of them by default")
    parser.add_argument("--only", action="append", choices=names, help="operation; all of them by default")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="arithmetic; all by default")
    parser.add_argument("--shape", default="", help="part of the shape's name")
    arguments = parser.parse_args()
    gpus = [GPUS[name] for name in arguments.gpu or GPUS]
    wanted = [case for case in cases() if case.operation in (arguments.only or names) and arguments.shape in case.shape]
    heads = "operation", "shape", "mode", "kernel", "warps", "GPU", "shared memory", "registers", "spilled"
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in table(wanted, gpus, arguments.mode or list(MODES)):
        mark = " !" if row.needs.spilled > MOST_SPILLED or not row.fits else ""
        capability = ".".join(map(str, row.gpu.capability))
        cells = (row.case.operation, row.case.shape, row.mode, row.kernel.name, row.kernel.warps, capability,
                 *dataclasses.astuple(row.needs))  # fmt: skip
        print(f"| {' | '.join(map(str, cells))}{mark} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
