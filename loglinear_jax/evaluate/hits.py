"""Tokens that a model could recall from its past: AR hits (Arora et al., "Zoology", 2023, section 3).

A token is an AR hit (associative-recall hit) if it and the token before it, a bigram, stood next to each other before in the
same document.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

CHUNK = 1 << 22  # training tokens whose bigrams are sorted at a time


def bigrams(tokens: Int[np.ndarray, " S"]) -> Int[np.ndarray, " T"]:
    """A number for each token but the first, T = S - 1: the same where the token and the one before it are the same. Token ids
    are below 2^31."""
    tokens = tokens.astype(np.int64)
    return tokens[:-1] << 31 | tokens[1:]


def hit_distances(tokens: Int[np.ndarray, " S"]) -> Int[np.ndarray, " T"]:
    """How many tokens ago the bigram that each token but the first completes was last completed; 0 for a token that is no AR
    hit. tokens: of one document."""
    found = bigrams(tokens)
    order = np.argsort(found, kind="stable")
    same = found[order[1:]] == found[order[:-1]]
    distances = np.zeros(len(found), np.int64)
    distances[order[1:][same]] = (order[1:] - order[:-1])[same]
    return distances


def bigram_counts(tokens: Int[np.ndarray, " S"], wanted: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """How often each of the `bigrams` wanted is in the tokens, such as those of a training split. wanted: sorted, each once.

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
