"""Time and memory of log-linear attention and other implementations (peers) against T, on this machine.

    loglinear_jax benchmark attention                                       # what a CPU can do
    loglinear_jax benchmark attention --preset=language --output=bench      # a GPU; writes bench.json

Peers: our own forms by name, of which "pallas" takes the best kernels for the GPU, and "triton" those for any since Ampere;
"gated_linear", the same with λ ≡ 1 and one state; "flash", cuDNN's FlashAttention through jax.nn with head dim V; "jla", one
state by simple_gla of jax-linear-attention, where that is installed; and "fla", chunk_log_linear_attn of
flash-linear-attention, where torch and fla are. The presets "delta", "delta_recall" and "delta_recall64" (many seeds of a
recall task at once, states of 32 and of 64) are of the gated delta rule, with keys of length 1, and have peers of their own:
"log_linear_delta"; and with one state "gated_delta", "jla_delta" and "fla_delta". Ours also come with "_xla" or "_pallas" at
the end: that form, in place of what is chosen by itself.
Times are medians of queued calls over inputs that take turns. Memory is the peak beyond inputs and outputs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import itertools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from loglinear_jax.benchmarks import measure
from loglinear_jax.command_line import BadInput, comma_separated, one_of, power_of_two, size
from loglinear_jax.fenwick import num_levels
from loglinear_jax.mixers import unit
from loglinear_jax.ops import (
    gated_delta_attention,
    gated_linear_attention,
    log_linear_attention,
    log_linear_delta_attention,
)
from loglinear_jax.settings import first_line
from pallas_kernels import UnsupportedError, fenwick_attention
from pallas_kernels.attention.tiles import choose_tiles
from pallas_kernels.common.tiles import tile_for

HELP = "time and memory of the attention and its peers against T"
PRESETS: dict[str, dict[str, Any]] = {
    "small": dict(batch=4, heads=2, groups=2, key_dim=32, value_dim=32, dtype="float32"),
    "language": dict(batch=2, heads=48, groups=1, key_dim=128, value_dim=64, dtype="bfloat16"),
    "grouped": dict(batch=2, heads=16, groups=16, key_dim=64, value_dim=64, dtype="bfloat16"),
    "long": dict(batch=1, heads=16, groups=16, key_dim=64, value_dim=64, dtype="bfloat16"),
    "wide": dict(batch=2, heads=16, groups=16, key_dim=128, value_dim=128, dtype="bfloat16"),
    "delta": dict(batch=2, heads=16, groups=16, key_dim=128, value_dim=128, dtype="bfloat16", delta=True),
    "delta_recall": dict(batch=1536, heads=2, groups=2, key_dim=32, value_dim=32, dtype="float32", delta=True),
    "delta_recall64": dict(batch=1536, heads=1, groups=1, key_dim=64, value_dim=64, dtype="float32", delta=True),
}
# Inputs take turns until they have at least this many bytes, more than any GPU's cache.
ROTATED_BYTES, MAX_SETS = 256 << 20, 6
MAX_SCORES = 1 << 26
MIB = 1 << 20
# Where errors of peers come from, by the start of a module's name.
PEERS_CODE = ("torch", "triton", "fla", "jla", "jax._src.cudnn")


class Skip(Exception):
    """Why a peer cannot be timed here."""


# --- Inputs -----------------------------------------------------------------------------------------------------------


def shape_of(preset: dict, length: int) -> dict[str, tuple[int, ...]]:
    batch, heads, groups = preset["batch"], preset["heads"], preset["groups"]
    shapes = dict(
        q=(batch, length, groups, preset["key_dim"]),
        k=(batch, length, groups, preset["key_dim"]),
        v=(batch, length, heads, preset["value_dim"]),
        log_decay=(batch, length, heads),
        lam=(batch, length, heads, num_levels(length)),
    )
    return shapes | (dict(beta=shapes["log_decay"]) if preset.get("delta") else {})


def draw_inputs(preset: dict, length: int, seed: int) -> tuple[jax.Array, ...]:
    """Random q, k, v, log_decay, lam, for the delta rule beta, and a cotangent of the output."""
    shapes = shape_of(preset, length)
    keys = iter(jax.random.split(jax.random.key(seed), 7))
    q, k, v, cotangent = (jax.random.normal(next(keys), shapes[name], preset["dtype"]) for name in ("q", "k", "v", "v"))
    log_decay = -0.1 * jax.random.uniform(next(keys), shapes["log_decay"])
    lam = jax.random.uniform(next(keys), shapes["lam"])
    if "beta" not in shapes:
        return q, k, v, log_decay, lam, cotangent
    return unit(q), unit(k), v, log_decay, lam, jax.random.uniform(next(keys), shapes["beta"]), cotangent


def moved_bytes(preset: dict, length: int) -> tuple[int, int]:
    """(forward, forward + backward): bytes of inputs and outputs, each moved once for each pass that needs it."""
    sizes = {name: int(np.prod(shape)) for name, shape in shape_of(preset, length).items()}
    width = jnp.dtype(preset["dtype"]).itemsize
    inputs = width * (sizes["q"] + sizes["k"] + sizes["v"])
    inputs += 4 * (sizes["log_decay"] + sizes["lam"] + sizes.get("beta", 0))
    output = width * sizes["v"]
    return inputs + output, (inputs + output) + (2 * inputs + output)


# --- Peers ------------------------------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """What is timed. call: of the arrays of `draw_inputs` but the cotangent; None of flash-linear-attention, which is in torch.
    chunked: whether it takes a chunk_size. delta: whether it is of the delta rule. ours: whether it takes segment_ids."""

    call: Callable | None
    chunked: bool = False
    delta: bool = False
    ours: bool = False


def _flash(q, k, v, log_decay, lam):
    """Causal softmax attention with the values' head dim: q and k of the same size stand for ours."""
    if jax.default_backend() != "gpu":
        raise Skip("cuDNN needs a GPU")
    return jax.nn.dot_product_attention(v, jnp.flip(v, 1), v, is_causal=True, implementation="cudnn")


