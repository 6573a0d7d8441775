"""Parameters that were given: held against the model that they are for, and in the form that decoding reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from loglinear_jax.models.language import MATRICES, LanguageModel
from loglinear_jax.models.own import OwnSettings


def param_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by its path, such as "layer_0/mixer/skip"."""
    m = model.settings
    if isinstance(m, OwnSettings):
        return {path: x.shape for path, x in _initial_shapes(model).items()}
    # Layers whose mixers are alike have the same parameters, in every form of the attention.
    few = type(model)(dataclasses.replace(m, layers=min(m.layers, len(m.pattern)), implementation=None))
    shapes = _initial_shapes(few)
    found = {path: x.shape for path, x in shapes.items()}
    for index in range(len(m.pattern), m.layers):
        like = f"layer_{index % len(m.pattern)}/"
        found |= {f"layer_{index}/{p.removeprefix(like)}": x.shape for p, x in shapes.items() if p.startswith(like)}
    return found


def _initial_shapes(model: nn.Module) -> dict[str, jax.ShapeDtypeStruct]:
    token = jax.ShapeDtypeStruct((1, 1), np.int32)
    return flatten_dict(jax.eval_shape(model.init, jax.random.key(0), token)["params"], sep="/")


def flat_params(model: LanguageModel, params: Any) -> dict[str, Any]:
    """One seed's parameters {"params": ...} by path.

    Raises ValueError naming a parameter that is missing, unknown, or of another shape than in the model.
    """
    tree = params.get("params") if isinstance(params, Mapping) else None
    if not isinstance(tree, Mapping):
        raise ValueError(
            'params has no mapping "params": expected the parameters of a LanguageModel, as its init gives them'
        )
    given, shapes = flatten_dict(tree, sep="/"), param_shapes(model)
    if missing := sorted(shapes.keys() - given.keys()):
        raise ValueError(f"params has no {missing[0]}: expected the parameters of a LanguageModel of these settings")
    if unknown := sorted(map(str, given.keys() - shapes.keys())):
        raise ValueError(f"params has {unknown[0]}, for which the LanguageModel of these settings has no place")
    for path, shape in shapes.items():
        got = np.shape(given[path])
        if got != shape:
            stacked = ", the params of one seed, not of several" if got[1:] == shape else ""
            raise ValueError(f"{path} has shape {got}: expected {shape}{stacked}")
    return given


# What a step of decoding rounds to the model's dtype: the convolution too, which a kernel reads in float32.
ROUNDED = re.compile(LanguageModel.ROUNDED.pattern + r"|layer_\d+/(mixer/)?conv/\w+")


def decoding_weights(model: LanguageModel, params: Any) -> dict[str, Array]:
    """The parameters {"params": ...} as steps of decoding read them fastest, by path. `params_of` makes them parameters again.

    They are in the model's dtype where it rounds them to that wherever it reads them. Matrices are [outputs, inputs]: a product
    with one token is a sum for each output, and what it adds up lies together.
    """
    given = flatten_dict(params["params"], sep="/")
    rounded = {
        path: jnp.asarray(x, model.settings.dtype) if ROUNDED.fullmatch(path) else jnp.asarray(x)
        for path, x in given.items()
    }
    return _turned(rounded)


def params_of(weights: Mapping[str, Array]) -> dict[str, Any]:
    """The parameters {"params": ...} that `decoding_weights` were made of, rounded: the model gives the same outputs with them.

    To be called inside jax.jit, where turning the matrices back costs nothing.
    """
    return {"params": unflatten_dict(_turned(weights), sep="/")}


def _turned(params: Mapping[str, Array]) -> dict[str, Array]:
    return {path: x.T if MATRICES.fullmatch(path) else x for path, x in params.items()}
