"""What a task is, and how one is found by name."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Int

from loglinear_jax.components import find_module
from loglinear_jax.settings import SettingError, check_fields, is_of, setting
from loglinear_jax.tasks.draws import standard_settings
from loglinear_jax.tasks.mixture import Mixture

CONVERGED_ACCURACY = 0.90  # a seed has converged if its accuracy reaches this, in validation if it has no test
SOLVED_ACCURACY = 0.99  # and it has solved its task at this in validation


@dataclasses.dataclass(frozen=True)
class Score:
    """What counts in a task, and how it is shown.

    name: in words. metric: the validation value of which the best is kept, the highest "accuracy" or the lowest "loss".
    unit, digits: of a shown value. thresholds: accuracies from which a seed counts as converged, and as solved; none where
    accuracy does not matter.
    """

    name: str
    metric: str
    unit: str
    digits: int
    thresholds: tuple[float, ...]

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"

    @property
    def label(self) -> str:
        """For an axis: "validation accuracy (%)"."""
        return f"validation {self.name}" + (f" ({self.unit})" if self.unit else "")

    def of(self, loss: Any, accuracy: Any) -> np.ndarray:
        """Shown values: 100 · accuracy (a share of 1), or exp(loss in nats); None becomes nan."""
        value = np.asarray(accuracy if self.metric == "accuracy" else loss, np.float64)
        return 100 * value if self.metric == "accuracy" else np.exp(value)

    def text(self, value: float) -> str:
        """ "97.1 %", "71.5"."""
        return f"{value:.{self.digits}f}" + (f" {self.unit}" if self.unit else "")


ACCURACY = Score("accuracy", "accuracy", "%", 1, (CONVERGED_ACCURACY, SOLVED_ACCURACY))
PERPLEXITY = Score("perplexity", "loss", "", 1, ())


class BaseTask:
    """Base of all tasks: what training and analysis need from a task, whether its sequences are drawn (`Task`) or read
    from a text (`Text`).

    A frozen dataclass with seq_len and vocab_size, and its own settings as fields.
    """

    score: ClassVar[Score] = ACCURACY  # or PERPLEXITY
    TITLE: ClassVar[str] = ""  # in tables and titles; "": the task's name
    # The field that tables have in columns, its short name and its words: ("num_pairs", "kv", "key-value pairs").
    AXIS: ClassVar[tuple[str, str, str] | None] = None
    # What tokens are for, and which of them hold what is to be predicted; for analysis.
    ROLES: ClassVar[tuple[str, ...]] = ("token",)
    ANSWERS: ClassVar[tuple[str, ...]] = ROLES
    # Whether batches come from the host, so that several devices can share out the sequences of one.
    STREAMED: ClassVar[bool] = False
    # Settings of training that mean nothing to it, and are left out of its configs.
    UNUSED_TRAIN_SETTINGS: ClassVar[tuple[str, ...]] = ()
    # Settings that say where data is. A run goes on with others if they hold the same (`corpus_read`).
    LOCATIONS: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raises SettingError, naming the settings, if they admit no sequence; every other error counts as a bug."""

    def check_sequences(self) -> None:
        """Raises SettingError if drawn sequences are not what they should be; sequences that are read are not
        checked."""

    def open(self, batch_size: int, seeds: list[int]) -> None:
        """Opens what the sequences are read from, if they are read. Raises SettingError if it can't be used."""

    @property
    def has_segments(self) -> bool:
        """Whether windows have segment_ids, int32 [B, T], as a third array: a token sees only its own segment."""
        return False

    @property
    def corpus_read(self) -> Any | None:
        """The loglinear_jax.text.Corpus that the sequences are read from; None for drawn ones."""
        return None

    def inspection_sequences(
        self, num: int, seq_len: int | None = None
    ) -> tuple[Int[np.ndarray, "num T"], Int[np.ndarray, "num T"]]:
        """(tokens, targets) to look at, which no seed was trained on. seq_len: that of the longest trained ones if None.

        Raises ValueError if there is no sequence of that length.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method inspection_sequences(num, seq_len)")

    def roles(self, tokens: Int[np.ndarray, "num T"]) -> Int[np.ndarray, "num T"]:
        """What each token of a sample is for, as an index of ROLES."""
        return np.zeros(tokens.shape, np.int32)

    def sources(
        self, tokens: Int[np.ndarray, "num T"], targets: Int[np.ndarray, "num T"]
    ) -> Int[np.ndarray, "num T"] | None:
        """Where the answer of each scored target of a sample is: the position, not after the target's own, of the
        token to be output; -1 where nothing is scored. None if answers have no single position, as in a text."""
        return None

    def shown(self, token: int) -> str:
        """A token in a figure."""
        return str(token)

    def marks(self) -> dict[str, int]:
        """Where parts of a sequence begin, by name, for figures."""
        return {}

    @property
    def trained_on(self) -> Mixture:
        """What training batches are drawn from: the task itself, unless it is trained on sequences of several kinds."""
        return Mixture.of(self)

    @property
    def evaluated_on(self) -> Mixture:
        """The same for validation and test; each part counts the same, whatever its weight."""
        return Mixture.of(self)

    @property
    def max_seq_len(self) -> int:
        """Tokens in the longest sequences in training or evaluation."""
        return max(self.trained_on.longest, self.evaluated_on.longest)

    @property
    def unread(self) -> set[str]:
        """Names of its settings that have no effect, given the others."""
        return set()

    @property
    def untold(self) -> set[str]:
        """Names of its settings that titles leave out."""
        return self.unread

    @property
    def scored(self) -> slice:
        """The positions where targets may differ from -1, in every sequence; training computes no logits elsewhere."""
        return slice(None)

    @property
    def num_scored(self) -> int | None:
        """How many targets every sequence has, if always the same number; training then computes logits only at
        these. None: the number varies, or `scored` already has no other positions."""
        return None

    def describe(self) -> str:
        """The task and its settings in a few words, for titles."""
        words = {"seq_len": "length", "vocab_size": "vocabulary"}
        told = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in self.untold
        }
        settings = [
            f"{words.get(name, name.removeprefix('num_').replace('_', ' '))} {str(value).replace(',', ' ')}"
            for name, value in told.items()
            if value != ""
        ]
        return ", ".join([self.TITLE or type(self).__name__, *settings])


@dataclasses.dataclass(frozen=True)
class Task(BaseTask):
    """Base of synthetic tasks, which draw sequences to learn. A subclass adds its settings as fields with defaults, and
    the method `sample`; it may have a `check`."""

    seq_len: int = setting(128, "tokens in a sequence", least=1)
    vocab_size: int = setting(128, "token ids are 0 .. vocab_size - 1", least=1)

    def sample(self, key: jax.Array, num: int) -> tuple[Int[Array, "num T"], Int[Array, "num T"]]:
        """`num` sequences: token ids, and at each position the id to predict there, or -1 where nothing is scored.

        Pure and traceable: it is jitted, and vmapped over the keys of the seeds.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method sample(key, num)")

    def sample_evaluation(self, key: jax.Array, num: int) -> tuple[Int[Array, "num T"], Int[Array, "num T"]]:
        """`num` sequences for validation, test and inspection, in the form of `sample`; those of `sample` itself,
        unless a task is evaluated on other sequences than it is trained on."""
        return self.sample(key, num)

    def check_sequences(self) -> None:
        """Draws a few sequences; raises SettingError if they are not what `sample` promises, if nothing in them is
        scored, or if two keys give the same ones."""
        for part in self.trained_on.parts:
            check_sample(part, num=64, of_two_keys=True)
        if type(self).sample_evaluation is not Task.sample_evaluation:
            for part in self.evaluated_on.parts:
                check_sample(part, method="sample_evaluation")

    def inspection_sequences(self, num, seq_len=None):
        return _inspect(with_length(self.trained_on.longest_part, num, seq_len), num)