def _triton(q, k, v, log_decay, lam):
    tiles = choose_tiles(q.shape[1], tile_for(q.shape[3]), v.shape[3], q.dtype)
    return fenwick_attention(q, k, v, log_decay, lam, tiles=tiles)


def _jla(module: str, function: str, q, k, v, log_decay, lam, *beta):
    """A function of jax-linear-attention."""
    try:
        found = getattr(importlib.import_module(f"jla.ops.mosaic_gpu.{module}"), function)
    except ImportError as error:
        raise Skip(str(error)) from error
    return found(q, k, v, log_decay, *beta, scale=1.0)[0]


def _gated_linear(q, k, v, log_decay, lam, **settings):
    return gated_linear_attention(q, k, v, log_decay, **settings)


def _log_linear_delta(q, k, v, log_decay, lam, beta, **settings):
    return log_linear_delta_attention(q, k, v, log_decay, beta, lam, **settings)


def _gated_delta(q, k, v, log_decay, lam, beta, **settings):
    return gated_delta_attention(q, k, v, log_decay, beta, **settings)


def _of_form(call: Callable, form: str | None, delta: bool = False) -> Peer:
    return Peer(functools.partial(call, implementation=form), form not in ("parallel", "recurrent"), delta, ours=True)


PEERS = {
    "flash": Peer(_flash),
    "gated_linear": Peer(_gated_linear, True, ours=True),
    "jla": Peer(functools.partial(_jla, "scalar_gate", "simple_gla")),
    "triton": Peer(_triton),
    "fla": Peer(None),
    "jla_delta": Peer(functools.partial(_jla, "gated_delta_rule", "gated_delta_rule"), delta=True),
    "fla_delta": Peer(None, delta=True),
    **{form: _of_form(log_linear_attention, form) for form in ("parallel", "recurrent", "xla", "pallas")},
    **{
        name + (f"_{form}" if form else ""): _of_form(call, form, delta=True)
        for name, call in (("log_linear_delta", _log_linear_delta), ("gated_delta", _gated_delta))
        for form in (None, "xla", "pallas")
    },
}
DEFAULT_PEERS, DEFAULT_PEERS_OF_DELTA = ("xla", "parallel"), ("log_linear_delta", "gated_delta")


def _packed(function, ids, *arrays):
    """The barrier keeps XLA from computing with the ids before the call."""
    return function(*arrays, segment_ids=jax.lax.optimization_barrier(ids))


