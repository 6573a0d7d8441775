"""What outcome.json and summary.json hold: the outcomes of variants, per seed and together, and where they come from."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from loglinear_jax.distributed import to_host
from loglinear_jax.lam import count_lam_params
from loglinear_jax.statistics import wilson_interval
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, PERPLEXITY, SOLVED_ACCURACY, Score
from loglinear_jax.train import SeedState


@dataclasses.dataclass(frozen=True)
class VariantOutcome:
    """The outcome of one trained variant. Lists have an entry per seed; accuracies are shares of 1, losses in nats; a
    step is None if it was never reached.

    metric: "accuracy" or "loss", by which the best step of a seed was chosen in validation. best_loss, best_accuracy:
    the validation values at that step; best_loss is None for a seed without a finite evaluation. solved_step: the first
    evaluated step at SOLVED_ACCURACY (99 %) in validation. diverged_step: the step whose loss or gradient was not
    finite. last_step: of all seeds. num_steps: how many steps were requested; None in outcomes of earlier versions.
    params, lam_params: how many parameters there are in all, and how many are λ's. seconds: of training and evaluating,
    in all processes.
    seed_steps_per_second, tokens_per_second: medians over evaluations; None where seeds were trained in several programs.
    test_loss, test_accuracy: of the best step's parameters, on num_test sequences of the seed drawn after training, or
    on the test split of a text, which has only a loss; None for a run of an earlier version.
    test_accuracy_of_parts: the same accuracy by part of the test, where it has several: "64/4". Each counts the same in
    test_accuracy.
    predicts, test_loss_from_position: only for a text; which token is predicted, and the test loss by the first
    position of a range of positions in the window.
    """

    metric: str
    seeds: list[int]
    best_loss: list[float | None]
    best_accuracy: list[float]
    best_step: list[int | None]
    solved_step: list[int | None]
    diverged_step: list[int | None]
    last_step: int
    params: int
    lam_params: int
    seconds: float | None = None
    seed_steps_per_second: float | None = None
    tokens_per_second: float | None = None
    predicts: str | None = None
    test_loss: list[float | None] | None = None
    test_accuracy: list[float | None] | None = None
    test_accuracy_of_parts: dict[str, list[float | None]] | None = None
    test_loss_from_position: dict[str, list[float | None]] | None = None
    num_steps: int | None = None

    @property
    def accuracy(self) -> np.ndarray:
        """The accuracies [seeds] to report: on the test set, or the best in validation if there is no test. To
        compare several outcomes, use those of `on_one_set`."""
        return np.array(self.best_accuracy if self.test_accuracy is None else self.test_accuracy, np.float64)

    @property
    def mean_accuracy(self) -> float:
        return float(np.mean(self.accuracy))

    @property
    def std_accuracy(self) -> float | None:
        """Standard deviation over seeds (divisor n - 1); None for one seed."""
        return float(np.std(self.accuracy, ddof=1)) if len(self.seeds) > 1 else None

    @property
    def peak_accuracy(self) -> float:
        return float(np.max(self.accuracy))

    def reached(self, threshold: float) -> list[bool]:
        """Whether each seed's `accuracy` is at least this high; for SOLVED_ACCURACY, whether it ever was in
        validation."""
        if threshold == SOLVED_ACCURACY:
            return [step is not None for step in self.solved_step]
        return (self.accuracy >= np.float32(threshold)).tolist()  # as accuracies are in float32

    @property
    def num_converged(self) -> int:
        """Seeds whose `accuracy` reached CONVERGED_ACCURACY (90 %)."""
        return sum(self.reached(CONVERGED_ACCURACY))

    @property
    def share_converged(self) -> float:
        return self.num_converged / len(self.seeds)

    @property
    def share_converged_interval(self) -> list[float]:
        """Wilson's 95 % interval of share_converged."""
        return list(wilson_interval(self.num_converged, len(self.seeds)))

    @property
    def num_solved(self) -> int:
        """Seeds that reached SOLVED_ACCURACY (99 %) in validation."""
        return sum(self.reached(SOLVED_ACCURACY))

    @property
    def median_solved_step(self) -> float | None:
        """Median of solved_step over the seeds that reached it."""
        reached = [step for step in self.solved_step if step is not None]
        return float(np.median(reached)) if reached else None

    @property
    def num_diverged(self) -> int:
        return sum(step is not None for step in self.diverged_step)

    @property
    def lam_params_percent(self) -> float:
        """λ's parameters in % of all others."""
        return 100 * self.lam_params / (self.params - self.lam_params)

    @property
    def score(self) -> Score:
        """The score of its task."""
        return PERPLEXITY if self.metric == PERPLEXITY.metric else ACCURACY

    @property
    def best(self) -> np.ndarray:
        """The score's values, as shown, [seeds] at each seed's best validation; nan where there was none."""
        return self.score.of(np.array(self.best_loss, float), np.array(self.best_accuracy, float))

    @property
    def shown(self) -> np.ndarray:
        """What tables show of each seed [seeds]: 100 · `accuracy`, or the best validation perplexity."""
        return self.score.of(np.array(self.best_loss, float), self.accuracy)

    @property
    def shown_as(self) -> str:
        """What `shown` is: "test accuracy", "best validation accuracy", "best validation perplexity"."""
        tested = self.score is ACCURACY and self.test_accuracy is not None
        return f"{'test' if tested else 'best validation'} {self.score.name}"

    def to_json(self) -> dict[str, Any]:
        """The fields that are set, and what follows from them in a task of this score, for a file."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return fields | {name: getattr(self, name) for name in DERIVED[self.score]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> VariantOutcome:
        """What `to_json` gave, now or in an earlier version. Raises ValueError naming what is missing."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
        if lacking := [name for name in required if name not in values]:
            raise ValueError(f"there is no {lacking[0]}")
        outcome = cls(**{name: value for name, value in values.items() if name in fields})
        for name in OF_SEEDS:
            if len(getattr(outcome, name)) != len(outcome.seeds):
                raise ValueError(f"{name} has {len(getattr(outcome, name))} entries for {len(outcome.seeds)} seeds")
        return outcome

    def of_seeds(self, seeds: Collection[int]) -> VariantOutcome:
        """The outcome of these of its seeds alone."""
        kept = [seed in seeds for seed in self.seeds]
        return dataclasses.replace(self, **_lists_of(lambda values: list(itertools.compress(values, kept)), self))

    def with_seeds_of(self, other: VariantOutcome) -> VariantOutcome:
        """The outcome of this one's seeds and then the other's, which were trained in another program, so that no rate of
        training is known of all of them."""
        own, further = vars(self), vars(other)
        joined = _lists_of(operator.add, self, other)
        for name, of_both in (("last_step", max), ("num_steps", max), ("seconds", sum)):
            known = None not in (own[name], further[name])
            joined[name] = of_both((own[name], further[name])) if known else None
        # Seeds that all stopped before their steps were over need no more, however many the others take.
        if joined["num_steps"] is not None:
            taken = [one.num_steps for one in (self, other) if one.last_step >= one.num_steps]
            joined["num_steps"] = min(taken, default=joined["num_steps"])
        return dataclasses.replace(self, **joined, seed_steps_per_second=None, tokens_per_second=None)


