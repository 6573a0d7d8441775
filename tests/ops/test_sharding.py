"""Every form of every operation over arrays that are sharded by batch and heads: as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_kernels

from .forms import FORMS, HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="takes four CPU devices")


FAST = ("log_linear", "recurrent")


def specs(arrays, heads="model"):
    """Batch and heads, or groups of heads, of [B, T, H, ...]."""
    return tuple(PartitionSpec("data", None, heads, *[None] * (x.ndim - 3)) for x in arrays)


def output_and_gradients(run):
    def both(*inputs):
        out, pull = jax.vjp(run, *inputs)
        return out, *pull(jnp.cos(jnp.arange(out.shape[-1], dtype=out.dtype)) * out)

    return both


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "pallas"], ids=str)
def test_packs_over_explicit_axes(form):
    inputs = form.operation.inputs(0, 2, 20, 2, 4, 16, 16, dtype=np.float32)
    segment_ids = jnp.arange(40).reshape(2, 20) // 7
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((*inputs, segment_ids), (*specs(inputs), PartitionSpec("data")), strict=True)
    ]

    def run(*arrays):
        return form.operation.function(*arrays[:-1], segment_ids=arrays[-1], implementation=form.name)

    np.testing.assert_allclose(jax.jit(run)(*placed), run(*inputs, segment_ids), rtol=1e-4, atol=1e-4)


CASES = [
    pytest.param(
        form, how, id=f"{form}-{how}", marks=[] if (form.operation.name, form.name) == FAST else pytest.mark.slow
    )
    for form in FORMS
    for how in ("explicit", "auto", "shard_map")
]


@pytest.mark.parametrize(("form", "how"), CASES)
def test_batch_and_heads(form, how):
    inputs = form.operation.inputs(0, 2, 20, 2, 4, 16, 16, dtype=np.float32)
    chunk = {"chunk_size": 16} if form.name in ("xla", "pallas") else {}
    run = output_and_gradients(functools.partial(form.operation.function, implementation=form.name, **chunk))
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    heads = None if form.name == "pallas" and how != "shard_map" else "model"  # kernels share out the batch alone
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    with pallas_kernels.interpret(form.name == "pallas"):
        expected = jax.jit(run)(*inputs)
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, specs(inputs, heads), strict=True)
        ]
        if how == "shard_map":  # Pallas's interpreter mixes arrays that vary over the devices with indices that do not
            shards = dict(in_specs=specs(inputs), out_specs=specs(expected), check_vma=form.name != "pallas")
            run = jax.shard_map(run, mesh=mesh, **shards)
        compiled = jax.jit(run).lower(*placed).compile()
        out = compiled(*placed)
    for x, y in zip(out, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        assert (*x.sharding.spec, None, None)[:3:2] == ("data", heads)
    assert not any(moved in compiled.as_text() for moved in ("all-gather(", "all-reduce(", "all-to-all(", "permute("))
