"""Text: predict the next token, or the one after it, of a corpus that is read in windows."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from loglinear_jax.settings import SettingError, setting
from loglinear_jax.tasks.base import PERPLEXITY, BaseTask, with_length
from loglinear_jax.text import Corpus, SeedBatches, evaluation_windows, open_corpus

TARGETS = {1: "next token", 2: "token after the next"}


@dataclasses.dataclass(frozen=True)
class CorpusTask(BaseTask):
    """What tasks have in common that read the tokens of a corpus. A subclass has the methods `batches` and `windows`, and the
    properties `data` and `predicts`.

    The corpus is opened, and tokenised if it never was, when it is first read.
    """

    corpus: str = setting("", "the text: a file, a folder, or the name of one that can be downloaded")
    tokenizer: str = setting(
        "gpt2",
        "a file tokenizer.json; a folder of it, or of vocab.json and merges.txt; or a name on the Hugging Face hub",
    )
    cache: str = setting("~/.cache/loglinear_jax", "where tokenised corpora are kept")
    seq_len: int = setting(512, "tokens in a window", least=1)
    validation_windows: int | None = setting(
        None,
        "windows of the validation split evaluated while training; None: all, for perplexities to be compared",
        least=0,
    )

    score = PERPLEXITY
    STREAMED = True
    UNUSED_TRAIN_SETTINGS = ("stream", "num_train", "num_validation", "num_test")  # of drawn sequences
    LOCATIONS = ("corpus", "tokenizer", "cache")  # the manifest of the corpus says what they hold
    ROLES = ("word", "part of a word", "number", "sign")
    ANSWERS = ROLES

    def open(self, batch_size: int, seeds: list[int]) -> None:
        """Opens the corpus; raises CorpusError, saying what is wrong with it, if any split can't be used."""
        self.batches(batch_size, seeds)
        for split in ("validation", "test"):
            self.windows(split)

    @property
    def data(self) -> Corpus:
        """The corpus, tokenised."""
        raise NotImplementedError(f"{type(self).__name__} has no property data")

    @property
    def predicts(self) -> str:
        """Which token the targets are, in words."""
        raise NotImplementedError(f"{type(self).__name__} has no property predicts")

    @property
    def corpus_read(self) -> Corpus:
        return self.data

    @property
    def vocab_size(self) -> int:
        return self.data.vocab_size

    def batches(self, batch_size: int, seeds: list[int]) -> Any:
        """The training split's batches, by seed and step; `iterate(first_step, state)` begins anywhere. Raises CorpusError if
        the split is too short for one."""
        raise NotImplementedError(f"{type(self).__name__} has no method batches(batch_size, seeds)")

    def windows(self, split: str) -> tuple[np.ndarray, ...]:
        """(tokens, targets) [windows, seq_len] of a split, of validation the first validation_windows; -1 where nothing is
        scored. With `has_segments` also segment_ids."""
        raise NotImplementedError(f"{type(self).__name__} has no method windows(split)")

    def windows_of(self, split: str) -> int | None:
        """How many windows of a split are evaluated; None: all."""
        return (self.validation_windows or None) if split == "validation" else None

    def inspection_sequences(self, num, seq_len=None):
        """The first windows of the validation split: as many tokens as `num` windows of the task's own length have."""
        task = with_length(self, num, seq_len)
        count = max(num * self.seq_len // task.seq_len, 1)
        return tuple(x[:count] for x in task.windows("validation"))

    def describe(self) -> str:
        return f"{Path(self.corpus).stem}, windows of {self.seq_len}, {self.predicts}"

    def roles(self, tokens: np.ndarray) -> np.ndarray:
        """Whether a token begins a word (after a space), goes on in one, has a digit, or no letter at all."""
        return _roles(self.data.tokenizer, self.vocab_size)[tokens]

    def shown(self, token: int) -> str:
        """The token's text."""
        return repr(self.data.tokenizer.decode([int(token)]))


@dataclasses.dataclass(frozen=True)
class Text(CorpusTask):
    """Windows of seq_len tokens of a corpus; the target of each token is the one target_offset further on
    (loglinear_jax.text.open_corpus)."""

    corpus: str = setting(
        "wikitext-103-raw",
        "`wikitext-103-raw`, `wikitext-103`, `wikitext-2-raw`, `wikitext-2`, a text file, or a folder of train.txt, valid.txt, "
        "test.txt",
    )
    target_offset: int = setting(
        1,
        "which token is predicted: 1, the next; 2, the one after it, as the released code does by shifting labels twice",
    )

    TITLE = "Text"

    def check(self) -> None:
        if self.target_offset not in TARGETS:
            raise SettingError(
                f"task.target_offset must be 1 (next token) or 2 (the one after), got {self.target_offset}"
            )

    @property
    def data(self) -> Corpus:
        return _open(self.corpus, self.tokenizer, self.cache)

    @property
    def predicts(self) -> str:
        return TARGETS[self.target_offset]

    def batches(self, batch_size: int, seeds: list[int]) -> SeedBatches:
        return SeedBatches(
            self.data.train,
            seq_len=self.seq_len,
            target_offset=self.target_offset,
            batch_size=batch_size,
            seeds=seeds,
        )

    def windows(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        tokens, limit = getattr(self.data, split), self.windows_of(split)
        return evaluation_windows(tokens, seq_len=self.seq_len, target_offset=self.target_offset, limit=limit)


@functools.cache
def _open(corpus: str, tokenizer: str, cache: str) -> Corpus:
    return open_corpus(corpus, tokenizer=tokenizer, cache=cache)


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
