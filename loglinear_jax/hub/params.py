"""Parameters of external checkpoints, converted to ours and back."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from loglinear_jax.hub.layouts import (
    TURN,
    TURN_BACK,
    Layout,
    Place,
    config_of,
    find_layout,
    layout_for,
    number,
    part_sizes,
    settings_of,
)
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.models.params import flat_params, param_shapes

DTYPES = ("float32", "bfloat16", "float16", "float64")
HEAD, EMBEDDING = "head", "embed/embedding"
MAX_LEVELS = 32  # those of int32 positions


def import_params(
    state_dict: Mapping[str, Any], config: Mapping[str, Any], *, dtype: str = "float32"
) -> tuple[LanguageSettings, dict[str, Any]]:
    """Convert a state dict and config of an external model to (settings, params) of a LanguageModel that computes the same.

    state_dict: names to arrays (NumPy, JAX or torch). config: the model's config.json as a mapping; its `architectures` or
    `model_type` say which of `loglinear_jax.hub.layouts.LAYOUTS` it is. dtype: of the activations; logits are in float32.
    Parameters come out in float32. Where word embeddings are tied, the head is a copy of them.

    Raises ValueError naming the array that is missing, unknown, not floating, not finite, or of another shape than the config
    says; the field of config that is missing or that our model lacks; or the invalid argument.
    """
    for name, value in (("state_dict", state_dict), ("config", config)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is of type {type(value).__name__}: expected a mapping")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(
            "dtype is 'float64': expected a narrower one while jax_enable_x64 is off, as JAX has none then"
        )
    architecture, layout = find_layout(config)
    settings = settings_of(layout, config, _count_levels(layout, state_dict, architecture), dtype)
    places = layout.places(settings)
    tied = number(config, "tie_word_embeddings", False, bool) and places[HEAD].names[0] not in state_dict
    if tied:
        del places[HEAD]
    expected = _expected_shapes(settings, places)
    if missing := sorted(expected.keys() - state_dict.keys()):
        raise ValueError(_is_missing(missing[0], architecture, expected[missing[0]], len(missing) - 1))
    if unknown := sorted(state_dict.keys() - expected.keys(), key=str):
        [near] = difflib.get_close_matches(str(unknown[0]), expected, n=1, cutoff=0.0)
        raise ValueError(
            f"Unexpected parameter {unknown[0]} of shape {np.shape(state_dict[unknown[0]])}: expected the "
            f"{len(expected)} parameters of a {architecture} with this config; the closest is {near}"
        )
    ours = {}
    for path, place in places.items():
        parts = []
        for name in place.names:
            part = as_float32(name, state_dict[name])
            if part.shape != expected[name]:
                raise ValueError(f"{name} has shape {part.shape}: expected {expected[name]}, by the config")
            parts.append(part)
        ours[path] = TURN[place.turn](parts[0] if len(parts) == 1 else np.concatenate(parts))
    if tied:
        ours[HEAD] = ours[EMBEDDING].T
    return settings, {"params": unflatten_dict(ours, sep="/")}


def _expected_shapes(settings: LanguageSettings, places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Of the others' arrays, by name."""
    shapes = param_shapes(LanguageModel(settings))
    expected = {}
    for path, place in places.items():
        whole = TURN_BACK[place.turn](np.broadcast_to(np.float32(0), shapes[path])).shape
        rows = part_sizes(path, settings) if len(place.names) > 1 else [whole[0]]
        expected |= {name: (size, *whole[1:]) for name, size in zip(place.names, rows, strict=True)}
    return expected


def _is_missing(name: str, architecture: str, shape, others: int = 0) -> str:
    more = f"; {others} more are missing" if others else ""
    named = f"{name} is missing: expected all parameters of a {architecture} with this config"
    return f"{named}, this one of shape {shape}{more}"


def _count_levels(layout: Layout, state_dict: Mapping[str, Any], architecture: str) -> int | None:
    """λ's, which no config says."""
    name = layout.levels_name
    if name is None:
        return None
    if name not in state_dict:
        raise ValueError(_is_missing(name, architecture, "[heads, levels]"))
    shape = np.shape(state_dict[name])
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_LEVELS:
        raise ValueError(f"{name} has shape {shape}: expected [heads, levels], at most {MAX_LEVELS} levels")
    return shape[1]


def export_params(
    settings: LanguageSettings, params: Mapping[str, Any], architecture: str | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Convert a LanguageModel's parameters to (config, state_dict) of an external architecture, in float32.

    architecture: None is the first that has such models. `import_params` is the inverse.

    Guo et al.'s models, and flash-linear-attention's log-linear one, always have λ for 16,384 positions; ours must have been
    built with max_length=16384 to be loaded there.

    Raises ValueError for a model that the architecture does not have, and naming the parameter that is missing, unknown, not
    floating, not finite, or of another shape than in the model of these settings.
    """
    if not isinstance(settings, LanguageSettings):
        raise ValueError(
            f"settings is of type {type(settings).__name__}: expected the LanguageSettings of a LanguageModel"
        )
    architecture, layout = layout_for(settings, architecture)
    settings.check()
    ours = flat_params(LanguageModel(settings), params)
    state_dict = {}
    for path, place in layout.places(settings).items():
        whole = TURN_BACK[place.turn](as_float32(path, ours[path]))
        ends = np.cumsum(part_sizes(path, settings))[:-1] if len(place.names) > 1 else []
        for name, part in zip(place.names, np.split(whole, ends), strict=True):
            state_dict[name] = np.ascontiguousarray(part)
    return config_of(architecture, layout, settings), state_dict


def as_float32(name: str, x: Any) -> np.ndarray:
    """Raises ValueError unless x is of floats that float32 holds, none of them NaN."""
    if hasattr(x, "detach"):  # torch, whose bfloat16 NumPy does not know
        dtype, floating = str(x.dtype).removeprefix("torch."), x.is_floating_point()
        x = x.detach().cpu().float().numpy() if floating else x
    else:
        x = np.asarray(x)
        dtype, floating = x.dtype, jnp.issubdtype(x.dtype, jnp.floating)
    if not floating:
        raise ValueError(f"{name} has dtype {dtype}: expected a floating dtype")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not (finite := np.isfinite(x)).all():
        raise ValueError(f"{name} has {x.size - finite.sum()} of {x.size} values that are not finite in float32")
    return x
