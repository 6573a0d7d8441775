"""Time of training the recall model: milliseconds for each seed and step of recall tasks, seeds vmapped.

    loglinear_jax benchmark training --output=training

A step of training is timed over several dispatches, an evaluation apart from it; the time of an evaluation is shared out
over the steps between two. Logging and checkpoints are not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from loglinear_jax.benchmarks import measure
from loglinear_jax.command_line import BadInput, one_of, size
from loglinear_jax.config import Experiment, build
from loglinear_jax.config.files import read_config_arguments
from loglinear_jax.train import ManySeeds, SeedTrainer, open_data

HELP = "time of training the recall model with many seeds"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A recall task, as a config, how many seeds are trained at once, and on how many sequences a step."""

    title: str
    config: str
    num_seeds: int
    batch_size: int = 64


WORKLOADS = {
    "mqar": Workload("MQAR, length 128, 32 pairs", "mqar:kv=32", 32),
    "selective_copy": Workload("selective copying, length 1024", "selective_copy:seq=1024", 8),
    "zoology_mqar": Workload("Zoology's MQAR, length 256, 4 to 64 pairs", "zoology_mqar:table2,width=64", 96),
    "mad": Workload("MAD, in-context recall, length 128", "mad:recall", 32, batch_size=128),
}
RATES = 6
# How to compute: the name in the table, and the settings that ask for it.
WAYS = {
    "float32": ("float32", ["--config.train.precision=float32"]),
    "tf32": ("TF32", ["--config.train.precision=tf32"]),
    "bfloat16": ("bfloat16", ["--config.train.precision=bfloat16"]),
    "rates": (f"TF32, a sixth of the seeds at {RATES} learning rates each", ["--config.train.precision=tf32"]),
    "xla": ("`xla` form, float32", ["--config.train.precision=float32", "--config.model.implementation=xla"]),
}


def time_training(experiment: Experiment, steps: int = 150, rates: int = 1) -> dict[str, Any]:
    """Milliseconds of a step and of an evaluation of all seeds, and of both for each seed and step.

    steps: timed, in dispatches of train.steps_per_dispatch after one that compiles. rates: so many learning rates, each with
    the same seeds, in as many replicas as there are seeds in the experiment, a multiple of it.
    """
    train = experiment.train
    seeds, of_replicas = train.seeds, None
    if rates > 1:
        seeds = seeds[: len(seeds) // rates]
        of_replicas = [(train.learning_rate * 2**index, train.weight_decay) for index in range(rates) for _ in seeds]
        seeds = seeds * rates
    many = ManySeeds(SeedTrainer(experiment.model, experiment.task, train), seeds, rates=of_replicas)
    data = open_data(many, 0)
    sizes = [train.steps_per_dispatch] * (1 + -(-steps // train.steps_per_dispatch))
    dispatches = data.dispatches(sizes)
    state = many.init(many.seeds)

    def dispatch(state):
        num_steps, batches = next(dispatches)
        return many.train_steps(state, batches, num_steps)

    def evaluate(state):
        return many.evaluate_and_record(state, data.validation)[0]

    state, _ = measure.timed(evaluate, measure.timed(dispatch, state)[0])  # both compile
    state, seconds = measure.timed(dispatch, state, len(sizes) - 1)
    step_ms = 1e3 * sum(seconds) / sum(sizes[1:])
    state, evaluations = measure.timed(evaluate, state, 3)
    evaluation_ms = 1e3 * float(np.median(evaluations))
    together = (step_ms + evaluation_ms / train.eval_every) / len(seeds)
    data.close()
    return {"step_ms": step_ms, "evaluation_ms": evaluation_ms, "ms_per_seed_and_step": together}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = measure.flag_adder(parser)
    add("tasks", ",".join(WORKLOADS), "recall tasks to train", one_of(tuple(WORKLOADS)))
    add("ways", "float32,tf32,xla", f"ways to compute: {', '.join(WAYS)}", one_of(tuple(WAYS)))
    add("variant", "mlp_softplus", "variant to train")
    defaults = ", ".join(f"{workload.num_seeds} of {name}" for name, workload in WORKLOADS.items())
    parser.add_argument("--seeds", type=size, help=f"seeds trained at once (default: {defaults})")
    add("steps", 150, "training steps to time", type=size)


def run(args: argparse.Namespace) -> int:
    seeds_of = {task: args.seeds or WORKLOADS[task].num_seeds for task in args.tasks}
    for task, seeds in seeds_of.items():
        build(read_config_arguments([f"--config={WORKLOADS[task].config}"]).config, args.variant)
        if "rates" in args.ways and seeds % RATES:
            expected = f"--ways=rates takes a multiple of {RATES} seeds"
            raise BadInput(f"{expected}, got {seeds} of {task}: give --tasks or --seeds")
    record = measure.Record(args, variant=args.variant)
    for task, way in itertools.product(args.tasks, args.ways):
        workload, seeds = WORKLOADS[task], seeds_of[task]
        sizes = [f"--config.train.num_seeds={seeds}", f"--config.train.batch_size={workload.batch_size}"]
        given = [f"--config={workload.config}", *sizes, *WAYS[way][1]]
        experiment = build(read_config_arguments(given).config, args.variant)
        compute = functools.partial(time_training, experiment, args.steps, RATES if way == "rates" else 1)
        about = {"task": task, "title": f"{workload.title}, {seeds} seeds", "way": WAYS[way][0], "config": given}
        record.measure("training", compute, **about)
    print(f"\n{record.machine}; {args.variant}; milliseconds for each seed and step\n")
    print(record.by("training", "title", "way", lambda row: f"{row['ms_per_seed_and_step']:.3g}"))
    return 0 if record.complete else 1