def _lists_of(function: Callable[..., list[Any]], *outcomes: VariantOutcome) -> dict[str, Any]:
    """The fields that have an entry per seed, also in dicts: `function` of their lists in all outcomes."""

    def of_lists(*values: Any) -> Any:
        if isinstance(values[0], dict):
            return {name: of_lists(*(one[name] for one in values)) for name in values[0]}
        return function(*values)

    names = [name for name, value in vars(outcomes[0]).items() if isinstance(value, (list, dict))]
    return {name: of_lists(*(getattr(outcome, name) for outcome in outcomes)) for name in names}


OF_SEEDS = ("best_loss", "best_accuracy", "best_step", "solved_step", "diverged_step")
DERIVED = {
    ACCURACY: (
        "mean_accuracy", "std_accuracy", "peak_accuracy", "num_converged", "share_converged", "share_converged_interval",
        "median_solved_step", "lam_params_percent",
    ),
    PERPLEXITY: ("lam_params_percent",),
}  # fmt: skip

Key = TypeVar("Key")


def on_one_set(outcomes: Mapping[Key, VariantOutcome]) -> dict[Key, VariantOutcome]:
    """The outcomes with accuracies that may be compared: all on test sets, or all in validation if one of them has no test.

    Those of tasks in which accuracy does not matter have no say.
    """
    tested = all(o.test_accuracy is not None for o in outcomes.values() if o.score is ACCURACY)
    return {key: o if tested else dataclasses.replace(o, test_accuracy=None) for key, o in outcomes.items()}


