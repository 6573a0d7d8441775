"""Time and memory of log-linear attention and its peers against T, on the machine at hand.

    loglinear_jax benchmark attention                                       # what a CPU can do
    loglinear_jax benchmark attention --preset=language --output=bench      # a GPU; writes bench.json and bench.png

Peers: our own forms by name, of which "pallas" takes the best kernels for the GPU, and "triton" those for any since Ampere;
"gated_linear", the same with λ ≡ 1 and one state; "flash", cuDNN's FlashAttention through jax.nn with head dim V; "jla", one
state by simple_gla of jax-linear-attention, where that is installed; and "fla", chunk_log_linear_attn of
flash-linear-attention, where torch and fla are. The presets "delta", "delta_recall" and "delta_recall64" (many seeds of a
recall task at once, states of 32 and of 64) are of the gated delta rule, with keys of length 1, and have peers of their own:
"log_linear_delta"; and with one state "gated_delta", "jla_delta" and "fla_delta". Ours also come with "_xla" or "_pallas" at
the end: that form, in place of what is chosen by itself.
With --kernels, each kernel's time by a profile, too.
Times are medians of queued calls over inputs that take turns. Memory is the peak beyond inputs and outputs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from tabulate import tabulate

from loglinear_jax import provenance
from loglinear_jax.benchmarks import common, kernels, timing
from loglinear_jax.command_line import BadInput, comma_separated, one_of, power_of_two, size, whole_number
from loglinear_jax.fenwick import num_levels
from loglinear_jax.mixers import unit
from loglinear_jax.ops import (
    gated_delta_attention,
    gated_linear_attention,
    log_linear_attention,
    log_linear_delta_attention,
)
from loglinear_jax.ops.log_linear.api import Implementation
from pallas_kernels import UnsupportedError, fenwick_attention
from pallas_kernels.attention.tiles import choose_tiles
from pallas_kernels.common.tiles import tile_for

PRESETS = {
    "small": dict(batch=4, heads=2, groups=2, key_dim=32, value_dim=32, dtype="float32"),
    "language": dict(batch=2, heads=48, groups=1, key_dim=128, value_dim=64, dtype="bfloat16"),
    "grouped": dict(batch=2, heads=16, groups=16, key_dim=64, value_dim=64, dtype="bfloat16"),
    "wide": dict(batch=2, heads=16, groups=16, key_dim=128, value_dim=128, dtype="bfloat16"),
    "delta": dict(batch=2, heads=16, groups=16, key_dim=128, value_dim=128, dtype="bfloat16", delta=True),
    "delta_recall": dict(batch=1536, heads=2, groups=2, key_dim=32, value_dim=32, dtype="float32", delta=True),
    "delta_recall64": dict(batch=1536, heads=1, groups=1, key_dim=64, value_dim=64, dtype="float32", delta=True),
}
HELP = "time and memory of the attention against T, beside peers"

# Inputs take turns until they have at least this many bytes, more than any GPU's cache.
ROTATED_BYTES, MAX_SETS = 256 << 20, 6
MAX_SCORES = 1 << 26
GROWTH = 4


class Skip(Exception):
    """Why a peer cannot be timed here."""


# Where errors of peers come from, by the start of a module's name.
PEERS_CODE = ("torch", "triton", "fla", "jla", "jax._src.cudnn")


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
    inputs = width * (sizes["q"] + sizes["k"] + sizes["v"]) + 4 * (
        sizes["log_decay"] + sizes["lam"] + sizes.get("beta", 0)
    )
    output = width * sizes["v"]
    return inputs + output, (inputs + output) + (2 * inputs + output)


# --- Peers in JAX -----------------------------------------------------------------------------------------------------


def flash(q, k, v, log_decay, lam):
    """Causal softmax attention with the values' head dim: q and k of the same size stand for ours."""
    del q, k, log_decay, lam
    return jax.nn.dot_product_attention(v, jnp.flip(v, 1), v, is_causal=True, implementation="cudnn")


def gated_linear(q, k, v, log_decay, lam, **settings):
    del lam
    return gated_linear_attention(q, k, v, log_decay, **settings)


