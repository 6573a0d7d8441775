"""Byte-level BPE tokenizers, from a folder or from the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path

import huggingface_hub
import tokenizers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from loglinear_jax.text.errors import CorpusError


def load_tokenizer(where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a local folder or, if there is no such folder, of that name on the Hugging Face hub.

    A folder holds tokenizer.json, or vocab.json and merges.txt of a byte-level BPE such as GPT-2's. From the hub,
    tokenizer.json is taken; what was downloaded once is used again without a network.
    Raises CorpusError if neither can be had or the files can't be read.
    """
    folder = Path(where).expanduser()
    if where and folder.is_dir():
        return _read(folder)
    if not where or folder.exists() or where.startswith((".", "/", "~")):
        raise CorpusError(f"tokenizer: {where!r} is not a folder: expected one with {FILES}, or a name on the hub")
    return _parse(_from_hub(where).read_text(encoding="utf-8"), where)


def tokenizer_sha256(tokenizer: tokenizers.Tokenizer) -> str:
    """Of everything that decides its token ids; the same vocabulary in another form of file may have another."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def tokenizer_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the largest token id: the rows that an embedding needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


FILES = "tokenizer.json, or vocab.json and merges.txt"


def _read(folder: Path) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return _parse((folder / "tokenizer.json").read_text(encoding="utf-8"), folder)
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        raise CorpusError(f"tokenizer: {folder} holds no tokenizer: expected {FILES}")
    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CorpusError(f"tokenizer: {vocab} and {merges} are not a byte-level BPE: {error}") from error
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return _checked(tokenizer, folder)


def _parse(text: str, where: str | Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise CorpusError(f"tokenizer: tokenizer.json of {where} can't be read: {error}") from error
    # A saved tokenizer may cut or fill every line to one length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _checked(tokenizer, where)


def _checked(tokenizer: tokenizers.Tokenizer, where: str | Path) -> tokenizers.Tokenizer:
    if not tokenizer.get_vocab_size():
        raise CorpusError(f"tokenizer: the vocabulary of {where} is empty")
    return tokenizer


def _from_hub(name: str) -> Path:
    try:
        try:
            return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json", local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CorpusError(
            f"tokenizer: {name!r} is not a local folder, and can't be had from the hub ({_first_line(error)}). "
            f"Without a network, give a folder that holds {FILES}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
