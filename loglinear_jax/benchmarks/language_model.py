"""Speed of the language model: training steps, as tokens per second and model FLOP utilisation; decoding against length.

loglinear_jax benchmark language --what=training
loglinear_jax benchmark language --what=decoding --mixers=log_linear,softmax
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.benchmarks import common, kernels, timing
from loglinear_jax.command_line import comma_separated, one_of, size
from loglinear_jax.mixers import FORMER_NAMES, MIXERS
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.models.params import decoding_weights, params_of
from loglinear_jax.runs.utilisation import matmul_flops_per_token
from loglinear_jax.tasks import Task
from loglinear_jax.train import PRECISIONS, ManySeeds, SeedTrainer, TrainSettings, device_mesh

HELP = "speed of the language model: training, and decoding behind many tokens"
PARTS = ("training", "decoding")


def trained(
    settings: LanguageSettings,
    batch: int,
    length: int,
    mesh: jax.sharding.Mesh,
    *,
    num_seeds: int = 1,
    precision: str | None = None,
    warmup_steps: int = 500,
) -> ManySeeds:
    """The model with a usual recipe, for batches of so many sequences that are given. precision: as train.precision;
    settings.dtype if None."""
    train = TrainSettings(
        num_steps=100_000, batch_size=batch, learning_rate=3e-4, warmup_steps=warmup_steps, schedule="cosine",
        weight_decay=0.1, stream=True, stop_at=None, precision=precision or settings.dtype,
    )  # fmt: skip
    trainer = SeedTrainer(LanguageModel(settings), Task(length, settings.vocab_size), train)
    return ManySeeds(trainer, list(range(num_seeds)), mesh)


def time_training(
    settings: LanguageSettings,
    batch: int,
    length: int,
    *,
    num_seeds: int = 1,
    steps: int = 20,
    repeats: int = 3,
    precision: str | None = None,
    profile: bool = False,
) -> dict[str, Any]:
    """Milliseconds of a step of all seeds, tokens per second, FLOP/s of the matrix products, and the devices used; with
    `profile`, kernels.

    steps: in one dispatch, of which `repeats` are timed. precision: as train.precision; settings.dtype if None.
    """
    mesh = device_mesh(num_seeds, batch)
    many = trained(settings, batch, length, mesh, num_seeds=num_seeds, precision=precision)
    state = many.init(many.seeds)
    flops = matmul_flops_per_token(jax.tree.map(lambda x: x[0], state.params))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, settings.vocab_size, (num_seeds, steps, batch, length + 1), np.int32)
    data = {"batches": many.place("batches", (tokens[..., :-1], tokens[..., 1:]))}
    state = many.train_steps(state, data, steps)
    state, seconds_of_all = timing.timed(lambda state: many.train_steps(state, data, steps), state, repeats)
    seconds = float(np.median(seconds_of_all)) / steps
    rate = num_seeds * batch * length / seconds
    result = {"ms": 1e3 * seconds, "tokens_per_second": rate, "flops": rate * flops, "devices": many.mesh.size}
    if profile:
        result["kernels"] = kernels.profiled(lambda: many.train_steps(state, data, steps), steps)
    return result


def cache_shapes(settings: LanguageSettings, length: int) -> Any:
    """Shapes and dtypes of what one sequence remembers while decoding, with room for `length` tokens."""
    model, tokens = LanguageModel(settings), jnp.zeros((1, 1), jnp.int32)

    def prefill():
        return model.apply(model.init(jax.random.key(0), tokens), tokens, length, method="prefill")[1]

    return jax.eval_shape(prefill)


def size_in_bytes(shapes: Any) -> int:
    """Of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def time_decoding(
    settings: LanguageSettings, length: int, *, decoded: int = 64, profile: bool = False
) -> dict[str, Any]:
    """Milliseconds a token behind `length` tokens, for one sequence, and the bytes of its caches; with `profile`, kernels.

    decoded: tokens in one dispatch, of which five are timed.
    """
    model = LanguageModel(settings)
    tokens = jnp.zeros((1, 1), jnp.int32)
    weights = decoding_weights(model, jax.jit(model.init)(jax.random.key(0), tokens))
    # What is remembered does not matter for the time, only its size and position.
    first = max(length - 7 * decoded, 0)  # seven dispatches, the first to compile and the last to profile
    shapes = cache_shapes(settings, length)
    caches = jax.tree.map(lambda x: jnp.full(x.shape, first if x.shape == () else 0, x.dtype), shapes)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def decode(weights, caches):
        def step(carry, _):
            token, caches = carry
            logits, caches = model.apply(params_of(weights), token, caches, method="step")
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), caches), None

        return jax.lax.scan(step, (tokens[:, 0], caches), length=decoded)[0][1]

    caches, (_, *seconds) = timing.timed(lambda caches: decode(weights, caches), caches, 6)  # the first compiles
    result = {"ms": 1e3 * float(np.median(seconds)) / decoded, "bytes": size_in_bytes(shapes)}
    if profile:
        result["kernels"] = kernels.profiled(lambda: decode(weights, caches), decoded)
    return result


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


