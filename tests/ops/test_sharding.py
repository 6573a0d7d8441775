"""Every form of every operation over arrays that are sharded by batch and heads: as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_kernels
from pallas_kernels.common import support

from .forms import FORMS, HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="takes four CPU devices")


FAST = ("log_linear", "recurrent")


def specs(arrays):
    """Batch and heads, or groups of heads, of [B, T, H, ...]."""
    return tuple(PartitionSpec("data", None, "model", *[None] * (x.ndim - 3)) for x in arrays)


def output_and_gradients(run):
    def both(*inputs):
        out, pull = jax.vjp(run, *inputs)
        return out, *pull(jnp.cos(jnp.arange(out.shape[-1], dtype=out.dtype)) * out)

    return both


CASES = [
    pytest.param(
        form, how, id=f"{form}-{how}", marks=[] if (form.operation.name, form.name) == FAST else pytest.mark.slow
    )
    for form in FORMS
    for how in ("auto", "packs", *(["shard_map"] if form.name == "pallas" else []))
]


def mesh_of(kind: AxisType):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def sharded(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def placed_on(mesh, inputs):
    """Batch and heads sharded; a single group is whole everywhere."""
    return [sharded(x, mesh, "data", None, "model" if x.shape[2] > 1 else None) for x in inputs]


BY_KERNELS = [
    pytest.param(form, marks=[] if form.operation.name == "gated_linear" else pytest.mark.slow)
    for form in FORMS
    if form.name == "pallas"
]


@pytest.mark.slow
@pytest.mark.parametrize("form", BY_KERNELS, ids=str)
def test_heads_of_one_group_by_kernels(form):
    """Nothing is gathered; gradients of queries and keys are summed over the devices. And vmap's axis is sharded."""
    inputs = form.operation.inputs(0, 2, 40, 1, 4, 16, 16, dtype=np.float32)
    run = jax.jit(
        output_and_gradients(functools.partial(form.operation.function, implementation="pallas", chunk_size=16))
    )
    mesh = mesh_of(AxisType.Auto)
    with pallas_kernels.interpret():
        expected = run(*inputs)
        compiled = run.lower(*placed_on(mesh, inputs)).compile()
        found = compiled(*placed_on(mesh, inputs))
        seeds = [sharded(x[:, None], mesh, "data", None, None, "model" if x.shape[2] > 1 else None) for x in inputs]
        of_seeds = jax.vmap(lambda *x: run(*x)[0])(*seeds)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_seeds[:, 0], expected[0], rtol=1e-4, atol=1e-4)
    assert "all-reduce(" in compiled.as_text()
    assert not any(moved in compiled.as_text() for moved in ("all-gather(", "all-to-all(", "permute("))


@pytest.mark.parametrize("form", BY_KERNELS, ids=str)
def test_kernels_in_shard_map_are_traced(form, monkeypatch):
    """With states in and out, and JAX's check of what varies over the devices, which the interpreter does without."""
    monkeypatch.setattr(support, "why_no_device", lambda: None)
    monkeypatch.setattr(support, "compute_capability", lambda: (8, 0))
    inputs = form.operation.inputs(0, 2, 40, 1, 4, 16, 16, dtype=np.float32)
    state = form.operation.make_state(form.operation.draw_state(1, inputs), 32)

    def both(state, *inputs):
        options = dict(return_state=True, implementation="pallas")
        out, pull = jax.vjp(
            lambda state, *x: form.operation.function(*x, initial_state=state, **options), state, *inputs
        )
        return out[0], pull(out)[1:]

    of_state = jax.tree.map(lambda x: PartitionSpec("data", "model") if x.ndim else PartitionSpec(), state)
    of_inputs = [PartitionSpec("data", None, "model" if x.shape[2] > 1 else None) for x in inputs]
    results = of_inputs[2], tuple(of_inputs)
    both = jax.shard_map(both, mesh=mesh_of(AxisType.Auto), in_specs=(of_state, *of_inputs), out_specs=results)
    with pallas_kernels.interpret(False):
        assert "pallas_call" in str(jax.make_jaxpr(both)(state, *inputs))


@pytest.mark.parametrize(("form", "how"), CASES)
def test_batch_and_heads(form, how):
    """Packs over explicit axes, and whole sequences over others."""
    inputs = form.operation.inputs(0, 2, 20, 2, 4, 16, 16, dtype=np.float32)
    options = {"implementation": form.name} | ({"chunk_size": 16} if form.name in ("xla", "pallas") else {})
    mesh = mesh_of(AxisType.Explicit if how == "packs" else AxisType.Auto)
    segment_ids = jnp.arange(40).reshape(2, 20) // 7 if how == "packs" else None

    def of(segment_ids):
        return output_and_gradients(functools.partial(form.operation.function, segment_ids=segment_ids, **options))

    with pallas_kernels.interpret(form.name == "pallas"):
        expected = jax.jit(of(segment_ids))(*inputs)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, specs(inputs), strict=True)]
        run = of(None if segment_ids is None else sharded(segment_ids, mesh, "data"))
        if how == "shard_map":  # Pallas's interpreter mixes arrays that vary over the devices with indices that do not
            run = jax.shard_map(run, mesh=mesh, in_specs=specs(inputs), out_specs=specs(expected), check_vma=False)
        compiled = jax.jit(run).lower(*placed).compile()
        out = compiled(*placed)
    for x, y in zip(out, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * max(np.abs(y).max(), 1))
        assert (*x.sharding.spec, None, None)[:3:2] == ("data", "model")
    assert not any(moved in compiled.as_text() for moved in ("all-gather(", "all-reduce(", "all-to-all(", "permute("))
