"""Speed of the language model: training steps, as tokens per second and model FLOP utilisation; decoding against length.

python -m loglinear_jax.benchmarks.language_model --what=training
python -m loglinear_jax.benchmarks.language_model --what=decoding --mixers=log_linear,softmax
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags
from tabulate import tabulate

from loglinear_jax.benchmarks.model_speed import matmul_rate, time_decoding, time_training
from loglinear_jax.commands.list_flags import define_list, one_of, size
from loglinear_jax.mixers import MIXERS
from loglinear_jax.models import LanguageSettings

PARTS = ("training", "decoding")


class Shape(NamedTuple):
    batch: int
    length: int

    @classmethod
    def read(cls, text: str) -> Shape:
        batch, times, length = text.partition("x")
        if not times:
            raise ValueError(f"expected batch x length such as 8x512, got {text!r}")
        return cls(size(batch), size(length))

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}"


WHAT = define_list("what", PARTS, "what to time", one_of(PARTS))
MIXER = define_list("mixers", ["log_linear", "softmax"], f"of {', '.join(MIXERS)}", one_of(MIXERS))
LAM = flags.DEFINE_string("lam", "mlp_softplus", "λ of log_linear")
HIDDEN = flags.DEFINE_integer("hidden", 512, "width of the model")
LAYERS = flags.DEFINE_integer("layers", 6, "blocks")
VOCAB = flags.DEFINE_integer("vocab", 50_257, "vocabulary")
PRECISION = flags.DEFINE_string("precision", "bfloat16", "as train.precision")
SEEDS = flags.DEFINE_integer("seeds", 1, "seeds trained at once")
SHAPES = define_list("shapes", ["8x512", "64x512", "4x8192"], "batch x length of training steps", Shape.read)
REMAT = flags.DEFINE_string("remat", "none", "as model.remat")
STEPS = flags.DEFINE_integer("steps", 20, "training steps in one dispatch, of which three are timed")
LENGTHS = define_list("lengths", [1024, 16384, 262144, 1048576], "tokens before the decoded ones", size)
DECODED = flags.DEFINE_integer("decoded", 64, "tokens decoded in one dispatch, of which five are timed")
OUTPUT = flags.DEFINE_string("output", None, "write OUTPUT.json")


def settings_of(mixer: str, max_length: int) -> LanguageSettings:
    heads = HIDDEN.value // 64
    dtype = "bfloat16" if PRECISION.value == "bfloat16" else "float32"
    return LanguageSettings(
        VOCAB.value, max_length, mixer=mixer, lam=LAM.value, hidden=HIDDEN.value, layers=LAYERS.value, heads=heads,
        dtype=dtype, remat=REMAT.value,
    )  # fmt: skip


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
        for mixer in MIXER.value:
            for shape in SHAPES.value:
                row = {"mixer": mixer, "batch x T": str(shape)} | time_training(
                    settings_of(mixer, shape.length),
                    *shape,
                    num_seeds=SEEDS.value,
                    steps=STEPS.value,
                    precision=PRECISION.value,
                )
                row["utilisation"] = row.pop("flops") / peak / row.pop("devices")
                rows.append(row)
                print(json.dumps(row), flush=True)
        print("\n" + tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3g"))
    if "decoding" in WHAT.value:
        rows = record["decoding"] = []
        for mixer in MIXER.value:
            for length in LENGTHS.value:
                rows.append(
                    {"mixer": mixer, "T": length}
                    | time_decoding(settings_of(mixer, length), length, decoded=DECODED.value)
                )
                print(json.dumps(rows[-1]), flush=True)
        print(f"\n{machine}; {model}; one sequence\n")
        print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4g", intfmt=","))
    if OUTPUT.value:
        Path(OUTPUT.value).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
