"""Whether a config fits into this machine's memory, by arithmetic: nothing is allocated or compiled."""

from __future__ import annotations

import math
import os

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
# Where rates_at_once is None: the share of the memory that programs may take, by an estimate. In it are the outputs of so many
# layers for each layer, as backpropagation and operations hold them (25 to 50 on a CPU), and logits so many times. 96 seeds of
# Zoology's MQAR with width 64 took 49.5 GiB of an H200 at most, where the estimate is 60.9.
SHARE_OF_RATES, OUTPUTS_OF_A_LAYER, COPIES_OF_LOGITS = 0.8, 50, 3

PARAMETERS, SEQUENCES, ACTIVATIONS = "the parameters", "the sequences", "the activations of one layer"
OF_STREAMS = "train.steps_per_dispatch train.batch_size task.seq_len train.num_seeds"
DECIDED_BY = {  # what to reduce where it takes too much
    PARAMETERS: "model.layers model.hidden model.heads model.head_dim model.key_dim model.lam_hidden task.vocab_size "
    "train.num_seeds train.rates_at_once",
    SEQUENCES: "train.num_train train.num_validation train.num_test task.seq_len train.num_seeds train.rates_at_once",
    ACTIVATIONS: "train.batch_size train.eval_batch_size task.seq_len model.hidden model.heads model.head_dim "
    "train.num_seeds train.rates_at_once",
}


def rates_at_once(
    model_class: type[nn.Module], model: MixerSettings, task: BaseTask, train: TrainSettings, rates: int
) -> int:
    """How many of so many learning rates and weight decays one program trains: train.rates_at_once, or if that is None as many
    as should fit into this machine's memory by an estimate, in programs of about the same size."""
    memory = memory_in_bytes()
    if train.rates_at_once is not None or memory is None or rates == 1:
        return min(rates, train.rates_at_once or rates)
    if isinstance(model, OwnSettings):  # what its layers hold is not known
        return 1
    needed = memory_needed(model_class, model, task, train)
    tokens = train.num_seeds * train.batch_size // train.grad_accumulation * task.trained_on.longest
    outputs = OUTPUTS_OF_A_LAYER * model.layers * tokens * _widest(model) * _width(train)
    logits = COPIES_OF_LOGITS * 4 * min(tokens * model.vocab_size, train.num_seeds * MOST_LOGITS)
    free, of_one = SHARE_OF_RATES * memory, needed[PARAMETERS] + outputs + logits
    if rates_share_data():
        free -= needed[SEQUENCES]
    else:
        of_one += needed[SEQUENCES]
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
    needed = memory_needed(model_class, model, task, train, rates)
    if memory is None or sum(needed.values()) <= memory:
        return
    largest = max(needed, key=needed.__getitem__)
    names = OF_STREAMS if task.STREAMED and largest is SEQUENCES else DECIDED_BY[largest]
    sections = {"model": model, "task": task, "train": train}
    paths = [name.split(".") for name in names.split()]
    values = [(f"{section}.{name}", getattr(sections[section], name, None)) for section, name in paths]
    raise ConfigError(
        f"{variant}: {largest} of {train.num_seeds} seeds{f' at {rates} rates' if rates > 1 else ''} alone take "
        f"{needed[largest] / 2**30:,.1f} GiB, but this machine's devices have {memory / 2**30:,.1f}: reduce some of "
        + ", ".join(f"{name}={value}" for name, value in values if value is not None)
    )


def memory_needed(
    model_class: type[nn.Module], model: MixerSettings, task: BaseTask, train: TrainSettings, rates: int = 1
) -> dict[str, int]:
    """What training holds at the same time, and at least how many bytes of each."""
    replicas = train.num_seeds * rates
    at_once = train.batch_size // train.grad_accumulation * task.trained_on.longest
    if task.STREAMED:  # a dispatch at a time
        held = min(train.steps_per_dispatch, train.eval_every, train.num_steps) * train.batch_size * task.seq_len
    else:
        num_train = 0 if train.stream else train.num_train
        pieces, piece = task.evaluated_on.pieces(train.num_test, train.num_validation)
        trained = num_train * task.trained_on.mean_length + train.num_validation * task.evaluated_on.mean_length
        held = max(trained, pieces * piece * task.evaluated_on.mean_length)  # one after the other
        evaluated = min(train.eval_batch_size, max(train.num_validation, piece))
        at_once = max(at_once, evaluated * task.evaluated_on.longest)
    params = sum(math.prod(shape) for shape in param_shapes(model_class(model)).values())
    needed = {
        PARAMETERS: replicas * (COPIES * 4 - (2 if train.moment_dtype == "bfloat16" else 0)) * params,
        # Ids, targets and, of packed documents, segment ids, int32.
        SEQUENCES: (train.num_seeds if rates_share_data() else replicas)
        * round(held)
        * (12 if task.has_segments else 8),
    }
    if isinstance(model, OwnSettings):
        return needed
    return needed | {ACTIVATIONS: replicas * at_once * _widest(model) * _width(train)}


def _widest(model: MixerSettings) -> int:
    return max(model.hidden, model.heads * model.head_dim)


def _width(train: TrainSettings) -> int:
    """Bytes of an activation."""
    return 2 if train.precision == "bfloat16" else 4


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
