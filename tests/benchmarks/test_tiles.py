"""What the search for tiles tries."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from loglinear_jax.benchmarks import tiles
from loglinear_jax.commands.main import main
from pallas_kernels.attention import api as attention
from pallas_kernels.attention.hopper.tiles import GROUPS_A_PROGRAM, HEADS_A_PROGRAM, choose_hopper_tiles
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.common import support


def sizes(length):
    return attention.sizes_for(1, length, 1, 4, 16, 16, jnp.dtype("float32"), "highest", Tiles().with_chunk(64))


def test_every_kernel_is_tried_with_every_launch():
    tried = tiles.Tried(
        spans=(2,), heads_a_program=(1, 3, 4), elements=(512,), radices=(8, 16), warps=(4,), stages=(1, 2)
    )
    counts = {}
    for name, _, _ in tiles.candidates(sizes(256), tried):
        counts[name] = counts.get(name, 0) + 1
    # Two launches; times heads, of which 3 do not divide 4; or times spans; or warps times radices.
    assert counts == {
        "outputs": 4,
        "state_gradients": 2,
        "query_gradients": 4,
        "chunk_gradients": 4,
        "chunk_states": 2,
        "spread_gradients": 2,
        "merge_states": 2,
    }
    one_chunk = {name for name, _, _ in tiles.candidates(sizes(64), tried)}
    assert one_chunk == {"outputs", "chunk_gradients"}


@pytest.mark.skipif(support.mosaic is None, reason="needs JAX 0.11.2, which needs Python 3.12")
def test_every_kernel_for_hopper_is_tried():
    few = attention.sizes_for(1, 300, 1, 2, 64, 64, jnp.dtype("bfloat16"), None, choose_hopper_tiles(300, 64))
    few = dataclasses.replace(few, interpret=True)
    inputs = tiles.draw_inputs(0, few, "hopper")
    kernels = list(tiles.hopper_candidates(few, tiles.Tried(heads_a_program=(2, 3), radices=(4,))))
    assert [(name, settings) for name, settings, _ in kernels] == [
        *(("chunk_states", (1, span, 1)) for span in (1, 2)),  # of one head, warpgroups have nothing to share
        *(("chunk_states", (2, span, warpgroups)) for span in (1, 2) for warpgroups in (1, 2)),
        *((name, heads) for name in HEADS_A_PROGRAM if name != "chunk_states" for heads in (1, 2)),
        ("spread_gradients", 4),
        ("merge_states", 4),
    ]
    for _, _, call in kernels:
        jax.eval_shape(call, inputs)


@pytest.mark.skipif(support.mosaic is None, reason="needs JAX 0.11.2, which needs Python 3.12")
def test_kernels_for_hopper_are_tried_with_several_groups_of_one_head():
    few = attention.sizes_for(1, 300, 2, 2, 64, 64, jnp.dtype("bfloat16"), None, choose_hopper_tiles(300, 64))
    few = dataclasses.replace(few, interpret=True)
    inputs = tiles.draw_inputs(0, few, "hopper")
    kernels = list(tiles.hopper_candidates(few, tiles.Tried(heads_a_program=(2,), radices=(4,))))
    for_heads = {(name, settings) for name, settings, _ in kernels if name in HEADS_A_PROGRAM}
    assert for_heads == {
        *(("chunk_states", (1, span, 1)) for span in (1, 2)),
        *((name, heads) for name in GROUPS_A_PROGRAM for heads in (1, 2)),
        ("state_gradients", 1),
    }
    for _, _, call in kernels:
        jax.eval_shape(call, inputs)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="runs on a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["benchmark", "tiles"]) == 2
    err = capsys.readouterr().err
    assert "GPU" in err and err.count("\n") == 1
