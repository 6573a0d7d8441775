"""Tokenizers from a folder or from the hub, and the check that one gives every text back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import huggingface_hub.constants
import tokenizers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from loglinear_jax.files import local_path
from loglinear_jax.text.errors import CorpusError
from loglinear_jax.text.files import check_text_file, decode
from loglinear_jax.text.network import NoAnswer, check_answers

FILES = "tokenizer.json, or vocab.json and merges.txt"
MAX_IDS = 2**24  # an embedding has a row for each; the largest vocabularies in use have fewer than 2**19
MAX_SPECIAL = 1000  # entries of vocab.json, longer than a character, that no merge makes


def load_tokenizer(where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a local folder or, if there is no such folder, of that name on the Hugging Face hub.

    A folder holds tokenizer.json, or vocab.json and merges.txt of a byte-level BPE such as GPT-2's. From the hub,
    tokenizer.json is taken; what was downloaded once is used again without a network.
    Raises CorpusError if neither can be had or the files can't be read, and SettingError as `local_path`.
    """
    folder = local_path(where, "tokenizer")
    try:
        if where and folder.is_dir():
            return _read(folder)
        there = folder.exists()
    except OSError as error:
        raise CorpusError(f"tokenizer: {where!r} can't be read: {error.strerror}") from error
    if not where or there or where.startswith((".", "/", "~")):
        raise CorpusError(f"tokenizer: {where!r} is not a folder: expected one with {FILES}, or a name on the hub")
    return _parse(_from_hub(where))


def holds_tokenizer(folder: Path) -> bool:
    """Whether there are the files that `load_tokenizer` reads."""
    return (folder / "tokenizer.json").exists() or all(
        (folder / name).exists() for name in ("vocab.json", "merges.txt")
    )


def file_of_ids(where: str) -> str:
    """The file that has the token ids of `load_tokenizer`; a name on the hub as it is."""
    folder = local_path(where, "tokenizer")
    if not folder.is_dir():
        return where
    return str(folder / ("tokenizer.json" if (folder / "tokenizer.json").exists() else "vocab.json"))


def tokenizer_sha256(tokenizer: tokenizers.Tokenizer) -> str:
    """Of everything that decides its token ids; the same vocabulary in another form of file may have another."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def tokenizer_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the largest token id: the rows that an embedding needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def check_returned(
    tokenizer: tokenizers.Tokenizer, pieces: Sequence[str], ids: Sequence[Sequence[int]], *, name: str, where: str
) -> None:
    """Raises CorpusError for the first piece that its token ids do not decode to. name, where: the tokenizer, the text.

    Perplexity counts what is left of a text; of a tokenizer that drops, changes or joins characters it can't be compared.
    Canonically equivalent characters, é in one code point or in two, are the same.
    """
    returned = tokenizer.decode_batch(ids, skip_special_tokens=False)
    for piece, back in zip(pieces, returned, strict=True):
        if piece != back and unicodedata.normalize("NFC", piece) != unicodedata.normalize("NFC", back):
            at = next(
                (i for i, (a, b) in enumerate(zip(piece, back, strict=False)) if a != b), min(len(piece), len(back))
            )
            part = slice(max(at - 20, 0), at + 20)
            raise CorpusError(
                f"tokenizer: {name} loses a part of the text: {piece[part]!r} in {where} comes back as {back[part]!r} when its "
                "tokens are decoded; the perplexity of what is left can't be compared: expected a tokenizer that loses "
                "nothing, such as GPT-2's byte-level BPE"
            )


def _read(folder: Path) -> tokenizers.Tokenizer:
    whole, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if not holds_tokenizer(folder):
        of_sentencepiece = (folder / "tokenizer.model").exists()
        raise CorpusError(
            f"tokenizer: {folder} holds no tokenizer{' but tokenizer.model' * of_sentencepiece}: expected {FILES}"
            + ", to which transformers' AutoTokenizer converts it" * of_sentencepiece
        )
    if whole.exists():
        return _parse(whole)
    entries = _vocabulary(vocab)
    _text(merges)
    with _told(f"{vocab} and {merges} are not a byte-level BPE"):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
        _, pairs = tokenizers.models.BPE.read_file(str(vocab), str(merges))
    unmade = {entry for entry in entries if len(entry) > 1} - {"".join(pair) for pair in pairs}
    if len(unmade) > MAX_SPECIAL:
        raise CorpusError(
            f"tokenizer: {merges} makes only {len(entries) - len(unmade)} of the {len(entries)} entries of {vocab}: it is not "
            "whole, or of another vocabulary"
        )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return _checked(tokenizer, folder)


def _parse(path: Path) -> tokenizers.Tokenizer:
    text = _text(path)
    with _told(f"{path} can't be read as a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
    # A saved tokenizer may cut or fill every line to one length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _checked(tokenizer, path)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Raises CorpusError for whatever the tokenizers library finds wrong with a file."""
    try:
        yield
    except Exception as error:  # it raises nothing narrower
        raise CorpusError(f"tokenizer: {what}: {_first_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust; it can't be imported
            raise
        raise CorpusError(f"tokenizer: {what}: {_first_line(error)}") from error


def _text(path: Path) -> str:
    check_text_file(path, "tokenizer")
    return decode(path.read_bytes(), "tokenizer", path)


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        entries = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorpusError(f"tokenizer: {path} is not JSON: {error}") from error
    if not isinstance(entries, dict) or not all(type(i) is int and 0 <= i < MAX_IDS for i in entries.values()):
        raise CorpusError(
            f"tokenizer: {path} is not a vocabulary: expected an object of token ids from 0 to {MAX_IDS - 1}"
        )
    return entries


def _checked(tokenizer: tokenizers.Tokenizer, where: str | Path) -> tokenizers.Tokenizer:
    if not tokenizer.get_vocab_size():
        raise CorpusError(f"tokenizer: the vocabulary of {where} is empty")
    if (size := tokenizer_size(tokenizer)) > MAX_IDS:
        raise CorpusError(f"tokenizer: {where} has the token id {size - 1}: expected at most {MAX_IDS - 1}")
    return tokenizer


def _from_hub(name: str) -> Path:
    try:
        path = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
        if not isinstance(path, str):  # not here yet
            if not huggingface_hub.constants.HF_HUB_OFFLINE:  # or it would ask the hub again and again for minutes
                check_answers(huggingface_hub.hf_hub_url(name, "tokenizer.json"))
            path = huggingface_hub.hf_hub_download(name, "tokenizer.json")
    except (HfHubHTTPError, HFValidationError, NoAnswer, OSError) as error:
        raise CorpusError(
            f"tokenizer: {name!r} is not a local folder, and can't be had from the hub ({_first_line(error)}). "
            f"Without a network, give a folder that holds {FILES}"
        ) from error
    return _as_sent(Path(path))


def _as_sent(path: Path) -> Path:
    """The hub's file if it is what the hub sent: kept there under its hash, SHA-256 or that of Git."""
    expected, data = path.resolve().name, path.read_bytes()
    hashes = {64: hashlib.sha256(data), 40: hashlib.sha1(b"blob %d\0" % len(data) + data)}
    if len(expected) in hashes and hashes[len(expected)].hexdigest() != expected:
        raise CorpusError(f"tokenizer: {path} is not what the hub sent, as its hash is not {expected}: delete it")
    return path


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
