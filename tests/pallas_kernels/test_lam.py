"""The fused λ MLP against plain float64 arithmetic: in Pallas's interpreter, or on the GPU where there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from scipy import stats

import pallas_kernels
from loglinear_jax.lam import MANY_ROWS, make_lam
from pallas_kernels import registry
from pallas_kernels.common import support
from pallas_kernels.pointwise.lam_mlp import MlpSizes, normal_distribution
from tests.ops.inputs import relative_error
from tests.pallas_kernels.conftest import HAS_GPU
from tests.pallas_kernels.modes import check_against_float64, flat_value_and_gradients

pytestmark = pytest.mark.usefixtures("run_kernels")
NAMES = "d", "w1", "b1", "w2", "b2"
TOLERANCE = {"tensorfloat32": 2e-3, "highest": 1e-5}


def draw(seed, shape, levels, hidden):
    rng = np.random.default_rng(seed)
    shapes = ((*shape, levels), (levels, hidden), (hidden,), (hidden, levels), (levels,))
    return [jnp.asarray(0.5 * rng.normal(size=s), jnp.float32) for s in shapes]


def plain(d, w1, b1, w2, b2, *, out, activation):
    hidden = d @ w1 + b1
    if activation == "gelu":
        hidden = jax.nn.gelu(hidden, approximate=False)
    return {"softplus": jax.nn.softplus, "softmax": jax.nn.softmax}[out](hidden @ w2 + b2)


def check(inputs, out, activation, precision="highest"):
    kernel = functools.partial(pallas_kernels.lam_mlp, out=out, activation=activation, precision=precision)
    exact = functools.partial(plain, out=out, activation=activation)
    return check_against_float64(("lam", *NAMES), kernel, exact, inputs, TOLERANCE[precision])


@settings(max_examples=6)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    levels=st.integers(1, 20),
    hidden=st.sampled_from([1, 5, 16, 22, 64]),
    out=st.sampled_from(["softplus", "softmax"]),
    activation=st.sampled_from(["gelu", "identity"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_value_and_gradients(shape, levels, hidden, out, activation, seed):
    with pallas_kernels.interpret(not HAS_GPU):
        check(draw(seed, shape, levels, hidden), out, activation)


def test_more_rows_than_one_pass_of_the_programs():
    check(draw(0, (3, 1111), 7, 128), "softplus", "gelu")


def test_mapped_twice_is_a_loop():
    inputs = [jnp.stack(x) for x in zip(*(draw(seed, (2, 9), 6, 16) for seed in range(3)), strict=True)]
    inputs = [jnp.stack([x, 2 * x]) for x in inputs]
    inputs[1] = inputs[1][0]  # w1 has no outer axis
    kernel = functools.partial(pallas_kernels.lam_mlp, out="softmax", precision="highest")
    function = jax.jit(functools.partial(flat_value_and_gradients, kernel))
    mapped = jax.jit(jax.vmap(jax.vmap(lambda *x: function(x)), (0, None, 0, 0, 0)))(*inputs)
    for outer in range(2):
        for inner in range(3):
            own = [x[inner] if i == 1 else x[outer, inner] for i, x in enumerate(inputs)]
            for result, expected in zip(mapped, function(own), strict=True):
                assert relative_error(result[outer, inner], expected) < 1e-5


def test_weights_that_all_devices_share_in_shard_map(compiling_for_a_gpu):
    inputs = [np.asarray(x) for x in draw(0, (2, 9), 6, 16)]
    mesh, shared = Mesh(np.array(jax.devices("cpu")[:2]), "devices"), PartitionSpec()
    sharded = jax.shard_map(
        functools.partial(pallas_kernels.lam_mlp, out="softmax"),
        mesh=mesh, in_specs=(PartitionSpec("devices"), *[shared] * 4), out_specs=PartitionSpec("devices"),
    )  # fmt: skip
    results = jax.eval_shape(lambda *x: flat_value_and_gradients(sharded, x), *inputs)
    assert [x.shape for x in results] == [x.shape for x in (inputs[0], *inputs)]


@pytest.mark.parametrize(("mlps", "warps", "rows"), [(1, 2, 64), (2, 4, 128), (32, 4, 128)])
def test_programs_of_several_mlps_are_larger(mlps, warps, rows):
    sizes = MlpSizes(1000, 11, 16, 32, "softplus", "gelu", "tf32", interpret=True, mlps=mlps)
    assert (sizes.launch.warps, sizes.block) == (warps, rows)


def test_normal_distribution():
    x = np.linspace(-8, 8, 10_001)
    below, density = normal_distribution(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(below, stats.norm.cdf(x), atol=1e-6)
    np.testing.assert_allclose(density, stats.norm.pdf(x), atol=1e-6)


@pytest.mark.parametrize("name", ["mlp_softplus", "mlp_softmax"])
def test_the_module_takes_the_kernel(name):
    d = draw(0, (5, 2), 6, 1)[0]
    params = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape), make_lam(name).init(jax.random.key(0), d)
    )
    kernel, plainly = (make_lam(name, implementation=i) for i in ("pallas", "xla"))
    assert "pallas_call" in str(jax.make_jaxpr(kernel.apply)(params, d))
    assert "pallas_call" not in str(jax.make_jaxpr(plainly.apply)(params, d))
    np.testing.assert_allclose(kernel.apply(params, d), plainly.apply(params, d), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("levels", "settings", "message"),
    [(32, {}, "L, the number of levels, is 32"), (6, dict(hidden=129), "d_h, the hidden width, is 129")],
)
def test_the_module_raises_where_the_kernel_that_it_is_asked_for_cannot_run(levels, settings, message):
    d = draw(0, (5, 2), levels, 1)[0]
    with pytest.raises(pallas_kernels.UnsupportedError, match=message):
        make_lam("mlp_softplus", implementation="pallas", **settings).init(jax.random.key(0), d)


def test_the_module_asks_for_the_precision_that_it_runs_in():
    d = draw(0, (5, 2), 6, 1)[0]
    with (
        jax.default_matmul_precision("bfloat16"),
        pytest.raises(pallas_kernels.UnsupportedError, match="jax_default_matmul_precision is 'bfloat16'"),
    ):
        make_lam("mlp_softplus", implementation="pallas").init(jax.random.key(0), d)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_the_module_needs_a_gpu_for_the_kernel_and_says_nothing_without(caplog):
    d = draw(0, (5, 2), 6, 1)[0]
    with pallas_kernels.interpret(False):
        make_lam("mlp_softplus").init(jax.random.key(0), d)
        with pytest.raises(pallas_kernels.UnsupportedError, match="JAX runs on cpu"):
            make_lam("mlp_softplus", implementation="pallas").init(jax.random.key(0), d)
    assert not caplog.records


def test_a_module_that_falls_back_on_a_gpu_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    registry.tell_once.cache_clear()
    d = draw(0, (MANY_ROWS,), 6, 1)[0]
    module, plainly = (make_lam("mlp_softplus", hidden=129, implementation=i) for i in (None, "xla"))
    with pallas_kernels.interpret(False):
        params = module.init(jax.random.key(0), d)
        np.testing.assert_array_equal(module.apply(params, d), plainly.apply(params, d))
    assert caplog.messages == [
        "the MLP of λ falls back to implementation='xla', which is slower: d_h, the hidden width, is 129: the kernel of the λ "
        "MLP takes 1 to 128"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["softplus", "softmax"])
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("levels", [8, 31])
@pytest.mark.parametrize("hidden", [22, 64, 128])
def test_accuracy_and_races_on_a_gpu(hidden, levels, precision, out):
    runs = [check(draw(2, (64, 256, 2), levels, hidden), out, "gelu", precision) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)
