"""Time of the token mixer (decays, λ, attention) with each λ, forward and forward + backward, on this machine.

    loglinear_jax benchmark lam --preset=language --lams=fixed,mlp_softplus,content --lengths=8192

Times are medians of queued calls over inputs that take turns, as in `benchmark attention`.
"""

from __future__ import annotations

import argparse
import functools
import itertools

import jax

from loglinear_jax.benchmarks import measure
from loglinear_jax.benchmarks.attention import PRESETS, draw_inputs
from loglinear_jax.command_line import one_of, size
from loglinear_jax.fenwick import num_levels
from loglinear_jax.lam import LAMS
from loglinear_jax.mixers import make_mixer

HELP = "time of each λ with its attention"
INPUT_SETS = 3


def time_lam(lam: str, preset: dict, length: int) -> dict[str, float]:
    """`measure.time_passes` of the mixer with this λ; gradients in its parameters and every input."""
    mixer = make_mixer("log_linear", num_levels=num_levels(length), lam=lam, lam_hidden=None)

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
    return measure.time_passes(mix, [(params, *given) for given in inputs])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = measure.flag_adder(parser)
    add("preset", "small", "name of the shape", choices=PRESETS)
    add("lengths", "1024", "sequence lengths in tokens", size)
    add("lams", "fixed,linear,mlp_softplus,content,content_mlp", "names of λ", one_of(tuple(LAMS)))


def run(args: argparse.Namespace) -> int:
    """Times every λ at every length, and prints a table."""
    preset = PRESETS[args.preset]
    record = measure.Record(args, **preset)
    for length, lam in itertools.product(args.lengths, args.lams):
        record.measure("lam", functools.partial(time_lam, lam, preset, length), λ=lam, T=length)
    print(f"\n{record.machine}; {args.preset}; forward / forward + backward, ms\n")
    print(record.by("lam", "λ", "T", measure.both_ms))
    return 0 if record.complete else 1