def time_jax(
    name: str, preset: dict, length: int, repeats: int = 10, devices: int = 1, documents: int = 1
) -> dict[str, Any]:
    """forward_ms and both_ms of a peer in JAX; on one device also forward_bytes and both_bytes. On several, the sequence of
    `length` tokens in all is cut over them. A preset's chunk_size, if it has one, is for the peers that are chunked.

    documents: how many documents of equal length each sequence is packed of, for our own peers.

    Raises Skip if it can't be timed here.
    """
    if name == "parallel" and preset["batch"] * preset["heads"] * length**2 > MAX_SCORES:
        raise Skip("too many scores")
    function = PEERS[name].call
    if (chunk_size := preset.get("chunk_size")) and PEERS[name].chunked:
        function = functools.partial(function, chunk_size=chunk_size)
    if documents > 1:
        ids = np.broadcast_to((np.arange(length) * documents // length).astype(np.int32), (preset["batch"], length))
        function = functools.partial(_packed, function, ids)
    first = draw_inputs(preset, length, 0)
    sets = min(max(-(-ROTATED_BYTES // sum(x.nbytes for x in first)), 2), MAX_SETS)
    inputs = [first, *(draw_inputs(preset, length, seed) for seed in range(1, sets))]
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        pieces = PartitionSpec(None, "sequence")
        call = functools.partial(function, axis_name="sequence")
        function = jax.shard_map(call, mesh=mesh, in_specs=pieces, out_specs=pieces)
        inputs = jax.device_put(inputs, NamedSharding(mesh, pieces))
    found: dict[str, Any] = measure.time_passes(function, inputs, repeats=repeats)
    for kind, call in measure.passes_of(function).items() if devices == 1 else ():
        found[f"{kind}_bytes"] = jax.jit(call).lower(*first).compile().memory_analysis().temp_size_in_bytes
    return found


def time_fla(preset: dict, length: int, repeats: int = 10) -> dict[str, Any]:
    """The same of flash-linear-attention's kernel, in torch, in this process."""
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.log_linear_attn import chunk_log_linear_attn
    except ImportError as error:
        raise Skip(str(error)) from error
    dtype, delta = getattr(torch, preset["dtype"]), preset.get("delta")
    function = functools.partial(chunk_gated_delta_rule, scale=1.0) if delta else chunk_log_linear_attn

    def to_torch(x, dtype):
        return torch.from_numpy(np.array(x.astype(jnp.float32))).cuda().to(dtype)

    inputs = []
    for seed in range(2):
        q, k, v, log_decay, lam, *beta, cotangent = draw_inputs(preset, length, seed)
        # fla's kernel multiplies scores of q's dtype by λ: it takes λ in that dtype only.
        arrays = [(q, dtype), (k, dtype), (v, dtype), (log_decay, torch.float32), (beta[0] if beta else lam, dtype)]
        inputs.append(([to_torch(*x).requires_grad_() for x in arrays], to_torch(cotangent, dtype)))

    def forward(tensors, _):
        with torch.no_grad():
            return [function(*tensors)[0]]

    def both(tensors, cotangent):
        out = function(*tensors)[0]
        return [out, *torch.autograd.grad(out, tensors, cotangent)]

    class Wait:
        def block_until_ready(self):
            torch.cuda.synchronize()

    result = {}
    for kind, call in (("forward", forward), ("both", both)):

        def thunk(call=call):
            for arguments in inputs:
                call(*arguments)
            return Wait()

        call(*inputs[0])
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        outputs = call(*inputs[0])
        torch.cuda.synchronize()
        of_outputs = sum(x.numel() * x.element_size() for x in outputs)
        result[f"{kind}_bytes"] = torch.cuda.max_memory_allocated() - kept - of_outputs
        del outputs
        result[f"{kind}_ms"] = measure.median_ms(thunk, len(inputs), repeats=repeats)
    if length <= 4096:
        same = PEERS["gated_delta"].call if delta else log_linear_attention
        ours = np.asarray(same(*draw_inputs(preset, length, 0)[:-1]).astype(jnp.float32))
        theirs = forward(*inputs[0])[0].float().cpu().numpy()
        result["difference"] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    return result


# --- The command ------------------------------------------------------------------------------------------------------


def measure_peers(
    record: measure.Record, preset: dict, lengths: list[int], peers: list[str], repeats: int = 10, documents: int = 1
) -> bool:
    """Adds a row "attention" to the record for each peer and length, and another of packed documents for ours; whether all went
    well. What cannot run is left out, and the reason printed; all went well if that was only what `Skip` says."""
    well = True
    for length, peer, packed in itertools.product(lengths, peers, sorted({1, documents})):
        if packed > 1 and not PEERS[peer].ours:
            continue
        label = f"{peer}, {packed} documents" if packed > 1 else peer
        try:
            of_peer = (preset, length, repeats)
            found = time_fla(*of_peer) if PEERS[peer].call is None else time_jax(peer, *of_peer, documents=packed)
            record.add("attention", peer=label, T=length, **found)
        except Exception as reason:  # out of memory, a compiler of the peer's: the others are still measured
            if not isinstance(reason, Skip):
                if not _of_peer(reason):
                    raise
                well = False
            print(f"T={length} {label}: not measured, {first_line(reason)[:200]}", flush=True)
        gc.collect()
    return well


def _of_peer(error: Exception) -> bool:
    """Whether an error is the device's or a peer's; any other is a bug here."""
    if isinstance(error, (jax.errors.JaxRuntimeError, UnsupportedError)):
        return True
    raised_in = list(traceback.walk_tb(error.__traceback__))[-1][0].f_globals.get("__name__", "")
    modules = (type(error).__module__, raised_in)
    return any(f"{module}.".startswith(f"{peer}.") for module in modules for peer in PEERS_CODE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = measure.flag_adder(parser)
    add("preset", "small", "name of a set of shapes", choices=list(PRESETS))
    lengths = [256 << n for n in range(8)]
    parser.add_argument("--lengths", type=comma_separated(size), default=lengths, help="tokens (default: 256 to 32768)")
    defaults = f"(default: {','.join(DEFAULT_PEERS)}, of the delta rule {','.join(DEFAULT_PEERS_OF_DELTA)})"
    help_of_peers = f"peers to time, of {', '.join(PEERS)} {defaults}"
    parser.add_argument("--peers", type=comma_separated(one_of(tuple(PEERS))), help=help_of_peers)
    add("repeats", 10, "timed repeats; the median is reported", type=size)
    help_of_chunks = "tokens per chunk, a power of two, for peers with chunks (default: what they choose)"
    parser.add_argument("--chunk_size", type=power_of_two, help=help_of_chunks)
    help_of_documents = "also time our own with this many documents packed into each sequence (default: no)"
    parser.add_argument("--documents", type=size, default=1, help=help_of_documents)


def run(args: argparse.Namespace) -> int:
    """Times every peer at every length; prints tables of times, beside that of a copy of inputs and outputs, and of memory."""
    preset, lengths = PRESETS[args.preset] | {"chunk_size": args.chunk_size}, sorted(args.lengths)
    delta = preset.get("delta", False)
    of_preset = [name for name, peer in PEERS.items() if peer.delta == delta]
    peers = args.peers or list(DEFAULT_PEERS_OF_DELTA if delta else DEFAULT_PEERS)
    if wrong := [peer for peer in peers if peer not in of_preset]:
        expected = f"expected some of {', '.join(of_preset)}"
        raise BadInput(f"--peers: {wrong[0]} is not a peer of --preset={args.preset}: {expected}")
    record = measure.Record(args, **preset)
    well = measure_peers(record, preset, lengths, peers, args.repeats, args.documents)
    shape = "B={batch} H={heads} G={groups} K={key_dim} V={value_dim} {dtype}".format(**preset)
    memory = record.by(
        "attention", "peer", "T", lambda row: f"{row['forward_bytes'] / MIB:.3g} / {row['both_bytes'] / MIB:.3g}"
    )
    rate = record.values["copy_bytes_per_second"] = (
        measure.copy_bandwidth()
    )  # last, as a GPU raises its clocks with work
    for length in lengths:
        forward, both = (1e3 * moved / rate for moved in moved_bytes(preset, length))
        record.add("attention", peer="copy", T=length, forward_ms=forward, both_ms=both)
    print(f"\n{record.machine}, {shape}, copy {rate / 1e12:.2f} TB/s; forward / forward + backward, ms\n")
    print(record.by("attention", "peer", "T", measure.both_ms))
    print(f"\nPeak memory beyond inputs and outputs, MiB\n\n{memory}")
    return 0 if well else 1
