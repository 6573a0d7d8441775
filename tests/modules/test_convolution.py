"""The causal convolution in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import pallas_kernels
from loglinear_jax.modules import CausalConv

from ..ops.inputs import in_float64, relative_error

LENGTH, WIDTH = 12, 4


@in_float64
@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("cuts", [(2, 3, 9), tuple(range(1, LENGTH))])
def test_documents_in_a_pack_are_as_alone(has_window, cuts):
    """Outputs, the window that is left, and gradients of both."""
    rng = np.random.default_rng(0)
    x, window = (jnp.asarray(rng.normal(size=(1, length, 3))) for length in (LENGTH, WIDTH - 1))
    weights = [jnp.asarray(rng.normal(size=y.shape)) for y in (x, window)]
    conv = CausalConv(WIDTH, param_dtype=jnp.float64)
    params = conv.init(jax.random.key(0), x)
    segment_ids = jnp.asarray(np.searchsorted(cuts, np.arange(LENGTH), side="right") % 2)[None]

    def pack(params, x, window):
        return conv.apply(params, x, window if has_window else None, segment_ids)

    def alone(params, x, window):
        parts = []
        for first, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            y, after = conv.apply(params, x[:, first:end], window if has_window and first == 0 else None)
            parts.append(y)
        return jnp.concatenate(parts, axis=1), after

    def with_gradients(run):
        out, pull = jax.vjp(run, params, x, window)
        return out, pull(tuple(weights))

    got, expected = (jax.tree.leaves(jax.jit(with_gradients, static_argnums=0)(run)) for run in (pack, alone))
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) < 1e-12


def over_pieces(conv):
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,))
    pieces = PartitionSpec(None, "sequence")
    run = lambda params, x, segment_ids: conv.apply(params, x, segment_ids=segment_ids)[0]  # noqa: E731
    specs = dict(in_specs=(PartitionSpec(), pieces, pieces), out_specs=pieces)
    return jax.shard_map(run, mesh=mesh, check_vma=conv.implementation != "pallas", **specs)


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_pieces_of_a_sequence_on_four_devices(implementation, segmented):
    """As on one device, with gradients; inputs go to the next device alone."""
    conv = CausalConv(WIDTH, implementation=implementation, axis_name="sequence")
    x = jax.random.normal(jax.random.key(0), (2, 32, 16))
    params = conv.init(jax.random.key(1), x)
    ids = jnp.asarray(np.searchsorted([5, 8, 15], np.arange(64), side="right").reshape(2, 32)) if segmented else None

    def with_gradients(run):
        def both(params, x):
            y, pull = jax.vjp(lambda params, x: run(params, x, ids), params, x)
            return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

        return jax.jit(both)

    whole = CausalConv(WIDTH, implementation="xla")
    with pallas_kernels.interpret(implementation == "pallas"):
        run = with_gradients(over_pieces(conv))
        got, text = run(params, x), run.lower(params, x).compile().as_text()
    expected = with_gradients(lambda params, x, ids: whole.apply(params, x, segment_ids=ids)[0])(params, x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(one, other) < 1e-6
    assert "collective-permute" in text
    assert not any(moved in text for moved in ("all-gather", "all-to-all"))


def test_errors_of_pieces():
    conv, x = CausalConv(WIDTH, axis_name="sequence"), jnp.ones((1, 8, 3))
    params = conv.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="T = 2 tokens on each device: expected at least width - 1 = 3"):
        over_pieces(conv)(params, x, None)
    with pytest.raises(ValueError, match="axis_name is 'sequence': expected an axis of the mesh"):
        conv.apply(params, x)
    with pytest.raises(ValueError, match="window is given: expected None with axis_name"):
        conv.apply(params, x, x[:, : WIDTH - 1])
