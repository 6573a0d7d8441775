"""In which arithmetic the kernels are tested, how exact they are to be in it; and their grids."""

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

TOLERANCE = {"bf16": 1e-2, "tf32": 2e-3, "f32": 1e-5}
DTYPES = {"bf16": jnp.bfloat16, "tf32": jnp.float32, "f32": jnp.float32}
PRECISIONS = {"bf16": None, "tf32": "tensorfloat32", "f32": "highest"}
# The interpreter computes what is to be in TF32 in float32, as it does "f32".
LOWER = ["bf16", pytest.param("tf32", marks=pytest.mark.gpu)]


def grids(function, *arguments):
    """The grid of every pallas_call that function makes."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["grid_mapping"].grid
            else:
                for inner in jax.extend.core.jaxprs_in_params(equation.params):
                    yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*arguments).jaxpr))
