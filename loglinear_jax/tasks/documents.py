"""Documents: predict the next token of each, packed into windows."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from loglinear_jax.settings import other_default, setting
from loglinear_jax.tasks.base import with_length
from loglinear_jax.tasks.text import CorpusTask
from loglinear_jax.text import (
    END_TOKEN,
    PACKINGS,
    Corpus,
    CutDocuments,
    PackedBatches,
    evaluation_packs,
    open_documents,
)


@dataclasses.dataclass(frozen=True)
class Documents(CorpusTask):
    """Packs of seq_len tokens of documents, with the end token before each document (loglinear_jax.text.batches).

    The first token of a document is predicted from the end token, and its last one predicts the end token.
    """

    corpus: str = setting(
        "books",
        "a folder of documents: train/, valid/, test/ of .txt and .jsonl files, or such files alone; a .jsonl file; or a data "
        "set on the Hugging Face hub, as owner/name",
    )
    text_field: str = setting("text", "where a line of JSON or a row of a data set has its text")
    end_token: str = setting(END_TOKEN, "the tokenizer's token between documents")
    seq_len: int = other_default(CorpusTask, "seq_len", 4096)
    packing: str = setting(
        "concatenate",
        "how documents share a window: `concatenate`, one after the other and cut where it ends; or `first_fit`, whole ones "
        "with padding. A document longer than seq_len is cut into windows of its own and a rest",
        choices=PACKINGS,
    )
    cross_documents: bool = setting(
        False, "whether a token sees the documents before its own in a window; False: segment_ids keep them apart"
    )

    TITLE = "Documents"
    predicts = "next token"

    @property
    def has_segments(self) -> bool:
        return not self.cross_documents

    @property
    def data(self) -> Corpus:
        return _open(self.corpus, self.tokenizer, self.text_field, self.end_token, self.cache)

    def batches(self, batch_size: int, seeds: list[int]) -> PackedBatches:
        return PackedBatches(self._documents("train"), packing=self.packing, batch_size=batch_size, seeds=seeds)

    def windows(self, split: str) -> tuple[np.ndarray, ...]:
        packs = evaluation_packs(self._documents(split), packing=self.packing, limit=self.windows_of(split))
        return packs if self.has_segments else packs[:2]

    def inspection_sequences(self, num, seq_len=None):
        """Windows of the validation split that a single document fills, as many tokens as `num` windows of the task's own
        length have. Raises ValueError if there is none."""
        task = with_length(self, num, seq_len)
        tokens, targets, segments = evaluation_packs(task._documents("validation"), packing=self.packing)
        count = max(num * self.seq_len // task.seq_len, 1)
        filled = np.flatnonzero((segments == 1).all(axis=1))[:count]
        if not len(filled):
            raise ValueError(f"seq_len={task.seq_len}: no document of the validation split has so many tokens")
        return tokens[filled], targets[filled]

    def _documents(self, split: str) -> CutDocuments:
        return CutDocuments(getattr(self.data, split), self.data.starts[split], self.seq_len)


@functools.cache
def _open(corpus: str, tokenizer: str, text_field: str, end_token: str, cache: str) -> Corpus:
    return open_documents(corpus, tokenizer=tokenizer, text_field=text_field, end_token=end_token, cache=cache)


TASK = Documents