def jla(q, k, v, log_decay, lam):
    del lam
    try:
        from jla.ops.mosaic_gpu.scalar_gate import simple_gla
    except ImportError as error:
        raise Skip(str(error)) from error
    return simple_gla(q, k, v, log_decay, scale=1.0)[0]


def triton(q, k, v, log_decay, lam):
    tiles = choose_tiles(q.shape[1], tile_for(q.shape[3]), v.shape[3], q.dtype)
    return fenwick_attention(q, k, v, log_decay, lam, tiles=tiles)


def log_linear_delta(q, k, v, log_decay, lam, beta, **settings):
    return log_linear_delta_attention(q, k, v, log_decay, beta, lam, **settings)


def gated_delta(q, k, v, log_decay, lam, beta, **settings):
    del lam
    return gated_delta_attention(q, k, v, log_decay, beta, **settings)


def jla_delta(q, k, v, log_decay, lam, beta):
    del lam
    try:
        from jla.ops.mosaic_gpu.gated_delta_rule import gated_delta_rule
    except ImportError as error:
        raise Skip(str(error)) from error
    return gated_delta_rule(q, k, v, log_decay, beta, scale=1.0)[0]


DELTA_RULES = {"log_linear_delta": log_linear_delta, "gated_delta": gated_delta}
OURS_OF_DELTA = DELTA_RULES | {
    f"{name}_{form}": functools.partial(function, implementation=form)
    for name, function in DELTA_RULES.items()
    for form in ("xla", "pallas")
}
DELTA_PEERS = OURS_OF_DELTA | {"jla_delta": jla_delta}
JAX_PEERS = {"flash": flash, "gated_linear": gated_linear, "jla": jla, "triton": triton} | {
    name: functools.partial(log_linear_attention, implementation=name) for name in get_args(Implementation)
}
CHUNKED = {"xla", "pallas", "gated_linear", *OURS_OF_DELTA}  # those that chunk_size is for
PEERS, PEERS_OF_DELTA = (*JAX_PEERS, "fla"), (*DELTA_PEERS, "fla_delta")
ALL_PEERS = (*PEERS, *PEERS_OF_DELTA)
DEFAULT_PEERS, DEFAULT_PEERS_OF_DELTA = ("xla", "parallel"), tuple(DELTA_RULES)


