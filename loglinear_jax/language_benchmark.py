"""Speed of the language model: training steps, as tokens per second and model FLOP utilisation; decoding against length.

python -m loglinear_jax.language_benchmark --what=training
python -m loglinear_jax.language_benchmark --what=decoding --mixers=log_linear,softmax
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tabulate import tabulate

from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.train import ManySeeds, SeedTrainer, TrainSettings, device_mesh
from pallas_kernels import timing

WHAT = flags.DEFINE_list("what", ["training", "decoding"], "what to time")
MIXERS = flags.DEFINE_list("mixers", ["log_linear", "softmax"], "of log_linear, linear, softmax")
LAM = flags.DEFINE_string("lam", "mlp_softplus", "λ of log_linear")
HIDDEN = flags.DEFINE_integer("hidden", 512, "width of the model")
LAYERS = flags.DEFINE_integer("layers", 6, "blocks")
VOCAB = flags.DEFINE_integer("vocab", 50_257, "vocabulary")
PRECISION = flags.DEFINE_string("precision", "bfloat16", "as train.precision")
SEEDS = flags.DEFINE_integer("seeds", 1, "seeds trained at once")
SHAPES = flags.DEFINE_list("shapes", ["8x512", "64x512", "4x8192"], "batch x length of training steps")
REMAT = flags.DEFINE_string("remat", "none", "as model.remat")
STEPS = flags.DEFINE_integer("steps", 20, "training steps in one dispatch, of which three are timed")
LENGTHS = flags.DEFINE_list("lengths", ["1024", "16384", "262144", "1048576"], "tokens before the decoded ones")
DECODED = flags.DEFINE_integer("decoded", 64, "tokens decoded in one dispatch, of which five are timed")
OUTPUT = flags.DEFINE_string("output", None, "write OUTPUT.json")


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """What a SeedTrainer asks of a task whose batches are given."""

    seq_len: int


def settings_of(mixer: str, max_length: int) -> LanguageSettings:
    heads = HIDDEN.value // 64
    dtype = "bfloat16" if PRECISION.value == "bfloat16" else "float32"
    return LanguageSettings(
        VOCAB.value, max_length, mixer=mixer, lam=LAM.value, hidden=HIDDEN.value, layers=LAYERS.value, heads=heads,
        dtype=dtype, remat=REMAT.value,
    )  # fmt: skip


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


def time_training(mixer: str, batch: int, length: int) -> dict[str, float]:
    """Milliseconds of a step of all seeds, tokens per second and FLOP/s of the matrix products."""
    model = LanguageModel(settings_of(mixer, length))
    train = TrainSettings(
        num_steps=100_000, batch_size=batch, learning_rate=3e-4, warmup_steps=500, schedule="cosine", weight_decay=0.1,
        num_train=None, metric="loss", stop_at=None, precision=PRECISION.value,
    )  # fmt: skip
    seeds = list(range(SEEDS.value))
    many = ManySeeds(SeedTrainer(model, _Tokens(length), train), seeds, device_mesh(len(seeds), batch))
    state = many.init(many.seeds)
    flops = matmul_flops_per_token(jax.tree.map(lambda x: x[0], state.params))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB.value, (len(seeds), STEPS.value, batch, length + 1), np.int32)
    data = {"batches": many.place("batches", (tokens[..., :-1], tokens[..., 1:]))}
    state = many.train_steps(state, data, STEPS.value)
    times = []
    for _ in range(3):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = many.train_steps(state, data, STEPS.value)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    seconds = float(np.median(times)) / STEPS.value
    rate = len(seeds) * batch * length / seconds
    return {"ms": 1e3 * seconds, "tokens_per_second": rate, "flops": rate * flops, "devices": many.mesh.size}


def time_decoding(mixer: str, length: int) -> dict[str, float]:
    """Milliseconds a token behind `length` tokens, for one sequence, and the bytes of its caches."""
    model = LanguageModel(settings_of(mixer, length))
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    # What is remembered does not matter for the time, only its size and position.
    shapes = jax.eval_shape(lambda p: model.apply(p, tokens, length, method="prefill")[1], params)
    first = max(length - 6 * DECODED.value, 0)  # six dispatches, the first to compile
    caches = jax.tree.map(lambda x: jnp.full(x.shape, first if x.shape == () else 0, x.dtype), shapes)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))

    @functools.partial(jax.jit, donate_argnums=(1,))
    def decode(params, caches):
        def step(carry, _):
            token, caches = carry
            logits, caches = model.apply(params, token, caches, method="step")
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), caches), None

        return jax.lax.scan(step, (tokens[:, 0], caches), length=DECODED.value)[0][1]

    caches = jax.block_until_ready(decode(params, caches))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        caches = jax.block_until_ready(decode(params, caches))
        times.append(time.perf_counter() - start)
    return {"ms": 1e3 * float(np.median(times)) / DECODED.value, "bytes": size}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    machine = f"{len(jax.devices())} × {jax.devices()[0].device_kind}, JAX {jax.__version__}"
    model = f"hidden {HIDDEN.value}, {LAYERS.value} layers, {PRECISION.value}"
    record: dict[str, Any] = {"machine": machine, "model": model}
    if "training" in WHAT.value:
        peak = record["matmul_flops"] = matmul_rate()
        print(f"{machine}; {model}, {SEEDS.value} seed(s); one device's matrix products: {peak / 1e12:.1f} TFLOP/s\n")
        rows = record["training"] = []
        for mixer in MIXERS.value:
            for shape in SHAPES.value:
                batch, length = map(int, shape.split("x"))
                row = {"mixer": mixer, "batch x T": shape} | time_training(mixer, batch, length)
                row["utilisation"] = row.pop("flops") / peak / row.pop("devices")
                rows.append(row)
                print(json.dumps(row), flush=True)
        print("\n" + tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3g"))
    if "decoding" in WHAT.value:
        rows = record["decoding"] = []
        for mixer in MIXERS.value:
            for length in map(int, LENGTHS.value):
                rows.append({"mixer": mixer, "T": length} | time_decoding(mixer, length))
                print(json.dumps(rows[-1]), flush=True)
        print(f"\n{machine}; {model}; one sequence\n")
        print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4g", intfmt=","))
    if OUTPUT.value:
        Path(OUTPUT.value).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
