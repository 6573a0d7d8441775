"""Time of the token mixer (decays, λ, attention) with each λ, forward and forward + backward, on the machine at hand.

    loglinear_jax benchmark lam --preset=language --lams=fixed,mlp_softplus,content --lengths=8192

Times are medians of queued calls over inputs that take turns, as in `benchmark attention`.
"""

from __future__ import annotations

import argparse
from typing import Any, get_args

import jax
from tabulate import tabulate

from loglinear_jax.benchmarks import measure
from loglinear_jax.benchmarks.attention import PRESETS, draw_inputs
from loglinear_jax.command_line import one_of, size
from loglinear_jax.fenwick import num_levels
from loglinear_jax.lam import LAMS
from loglinear_jax.mixers import make_mixer
from loglinear_jax.ops.checks import Implementation

HELP = "time of each λ with its attention"
INPUT_SETS = 3


def time_lam(lam: str, preset: dict, length: int, implementation: str | None, profile: bool) -> dict[str, Any]:
    """`measure.time_passes` of the mixer with this λ; gradients in its parameters and every input."""
    mixer = make_mixer(
        "log_linear", num_levels=num_levels(length), lam=lam, lam_hidden=None, implementation=implementation
    )

    def draw(seed):
        q, k, v, _, _, cotangent = draw_inputs(preset, length, seed)
        keys = jax.random.split(jax.random.key(seed + INPUT_SETS), len(mixer.inputs))
        more = {
            name: jax.random.normal(key, (*v.shape[:2], v.shape[2] * width), v.dtype)
            for key, (name, width) in zip(keys, mixer.inputs.items(), strict=True)
        }
        return (q, k, v, more), cotangent

    def mix(params, arrays):
        *of_attention, more = arrays
        return mixer.apply(params, *of_attention, **more)

    inputs = [draw(seed) for seed in range(INPUT_SETS)]
    *of_attention, more = inputs[0][0]
    params = {"params": mixer.init(jax.random.key(0), *of_attention, **more)["params"]}
    return measure.time_passes(mix, [(params, *given) for given in inputs], profile)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = measure.flag_adder(parser)
    add("preset", "small", "name of the shape", choices=PRESETS)
    add("lengths", "1024", "sequence lengths in tokens", size)
    add("lams", "fixed,linear,mlp_softplus,content,content_mlp", "names of λ", one_of(tuple(LAMS)))
    forms = get_args(Implementation)
    parser.add_argument("--implementation", choices=forms, help="form of the attention (default: the best that works)")
    measure.add_common(parser)


def run(args: argparse.Namespace) -> int:
    measure.check_kernels(args)
    preset = PRESETS[args.preset]
    record = measure.Record(args, **preset)
    print(f"{record.machine}; {args.preset}: {', '.join(f'{k}={v}' for k, v in preset.items())}")
    results: dict[str, dict[int, Any]] = {}
    rows = []
    for length in args.lengths:
        for lam in args.lams:
            found = time_lam(lam, preset, length, args.implementation, args.kernels)
            measure.print_kernels(f"T={length} {lam}", found)
            results.setdefault(lam, {})[length] = found
            rows.append([length, lam, found["forward_ms"], found["both_ms"]])
    print(tabulate(rows, ["T", "λ", "forward ms", "forward + backward ms"], floatfmt=".3f", tablefmt="github"))
    record.values["results"] = results
    record.write()
    return 0
