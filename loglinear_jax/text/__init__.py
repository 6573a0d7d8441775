"""Text to train on: WikiText or any text file, tokenised once, read as windows in each seed's own order."""

from loglinear_jax.command_line import needs_extra

with needs_extra("text"):
    from loglinear_jax.text.corpus import Corpus, open_corpus
    from loglinear_jax.text.files import CorpusError
    from loglinear_jax.text.tokenizer import load_tokenizer
    from loglinear_jax.text.windows import SeedBatches, evaluation_windows

__all__ = ["Corpus", "CorpusError", "SeedBatches", "evaluation_windows", "load_tokenizer", "open_corpus"]
