"""Models that others trained, from a folder or the model hub: config.json and safetensors, in one file or several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loglinear_jax.hub.params import export_params, import_params
from loglinear_jax.models import LanguageSettings

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NEEDED = ("*.json", "*.safetensors", "merges.txt")


def load_model(model: str | Path, *, dtype: str = "float32") -> tuple[LanguageSettings, dict[str, Any]]:
    """(settings, params) of a LanguageModel that computes what the model in a folder does.

    model: a folder with config.json and model.safetensors, or its shards and their index; or the name of one on the model hub,
    owner/name or, for a folder inside, owner/name/folder. dtype: of the activations; params are in float32.

    Raises ValueError, naming the file, for what is not there, cannot be read, or does not fit (see `import_params`).
    """
    folder = find_folder(model)
    config = _read_json(folder / CONFIG)
    arrays, files = _read_arrays(folder)
    try:
        return import_params(arrays, config, dtype=dtype, where=lambda name: f"{files.get(name, folder)}: {name}")
    except ValueError as error:
        at = str(folder / CONFIG) + ": " if str(error).startswith("config ") else ""
        raise ValueError(f"{at}{error}") from error


def save_model(
    folder: str | Path, settings: LanguageSettings, params: Mapping[str, Any], architecture: str | None = None
) -> None:
    """Writes config.json and model.safetensors, in float32, what `load_model` undoes. Arguments and errors as in
    `export_params`."""
    from safetensors.numpy import save_file

    config, arrays = export_params(settings, params, architecture)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=2) + "\n")


def find_folder(model: str | Path) -> Path:
    """The folder itself, or where the one of that name on the model hub has been copied to.

    Raises ValueError where there is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    owner, _, name = str(model).partition("/")
    name, _, inside = name.partition("/")
    if path.exists() or not (owner and name) or path.is_absolute() or owner in (".", "..", "~"):
        raise ValueError(f"{model} is not a folder: expected one with {CONFIG}, or owner/name on the model hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"{inside}/{pattern}" if inside else pattern for pattern in NEEDED]
    try:
        found = Path(snapshot_download(f"{owner}/{name}", allow_patterns=patterns)) / inside
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{model} is not a folder, and could not be downloaded from the model hub: {reason}"
        ) from error
    if not found.is_dir():
        raise ValueError(f"{model}: {owner}/{name} on the model hub has no folder {inside} with {' or '.join(NEEDED)}")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: expected it beside the weights") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}: expected a mapping")
    return found


def _read_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Path]]:
    """(the arrays by name, the file of each)."""
    if (folder / WEIGHTS).exists():
        shards: dict[Path, list[str] | None] = {folder / WEIGHTS: None}
    elif (folder / INDEX).exists():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{folder / INDEX} has no mapping weight_map of arrays to files")
        shards = {}
        for name, file in weight_map.items():
            shards.setdefault(folder / Path(file).name, []).append(name)
    else:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}: expected one of them")
    arrays, files = {}, {}
    for path, expected in shards.items():
        found = _read_shard(path)
        if missing := sorted(set(expected or ()) - found.keys()):
            raise ValueError(f"{path} has no {missing[0]}, which {INDEX} says is there")
        arrays |= found
        files |= dict.fromkeys(found, path)
    return arrays, files


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.flax import load_file  # NumPy has no bfloat16 of its own

    try:
        return {name: np.asarray(x) for name, x in load_file(path).items()}
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {INDEX} names it") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
