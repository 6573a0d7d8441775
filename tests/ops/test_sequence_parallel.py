"""Sequences that are cut over four devices: as on one device, with the collectives that they should have and no other."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import pallas_kernels
from loglinear_jax import init_fenwick_state, log_linear_attention
from loglinear_jax.ops.softmax import parallel
from pallas_kernels.common import support

from .forms import FORMS, HAS_GPU, in_tiers, kernels_run, types_of
from .inputs import random_inputs, relative_error

pytestmark = pytest.mark.skipif(HAS_GPU, reason="takes four CPU devices")

CASES = in_tiers([form for form in FORMS if str(form) != "softmax-recurrent"])
XLA = [form for form in FORMS if form.name == "xla"]
LOG_LINEAR_XLA = XLA[0]
PIECES = PartitionSpec(None, "sequence")


def over_pieces(form, devices=4, mapped=False, **options):
    """The form's function of arrays of tokens and, last, of segment ids or None, over a mesh of so many devices. mapped: arrays
    of tokens have an axis before."""
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def run(*arrays):
        *tokens, segment_ids = arrays
        return form(tokens, segment_ids=segment_ids, axis_name="sequence", **options)

    pieces = PIECES
    if mapped:
        of_one, pieces = run, PartitionSpec(None, *PIECES)
        run = lambda *arrays: jax.vmap(lambda *tokens: of_one(*tokens, None))(*arrays[:-1])  # noqa: E731
    # Pallas's interpreter mixes arrays that vary over the devices with indices that do not.
    return jax.shard_map(run, mesh=mesh, in_specs=pieces, out_specs=pieces, check_vma=form.name != "pallas")


def whole(form, *arrays):
    *tokens, segment_ids = arrays
    return form.operation.function(*tokens, segment_ids=segment_ids, implementation=form.operation.oracle)


def output_and_gradients(run):
    def both(*arrays):
        *tokens, segment_ids = arrays
        out, pull = jax.vjp(lambda *tokens: run(*tokens, segment_ids), *tokens)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return jax.jit(both)


def segments_of(batch, length):
    """One starts inside of a piece, one at a cut, one goes over three pieces; in the other rows, one of one token before a cut,
    and one over all."""
    piece = length // 4
    rows = [np.searchsorted([piece // 2, piece], np.arange(length), side="right"), np.arange(length) // (piece - 1)]
    rows.append(np.zeros(length, int))
    return jnp.asarray(np.stack(rows[:batch]), jnp.int32)


def of_segments(case):
    """The same form with several segments in each sequence. The fast tier has one such form."""
    (form,) = case.values
    return pytest.param(form, True, id=f"{case.id}-segments", marks=() if form is LOG_LINEAR_XLA else pytest.mark.slow)


@pytest.mark.parametrize(
    ("form", "segmented"),
    [pytest.param(*case.values, False, id=f"{case.id}-whole", marks=case.marks) for case in CASES]
    + [of_segments(case) for case in CASES],
)
def test_as_on_one_device(form, segmented):
    """Forward one all-gather, of a state for each head, and of segments the last id of the piece before. Backward one
    reduce-scatter, and nothing else of either. Softmax attention gathers keys, values and ids."""
    with types_of(form), kernels_run():
        inputs = form.operation.inputs(0, 3, 64, 2, 4, 16, 16, dtype=form.dtype, min_decay=-0.3)
        arrays = (*inputs, segments_of(3, 64) if segmented else None)
        forward = over_pieces(form)
        compiled = output_and_gradients(forward).lower(*arrays).compile()
        expected = output_and_gradients(functools.partial(whole, form))(*arrays)
        for name, x, y in zip(("o", *form.operation.arguments), compiled(*arrays), expected, strict=True):
            assert relative_error(x, y) < form.gradient_tolerance, name
        moved_forward = collectives(jax.jit(forward).lower(*arrays).compile())
    if form.operation.name == "softmax":
        gathers, scatters, of_ids = 2 + segmented, 2, {}
    else:
        gathers, scatters, of_ids = 1, 1, {"collective-permute": 1} if segmented else {}
    assert moved_forward == {"all-gather": gathers, **of_ids}
    assert collectives(compiled) == {"all-gather": gathers, "reduce-scatter": scatters, **of_ids}


def collectives(compiled):
    """How many of each the program has."""
    moves = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    names = re.findall(moves, compiled.as_text())
    return {name: names.count(name) for name in names}


BY_KERNELS = [case for case in CASES if case.values[0].name == "pallas"]


@pytest.mark.parametrize(("length", "segmented"), [(32, True), (256, False), (256, True)])
@pytest.mark.parametrize("form", BY_KERNELS)
def test_pieces_shorter_than_a_kernel_s_chunk_and_of_several(form, length, segmented):
    """In these the kernels of log-linear attention exchange states between those that make and those that read them."""
    with kernels_run():
        inputs = form.operation.inputs(0, 2, length, 1, 2, 16, 16, dtype=np.float32, min_decay=-0.02)
        arrays = (*inputs, segments_of(2, length) if segmented else None)
        found = output_and_gradients(over_pieces(form, chunk_size=16))(*arrays)
        expected = output_and_gradients(functools.partial(whole, form))(*arrays)
        for name, x, y in zip(("o", *form.operation.arguments), found, expected, strict=True):
            assert relative_error(x, y) < form.gradient_tolerance, name


@pytest.mark.parametrize("capability", [(8, 0), pytest.param((9, 0), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("form", BY_KERNELS)
def test_kernels_on_gpus_are_traced(form, capability, monkeypatch):
    """With JAX's check of what varies over the devices, which the interpreter does without; the batch is sharded, too."""
    monkeypatch.setattr(support, "why_no_device", lambda: None)
    monkeypatch.setattr(support, "compute_capability", lambda: capability)
    shape, dtype = ((2, 128, 2, 4, 16, 16), np.float32) if capability < (9, 0) else ((2, 512, 1, 4, 64, 64), "bfloat16")
    arrays = (*form.operation.inputs(0, *shape, dtype=dtype), segments_of(2, shape[1]))
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)

    def run(*arrays):
        return form(arrays[:-1], segment_ids=arrays[-1], axis_name="sequence", chunk_size=None)

    spec = PartitionSpec("data", "sequence")
    with pallas_kernels.interpret(False):
        traced = jax.make_jaxpr(output_and_gradients(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)))
        assert "reduce_scatter" in str(traced(*arrays))


