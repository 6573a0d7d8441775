"""Text: predict the next token, or the one after it, of a corpus that is read in windows."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import numpy as np
import tokenizers

from loglinear_jax.text import Corpus, SeedBatches, evaluation_windows, open_corpus

TARGETS = {1: "next token", 2: "token after the next"}


@dataclasses.dataclass(frozen=True)
class Text:
    """Windows of seq_len tokens of a corpus; the target of each token is the one target_offset further on.

    The corpus is opened, and tokenised if it never was, when it is first read.

    corpus, source, tokenizer, cache: see loglinear_jax.text.open_corpus. target_offset 2 is what the paper's released code
    trains and measures, by shifting labels twice. validation_windows: how many windows of the validation split to evaluate
    while training; 0, all of it, for perplexities to be compared.
    """

    corpus: str = "wikitext-103-raw"
    source: str = ""
    tokenizer: str = "gpt2"
    cache: str = "~/.cache/loglinear_jax"
    seq_len: int = 512
    target_offset: int = 1
    validation_windows: int = 0

    scored: ClassVar[slice] = slice(None)

    def check(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"task.seq_len must be at least 1, got {self.seq_len}")
        if self.target_offset not in TARGETS:
            raise ValueError(
                f"task.target_offset must be 1 (next token) or 2 (the one after), got {self.target_offset}"
            )
        if self.validation_windows < 0:
            raise ValueError(f"task.validation_windows must not be negative, got {self.validation_windows}")

    def check_data(self, batch_size: int, seeds: list[int]) -> None:
        """Opens the corpus; raises CorpusError, saying what is wrong with it, if any split can't be used."""
        self.batches(batch_size, seeds)
        for split in ("validation", "test"):
            self.windows(split)

    ROLES = ("word", "part of a word", "number", "sign")
    ANSWERS = ROLES

    def roles(self, tokens: np.ndarray) -> np.ndarray:
        """As of a Task: whether a token begins a word (after a space), goes on in one, has a digit, or no letter at all."""
        return _roles(self.data.tokenizer, self.vocab_size)[tokens]

    def shown(self, token: int) -> str:
        """As of a Task: the token's text."""
        return repr(self.data.tokenizer.decode([int(token)]))

    def marks(self) -> dict[str, int]:
        """As of a Task: none."""
        return {}

    @property
    def data(self) -> Corpus:
        """The corpus, tokenised."""
        return _open(self.corpus, self.source, self.tokenizer, self.cache)

    @property
    def vocab_size(self) -> int:
        return self.data.vocab_size

    def batches(self, batch_size: int, seeds: list[int]) -> SeedBatches:
        """The training split's batches, by seed and step. Raises CorpusError if it is too short for one."""
        return SeedBatches(
            self.data.train,
            seq_len=self.seq_len,
            target_offset=self.target_offset,
            batch_size=batch_size,
            seeds=seeds,
        )

    def windows(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) [windows, seq_len] of a split, of validation the first validation_windows; -1 where nothing is
        scored."""
        limit = (self.validation_windows or None) if split == "validation" else None
        tokens = getattr(self.data, split)
        return evaluation_windows(tokens, seq_len=self.seq_len, target_offset=self.target_offset, limit=limit)


@functools.cache
def _open(corpus: str, source: str, tokenizer: str, cache: str) -> Corpus:
    return open_corpus(corpus, source=source, tokenizer=tokenizer, cache=cache)


@functools.cache
def _roles(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> np.ndarray:
    def role(text: str) -> int:
        if any(c.isdigit() for c in text):
            return 2
        if not any(c.isalpha() for c in text):
            return 3
        return 0 if text[0] == " " else 1

    return np.array([role(tokenizer.decode([token])) for token in range(vocab_size)])


TASK = Text
