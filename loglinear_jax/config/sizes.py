"""Whether a config fits into this machine's memory, by arithmetic: nothing is allocated or compiled."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import flax.linen as nn
import jax

from loglinear_jax.config.errors import ConfigError
from loglinear_jax.models import OwnSettings
from loglinear_jax.models.params import param_shapes
from loglinear_jax.models.recall import MOST_LOGITS
from loglinear_jax.models.settings import MixerSettings
from loglinear_jax.tasks import BaseTask
from loglinear_jax.train import TrainSettings

# Of each parameter training always holds its value, the best one so far, and Adam's two moments.
COPIES = 4
SIZES = ("layers", "hidden", "heads", "head_dim", "key_dim")  # of a model, which decide its parameters
# Where rates_at_once is None: the share of the memory that programs may take, by an estimate. In it are the outputs of so many
# layers for each layer, as backpropagation and operations hold them (25 to 50 on a CPU), and logits so many times. 96 seeds of
# Zoology's MQAR with width 64 took 49.5 GiB of an H200 at most, where the estimate is 60.9.
SHARE_OF_RATES, OUTPUTS_OF_A_LAYER, COPIES_OF_LOGITS = 0.8, 50, 3


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory: what it is, at least how many bytes, and the settings that decide it."""

    name: str
    num_bytes: int
    settings: dict[str, Any]


def rates_at_once(
    model_class: type[nn.Module], model: MixerSettings, task: BaseTask, train: TrainSettings, rates: int
) -> int:
    """How many of so many learning rates and weight decays one program trains: train.rates_at_once, or if that is None as many
    as should fit into this machine's memory by an estimate, in programs of about the same size."""
    memory = memory_in_bytes()
    if train.rates_at_once is not None or memory is None or rates == 1:
        return min(rates, train.rates_at_once or rates)
    params, sequences, _ = (part.num_bytes for part in parts_of(model_class, model, task, train))
    tokens = train.num_seeds * train.batch_size // train.grad_accumulation * task.trained_on.longest
    if isinstance(model, OwnSettings):  # what its layers hold is not known
        return 1
    width = 2 if train.precision == "bfloat16" else 4
    outputs = OUTPUTS_OF_A_LAYER * model.layers * tokens * max(model.hidden, model.heads * model.head_dim) * width
    logits = COPIES_OF_LOGITS * 4 * min(tokens * model.vocab_size, train.num_seeds * MOST_LOGITS)
    free, of_one = SHARE_OF_RATES * memory, params + outputs + logits
    if rates_share_data():
        free -= sequences
    else:
        of_one += sequences
    fitting = min(rates, max(1, int(free / of_one)))
    return math.ceil(rates / math.ceil(rates / fitting))


def check_memory(
    variant: str,
    model_class: type[nn.Module],
    model: MixerSettings,
    task: BaseTask,
    train: TrainSettings,
    rates: int = 1,
) -> None:
    """Raises ConfigError, naming the settings to reduce, if training surely takes more memory than there is. rates: how many
    learning rates and weight decays are trained in one program."""
    memory = memory_in_bytes()
    rates = rates if jax.process_count() == 1 else 1  # several processes train one rate after the other
    parts = parts_of(model_class, model, task, train, rates)
    if memory is not None and sum(part.num_bytes for part in parts) > memory:
        largest = max(parts, key=lambda part: part.num_bytes)
        shown = ", ".join(f"{name}={value}" for name, value in largest.settings.items())
        raise ConfigError(
            f"{variant}: {largest.name} of {train.num_seeds} seeds{f' at {rates} rates' if rates > 1 else ''} alone take "
            f"{_gib(largest.num_bytes)} GiB, but this machine's devices have {_gib(memory)}: reduce some of {shown}"
        )


def parts_of(
    model_class: type[nn.Module], model: MixerSettings, task: BaseTask, train: TrainSettings, rates: int = 1
) -> list[Part]:
    """What training holds at the same time, at least."""
    seeds = {"train.num_seeds": train.num_seeds}
    at_rates = seeds if rates == 1 else seeds | {"train.rates_at_once": rates}
    replicas = train.num_seeds * rates
    holders, of_holders = (train.num_seeds, seeds) if rates_share_data() else (replicas, at_rates)
    sizes = {f"model.{name}": getattr(model, name) for name in SIZES if hasattr(model, name)}
    if "lam_hidden" not in model.unread and hasattr(model, "lam_hidden"):
        sizes["model.lam_hidden"] = model.lam_hidden
    if not task.STREAMED:  # otherwise the text decides it
        sizes["task.vocab_size"] = model.vocab_size
    width = 2 if train.precision == "bfloat16" else 4
    at_once = {"train.batch_size": train.batch_size}
    tokens = train.batch_size // train.grad_accumulation * task.trained_on.longest
    if task.STREAMED:  # a dispatch at a time
        steps = min(train.steps_per_dispatch, train.eval_every, train.num_steps)
        held = steps * train.batch_size * task.seq_len
        sequences = {"train.steps_per_dispatch": train.steps_per_dispatch, "train.batch_size": train.batch_size}
    else:
        trained = {"train.num_validation": train.num_validation}
        if not train.stream:
            trained["train.num_train"] = train.num_train
        pieces, piece = task.evaluated_on.pieces(train.num_test, train.num_validation)
        # Those of the test are drawn when the others are gone.
        counts = max(trained, {"train.num_test": pieces * piece}, key=lambda counts: sum(counts.values()))
        held = sum(
            num * (task.trained_on if name == "train.num_train" else task.evaluated_on).mean_length
            for name, num in counts.items()
        )
        sequences = {name: getattr(train, name.removeprefix("train.")) for name in counts}
        evaluated = min(train.eval_batch_size, max(train.num_validation, piece))
        if evaluated * task.evaluated_on.longest > tokens:
            tokens = evaluated * task.evaluated_on.longest
            at_once = {"train.eval_batch_size": train.eval_batch_size}
    params = sum(math.prod(shape) for shape in param_shapes(model_class(model)).values())
    length = {"task.seq_len": task.seq_len}
    parts = [
        Part("the parameters", replicas * COPIES * 4 * params, sizes | at_rates),
        # Token ids and targets, int32.
        Part("the sequences", holders * round(held) * 8, sequences | length | of_holders),
    ]
    if isinstance(model, OwnSettings):
        return parts
    of_layer = {name: sizes[name] for name in ("model.hidden", "model.heads", "model.head_dim")}
    activations = replicas * tokens * max(model.hidden, model.heads * model.head_dim) * width
    return [*parts, Part("the activations of one layer", activations, at_once | length | at_rates | of_layer)]


def rates_share_data() -> bool:
    """Whether a seed's data is held once for all rates, as one device has all of its replicas. With several devices that is so
    in some cases, too: then estimates are too large."""
    return jax.device_count() == 1


def memory_in_bytes() -> int | None:
    """Memory of all devices together; None if they do not say."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * jax.process_count()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * jax.device_count()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f}"
