"""Random inputs and comparisons for the attention tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax import log_linear_attention, num_levels

ARGUMENTS = ("q", "k", "v", "log_decay", "lam")


def in_float64(test):
    """Runs a test with 64-bit types on; unlike a fixture, also inside hypothesis."""

    @functools.wraps(test)
    def wrapped(*args, **kwargs):
        with jax.enable_x64(True):
            return test(*args, **kwargs)

    return wrapped


def random_inputs(
    seed, batch, length, groups, heads, key_dim, value_dim, levels=None, dtype=np.float64, min_decay=-2.0
):
    """q, k, v, log_decay, lam; log_decay is uniform in [min_decay, 0]."""
    rng = np.random.default_rng(seed)
    levels = num_levels(length) if levels is None else levels

    def normal(*shape):
        return rng.normal(size=shape)

    decay_dtype = np.promote_types(np.float32, np.float64 if dtype == np.float64 else np.float32)
    return (
        jnp.asarray(normal(batch, length, groups, key_dim), dtype),
        jnp.asarray(normal(batch, length, groups, key_dim), dtype),
        jnp.asarray(normal(batch, length, heads, value_dim), dtype),
        jnp.asarray(rng.uniform(min_decay, 0, size=(batch, length, heads)), decay_dtype),
        jnp.asarray(np.abs(normal(batch, length, heads, levels)), decay_dtype),
    )


def relative_error(out, expected):
    """‖out − expected‖ / ‖expected‖, in float64; nan never passes a comparison."""
    out, expected = (np.asarray(x, np.float64) for x in (out, expected))
    return np.linalg.norm(out - expected) / max(np.linalg.norm(expected), 1e-30)


def definition(q, k, v, log_decay, lam, start=0):
    """The sum of design §1, term by term in NumPy, with the level by comparing bits one at a time."""
    q, k, v, log_decay, lam = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, lam))
    batch, length, heads, _ = v.shape
    per_group = heads // q.shape[2]
    out = np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            g = h // per_group
            for t in range(length):
                for s in range(t + 1):
                    level = 0
                    while (start + t) >> level != (start + s) >> level:
                        level += 1
                    weight = lam[b, t, h, level] * np.exp(log_decay[b, s + 1 : t + 1, h].sum())
                    out[b, t, h] += weight * (q[b, t, g] @ k[b, s, g]) * v[b, s, h]
    return out


def outputs_and_gradients(inputs, initial_state=None, **kwargs):
    """Output, final levels, and gradients of a random linear function of both, in every input (and the initial levels)."""
    rng = np.random.default_rng(0)
    levels = None if initial_state is None else initial_state.levels

    def forward(inputs, levels):
        state = None if levels is None else initial_state.replace(levels=levels)
        return log_linear_attention(*inputs, initial_state=state, return_state=True, **kwargs)

    out, state = jax.eval_shape(forward, inputs, levels)
    weights = jnp.asarray(rng.normal(size=out.shape)), jnp.asarray(rng.normal(size=state.levels.shape))

    def scalar(inputs, levels):
        out, state = forward(inputs, levels)
        return jnp.sum(out * weights[0]) + jnp.sum(state.levels * weights[1]), (out, state)

    grad = jax.grad(scalar, argnums=(0,) if levels is None else (0, 1), has_aux=True)
    gradients, (out, state) = jax.jit(grad)(inputs, levels)
    return out, state, dict(zip((*ARGUMENTS, "initial_levels"), jax.tree.leaves(gradients), strict=False))
