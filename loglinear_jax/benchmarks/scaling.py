"""Several devices: one attention whose sequence is cut over them, and training steps of a language model over meshes.

    loglinear_jax benchmark scaling --what=attention --preset=language --lengths=131072 --peers=pallas
    loglinear_jax benchmark scaling --what=training --shape=4x8192 --hidden=2048 --layers=24 --remat=block --meshes=1x4x1

A mesh is data x fsdp x sequence, the devices along each of these axes (loglinear_jax.train.meshes). Every mesh trains on the
same random tokens, so the losses of two meshes differ by rounding alone. Memory is a device's peak since it began: give
one mesh alone to know its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from typing import NamedTuple

import jax

from loglinear_jax.benchmarks import attention, language_model, measure
from loglinear_jax.command_line import BadInput, comma_separated, one_of, size
from loglinear_jax.models import LanguageSettings
from loglinear_jax.train import can_be_cut, device_mesh

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

    def mesh(self, batch: int) -> jax.sharding.Mesh:
        return device_mesh(1, batch, jax.devices()[: math.prod(self)], self.fsdp, self.sequence)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = measure.flag_adder(parser)
    add("what", ",".join(PARTS), "what to time", one_of(PARTS))
    add("preset", "small", "shapes of the attention", choices=list(attention.PRESETS))
    help_of_peers = f"attentions to time, of {', '.join(CUT)} (default: by the preset)"
    parser.add_argument("--peers", type=comma_separated(one_of(CUT)), help=help_of_peers)
    add("lengths", "8192", "tokens of the attention's sequence, on all devices together", size)
    add("devices", "1,2,4", "numbers of devices to cut the sequence over", size)
    add("repeats", 10, "timed repeats of the attention; the median is reported", type=size)
    add("meshes", "1x1x1,4x1x1,1x4x1,1x1x4", "meshes for training, data x fsdp x sequence", MeshShape.read)
    language_model.add_model(add, "log_linear")
    add("shape", "4x8192", "batch x length of a training step, on all devices together", type=language_model.Shape.read)


def _check_pieces(given: str, length: int, pieces: int, least: int = 1) -> None:
    """Raises BadInput unless a sequence can be cut into so many pieces."""
    if not can_be_cut(length, pieces, least):
        raise BadInput(
            f"{given}: {length} tokens over {pieces} devices: expected a power of two tokens, at least {least}, on each"
        )


def run(args: argparse.Namespace) -> int:
    there = len(jax.devices())
    wanted = {"attention": ("--devices", args.devices), "training": ("--meshes", [math.prod(x) for x in args.meshes])}
    for flag, counts in (wanted[part] for part in args.what):
        if max(counts) > there:
            raise BadInput(f"{flag}: expected at most {there} devices, as many as there are, got {max(counts)}")
    if "attention" in args.what:
        for length, devices in itertools.product(args.lengths, args.devices):
            _check_pieces("--devices", length, devices)
    if "training" in args.what:
        batch, length = args.shape
        for mesh in args.meshes:
            if batch % (mesh.data * mesh.fsdp):
                raise BadInput(f"--meshes: {mesh}: expected data · fsdp to divide the batch of --shape={args.shape}")
            _check_pieces(f"--meshes: {mesh}", length, mesh.sequence, LanguageSettings.conv_width)
    record = measure.Record(args)
    print(f"{record.machine}, {there} device(s)\n")
    if "attention" in args.what:
        preset = attention.PRESETS[args.preset]
        peers = args.peers or (["log_linear_delta"] if preset.get("delta") else ["xla"])
        for peer, length, devices in itertools.product(peers, args.lengths, args.devices):
            compute = functools.partial(attention.time_jax, peer, preset, length, args.repeats, devices)
            record.measure("attention", compute, peer=peer, T=length, devices=devices)
        print(f"\n{args.preset}, milliseconds\n\n" + record.table("attention", floatfmt=".4g", intfmt=","))
    if "training" in args.what:
        (batch, length), peak = args.shape, measure.matmul_rate()
        sizes = dict(steps=args.steps, precision=args.precision)
        for mixer, mesh in itertools.product(args.mixers, args.meshes):
            settings = language_model.settings_of(args, mixer, length)
            compute = functools.partial(
                language_model.time_training, settings, batch, length, peak, mesh=mesh.mesh(batch), **sizes
            )
            record.measure("training", compute, **{"mixer": mixer, "data x fsdp x sequence": str(mesh)})
        title = (
            f"hidden {args.hidden}, {args.layers} layers, {args.precision}, remat {args.remat}, a step of {args.shape}"
        )
        print(f"\n{title}\n\n" + record.table("training", floatfmt=".6g", intfmt=","))
    return 0 if record.complete else 1
