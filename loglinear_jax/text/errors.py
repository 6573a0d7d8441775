"""The error of this package."""


class CorpusError(ValueError):
    """Text, a tokenizer or windows that cannot be had; the message says what to give instead."""
