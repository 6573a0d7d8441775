"""Speed of the language model: training steps, as tokens per second and model FLOP utilisation; decoding against length.

loglinear_jax benchmark language --what=training
loglinear_jax benchmark language --what=decoding --mixers=log_linear,softmax
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.benchmarks import measure
from loglinear_jax.command_line import one_of, size
from loglinear_jax.mixers import FORMER_NAMES, MIXERS
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.models.params import decoding_weights, params_of
from loglinear_jax.runs.utilisation import matmul_flops_per_token
from loglinear_jax.tasks import Task
from loglinear_jax.train import PRECISIONS, ManySeeds, SeedTrainer, TrainSettings, device_mesh

HELP = "speed of the language model: training, and decoding behind many tokens"
PARTS = ("training", "decoding")
DECODED = 64  # tokens in one dispatch, of which five are timed


def time_training(
    settings: LanguageSettings,
    batch: int,
    length: int,
    peak: float,
    *,
    num_seeds: int = 1,
    steps: int = 20,
    precision: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
    """Of the model with a usual recipe on random tokens: milliseconds of a step of all seeds, tokens per second, utilisation of
    the devices, the bytes that one of them held at most, where it says so, the parameters of a seed, and its loss in the first
    and the last dispatch.

    peak: FLOP/s of one device. steps: in one dispatch, of which three are timed, all on the same tokens. precision: as
    train.precision; settings.dtype if None. mesh: all devices if None.
    """
    mesh = device_mesh(num_seeds, batch) if mesh is None else mesh
    train = TrainSettings(
        num_steps=100_000, batch_size=batch, learning_rate=3e-4, warmup_steps=steps, schedule="cosine", weight_decay=0.1,
        stream=True, stop_at=None, precision=precision or settings.dtype,
    )  # fmt: skip
    trainer = SeedTrainer(LanguageModel(settings), Task(length, settings.vocab_size), train)
    many = ManySeeds(trainer, list(range(num_seeds)), mesh)
    tokens = np.random.default_rng(0).integers(0, settings.vocab_size, (num_seeds, steps, batch, length + 1), np.int32)
    data = {"batches": many.place("batches", (tokens[..., :-1], tokens[..., 1:]))}

    def dispatch(state):
        return many.train_steps(state, data, steps)

    state, seconds, losses = many.init(many.seeds), [], [0.0]
    for _ in range(4):  # the first compiles
        state, (taken,) = measure.timed(dispatch, state)
        seconds.append(taken / steps)
        losses.append(float(state.loss_sum[0]))
    ms = 1e3 * float(np.median(seconds[1:]))
    rate = num_seeds * batch * length / ms * 1e3
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
    memory = [stats["peak_bytes_in_use"] for device in mesh.devices.flat if (stats := device.memory_stats())]
    return {
        "ms": ms,
        "tokens_per_second": rate,
        "utilisation": rate * matmul_flops_per_token(params) / (peak * mesh.size),
        "peak_gib": max(memory) / 2**30 if memory else None,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "first_loss": losses[1] / steps,
        "last_loss": (losses[-1] - losses[-2]) / steps,
    }


def time_decoding(settings: LanguageSettings, length: int) -> dict[str, Any]:
    """Milliseconds a token behind `length` tokens, for one sequence, and the bytes of its caches."""
    model = LanguageModel(settings)
    tokens = jnp.zeros((1, 1), jnp.int32)
    weights = decoding_weights(model, jax.jit(model.init)(jax.random.key(0), tokens))
    # What is remembered does not matter for the time, only its size and position.
    first = max(length - 6 * DECODED, 0)  # six dispatches, the first to compile
    prefill = functools.partial(model.apply, max_length=length, method="prefill")
    shapes = jax.eval_shape(lambda weights: prefill(params_of(weights), tokens)[1], weights)
    caches = jax.tree.map(lambda x: jnp.full(x.shape, first if x.shape == () else 0, x.dtype), shapes)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def decode(weights, caches):
        def step(carry, _):
            token, caches = carry
            logits, caches = model.apply(params_of(weights), token, caches, method="step")
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), caches), None

        return jax.lax.scan(step, (tokens[:, 0], caches), length=DECODED)[0][1]

    _, (_, *seconds) = measure.timed(lambda caches: decode(weights, caches), caches, 6)  # the first compiles
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    return {"ms": 1e3 * float(np.median(seconds)) / DECODED, "bytes": num_bytes}


# --- The command --------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    batch: int
    length: int

    @classmethod
    def read(cls, text: str) -> Shape:
        batch, times, length = text.partition("x")
        if not times:
            raise argparse.ArgumentTypeError(f"expected batch x length such as 8x512, got {text!r}")
        return cls(size(batch), size(length))

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}"


def add_model(add: Any, mixers: str) -> None:
    """The flags of a language model that is trained, with its default mixers."""
    add("mixers", mixers, f"mixers to time, of {', '.join(MIXERS)}", one_of((*MIXERS, *FORMER_NAMES)))
    add("lam", "mlp_softplus", "λ of log_linear")
    add("hidden", 512, "width of the model, in heads of 64", type=size)
    add("layers", 6, "number of blocks", type=size)
    add("vocab", 50_257, "size of the vocabulary", type=size)
    add("precision", "bfloat16", "precision of matrix products, as train.precision", choices=tuple(PRECISIONS))
    add("remat", "none", "what is recomputed in the backward pass, as model.remat")
    add("steps", 20, "training steps in one dispatch, of which three are timed", type=size)


def settings_of(args: argparse.Namespace, mixer: str, max_length: int) -> LanguageSettings:
    """Of the flags of `add_model`. Raises SettingError."""
    settings = LanguageSettings(
        args.vocab, max_length, mixer=mixer, lam=args.lam, hidden=args.hidden, layers=args.layers,
        dtype="bfloat16" if args.precision == "bfloat16" else "float32", remat=args.remat,
    )  # fmt: skip
    settings.check()
    return settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = measure.flag_adder(parser)
    add("what", ",".join(PARTS), "what to time", one_of(PARTS))
    add_model(add, "log_linear,softmax")
    add("seeds", 1, "seeds trained at once", type=size)
    add("shapes", "8x512,64x512,4x8192", "batch x length of training steps", Shape.read)
    add("lengths", "1024,16384,262144,1048576", "tokens before the decoded ones", size)


def run(args: argparse.Namespace) -> int:
    for mixer in args.mixers:
        settings_of(args, mixer, max(args.lengths))
    model = f"hidden {args.hidden}, {args.layers} layers, {args.precision}"
    record = measure.Record(args, model=model)
    if "training" in args.what:
        peak = record.values["matmul_flops"] = measure.matmul_rate()
        one_device = f"one device's matrix products: {peak / 1e12:.1f} TFLOP/s"
        print(f"{record.machine}; {model}, {args.seeds} seed(s); {one_device}\n")
        sizes = dict(num_seeds=args.seeds, steps=args.steps, precision=args.precision)
        for mixer, shape in itertools.product(args.mixers, args.shapes):
            compute = functools.partial(time_training, settings_of(args, mixer, shape.length), *shape, peak, **sizes)
            record.measure("training", compute, **{"mixer": mixer, "batch x T": str(shape)})
        print("\n" + record.table("training", floatfmt=".3g", intfmt=","))
    if "decoding" in args.what:
        for mixer, length in itertools.product(args.mixers, args.lengths):
            compute = functools.partial(time_decoding, settings_of(args, mixer, length), length)
            record.measure("decoding", compute, mixer=mixer, T=length)
        print(f"\n{record.machine}; {model}; one sequence\n")
        print(record.table("decoding", floatfmt=".4g", intfmt=","))
    return 0 if record.complete else 1
