"""How to train: every setting of it, with its check."""

from __future__ import annotations

import dataclasses

from loglinear_jax.settings import SettingError, check_fields, setting

SCHEDULES = ("constant", "cosine", "wsd")
MOMENT_DTYPES = ("float32", "bfloat16")
PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "tensorfloat32"}  # of matrix products


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Settings of training: seeds, steps, optimiser, data sets, precision. The task's score decides which validation
    value is best."""

    num_seeds: int = setting(5, "seeds trained at once", least=1)
    first_seed: int = setting(0, "the first of them; the others follow")
    num_steps: int = setting(5_000, "optimiser steps", least=1)
    batch_size: int = setting(64, "sequences in a batch of one seed", least=1)
    learning_rate: float = setting(1e-3, "learning rate of Adam, or of AdamW if weight_decay is set", above=0)
    warmup_steps: int = setting(0, "steps in which the learning rate rises linearly, from 0 at the first one", least=0)
    schedule: str = setting(
        "constant",
        "the learning rate after warm-up: `constant`; `cosine` to 0 at num_steps; or `wsd` (warm-up, stable, decay), constant "
        "and then linear to 0 over the last decay_steps",
        choices=SCHEDULES,
    )
    decay_steps: int | None = setting(
        None, "steps of the linear fall in the schedule `wsd`; None: a fifth of num_steps", least=1
    )
    weight_decay: float = setting(0.0, "weight decay of AdamW; 0: Adam", least=0.0)
    decay_all: bool = setting(False, "decay every parameter, not only matrices other than those of λ and of decays")
    moment_dtype: str = setting(
        "float32", "dtype of Adam's first moment; bfloat16 takes half the memory", choices=MOMENT_DTYPES
    )
    z_loss: float = setting(
        0.0,
        "weight of (log Σ exp logits)², added to the training loss of each token so that logits stay small",
        least=0.0,
    )
    grad_clip: float | None = setting(
        1.0, "global norm to clip gradients to (the paper does not say, the released code clips at 1); 0 or None: no clipping",
        least=0.0,
    )  # fmt: skip
    grad_accumulation: int = setting(
        1,
        "parts of a batch whose gradients are computed one after another, to save memory",
        least=1,
    )
    fsdp_devices: int = setting(
        1,
        "language models: devices among which each batch, each large parameter and its moments are divided (ZeRO, stage 3); "
        "other devices, if any, have copies of these, or other seeds",
        least=1,
    )
    sequence_devices: int = setting(
        1, "language models: devices among which each sequence is divided, in pieces of a power of two tokens", least=1
    )
    stream: bool = setting(False, "fresh sequences in every step, instead of num_train fixed ones")
    num_train: int = setting(10_000, "size of each seed's training set", least=1)
    num_validation: int = setting(1_000, "size of each seed's validation set", least=1)
    num_test: int = setting(1_000, "size of each seed's test set, drawn after training", least=1)
    eval_batch_size: int = setting(250, "sequences of a seed evaluated at once: memory, not results", least=1)
    eval_every: int = setting(100, "steps between evaluations", least=1)
    stop_at: float | None = setting(0.99, "validation accuracy at which a seed stops; 0 or None: never")
    patience: int | None = setting(
        None, "evaluations in a row without a better one after which a seed stops; None: never", least=0
    )
    rates_at_once: int | None = setting(
        None,
        "number of a variant's learning rates and weight decays trained in one program, which affects memory, and results by "
        "rounding only; None: all, or half of them at a time if memory runs out",
        least=1,
    )
    precision: str = setting(
        "float32",
        "matrix products: `float32`, `tf32`, or `bfloat16` (bfloat16 activations, float32 parameters)",
        choices=tuple(PRECISIONS),
    )
    steps_per_dispatch: int = setting(50, "steps in one call of the device; signals are heard in between", least=1)
    checkpoint_every: int = setting(500, "steps between checkpoints, a multiple of eval_every", least=1)

    @property
    def seeds(self) -> list[int]:
        """The seeds' numbers."""
        return list(range(self.first_seed, self.first_seed + self.num_seeds))

    @property
    def but_for_rates(self) -> tuple[TrainSettings, bool]:
        """What all replicas in one program share: every setting except the rates, and whether there is a weight
        decay."""
        return dataclasses.replace(self, learning_rate=1.0, weight_decay=0.0), self.weight_decay == 0

    @property
    def unread(self) -> set[str]:
        """The settings that change nothing, given the others."""
        unread = {"num_train": self.stream, "decay_all": not self.weight_decay, "decay_steps": self.schedule != "wsd"}
        return {name for name, is_unread in unread.items() if is_unread}

    @property
    def steps_of_decay(self) -> int:
        """How many of the last steps lower the learning rate in the schedule `wsd`."""
        return max(self.num_steps // 5, 1) if self.decay_steps is None else self.decay_steps

    def check(self) -> None:
        """Raises SettingError naming the first invalid setting."""
        check_fields(self, "train")
        if self.first_seed < 0 or self.first_seed + self.num_seeds > 2**31:
            raise SettingError(f"train.first_seed must leave all seeds within 0 .. 2**31 - 1, got {self.first_seed}")
        if self.schedule == "cosine" and self.warmup_steps >= self.num_steps:  # it takes at least a step to fall
            raise SettingError(
                f"train.warmup_steps={self.warmup_steps} must be less than train.num_steps={self.num_steps}"
            )
        if self.schedule == "wsd" and self.warmup_steps + self.steps_of_decay > self.num_steps:
            raise SettingError(
                f"train.warmup_steps={self.warmup_steps} and train.decay_steps={self.steps_of_decay} together must be at most "
                f"train.num_steps={self.num_steps}"
            )
        if self.batch_size % self.grad_accumulation:
            raise SettingError(
                f"train.batch_size={self.batch_size} must be a multiple of "
                f"train.grad_accumulation={self.grad_accumulation}"
            )
        if self.stop_at is not None and not 0 <= self.stop_at <= 1:
            raise SettingError(f"train.stop_at is an accuracy from 0 (never) to 1, got {self.stop_at}")
        if self.checkpoint_every % self.eval_every:
            raise SettingError(
                f"train.checkpoint_every={self.checkpoint_every} must be a multiple of "
                f"train.eval_every={self.eval_every}"
            )