def with_length(task: BaseTask, num: int, seq_len: int | None) -> BaseTask:
    """The task with sequences of seq_len tokens, its own length if None.

    Raises SettingError for a length or a number of sequences that can't be.
    """
    if not is_of(num, int) or num < 1:
        raise SettingError(f"num must be a whole number from 1 on, got {num!r}")
    task = task if seq_len is None else dataclasses.replace(task, seq_len=seq_len)
    check_fields(task, "task")
    task.check()
    return task


# With nothing folded in, as training and validation do: other sequences than theirs, whatever their seeds.
INSPECTION_SEED = 2**31 - 1


@functools.lru_cache(maxsize=8)
def _inspect(task: Task, num: int) -> tuple[np.ndarray, np.ndarray]:
    with standard_settings():
        drawn = jax.jit(task.sample_evaluation, static_argnums=1)(jax.random.key(INSPECTION_SEED), num)
    return tuple(np.asarray(x) for x in drawn)


def find_task(name: str) -> type[BaseTask]:
    """Find a task's class by name: TASK of loglinear_jax/tasks/<name>.py or, if there is none, of the module `name`.

    Raises SettingError if there is no such module, or its TASK is not a task whose settings are fields. Errors of
    importing the module are not caught.
    """
    own = f"loglinear_jax.tasks.{name}"
    for path in (own, name):
        is_name = isinstance(name, str) and all(part.isidentifier() for part in path.split("."))
        if is_name and (module := find_module(path)) is not None:
            found = getattr(module, "TASK", None)
            break
    else:
        raise SettingError(
            f"task.name: no task {name!r}: there is no module {own}, and no module {name} here: put the folder that holds it "
            "in PYTHONPATH"
        )
    if not (isinstance(found, type) and issubclass(found, BaseTask)):
        raise SettingError(f"task.name: TASK of {path} is {found!r}: expected a dataclass that is a subclass of Task")
    if "__dataclass_fields__" not in vars(found):  # what it declares would be no settings
        raise SettingError(f"task.name: {found.__name__} of {path} lacks @dataclasses.dataclass(frozen=True) above it")
    return found


