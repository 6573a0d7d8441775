"""Tiles fit the shapes they are chosen for."""

import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.tiles import choose_tiles
from pallas_kernels.common.tiles import Launch


@given(
    length=st.integers(1, 1 << 20),
    key_dim=st.sampled_from([16, 32, 64, 128, 256]),
    value_dim=st.integers(16, 256),
    reps=st.integers(1, 50),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_programs_take_whole_heads_or_whole_fractions(length, key_dim, value_dim, reps, dtype):
    tiles = choose_tiles(length, key_dim, value_dim, dtype)
    assert 16 <= tiles.chunk <= max(2 * length - 1, 16)
    value_blocks = -(-value_dim // tiles.value_block)
    assert tiles.value_block < 2 * value_dim
    fitted = tiles.fitted(reps * value_blocks, value_blocks, groups=1)
    launches = [launch for launch in vars(fitted).values() if isinstance(launch, Launch)]
    assert len(launches) == 7
    for launch in launches:
        assert (reps * value_blocks) % launch.heads == 0
        assert launch.heads % value_blocks == 0 or value_blocks % launch.heads == 0


def test_programs_for_hopper_fill_its_multiprocessors():
    few, many = (HopperTiles().filling(48, 2, length) for length in (2048, 8192))
    assert (few.chunk_states, few.outputs, few.query_gradients, few.chunk_gradients) == (6, 6, 6, 12)
    assert (many.chunk_states, many.outputs, many.query_gradients, many.chunk_gradients) == (24, 24, 24, 48)
    assert many.fitted(48, 1, groups=2) == many
    alone = HopperTiles().filling(1, 1, 8192).fitted(1, 1, groups=1)
    assert (alone.outputs, alone.chunk_gradients, alone.state_gradients) == (1, 1, 1)
    assert HopperTiles().filling(6, 1000, 100_000).outputs == 6  # too many programs to follow


def test_programs_for_hopper_take_several_groups_of_one_head():
    tiles = HopperTiles().filling(1, 16, 8192, sequences=2)
    assert tiles.chunk_states == 1
    for heads in (tiles.outputs, tiles.query_gradients, tiles.chunk_gradients):
        assert heads > 1
        assert 16 % heads == 0
    assert tiles.fitted(1, 1, groups=16) == dataclasses.replace(tiles, state_gradients=1)
    assert tiles.fitted(1, 1, groups=1).chunk_gradients == 1


@pytest.mark.parametrize(
    ("warpgroups", "value_block", "heads", "expected"),
    [(2, 64, 24, 2), (2, 64, 5, 1), (2, 64, 9, 1), (3, 64, 9, 3), (3, 64, 1, 1), (2, 128, 8, 1)],
)
def test_warpgroups_share_heads_equally(warpgroups, value_block, heads, expected):
    tiles = HopperTiles(warpgroups=warpgroups, value_block=value_block)
    assert tiles.sharing_warpgroups(heads) == expected
