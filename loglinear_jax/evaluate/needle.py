"""A needle test: a sentence with a key and its value is put into a document, and the value is asked for at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from loglinear_jax.evaluate.documents import Documents, Measure
from loglinear_jax.evaluate.windows import window_scores
from loglinear_jax.models import LanguageModel
from loglinear_jax.settings import SettingError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

QUESTION, VALUE, STOP = " The secret number of {key} is", " {value}", "."
LENGTH = "length (tokens)"  # what needles are grouped by
KEYS = ("Amsterdam", "Berlin", "Cairo", "Delhi", "Lima", "London", "Oslo", "Paris", "Prague", "Rome", "Tokyo", "Vienna")


class Needles(NamedTuple):
    """Documents with a needle at each of several depths. windows: token ids, which end with the value. values: how
    many of the last tokens belong to the value."""

    windows: Int[np.ndarray, "documents depths S"]
    values: Int[np.ndarray, " documents"]


def hide_needles(
    tokenizer: Tokenizer, documents: Documents, numbers: Sequence[int], length: int, depths: Sequence[float]
) -> Needles:
    """Windows of length + 1 tokens: the beginning of a document, with " The secret number of KEY is VALUE." at each depth, and
    at the end " The secret number of KEY is VALUE".

    documents: of at least `length` tokens; their first token, the end token, stays first. numbers: of the documents; a
    document's number decides its key and its value of six digits, whatever the length and the depth. depths: where in
    the document the sentence is, in % of its tokens. Raises SettingError for a tokenizer that does not reproduce the
    sentence, and for a length without room for it.
    """
    windows, values = [], []
    for number, document in zip(numbers, documents, strict=True):
        rng = np.random.default_rng(number)
        filled = {"key": KEYS[rng.integers(len(KEYS))], "value": rng.integers(100_000, 1_000_000)}
        question, value, stop = (_encode(tokenizer, part.format(**filled)) for part in (QUESTION, VALUE, STOP))
        needle = [*question, *value, *stop]
        room = length + 1 - len(needle) - len(question) - len(value)
        if room < 1:
            raise SettingError(
                f"length={length}: expected at least {length + 1 - room}, the tokens of the needle and of its question"
            )
        places = [1 + round(depth / 100 * (room - 1)) for depth in depths]
        windows.append([[*document[:at], *needle, *document[at:room], *question, *value] for at in places])
        values.append(len(value))
    return Needles(np.array(windows, np.int32), np.array(values))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if "".join(back.split()) != "".join(text.split()):
        raise SettingError(f"the tokenizer makes {back!r} of the needle's {text!r}: expected one that loses nothing")
    return ids


def needle_scores(
    model: LanguageModel, params: Any, needles: Needles, tick: Callable[[int], Any] = lambda tokens: None
) -> tuple[Float[np.ndarray, "documents depths"], Bool[np.ndarray, "documents depths"]]:
    """Summed cross-entropy in nats of the value's tokens, and whether greedy decoding gives all of them. tick and
    errors: see `window_scores`."""
    losses, right = window_scores(model, params, needles.windows.reshape(-1, needles.windows.shape[-1]), tick)
    is_value = np.arange(losses.shape[1]) >= losses.shape[1] - needles.values[:, None, None]
    losses, right = (x.reshape(*needles.windows.shape[:2], -1) for x in (losses, right))
    return np.where(is_value, losses, 0.0).sum(axis=2, dtype=np.float64), (right | ~is_value).all(axis=2)


def needle_measures(
    lengths: Sequence[int],
    depths: Sequence[float],
    numbers: Sequence[Sequence[int]],
    values: Sequence[Int[np.ndarray, " documents"]],
    scores: Mapping[str, Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]],
) -> list[Measure]:
    """Loss of the value's tokens and greedy accuracy, by length, and by length and depth; a row for each document
    number of any length, in order.

    numbers, values: of each length, its documents' numbers and their `Needles.values`. scores: by model and seed,
    `needle_scores` of each length.
    """
    every = sorted({number for of_length in numbers for number in of_length})
    rows = [np.searchsorted(every, of_length) for of_length in numbers]

    def placed(of_lengths, dtype):
        """[documents, lengths, depths], 0 where a length lacks a document."""
        found = np.zeros((len(every), len(lengths), len(depths)), dtype)
        for index, (row, of_length) in enumerate(zip(rows, of_lengths, strict=True)):
            found[row, index] = of_length
        return found

    def of_models(score):
        """score(losses, right) of every length [seeds, documents, lengths, depths], by model."""
        return {
            model: np.array([placed([score(*one) for one in of_lengths], float) for of_lengths in of_seeds])
            for model, of_seeds in scores.items()
        }

    losses = placed([x[:, None] for x in values], int), of_models(lambda losses, right: losses)
    accuracies = placed([1] * len(lengths), int), of_models(lambda losses, right: 100.0 * right)
    grid = [f"{length:,}" for length in lengths], [f"{depth:g} %" for depth in depths]
    pairs = [f"{length}, {depth}" for length in grid[0] for depth in grid[1]]
    measures = []
    for name, unit, (counts, sums) in (("loss", "nats", losses), ("accuracy", "%", accuracies)):
        by_length = {model: x.sum(axis=3) for model, x in sums.items()}
        by_depth = {model: x.reshape(len(x), len(every), -1) for model, x in sums.items()}
        measures += [
            Measure(f"needle {name} by length", LENGTH, grid[0], lengths, counts.sum(axis=2), by_length, unit),
            Measure(
                f"needle {name} by length and depth", f"{LENGTH}, depth", pairs, None,
                counts.reshape(len(every), -1), by_depth, unit, grid,
            ),
        ]  # fmt: skip
    return measures
