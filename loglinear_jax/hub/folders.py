"""External checkpoints in a folder or on the model hub: config.json and safetensors, in one file or several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loglinear_jax.command_line import needs_extra
from loglinear_jax.files import local_path, why_not_local
from loglinear_jax.hub.layouts import export_params, import_params, shown
from loglinear_jax.models import LanguageSettings
from loglinear_jax.settings import first_line

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NEEDED = ("*.json", "*.safetensors", "merges.txt")
_POINTER = b"version https://git-lfs"
TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt")


def load_model(model: str | Path, *, dtype: str = "float32") -> tuple[LanguageSettings, dict[str, Any]]:
    """Load an external checkpoint as (settings, params) of a LanguageModel that computes the same.

    model: a folder with config.json and model.safetensors, or with shards and their index; or a name on the Hugging
    Face hub: owner/name or, for a folder in it, owner/name/folder. dtype: of the activations; params are in float32.

    Raises ValueError, naming the folder or file, for what is missing, cannot be read, or does not fit (see
    `import_params`).
    """
    folder, _ = find_folder(model)
    config, arrays = _read_json(folder / CONFIG), _read_arrays(folder)
    try:
        return import_params(arrays, config, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def stop_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids of which config.json says, as eos_token_id, that a text ends with them. Raises ValueError for what is no id."""
    config = _read_json(folder / CONFIG)
    try:
        return _stop_tokens(config, vocab_size)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def _stop_tokens(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        expected = f"expected a token id from 0 to {vocab_size - 1}, a list of them, or null"
        raise ValueError(f"config has eos_token_id={shown(value)}: {expected}")
    return tuple(ids)


def save_model(
    folder: str | Path,
    settings: LanguageSettings,
    params: Mapping[str, Any],
    architecture: str | None = None,
    *,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """Save a language model as config.json and model.safetensors in float32, which `load_model` reads.

    folder: made if it is not there; files of these names in it are replaced. eos_token_id: the tokens that end a text,
    for config.json; None writes that there is none, as other code would otherwise use a default id. Other arguments and
    errors: see `export_params`.
    """
    with needs_extra("hub"):
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

    config, arrays = export_params(settings, params, architecture)
    if not isinstance(folder, (str, Path)) or not str(folder):
        raise ValueError(f"folder is {folder!r}: expected the name of one")
    folder = local_path(folder, "folder")
    config |= {"torch_dtype": "float32", "eos_token_id": eos_token_id}
    _stop_tokens(config, settings.vocab_size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # which safetensors makes readable by its owner alone
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: the model can't be written there: {first_line(error)}") from error


def find_folder(model: str | Path) -> tuple[Path, Path]:
    """(the folder itself, or where the one of that name on the model hub has been copied to; the repository's root, which is
    another one for owner/name/folder).

    Raises ValueError where there is neither.
    """
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValueError(f"model is {model!r}: expected a folder with {CONFIG}, or owner/name on the model hub")
    if problem := why_not_local(model):
        raise ValueError(problem)
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return path, path
        there = path.exists()
    except OSError as error:  # too long a name
        raise ValueError(f"model {shown(str(model))} can't be read: {error.strerror}") from error
    owner, _, name = str(model).partition("/")
    name, _, inside = name.partition("/")
    outside = path.is_absolute() or owner in (".", "..") or ".." in Path(inside).parts
    if there or not (owner and name) or outside:
        raise ValueError(f"{model} is not a folder: expected one with {CONFIG}, or owner/name on the model hub")
    with needs_extra("hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*(f"{inside}/{pattern}" for pattern in NEEDED), *TOKENIZER] if inside else [*NEEDED]
    deeper = [f"{inside}/*/*" if inside else "*/*"]  # by a pattern's * also a folder is meant
    try:
        root = Path(snapshot_download(f"{owner}/{name}", allow_patterns=patterns, ignore_patterns=deeper))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{model} is not a folder, and could not be downloaded from the model hub: {first_line(error)}"
        ) from error
    found = root / inside
    if not (found / CONFIG).exists():
        raise ValueError(
            f"{model}: {owner}/{name} on the model hub has no {Path(inside, CONFIG)}: expected owner/name, or "
            "owner/name/folder where the model is in a folder"
        )
    return found, root


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: expected it beside the weights") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}: expected a mapping")
    return found


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the one file, or of all shards, by name."""
    if (folder / WEIGHTS).exists():
        return _read_shard(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}: expected one of them")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no mapping weight_map of arrays to files")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or not file.isprintable():
            raise ValueError(f"{folder / INDEX}: weight_map has {shown(file)}: expected the name of a file beside it")
    arrays = {}
    for file in dict.fromkeys(weight_map.values()):
        arrays |= _read_shard(folder / file)
    return arrays


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    with needs_extra("hub"):
        from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not iterable
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {INDEX} names it") from None
    except (SafetensorError, OSError, AttributeError, TypeError) as error:  # the last two of a dtype that NumPy lacks
        is_pointer = path.is_file() and path.read_bytes()[: len(_POINTER)] == _POINTER
        why = "it only names the file, for Git LFS: run git lfs pull there" if is_pointer else first_line(error)
        raise ValueError(f"{path} cannot be read as safetensors: {why}") from error
