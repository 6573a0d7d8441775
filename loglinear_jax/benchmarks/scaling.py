"""Several devices: one attention whose sequence is cut over them, and training steps of a language model over meshes.

    loglinear_jax benchmark scaling --what=attention --preset=language --lengths=131072 --peers=pallas
    loglinear_jax benchmark scaling --what=training --shape=4x8192 --hidden=2048 --layers=24 --remat=block --meshes=1x4x1

A mesh is data x fsdp x sequence, the devices along each of these axes (loglinear_jax.train.meshes). Every step trains on one
and the same batch of random tokens, so the losses of two meshes differ by rounding alone. Memory is a device's peak since the
command began: give one mesh alone to know its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from loglinear_jax.benchmarks import attention, common, kernels, language_model, timing
from loglinear_jax.command_line import BadInput, comma_separated, one_of, size
from loglinear_jax.mixers import FORMER_NAMES, MIXERS
from loglinear_jax.models import LanguageSettings
from loglinear_jax.runs.utilisation import utilisation
from loglinear_jax.train import device_mesh

HELP = "several devices: a sequence that is cut over them, and training steps over meshes"
PARTS = ("attention", "training")
CUT = tuple(name for name, peer in attention.PEERS.items() if peer.chunked)


class MeshShape(NamedTuple):
    data: int
    fsdp: int
    sequence: int

    @classmethod
    def read(cls, text: str) -> MeshShape:
        sizes = text.split("x")
        if len(sizes) != 3:
            raise argparse.ArgumentTypeError(f"expected data x fsdp x sequence such as 1x4x1, got {text!r}")
        return cls(*map(size, sizes))

    def __str__(self) -> str:
        return "x".join(map(str, self))


def time_attention(
    peer: str, preset: dict, length: int, devices: int, repeats: int = 10, profile: bool = False
) -> dict:
    """forward_ms and both_ms of a peer over a sequence of `length` tokens in all, cut over so many devices."""
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    pieces = PartitionSpec(None, "sequence")
    call = functools.partial(attention.PEERS[peer].call, axis_name="sequence")
    function = jax.shard_map(call, mesh=mesh, in_specs=pieces, out_specs=pieces)
    where = NamedSharding(mesh, pieces)
    inputs = [jax.device_put(attention.draw_inputs(preset, length, seed), where) for seed in range(2)]
    return kernels.time_passes(function, inputs, profile, repeats=repeats)


def time_training(
    settings: LanguageSettings,
    batch: int,
    length: int,
    shape: MeshShape,
    *,
    steps: int = 20,
    precision: str | None = None,
) -> dict[str, Any]:
    """Of so many steps, each a dispatch: milliseconds of one, their median; tokens per second; the losses of the first and the
    last; the utilisation (`runs.utilisation`) and the bytes that a device held at most, where devices say these."""
    devices = jax.devices()[: math.prod(shape)]
    mesh = device_mesh(1, batch, devices, shape.fsdp, shape.sequence)
    many = language_model.trained(settings, batch, length, mesh, precision=precision, warmup_steps=steps // 4)
    tokens = np.random.default_rng(0).integers(0, settings.vocab_size, (1, 1, batch, length + 1), np.int32)
    data = {"batches": many.place("batches", (tokens[..., :-1], tokens[..., 1:]))}
    state, losses, seconds = many.init(many.seeds), [0.0], []
    for _ in range(steps + 1):  # the first compiles
        state, (taken,) = timing.timed(lambda state: many.train_steps(state, data, 1), state)
        losses.append(float(state.loss_sum[0]))
        seconds.append(taken)
    first, *_, last = np.diff(losses)
    ms = 1e3 * float(np.median(seconds[1:]))
    rate = batch * length / ms * 1e3
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
    memory = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "ms": ms,
        "tokens_per_second": rate,
        "utilisation": utilisation(params, rate, len(devices)),
        "peak_gib": max(memory) / 2**30 if memory else None,
        "first_loss": float(first),
        "last_loss": float(last),
    }


# --- The command --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = common.flag_adder(parser)

    def add_list(name: str, default: str, help: str, item: Any) -> None:
        add(name, default, help, type=comma_separated(item))

    add_list("what", ",".join(PARTS), "what to time", one_of(PARTS))
    add("preset", "small", "shapes of the attention", choices=list(attention.PRESETS))
    parser.add_argument(
        "--peers",
        type=comma_separated(one_of(CUT)),
        help=f"of the attention, of {', '.join(CUT)} (default: by the preset)",
    )
    add_list("lengths", "8192", "tokens of the attention's sequence, on all devices together", size)
    add_list("devices", "1,2,4", "over how many devices it is cut", size)
    add("repeats", 10, "timed repeats of the attention, of which the median counts", type=size)
    add_list("meshes", "1x1x1,4x1x1,1x4x1,1x1x4", "of training, data x fsdp x sequence", MeshShape.read)
    add_list("mixers", "log_linear", f"of training, of {', '.join(MIXERS)}", one_of((*MIXERS, *FORMER_NAMES)))
    language_model.add_model(add)
    add("shape", "4x8192", "batch x length of a training step, on all devices together", type=language_model.Shape.read)
    add("steps", 20, "training steps", type=size)
    common.add_kernels(parser)
    common.add_output(parser)


def run(args: argparse.Namespace) -> int:
    common.check_kernels(args)
    there = len(jax.devices())
    wanted = {"attention": ("--devices", args.devices), "training": ("--meshes", [math.prod(x) for x in args.meshes])}
    for flag, counts in (wanted[part] for part in args.what):
        if max(counts) > there:
            raise BadInput(f"{flag}: expected at most {there} devices, as many as there are, got {max(counts)}")
    record = common.Record(args)
    print(f"{record.machine}, {there} device(s)\n")
    if "attention" in args.what:
        preset = attention.PRESETS[args.preset]
        peers = args.peers or (["log_linear_delta"] if preset.get("delta") else ["xla"])
        for peer, length, devices in itertools.product(peers, args.lengths, args.devices):
            found = time_attention(peer, preset, length, devices, args.repeats, args.kernels)
            row = {"peer": peer, "T": length, "devices": devices} | found
            record.add("attention", f"{peer} T={length} on {devices} devices", row)
        print(f"\n{args.preset}, milliseconds\n\n" + record.table("attention", floatfmt=".4g", intfmt=","))
    if "training" in args.what:
        batch, length = args.shape
        for mixer, mesh in itertools.product(args.mixers, args.meshes):
            settings = LanguageSettings(
                args.vocab, length, mixer=mixer, lam=args.lam, hidden=args.hidden, layers=args.layers, remat=args.remat,
                dtype="bfloat16" if args.precision == "bfloat16" else "float32",
            )  # fmt: skip
            settings.check()
            found = time_training(settings, batch, length, mesh, steps=args.steps, precision=args.precision)
            record.add("training", f"{mixer} {mesh}", {"mixer": mixer, "data x fsdp x sequence": str(mesh)} | found)
        title = (
            f"hidden {args.hidden}, {args.layers} layers, {args.precision}, remat {args.remat}, a step of {args.shape}"
        )
        print(f"\n{title}\n\n" + record.table("training", floatfmt=".6g", intfmt=","))
    return 0