def add_model(add: Callable[..., None]) -> None:
    """The flags of a language model that is trained."""
    add("lam", "mlp_softplus", "λ of log_linear")
    add("hidden", 512, "width of the model, in heads of 64", type=size)
    add("layers", 6, "number of blocks", type=size)
    add("vocab", 50_257, "size of the vocabulary", type=size)
    add("precision", "bfloat16", "precision of matrix products, as train.precision", choices=tuple(PRECISIONS))
    add("remat", "none", "what is recomputed in the backward pass, as model.remat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = common.flag_adder(parser)

    def add_list(name: str, default: str, help: str, item: Any) -> None:
        add(name, default, help, type=comma_separated(item))

    add_list("what", ",".join(PARTS), "what to time", one_of(PARTS))
    add_list("mixers", "log_linear,softmax", f"of {', '.join(MIXERS)}", one_of((*MIXERS, *FORMER_NAMES)))
    add_model(add)
    add("seeds", 1, "seeds trained at once", type=size)
    add_list("shapes", "8x512,64x512,4x8192", "batch x length of training steps", Shape.read)
    add("steps", 20, "training steps in one dispatch, of which three are timed", type=size)
    add_list("lengths", "1024,16384,262144,1048576", "tokens before the decoded ones", size)
    add("decoded", 64, "tokens decoded in one dispatch, of which five are timed", type=size)
    common.add_kernels(parser)
    common.add_output(parser)


def run(args: argparse.Namespace) -> int:
    def settings_of(mixer: str, max_length: int) -> LanguageSettings:
        return LanguageSettings(
            args.vocab, max_length, mixer=mixer, lam=args.lam, hidden=args.hidden, layers=args.layers,
            dtype="bfloat16" if args.precision == "bfloat16" else "float32", remat=args.remat,
        )  # fmt: skip

    common.check_kernels(args)
    for mixer in args.mixers:
        settings_of(mixer, max(args.lengths)).check()
    model = f"hidden {args.hidden}, {args.layers} layers, {args.precision}"
    record = common.Record(args, model=model)
    if "training" in args.what:
        peak = record.values["matmul_flops"] = timing.matmul_rate()
        one_device = f"one device's matrix products: {peak / 1e12:.1f} TFLOP/s"
        print(f"{record.machine}; {model}, {args.seeds} seed(s); {one_device}\n")
        sizes = dict(num_seeds=args.seeds, steps=args.steps, precision=args.precision, profile=args.kernels)
        for mixer, shape in itertools.product(args.mixers, args.shapes):
            found = time_training(settings_of(mixer, shape.length), *shape, **sizes)
            found["utilisation"] = found.pop("flops") / peak / found.pop("devices")
            record.add("training", f"{mixer} {shape}, a step", {"mixer": mixer, "batch x T": str(shape)} | found)
        print("\n" + record.table("training", floatfmt=".3g"))
    if "decoding" in args.what:
        for mixer, length in itertools.product(args.mixers, args.lengths):
            found = time_decoding(settings_of(mixer, length), length, decoded=args.decoded, profile=args.kernels)
            record.add("decoding", f"{mixer} T={length}, a token", {"mixer": mixer, "T": length} | found)
        print(f"\n{record.machine}; {model}; one sequence\n")
        print(record.table("decoding", floatfmt=".4g", intfmt=","))
    return 0
