"""How to train: every setting of it, with its check."""

from __future__ import annotations

import dataclasses

METRICS = ("accuracy", "loss")


SCHEDULES = ("constant", "cosine")


PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "tensorfloat32"}


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How to train one variant.

    num_steps, batch_size, learning_rate: of Adam, or AdamW with a weight_decay.
    warmup_steps, schedule: the learning rate rises linearly, then stays ("constant") or falls to 0 at num_steps ("cosine").
    weight_decay, decay_all: on matrices only, or on every parameter.
    grad_clip: global norm to clip gradients to, or None.
    grad_accumulation: parts of a batch whose gradients are computed one after another, to save memory. Each part counts the
      same, so where sequences have different numbers of targets the loss is another mean.
    num_train: size of each seed's fixed training set; None for an endless stream of fresh sequences. (A text has its own.)
    num_validation, eval_batch_size: size of each seed's validation set; sequences per seed evaluated at once.
    eval_every: steps between evaluations. stop_at: validation accuracy at which a seed stops, or None.
    metric: which validation value is best, the highest "accuracy" or the lowest "loss".
    patience: evaluations in a row without a better one, after which a seed stops; or None.
    precision: "float32", "tf32", or "bfloat16" (bfloat16 activations, float32 parameters).
    """

    num_steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    schedule: str = "constant"
    weight_decay: float = 0.0
    decay_all: bool = False
    grad_clip: float | None = 1.0
    grad_accumulation: int = 1
    num_train: int | None = 10_000
    num_validation: int = 1_000
    eval_batch_size: int = 250
    eval_every: int = 100
    stop_at: float | None = 0.99
    metric: str = "accuracy"
    patience: int | None = None
    precision: str = "float32"
