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
from loglinear_jax.hub.fields import shown
from loglinear_jax.hub.params import export_params, import_params
from loglinear_jax.models import LanguageSettings

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NEEDED = ("*.json", "*.safetensors", "merges.txt")
_POINTER = b"version https://git-lfs"
TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt")
FLOATS = ("F32", "BF16", "F16", "F64")  # as safetensors calls them


def load_model(model: str | Path, *, dtype: str = "float32") -> tuple[LanguageSettings, dict[str, Any]]:
    """Load an external checkpoint: (settings, params) of a LanguageModel that computes the same.

    model: a folder with config.json and model.safetensors, or its shards and their index; or the name of one on the model hub,
    owner/name or, for a folder inside, owner/name/folder. dtype: of the activations; params are in float32.

    Raises ValueError, naming the file, for what is not there, cannot be read, or does not fit (see `import_params`).
    """
    folder, _ = find_folder(model)
    config = _read_json(folder / CONFIG)
    arrays, files, listed = _read_arrays(folder)
    try:
        return import_params(arrays, config, dtype=dtype, where=lambda name: f"{files.get(name, listed)}: {name}")
    except ValueError as error:
        at = str(folder / CONFIG) + ": " if str(error).startswith("config ") else ""
        raise ValueError(f"{at}{error}") from error


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

    folder: made if it is not there; files of these names in it are replaced. eos_token_id: the tokens that end a text, as
    config.json is to say; none if None, where the code of others would take an id of its own. Other arguments and errors as in
    `export_params`.
    """
    with needs_extra("hub"):
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

    config, arrays = export_params(settings, params, architecture)
    if not isinstance(folder, (str, Path)):
        raise ValueError(f"folder is {folder!r}: expected the name of one")
    folder = local_path(folder, "folder")
    config |= {"torch_dtype": "float32", "eos_token_id": eos_token_id}
    _stop_tokens(config, settings.vocab_size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # which safetensors makes readable by its owner alone
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: the model can't be written there: {_first_line(error)}") from error


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
            f"{model} is not a folder, and could not be downloaded from the model hub: {_first_line(error)}"
        ) from error
    found = root / inside
    if not (found / CONFIG).exists():
        raise ValueError(
            f"{model}: {owner}/{name} on the model hub has no {Path(inside, CONFIG)}: expected owner/name, or "
            "owner/name/folder where the model is in a folder"
        )
    return found, root


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


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


def _read_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Path], Path]:
    """(the arrays by name, the file of each, the file that lists them all)."""
    if (folder / WEIGHTS).exists():
        arrays = _read_shard(folder / WEIGHTS)
        return arrays, dict.fromkeys(arrays, folder / WEIGHTS), folder / WEIGHTS
    if (folder / INDEX).exists():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} has no mapping weight_map of arrays to files")
        shards: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or "\0" in file:
                raise ValueError(
                    f"{folder / INDEX}: weight_map has {shown(name)}: {shown(file)}: expected the name of a file beside it"
                )
            shards.setdefault(folder / file, []).append(name)
    else:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}: expected one of them")
    arrays, files = {}, {}
    for path, expected in shards.items():
        found = _read_shard(path)
        if missing := sorted(set(expected) - found.keys()):
            raise ValueError(f"{path} has no {missing[0]}, which {INDEX} says is there")
        for name in found:
            if weight_map.get(name, path.name) != path.name:
                raise ValueError(
                    f"{path} has {name}, which {INDEX} says is in {weight_map[name]}: expected it there alone"
                )
            if name in files:
                raise ValueError(f"{path} and {files[name]} both have {name}: expected it in one of them")
        arrays |= found
        files |= dict.fromkeys(found, path)
    return arrays, files, folder / INDEX


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    with needs_extra("hub"):
        from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise ValueError(f"{path} is a folder: expected a file of safetensors")
    try:
        with safe_open(path, framework="np") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - not iterable
            for name, dtype in dtypes.items():
                if dtype not in FLOATS:
                    raise ValueError(f"{path}: {name} has dtype {dtype}: expected one of {', '.join(FLOATS)}")
            return {name: file.get_tensor(name) for name in dtypes}
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
        why = "it only names the file, for Git LFS: run git lfs pull there" if is_pointer else _first_line(error)
        raise ValueError(f"{path} cannot be read as safetensors: {why}") from error