@pytest.mark.parametrize("form", [LOG_LINEAR_XLA, *BY_KERNELS])
def test_seeds_that_are_mapped(form):
    """vmap inside of shard_map: seeds are mapped where sequences are cut, outputs and gradients."""
    with types_of(form), kernels_run():
        seeds = [form.operation.inputs(seed, 2, 64, 2, 4, 16, 16, dtype=form.dtype, min_decay=-0.3) for seed in (0, 1)]
        found = output_and_gradients(over_pieces(form, mapped=True))(*map(jnp.stack, zip(*seeds, strict=True)), None)
        of_one = output_and_gradients(jax.vmap(functools.partial(whole, form), in_axes=(0,) * len(seeds[0]) + (None,)))
        expected = of_one(*map(jnp.stack, zip(*seeds, strict=True)), None)
        for x, y in zip(found, expected, strict=True):
            assert relative_error(x, y) < form.gradient_tolerance


@pytest.mark.parametrize("form", in_tiers(XLA))
def test_nan_of_a_later_piece_reaches_no_earlier_one(form):
    with types_of(form):
        inputs = form.inputs(0, 1, 64, 1, 1)
        k = form.operation.arguments.index("k")
        spoiled = [x.at[:, 41].set(jnp.nan) if i == k else x for i, x in enumerate(inputs)]
        out = jax.jit(over_pieces(form))(*spoiled, None)
        first = form.first_reached("k", 41)
        np.testing.assert_array_equal(jnp.isnan(out).any((0, 2, 3))[:48], np.arange(48) >= first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(axis_name="rows"), "axis_name is 'rows': expected an axis of the mesh"),
        (dict(return_state=True), "return_state is True: expected False with axis_name"),
        (dict(first_position=4), "first_position is 4: expected 0 with axis_name"),
        (
            dict(initial_state=init_fenwick_state(1, 1, 3, 5, 64)),
            "initial_state is given: expected None with axis_name",
        ),
        (dict(length=24), "T is 6 tokens on each device: expected a power of two with axis_name = 'sequence'"),
        (dict(levels=5), r"L ≥ num_levels\(64\) = 7 for T tokens on each of 4 devices"),
    ],
)
def test_errors(options, message):
    length, levels = options.pop("length", 64), options.pop("levels", 7)
    inputs = random_inputs(0, 1, length, 1, 1, 3, 5, levels, np.float32)
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,))
    run = functools.partial(log_linear_attention, **{"axis_name": "sequence"} | options)
    with pytest.raises(ValueError, match=message):
        jax.shard_map(run, mesh=mesh, in_specs=PIECES, out_specs=PIECES)(*inputs)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_other_numbers_of_devices(devices):
    """Any number of pieces will do, only their length is a power of two."""
    form = LOG_LINEAR_XLA
    with types_of(form):
        inputs = form.operation.inputs(0, 1, 4 * devices, 1, 1, 3, 5)
        found = jax.jit(over_pieces(form, devices))(*inputs, None)
        assert relative_error(found, whole(form, *inputs, None)) < 1e-10


def test_softmax_attention_reaches_into_earlier_pieces(monkeypatch):
    """A window into the one before, or if it is longer into all; some queries of a piece at a time."""
    form = next(form for form in FORMS if str(form) == "softmax-parallel")
    with types_of(form):
        arrays = (*form.operation.inputs(0, 3, 32, 2, 4, 6, 5), segments_of(3, 32))
        for window, ids in ((None, arrays[-1]), (None, None), (11, arrays[-1]), (5, arrays[-1]), (8, None)):
            monkeypatch.setattr(parallel, "QUERIES_AT_ONCE", 32)
            expected = jax.jit(functools.partial(form.operation.function, window=window))(*arrays[:-1], segment_ids=ids)
            monkeypatch.setattr(parallel, "QUERIES_AT_ONCE", 3)
            attend = jax.jit(over_pieces(form, window=window))
            assert relative_error(attend(*arrays[:-1], ids), expected) < form.tolerance
            assert ("all_gather" in attend.lower(*arrays[:-1], ids).as_text()) == (window is None or window > 8)
        with pytest.raises(
            ValueError, match="implementation is 'recurrent': expected 'parallel' or None with axis_name"
        ):
            over_pieces(dataclasses.replace(form, name="recurrent"))(*arrays)
