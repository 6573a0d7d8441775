"""The text of tokens that come one at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 32  # tokens, at least, from which it is told how the text after them begins
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that is one byte, where others are not to be had
_NO_CHARACTER = "\ufffd"  # what bytes become that are no UTF-8, or not yet


class TextAfter:
    """What tokens add to the text of a prompt. Some tokenizers begin a text without the space that a token has inside one.

    A character may take several tokens, and bytes may turn out to be none: text is given once later tokens leave it as it is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = self._end_of(prompt)
        self._written = len(tokenizer.decode(self._ids))

    def add(self, token: int) -> str:
        """The text that is sure with this token; empty while there is none."""
        self._ids.append(int(token))
        if self._is_byte(self._ids[-1]) or (text := self._tokenizer.decode(self._ids)).endswith(_NO_CHARACTER):
            return ""
        more = self._beyond_what_is_written(text)
        if len(self._ids) > 4 * CONTEXT:  # so that a long text takes no longer a token
            self._ids = self._end_of(self._ids)
            self._written = len(self._tokenizer.decode(self._ids))
        return more

    def rest(self) -> str:
        """What is left, also of a character that is not whole."""
        return self._beyond_what_is_written(self._tokenizer.decode(self._ids))

    def _beyond_what_is_written(self, text: str) -> str:
        more, self._written = text[self._written :], max(self._written, len(text))
        return more

    def _end_of(self, ids: Sequence[int]) -> list[int]:
        """The last CONTEXT tokens, and those before them that a character or a run of bytes begins with."""
        first = max(len(ids) - CONTEXT, 0)
        while first and (self._is_byte(ids[first]) or self._tokenizer.decode(ids[first:]).startswith(_NO_CHARACTER)):
            taken = len(ids) - first
            first = first - 1 if taken < 2 * CONTEXT else max(first - taken, 0)
        return [int(token) for token in ids[first:]]

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None
