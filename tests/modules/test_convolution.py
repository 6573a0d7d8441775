"""The causal convolution in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.modules import CausalConv

from ..ops.inputs import in_float64, relative_error

LENGTH, WIDTH = 12, 4


@in_float64
@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("cuts", [(), (2, 3, 9), tuple(range(1, LENGTH))])
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