def load_task(name: str, **settings: Any) -> BaseTask:
    """Make a task by name (see `find_task`), with these settings.

    Raises SettingError if they are unknown or impossible. Other errors of its `check` are not caught.
    """
    task_class = find_task(name)
    known = {field.name for field in dataclasses.fields(task_class)}
    if unknown := sorted(set(settings) - known):
        raise SettingError(f"task.{unknown[0]}: {name} has no such setting; it has {', '.join(sorted(known))}")
    task = task_class(**settings)
    check_fields(task, "task")
    task.check()
    return task


def check_sample(task: Task, num: int = 4, method: str = "sample", of_two_keys: bool = False) -> None:
    """Draws `num` sequences; raises SettingError if they are not what `Task.sample` promises, or nothing in them is scored.

    method: `sample` or `sample_evaluation`. What it raises itself is not caught. of_two_keys: raises SettingError if another
    key draws the same: then training, validation and test would have the same sequences.
    """
    if type(task).sample is Task.sample:
        raise SettingError(f"{type(task).__name__} has no method sample(key, num)")

    @standard_settings()
    def draw(seed):
        return jax.jit(getattr(task, method), static_argnums=1)(jax.random.key(seed), num)

    drawn = draw(0)
    if not isinstance(drawn, (tuple, list)) or len(drawn) != 2:
        raise SettingError(f"{method} returns a {type(drawn).__name__}: expected the pair (tokens, targets)")
    for name, ids, lowest in (("tokens", drawn[0], 0), ("targets", drawn[1], -1)):
        shape, dtype = getattr(ids, "shape", None), getattr(ids, "dtype", type(ids).__name__)
        if shape != (num, task.seq_len) or not np.issubdtype(dtype, np.integer):
            raise SettingError(
                f"{method}({num} sequences) returns {name} of shape {shape} and dtype {dtype}: expected integers "
                f"[{num}, task.seq_len={task.seq_len}]"
            )
        if ids.min() < lowest or ids.max() >= task.vocab_size:
            raise SettingError(
                f"{method} returns {name} from {ids.min()} to {ids.max()}: expected {lowest} to task.vocab_size - 1 = "
                f"{task.vocab_size - 1}"
            )
    scored = np.asarray(drawn[1]) >= 0
    counts = scored.sum(axis=1)
    outside = scored.any(axis=0)
    outside[task.scored] = False
    expected = {
        "something to predict, a target ≥ 0": scored.any(),
        f"num_scored = {task.num_scored} targets": task.num_scored is None or (counts == task.num_scored).all(),
        f"targets within scored = {task.scored} alone": not outside.any(),
        "another key to draw others": not (of_two_keys and all(map(np.array_equal, drawn, draw(1)))),
    }
    if failed := [what for what, holds in expected.items() if not holds]:
        raise SettingError(
            f"{method} draws sequences with {counts.min()} to {counts.max()} targets: expected {failed[0]}"
        )
