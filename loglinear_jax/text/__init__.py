"""Text to train on, tokenised once: WikiText or any text file, read as windows, and documents, read as packs. Each seed has its
own order."""

from loglinear_jax.command_line import needs_extra

with needs_extra("text"):
    from loglinear_jax.text.batches import (
        PACKINGS,
        CutDocuments,
        PackedBatches,
        SeedBatches,
        evaluation_packs,
        evaluation_windows,
    )
    from loglinear_jax.text.corpus import Corpus, open_corpus, open_documents
    from loglinear_jax.text.sources import CorpusError
    from loglinear_jax.text.tokenizer import END_TOKEN, load_tokenizer

__all__ = [
    "END_TOKEN",
    "PACKINGS",
    "Corpus",
    "CorpusError",
    "CutDocuments",
    "PackedBatches",
    "SeedBatches",
    "evaluation_packs",
    "evaluation_windows",
    "load_tokenizer",
    "open_corpus",
    "open_documents",
]