def shared_seeds(outcomes: Iterable[VariantOutcome]) -> list[int]:
    """The seeds that all of the outcomes have: while seeds are added to a run, some variants have more than others."""
    first, *others = (outcome.seeds for outcome in outcomes)
    return [seed for seed in first if all(seed in seeds for seeds in others)]


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """Content of summary.json, or of a variant's outcome.json: outcomes, and the last process that they come from.

    command: the command line that made it. provenance: "commit" and "config_sha256" (see loglinear_jax.provenance). device:
    how many of which kind. versions: of packages by name.
    """

    variants: dict[str, VariantOutcome]
    command: str | None = None
    provenance: dict[str, str] = dataclasses.field(default_factory=dict)
    device: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "provenance": self.provenance,
            "device": self.device,
            "versions": self.versions,
            "variants": {name: outcome.to_json() for name, outcome in self.variants.items()},
        }

    @classmethod
    def from_json(cls, values: Any) -> RunSummary:
        """Raises ValueError naming what is missing."""
        if not isinstance(values, dict) or not isinstance(values.get("variants"), dict):
            raise ValueError("not a summary of a run: it has no variants")
        variants = {}
        for name, outcome in values["variants"].items():
            try:
                variants[name] = VariantOutcome.from_json(outcome)
            except (TypeError, ValueError) as error:
                raise ValueError(f"of another version: {name}: {error}") from error
        known = {field.name for field in dataclasses.fields(cls)} - {"variants"}
        return cls(variants=variants, **{name: value for name, value in values.items() if name in known})


def join_summaries(summaries: Sequence[RunSummary]) -> RunSummary:
    """One summary of several, of a run's variants or of the seeds of a variant, with the origin of the last.

    Where two have a variant, their seeds are joined; if they have the same seeds, the later one counts.
    """
    variants: dict[str, VariantOutcome] = {}
    for summary in summaries:
        for name, outcome in summary.variants.items():
            is_further = name in variants and set(variants[name].seeds).isdisjoint(outcome.seeds)
            variants[name] = variants[name].with_seeds_of(outcome) if is_further else outcome
    return dataclasses.replace(summaries[-1], variants=variants)


def outcome_of(state: SeedState, metric: str, **measured: Any) -> VariantOutcome:
    """The outcome of a trained variant, from its state of all seeds [S, ...]; measured: further fields."""

    def of_seeds(values):
        return to_host(values).tolist()

    def steps(values):
        return [step if step >= 0 else None for step in of_seeds(values)]

    def floats(values):
        return to_host(values).astype(np.float64).tolist()

    best_steps = of_seeds(state.best_step)
    one_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
    lam_params, other_params = count_lam_params(one_seed)
    return VariantOutcome(
        metric=metric,
        seeds=of_seeds(state.seed),
        best_loss=[loss if step >= 0 else None for loss, step in zip(floats(state.best_loss), best_steps, strict=True)],
        best_accuracy=floats(state.best_accuracy),
        best_step=steps(state.best_step),
        solved_step=steps(state.solved_step),
        diverged_step=steps(state.diverged_step),
        last_step=int(to_host(state.step).max()),
        params=lam_params + other_params,
        lam_params=lam_params,
        **measured,
    )
