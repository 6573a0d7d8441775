"""Tokenizers from a folder or from the hub, and the check that one gives every text back."""

from __future__ import annotations

import contextlib
import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import huggingface_hub.constants
import tokenizers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from tokenizers.decoders import DecodeStream

from loglinear_jax.files import local_path
from loglinear_jax.settings import first_line
from loglinear_jax.text.sources import CorpusError, check_answers, check_text_file, decode

FILES = "tokenizer.json, or vocab.json and merges.txt"
BYTES = "bytes"  # the name of the tokenizer whose tokens are the bytes of UTF-8
END_TOKEN = "<|endoftext|>"  # GPT-2's, and that of tokenizers made here


def load_tokenizer(where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a local file or folder or, if there is none, of that name on the Hugging Face hub.

    "bytes" is a tokenizer without a file: the 256 bytes and END_TOKEN. A file is a tokenizer.json, under any name that ends in
    .json. A folder holds tokenizer.json, or vocab.json and merges.txt of a byte-level BPE such as GPT-2's. From the hub,
    tokenizer.json is taken; what was downloaded once is used again without a network.
    Raises CorpusError if neither can be had or the files can't be read, and SettingError as `local_path`.
    """
    if where == BYTES:
        return train_tokenizer([], vocab_size=257)
    folder = local_path(where, "tokenizer")
    if where and folder.is_dir():
        return _read_folder(folder)
    if folder.suffix == ".json" and folder.exists():
        return _read(folder)
    if not where or folder.exists() or where.startswith((".", "/", "~")):
        raise CorpusError(
            f"tokenizer: {where!r} is not a folder: expected one with {FILES}, a file tokenizer.json, or a name on the hub"
        )
    return _read(_from_hub(where))


def _from_hub(name: str) -> Path:
    """The file tokenizer.json of a repository on the hub, downloaded unless it is there. Raises CorpusError."""
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(cached, str):
            return Path(cached)
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            check_answers(huggingface_hub.hf_hub_url(name, "tokenizer.json"))
        return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # requests' errors are OSErrors
        raise CorpusError(
            f"tokenizer: {name!r} is not a local folder, and can't be had from the hub ({first_line(error)}). Without "
            "a network, give a folder that holds tokenizer.json, or vocab.json and merges.txt"
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most vocab_size tokens, learned from the texts. Its first token is END_TOKEN, and 256 more
    are the bytes. Raises ValueError for a vocab_size below 257.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, the bytes and {END_TOKEN}, got {vocab_size}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files that `load_tokenizer` reads."""
    return (folder / "tokenizer.json").exists() or all(
        (folder / name).exists() for name in ("vocab.json", "merges.txt")
    )


def tokenizer_sha256(tokenizer: tokenizers.Tokenizer) -> str:
    """The hash of everything that decides the token ids; the same vocabulary in another file format may have another."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def tokenizer_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the largest token id: the rows that an embedding needs. Raises ValueError for a vocabulary without ids."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise ValueError("the vocabulary is empty")
    return max(ids) + 1


def check_returned(
    tokenizer: tokenizers.Tokenizer, pieces: Sequence[str], ids: Sequence[Sequence[int]], *, name: str, where: str
) -> None:
    """Raises CorpusError for the first piece that its token ids do not decode to. name, where: the tokenizer, the text.

    The perplexity of a tokenizer that drops, changes or joins characters can't be compared with others. Canonically
    equivalent characters, such as é in one code point or in two, are the same.
    """
    returned = tokenizer.decode_batch(ids, skip_special_tokens=False)
    for piece, back in zip(pieces, returned, strict=True):
        if piece != back and unicodedata.normalize("NFC", piece) != unicodedata.normalize("NFC", back):
            differing = (i for i, (a, b) in enumerate(zip(piece, back, strict=False)) if a != b)
            at = next(differing, min(len(piece), len(back)))
            part = slice(max(at - 20, 0), at + 20)
            raise CorpusError(
                f"tokenizer: {name} loses a part of the text: {piece[part]!r} in {where} comes back as {back[part]!r} when its "
                "tokens are decoded; the perplexity of what is left can't be compared: expected a tokenizer that loses "
                "nothing, such as GPT-2's byte-level BPE"
            )


def text_after(tokenizer: tokenizers.Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text that each token adds to a prompt's; empty while a character is not complete.

    Bytes that turn out to be no UTF-8 are shown as the replacement character.
    """
    stream, waiting = DecodeStream([int(token) for token in prompt]), []
    for token in tokens:
        waiting.append(int(token))
        try:
            text = shown = stream.step(tokenizer, int(token))
        except Exception:  # the library raises nothing narrower for such bytes
            stream, waiting = DecodeStream(), [int(token)]
            shown = stream.step(tokenizer, int(token))
            text = "\ufffd" + (shown or "")
        waiting = [] if shown else waiting
        yield text or ""
    if waiting:  # the last character is not complete
        yield tokenizer.decode(waiting, skip_special_tokens=False)


def _read_folder(folder: Path) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").exists():
        return _read(folder / "tokenizer.json")
    if not holds_tokenizer(folder):
        found = " but tokenizer.model, which transformers' AutoTokenizer converts to tokenizer.json"
        raise CorpusError(
            f"tokenizer: {folder} holds no tokenizer{found * (folder / 'tokenizer.model').exists()}: expected {FILES}"
        )
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (vocab, merges):
        _text(path)
    with _named(f"{vocab} and {merges} are not a byte-level BPE"):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
        tokenizer_size(tokenizer)  # there is none without ids
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _read(path: Path) -> tokenizers.Tokenizer:
    """A saved tokenizer, without its truncation and padding, which would bring every line to one length."""
    text = _text(path)
    with _named(f"{path} can't be read as a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer_size(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _text(path: Path) -> str:
    check_text_file(path, "tokenizer")
    return decode(path.read_bytes(), "tokenizer", path)


@contextlib.contextmanager
def _named(problem: str) -> Iterator[None]:
    """Raises CorpusError for whatever the tokenizers library finds wrong with a file."""
    try:
        yield
    except BaseException as error:  # also Rust's PanicException, which can't be imported
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise CorpusError(f"tokenizer: {problem}: {first_line(error)}") from error
