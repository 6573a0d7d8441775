"""What the search for tiles tries."""

import jax
import jax.numpy as jnp
import pytest

from loglinear_jax.benchmarks import tiles
from loglinear_jax.commands.main import main
from pallas_kernels import attention
from pallas_kernels.tiles import Tiles


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


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="runs on a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["benchmark", "tiles"]) == 2
    err = capsys.readouterr().err
    assert "GPU" in err and err.count("\n") == 1
