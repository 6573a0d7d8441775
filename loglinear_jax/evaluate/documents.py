"""Losses of documents: by position, on AR hits and on other tokens, and their means over documents.

A token is an AR hit (associative-recall hit; Arora et al., "Zoology", 2023, section 3) if it and the token before it, a bigram,
stood next to each other before in the same document: a model could recall it from its past.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from loglinear_jax.evaluate.windows import window_losses
from loglinear_jax.models import LanguageModel
from loglinear_jax.statistics import mean_interval, student_interval

CHUNK = 1 << 22  # training tokens whose bigrams are sorted at a time
LEAST_PADDED = 64  # tokens of a short document with its padding
Documents = Sequence[Int[np.ndarray, " S"]]


@dataclasses.dataclass(frozen=True)
class Measure:
    """Scores of models on documents, over groups of tokens. A model has the parameters of one seed or several.

    name: what is measured; by: what the groups are. groups: names of the groups; middles: the place of each on a
    logarithmic axis, None for groups that have no order. counts: tokens of each document in each group. sums: summed
    scores of these tokens, by model; all have the same seeds. unit: nats of a loss, or % of an accuracy. grid: names of
    rows and columns, where groups are all their pairs, row by row.
    """

    name: str
    by: str
    groups: Sequence[str]
    middles: Sequence[float] | None
    counts: Int[np.ndarray, "documents groups"]
    sums: Mapping[str, Float[np.ndarray, "seeds documents groups"]]
    unit: str = "nats"
    grid: tuple[Sequence[str], Sequence[str]] | None = None

    @property
    def unit_name(self) -> str:
        """What is in this unit."""
        return {"nats": "loss", "%": "accuracy"}[self.unit]

    def mean(self, model: str, group: int, other: str | None = None) -> tuple[float, float, float]:
        """Mean over tokens of a model's scores, or of how far they are above another model's, with a 95 % interval
        (mean, low, high): for one seed over documents, by `mean_of_tokens`; for losses of several seeds over the
        seeds, by `student_interval`. Accuracies of several seeds have no interval (nan), as they are bounded by 0
        and 100 %."""
        sums, counts = self.sums[model][:, :, group], self.counts[:, group]
        if other is not None:
            sums = sums - self.sums[other][:, :, group]
        if len(sums) == 1:
            return mean_of_tokens(sums[0], counts)
        if not counts.any():
            return np.nan, np.nan, np.nan
        means = sums.sum(axis=1) / counts.sum()
        return student_interval(means) if self.unit == "nats" else (float(means.mean()), np.nan, np.nan)


def mean_of_tokens(
    sums: Float[np.ndarray, " documents"], counts: Int[np.ndarray, " documents"]
) -> tuple[float, float, float]:
    """Mean over all tokens with a 95 % interval over documents, (mean, low, high), from each document's sum and number of
    tokens.

    The mean is a ratio of two sums over documents. The interval is `mean_interval` of the ratio's linear terms, one for each
    document (Cochran, "Sampling Techniques", 1977, section 6.4); nan for fewer than 10 documents with tokens. If all
    documents have equally many tokens, it is `mean_interval` of their means.
    """
    there = counts > 0
    sums, counts = sums[there], counts[there]
    if not len(counts):
        return np.nan, np.nan, np.nan
    mean = sums.sum() / counts.sum()
    return mean_interval(mean + (sums - mean * counts) / counts.mean())


def padded_lengths(documents: Documents) -> list[int]:
    """How many tokens of each document are computed: its own up to a power of two, so that few lengths are compiled."""
    own = [len(document) - 1 for document in documents]
    return [min(max(1 << (length - 1).bit_length(), LEAST_PADDED), max(own)) for length in own]


def document_losses(
    model: LanguageModel, params: Any, documents: Documents, tick: Callable[[int], Any] = lambda tokens: None
) -> list[Float[np.ndarray, " T"]]:
    """Cross-entropy in nats of every token of a document except the first, given all tokens before it; T = S - 1.

    tick: called with the number of tokens computed so far, `padded_lengths` in all. Raises what `window_losses` raises.
    """
    losses: list[Any] = [None] * len(documents)
    lengths = np.array(padded_lengths(documents))
    for length in np.unique(lengths):
        some = np.flatnonzero(lengths == length)
        windows = np.stack([np.pad(documents[i], (0, length + 1 - len(documents[i]))) for i in some])
        for index, of_window in zip(some, window_losses(model, params, windows, tick), strict=True):
            losses[index] = of_window[: len(documents[index]) - 1]
    return losses


def bigrams(tokens: Int[np.ndarray, " S"]) -> Int[np.ndarray, " T"]:
    """A number for each token except the first, T = S - 1, that identifies the bigram of the token and the one
    before it. Token ids are below 2^31."""
    tokens = tokens.astype(np.int64)
    return tokens[:-1] << 31 | tokens[1:]


def hit_distances(tokens: Int[np.ndarray, " S"]) -> Int[np.ndarray, " T"]:
    """For each token except the first, how many tokens ago the bigram that it completes last occurred; 0 for a token
    that is not an AR hit. tokens: of one document."""
    found = bigrams(tokens)
    order = np.argsort(found, kind="stable")
    same = found[order[1:]] == found[order[:-1]]
    distances = np.zeros(len(found), np.int64)
    distances[order[1:][same]] = (order[1:] - order[:-1])[same]
    return distances


def bigram_counts(tokens: Int[np.ndarray, " S"], wanted: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """How often each wanted bigram is in the tokens, for example of a training split. wanted: numbers from `bigrams`,
    sorted, each once.

    Memory does not grow with the tokens, which may be a memory map.
    """
    counts = np.zeros(len(wanted), np.int64)
    for first in range(0, len(tokens) - 1, CHUNK):
        found, times = np.unique(bigrams(tokens[first : first + CHUNK + 1]), return_counts=True)
        at = np.searchsorted(wanted, found)
        known = at < len(wanted)
        known[known] = wanted[at[known]] == found[known]
        counts[at[known]] += times[known]
    return counts


def loss_measures(
    documents: Documents,
    losses: Mapping[str, Sequence[Sequence[Float[np.ndarray, " T"]]]],
    train: Int[np.ndarray, " N"] | None = None,
) -> list[Measure]:
    """Losses of models on documents: for all tokens, AR hits and others; by position; and for AR hits by the distance
    to the bigram's last occurrence and by its count in the training split.

    losses: by model and seed, as `document_losses`. train: the tokens of the training split, if there is one. A measure
    without tokens, for example if there is no AR hit, is left out.
    """
    ends = np.cumsum([len(document) - 1 for document in documents])
    positions = np.concatenate([np.arange(1, len(document)) for document in documents])
    distances = np.concatenate([hit_distances(document) for document in documents])
    is_hit = distances > 0
    spans = [(1 << i, min((2 << i) - 1, most)) for most in [int(positions.max())] for i in range(most.bit_length())]
    middles = [(first * last) ** 0.5 for first, last in spans]
    each = [
        ("loss on AR hits and on the rest", "tokens", ["AR hits", "the rest"], None, np.where(is_hit, 0, 1)),
        ("loss by position", "position (tokens)", _names(spans), middles, np.frexp(positions)[1] - 1),
        (
            "loss on AR hits by distance", "tokens since the bigram's last occurrence", _names(spans), middles,
            np.where(is_hit, np.frexp(distances)[1] - 1, -1),
        ),
    ]  # fmt: skip
    if train is not None:
        found = np.concatenate([bigrams(document) for document in documents])[is_hit]
        wanted, inverse = np.unique(found, return_inverse=True)
        frequencies = np.zeros_like(distances)
        frequencies[is_hit] = bigram_counts(train, wanted)[inverse]
        decades = [(0, 0)] + [(10**i, 10 ** (i + 1) - 1) for i in range(len(str(frequencies.max())))]
        number_of_digits = np.searchsorted([first for first, _ in decades[1:]], frequencies, side="right")
        by = "occurrences of the bigram in the training split"
        groups = np.where(is_hit, number_of_digits, -1)
        each.append(("loss on AR hits by training frequency", by, _names(decades), None, groups))
    every = {
        model: np.array([np.concatenate(of_seed) for of_seed in of_model], np.float64)
        for model, of_model in losses.items()
    }
    document = np.repeat(np.arange(len(documents)), np.diff(ends, prepend=0))
    first, *others = [_measure(*of_measure, document, every) for of_measure in each]

    def with_all(x):
        return np.concatenate([x.sum(axis=-1, keepdims=True), x], axis=-1)

    sums = {model: with_all(x) for model, x in first.sums.items()}
    whole = dataclasses.replace(first, groups=["all", *first.groups], counts=with_all(first.counts), sums=sums)
    return [whole, *(measure for measure in others if measure.counts.any())]


def _measure(name, by, groups, middles, group, document, losses) -> Measure:
    """group, document: of each token; a group below 0 is none. losses [seeds, tokens], by model."""
    shape, inside = (document[-1] + 1, len(groups)), group >= 0
    at = (document * len(groups) + group)[inside]

    def summed(values):
        return np.bincount(at, None if values is None else values[inside], shape[0] * shape[1]).reshape(shape)

    sums = {model: np.array([summed(of_seed) for of_seed in x]) for model, x in losses.items()}
    return Measure(name, by, groups, middles, summed(None), sums)


def _names(ranges: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{first:,}" if first == last else f"{first:,} – {last:,}" for first, last in ranges]