def time_jax(
    name: str, preset: dict, length: int, repeats: int = 10, max_scores: int = MAX_SCORES, profile: bool = False
) -> dict[str, Any]:
    """forward_ms, both_ms, forward_bytes and both_bytes of a peer in JAX, and with `profile` forward_kernels and both_kernels.
    A preset's chunk_size, if it has one, is for those that are CHUNKED. Raises Skip if it can't be timed here."""
    if name == "parallel" and preset["batch"] * preset["heads"] * length**2 > max_scores:
        raise Skip("too many scores")
    if name == "flash" and jax.default_backend() != "gpu":
        raise Skip("cuDNN needs a GPU")
    function = (DELTA_PEERS if preset.get("delta") else JAX_PEERS)[name]
    if (chunk_size := preset.get("chunk_size")) and name in CHUNKED:
        function = functools.partial(function, chunk_size=chunk_size)

    first = draw_inputs(preset, length, 0)
    sets = min(max(-(-ROTATED_BYTES // sum(x.nbytes for x in first)), 2), MAX_SETS)
    inputs = [first, *(draw_inputs(preset, length, seed) for seed in range(1, sets))]
    found = kernels.time_passes(function, inputs, profile, repeats=repeats)
    calls = dict(forward=lambda *x: function(*x[:-1]), both=functools.partial(kernels.both_passes, function))
    for kind, call in calls.items():
        found[f"{kind}_bytes"] = jax.jit(call).lower(*first).compile().memory_analysis().temp_size_in_bytes
    return found


# --- flash-linear-attention, in torch -----------------------------------------------------------------------------------


def time_fla(preset: dict, length: int, repeats: int = 10, profile: bool = False) -> dict[str, Any]:
    """The same of fla's kernel, in torch, in this process."""
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.log_linear_attn import chunk_log_linear_attn
    except ImportError as error:
        raise Skip(str(error)) from error
    dtype = getattr(torch, preset["dtype"])
    function = functools.partial(chunk_gated_delta_rule, scale=1.0) if preset.get("delta") else chunk_log_linear_attn

    def to_torch(x):
        return torch.from_numpy(np.array(x.astype(jnp.float32))).cuda()

    inputs = []
    for seed in range(2):
        q, k, v, log_decay, lam, *beta, cotangent = draw_inputs(preset, length, seed)
        # fla's kernel multiplies scores of q's dtype by λ: it takes λ in that dtype only.
        lam_or_beta = beta[0] if beta else lam
        tensors = [to_torch(x).to(dtype) for x in (q, k, v)] + [to_torch(log_decay), to_torch(lam_or_beta).to(dtype)]
        inputs.append(([x.requires_grad_() for x in tensors], to_torch(cotangent).to(dtype)))

    def forward(tensors, _):
        with torch.no_grad():
            return function(*tensors)[0]

    def both(tensors, cotangent):
        out = function(*tensors)[0]
        return out, torch.autograd.grad(out, tensors, cotangent)

    result = {}
    for kind, call in (("forward", forward), ("both", both)):
        outputs = call(*inputs[0])
        outputs = [outputs] if kind == "forward" else [outputs[0], *outputs[1]]
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - sum(x.numel() * x.element_size() for x in outputs)
        del outputs
        torch.cuda.reset_peak_memory_stats()
        outputs = call(*inputs[0])
        outputs = [outputs] if kind == "forward" else [outputs[0], *outputs[1]]
        torch.cuda.synchronize()
        of_outputs = sum(x.numel() * x.element_size() for x in outputs)
        result[f"{kind}_bytes"] = torch.cuda.max_memory_allocated() - kept - of_outputs
        del outputs

        class Wait:
            def block_until_ready(self):
                torch.cuda.synchronize()

        def thunk(call=call):
            for arguments in inputs:
                call(*arguments)
            return Wait()

        result |= kernels.measured(kind, thunk, len(inputs), profile, repeats=repeats)
    if length <= 4096:
        same = gated_delta if preset.get("delta") else log_linear_attention
        ours = same(*draw_inputs(preset, length, 0)[:-1])
        theirs = forward(*inputs[0]).float().cpu().numpy()
        ours = np.asarray(ours.astype(jnp.float32))
        result["difference"] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    return result


def release_memory() -> None:
    gc.collect()
    if jax.default_backend() == "gpu":
        try:
            import torch
        except ImportError:
            return
        torch.cuda.empty_cache()


# --- Report -------------------------------------------------------------------------------------------------------------


def measure(
    preset: dict,
    lengths: list[int],
    peers: list[str],
    repeats: int = 10,
    max_scores: int = MAX_SCORES,
    save: Callable[[dict], None] = lambda results: None,
    profile: bool = False,
) -> tuple[dict[str, dict[int, dict]], bool]:
    """(peer -> length -> times and bytes, whether all went well). A length that cannot run is left out, and the reason printed;
    all went well if that was only what `Skip` says.

    repeats: timed, of which the median counts. max_scores: of B·H·T², above which the parallel form is skipped. `save` is
    called with what there is after each length. profile: print each kernel's time, too.
    """
    results: dict[str, dict[int, dict]] = {peer: {} for peer in peers}
    well = True
    for length in lengths:
        for peer in peers:
            try:
                if peer in ("fla", "fla_delta"):
                    found = time_fla(preset, length, repeats, profile)
                else:
                    found = time_jax(peer, preset, length, repeats, max_scores, profile)
                results[peer][length] = found
                extra = f", output differs from ours by {found['difference']:.1e}" if "difference" in found else ""
                print(f"T={length} {peer}: {found['forward_ms']:.3f} / {found['both_ms']:.3f} ms{extra}", flush=True)
                kernels.print_tables(f"T={length} {peer}", found)
            except Exception as reason:  # out of memory, a compiler of the peer's: the others are still measured
                if not isinstance(reason, Skip):
                    if not _of_peer(reason):
                        raise
                    well = False
                print(f"T={length} {peer}: not measured, {(str(reason).splitlines() or ['?'])[0][:200]}", flush=True)
            release_memory()
        save(results)
    return results, well


def _of_peer(error: Exception) -> bool:
    """Whether an error is the device's or a peer's; any other is a bug here."""
    if isinstance(error, (jax.errors.JaxRuntimeError, UnsupportedError)):
        return True
    raised_in = list(traceback.walk_tb(error.__traceback__))[-1][0].f_globals.get("__name__", "")
    modules = (type(error).__module__, raised_in)
    return any(f"{module}.".startswith(f"{peer}.") for module in modules for peer in PEERS_CODE)


def table(results: dict, lengths: list[int], kind: str, unit: float) -> str:
    def cell(found):
        return f"{found[f'forward_{kind}'] / unit:.3g} / {found[f'both_{kind}'] / unit:.3g}"

    rows = []
    for peer, by_length in results.items():
        row = {"": peer} | {f"T={n}": cell(by_length[n]) for n in lengths if n in by_length}
        longest = max((n for n in by_length if n // GROWTH in by_length), default=None)
        if kind == "ms" and longest:
            short, long = by_length[longest // GROWTH], by_length[longest]
            factors = " / ".join(f"{long[key] / short[key]:.1f}×" for key in ("forward_ms", "both_ms"))
            row[f"growth over {GROWTH}× T"] = f"{longest // GROWTH} → {longest}: {factors}"
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", missingval="–")


STYLES = {  # label, colour (Okabe and Ito's, safe for the colour-blind), marker
    "pallas": ("log-linear, best kernels (ours)", "#D55E00", "o"),
    "xla": ("log-linear, XLA (ours)", "#E69F00", "s"),
    "fla": ("log-linear, flash-linear-attention", "#0072B2", "^"),
    "flash": ("softmax, cuDNN FlashAttention", "#009E73", "D"),
    "gated_linear": ("gated linear (λ ≡ 1), XLA (ours)", "#CC79A7", "v"),
    "copy": ("inputs and outputs moved once", "#000000", "_"),
    "parallel": ("log-linear, parallel (ours)", "#56B4E9", "x"),
    "triton": ("log-linear, kernels by Triton (ours)", "#B07AA1", "P"),
    "jla": ("one state, jax-linear-attention", "#666666", "*"),
    "recurrent": ("log-linear, recurrent (ours)", "#F0E442", "+"),
    "log_linear_delta": ("log-linear delta rule (ours)", "#D55E00", "o"),
    "gated_delta": ("delta rule, one state (ours)", "#E69F00", "s"),
    "jla_delta": ("delta rule, one state, jax-linear-attention", "#666666", "*"),
    "fla_delta": ("delta rule, one state, flash-linear-attention", "#0072B2", "^"),
    "log_linear_delta_xla": ("log-linear delta rule, XLA (ours)", "#56B4E9", "x"),
    "log_linear_delta_pallas": ("log-linear delta rule, kernels (ours)", "#009E73", "D"),
    "gated_delta_xla": ("delta rule, one state, XLA (ours)", "#F0E442", "+"),
    "gated_delta_pallas": ("delta rule, one state, kernels (ours)", "#CC79A7", "v"),
}


def growth_in_words(results: dict) -> str:
    """How much longer GROWTH times the tokens take, forward and backward: the first peer, and the one that grows most."""
    factors = {}
    for peer, by_length in results.items():
        longest = max((n for n in by_length if n // GROWTH in by_length), default=None)
        if longest is not None and peer != "copy":
            factors[peer] = by_length[longest]["both_ms"] / by_length[longest // GROWTH]["both_ms"]
    if not factors:
        return ""
    ours = next(iter(factors))
    shown = dict.fromkeys([ours, max(factors, key=factors.get)])
    words = [f"{STYLES[peer][0]} takes {factors[peer]:.0f} times as long" for peer in shown]
    return f"For {GROWTH} times the tokens " + ", ".join(words)


def draw(results: dict, title: str, path: Path) -> None:
    """Time of the forward pass, of both passes, and memory, against T; log-log."""
    from loglinear_jax.analysis.style import FULL_WIDTH, new_figure, open_frame, wrap

    figure, (axes,) = new_figure(FULL_WIDTH, 4.6, columns=3)
    panels = (
        ("forward_ms", 1, "forward (ms)"),
        ("both_ms", 1, "forward + backward (ms)"),
        ("both_bytes", 1 << 20, "memory beyond inputs and outputs (MiB)"),
    )
    for axis, (key, unit_size, label) in zip(axes, panels, strict=True):
        for peer, by_length in results.items():
            name, colour, marker = STYLES[peer]
            points = [(n, found[key] / unit_size) for n, found in by_length.items() if found.get(key)]
            if points:
                axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, color=colour, label=name, lw=1.6)
        axis.set(xscale="log", yscale="log", xlabel="T (tokens)", title=label)
        axis.title.set_fontsize(9)
        lengths = sorted({n for by_length in results.values() for n in by_length})
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        open_frame(axis)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    message = growth_in_words(results)
    figure.suptitle(wrap(f"{message}\n{title}" if message else title, FULL_WIDTH, 10), fontsize=10)
    figure.savefig(path, dpi=150)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=list(PRESETS), default="small", help="shapes (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=comma_separated(size),
        default=[256 << n for n in range(8)],
        help="tokens (default: 256 to 32768)",
    )
    parser.add_argument(
        "--peers",
        type=comma_separated(one_of(ALL_PEERS)),
        help=f"what to time, of {', '.join(ALL_PEERS)} (default: {','.join(DEFAULT_PEERS)}, of the delta rule "
        f"{','.join(DEFAULT_PEERS_OF_DELTA)})",
    )
    parser.add_argument("--repeats", type=size, default=10, help="timed repeats, of which the median counts")
    parser.add_argument(
        "--max_scores",
        type=functools.partial(whole_number, least=1),
        default=MAX_SCORES,
        help="skip the parallel form above this many scores (B·H·T²)",
    )
    parser.add_argument(
        "--chunk_size",
        type=power_of_two,
        help=f"tokens a chunk, a power of two, of {', '.join(sorted(CHUNKED))} (default: what they choose)",
    )
    kernels.add_kernels(parser)
    common.add_output(parser, (".json", ".png"))


def run(args: argparse.Namespace) -> int:
    kernels.check_kernels(args)
    preset, lengths = PRESETS[args.preset] | {"chunk_size": args.chunk_size}, sorted(args.lengths)
    delta = preset.get("delta", False)
    of_preset = PEERS_OF_DELTA if delta else PEERS
    peers = args.peers or list(DEFAULT_PEERS_OF_DELTA if delta else DEFAULT_PEERS)
    if wrong := [peer for peer in peers if peer not in of_preset]:
        raise BadInput(
            f"--peers: {wrong[0]} is not a peer of --preset={args.preset}: expected some of {', '.join(of_preset)}"
        )
    shape = "B={batch} H={heads} G={groups} K={key_dim} V={value_dim} {dtype}".format(**preset)
    origin = provenance.origin(args.called)
    moved = {n: moved_bytes(preset, n) for n in lengths}
    bandwidth = {"at_start": timing.steady(timing.copy_bandwidth)}

    def copy() -> dict[int, dict]:
        best = max(bandwidth.values())
        return {n: dict(forward_ms=1e3 * moved[n][0] / best, both_ms=1e3 * moved[n][1] / best) for n in lengths}

    def save(results: dict) -> None:
        record = origin | preset | {"copy_bytes_per_second": max(bandwidth.values())}
        record |= {f"copy_bytes_per_second_{when}": value for when, value in bandwidth.items()}
        common.write_record(args.output, record | {"results": results})
        if args.output:
            draw(results | {"copy": copy()}, f"{origin['machine']}, {shape}", common.output_file(args.output, ".png"))

    results, well = measure(preset, lengths, peers, args.repeats, args.max_scores, save, args.kernels)
    bandwidth["at_end"] = timing.steady(timing.copy_bandwidth)
    save(results)
    best = max(bandwidth.values())
    print(f"\n{origin['machine']}, {shape}, copy {best / 1e12:.2f} TB/s; forward / forward + backward, ms\n")
    print(table(results | {"copy": copy()}, lengths, "ms", 1))
    print("\nPeak memory beyond inputs and outputs, MiB\n")
    print(table(results, lengths, "bytes", 1 << 20))
    return 0 if well else 1
