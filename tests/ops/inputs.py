"""Random inputs and comparisons for the attention tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax import num_levels

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


def extreme_decays(kind, length):
    """Log decays [1, T, 2], with which a naive cumulative sum is neither finite nor accurate."""
    rng, shape = np.random.default_rng(8), (1, length, 2)
    return {
        "none": np.zeros(shape),
        "strong": np.full(shape, -50.0),
        "uniform": rng.uniform(-50, 0, shape),
        # Mostly slow forgetting with sudden losses: small differences of large sums.
        "mixed": np.where(rng.random(shape) < 0.2, -50.0, -0.01 * rng.random(shape)),
        "reset": np.where(rng.random(shape) < 0.1, -np.inf, -0.01),
    }[kind]


def relative_error(out, expected):
    """‖out − expected‖ / ‖expected‖, in float64; nan never passes a comparison."""
    out, expected = (np.asarray(x, np.float64) for x in (out, expected))
    return np.linalg.norm(out - expected) / max(np.linalg.norm(expected), 1e-30)


def worst_token(out, expected):
    """The largest ‖out − expected‖ of a token, [B, T, ...], against the root mean square of ‖expected‖ over tokens."""
    out, expected = (np.asarray(x, np.float64).reshape(*x.shape[:2], -1) for x in (out, expected))
    sizes = np.linalg.norm(expected, axis=-1)
    return np.max(np.linalg.norm(out - expected, axis=-1)) / max(np.sqrt(np.mean(sizes**2)), 1e-30)


def definition(q, k, v, log_decay, lam, beta=None):
    """The sum of design §1, term by term in NumPy; with beta log-linear Gated DeltaNet: what is read of a token goes backwards
    through the transitions of those after it."""
    q, k, v, log_decay, lam = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, lam))
    out = np.zeros_like(v)
    for b, t, h in np.ndindex(v.shape[:3]):
        group = h // (v.shape[2] // q.shape[2])
        reads = q[b, t, group]
        for s in range(t, -1, -1):
            key, rate = k[b, s, group], 1.0 if beta is None else float(beta[b, s, h])
            found, level = reads @ key, len(f"{t ^ s:b}") if t > s else 0
            out[b, t, h] += lam[b, t, h, level] * found * rate * v[b, s, h]
            reads = np.exp(log_decay[b, s, h]) * (reads if beta is None else reads - rate * found * key)
    return out


def bucket_definition(q, k, log_decay):
    """Bucket scores: of each level alone, what values of one give."""
    levels = num_levels(log_decay.shape[1])
    ones, of_level = np.ones((*log_decay.shape, 1)), np.eye(levels)
    lams = (np.broadcast_to(of_level[level], (*log_decay.shape, levels)) for level in range(levels))
    return np.concatenate([definition(q, k, ones, log_decay, lam) for lam in lams], axis=-1)


def softmax_definition(q, k, v, window=None):
    """Softmax attention term by term in NumPy, with pairs of features as complex numbers that positions rotate."""
    half = q.shape[-1] // 2

    def rotate(x):
        x = np.asarray(x, np.float64)
        turn = np.exp(1j * np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half))[:, None]
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    q, k, v = rotate(q), rotate(k), np.asarray(v, np.float64)
    per_group = v.shape[2] // q.shape[2]
    out = np.zeros_like(v)
    for b, t, h in np.ndindex(v.shape[:3]):
        seen = slice(0 if window is None else max(t + 1 - window, 0), t + 1)
        scores = np.exp(k[b, seen, h // per_group] @ q[b, t, h // per_group] / np.sqrt(q.shape[-1]))
        out[b, t, h] = scores @ v[b, seen, h] / scores.sum()
    return out
