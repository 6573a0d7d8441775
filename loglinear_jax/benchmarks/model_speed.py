"""Time and memory of the language model: training steps, and decoding behind many tokens."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.benchmarks import timing
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.tasks import Task
from loglinear_jax.train import ManySeeds, SeedTrainer, TrainSettings, device_mesh


def matmul_flops_per_token(params: Any) -> float:
    """Of a training step: 6 for each weight of a matrix product; embeddings are looked up, attention itself not counted."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    matrices = [x.size for path, x in leaves if x.ndim == 2 and "embed" not in str(path) and "conv" not in str(path)]
    return 6.0 * sum(matrices)


def matmul_rate(size: int = 8192) -> float:
    """FLOP/s of a large bfloat16 (on a CPU: float32, smaller) matrix product on one device."""
    gpu = jax.default_backend() == "gpu"
    size = size if gpu else 1024
    dtype = jnp.bfloat16 if gpu else jnp.float32
    sets = [(jnp.ones((size, size), dtype), jnp.ones((size, size), dtype)) for _ in range(2)]
    ms = timing.median_ms(timing.compile_over(jnp.dot, sets), len(sets), repeats=20, min_ms=100.0)
    return 2 * size**3 / (ms * 1e-3)


def time_training(
    settings: LanguageSettings,
    batch: int,
    length: int,
    *,
    num_seeds: int = 1,
    steps: int = 20,
    repeats: int = 3,
    precision: str | None = None,
) -> dict[str, float]:
    """Milliseconds of a step of all seeds, tokens per second, FLOP/s of the matrix products, and the devices used.

    steps: in one dispatch, of which `repeats` are timed. precision: as train.precision; settings.dtype if None.
    """
    model = LanguageModel(settings)
    train = TrainSettings(
        num_steps=100_000, batch_size=batch, learning_rate=3e-4, warmup_steps=500, schedule="cosine", weight_decay=0.1,
        num_train=None, metric="loss", stop_at=None, precision=precision or settings.dtype,
    )  # fmt: skip
    seeds = list(range(num_seeds))
    task = Task(length, settings.vocab_size)  # its batches are given below
    many = ManySeeds(SeedTrainer(model, task, train), seeds, device_mesh(len(seeds), batch))
    state = many.init(many.seeds)
    flops = matmul_flops_per_token(jax.tree.map(lambda x: x[0], state.params))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, settings.vocab_size, (num_seeds, steps, batch, length + 1), np.int32)
    data = {"batches": many.place("batches", (tokens[..., :-1], tokens[..., 1:]))}
    state = many.train_steps(state, data, steps)
    times = []
    for _ in range(repeats):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = many.train_steps(state, data, steps)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    seconds = float(np.median(times)) / steps
    rate = num_seeds * batch * length / seconds
    return {"ms": 1e3 * seconds, "tokens_per_second": rate, "flops": rate * flops, "devices": many.mesh.size}


def cache_shapes(settings: LanguageSettings, length: int) -> Any:
    """Shapes and dtypes of what one sequence remembers while decoding, with room for `length` tokens."""
    model, tokens = LanguageModel(settings), jnp.zeros((1, 1), jnp.int32)

    def prefill():
        return model.apply(model.init(jax.random.key(0), tokens), tokens, length, method="prefill")[1]

    return jax.eval_shape(prefill)


def size_in_bytes(shapes: Any) -> int:
    """Of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def time_decoding(settings: LanguageSettings, length: int, *, decoded: int = 64) -> dict[str, float]:
    """Milliseconds a token behind `length` tokens, for one sequence, and the bytes of its caches.

    decoded: tokens in one dispatch, of which five are timed.
    """
    model = LanguageModel(settings)
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    # What is remembered does not matter for the time, only its size and position.
    first = max(length - 6 * decoded, 0)  # six dispatches, the first to compile
    shapes = cache_shapes(settings, length)
    caches = jax.tree.map(lambda x: jnp.full(x.shape, first if x.shape == () else 0, x.dtype), shapes)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def decode(params, caches):
        def step(carry, _):
            token, caches = carry
            logits, caches = model.apply(params, token, caches, method="step")
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), caches), None

        return jax.lax.scan(step, (tokens[:, 0], caches), length=decoded)[0][1]

    caches = jax.block_until_ready(decode(params, caches))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        caches = jax.block_until_ready(decode(params, caches))
        times.append(time.perf_counter() - start)
    return {"ms": 1e3 * float(np.median(times)) / decoded, "bytes": size_in_bytes(shapes)}
