"""λ of trained models and what it multiplies: values at tokens, and the learned static part."""

from __future__ import annotations

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from loglinear_jax.fenwick import num_levels
from loglinear_jax.lam import lam_traits
from loglinear_jax.runs.loading import TrainedVariant

Which = Literal["best", "last"]


def layers_that(trained: TrainedVariant, trait: Literal["has_lam", "has_states"]) -> list[int]:
    """List the layers whose mixer has λ, or states.

    Returns:
        All layers or none, or some of a model with several mixers; none of a model of one's own.
    """
    mixers = getattr(trained.model.settings, "mixers", ())
    return (
        [i for i in range(trained.model.settings.layers) if getattr(mixers[i % len(mixers)], trait)] if mixers else []
    )


def _layers(trained: TrainedVariant, trait: str, what: str) -> list[int]:
    """Raises ValueError if no layer has it."""
    if layers := layers_that(trained, trait):
        return layers
    settings = trained.model.settings
    named = f"its mixer is {settings.mixer}" if hasattr(settings, "mixer") else f"it is {settings.kind}"
    raise ValueError(f"{trained.variant} of {trained.workdir} has no {what}: {named}")


@functools.cache
def _sown(model: nn.Module):
    return jax.jit(lambda params, tokens: model.apply(params, tokens, mutable=["intermediates"])[1]["intermediates"])


def mixer_values(
    trained: TrainedVariant, seed: int, tokens: Int[np.ndarray, "num T"], which: Which = "best"
) -> dict[int, dict[str, np.ndarray]]:
    """Compute what the mixer of each layer sows for these tokens: queries, keys, log decays, λ, β.

    Returns:
        By layer and name, float32. Layers of softmax attention, which have no states, are left out.

    Raises:
        ValueError: if no layer has states, and for more tokens than λ has levels for.
    """
    layers, settings = _layers(trained, "has_states", "states"), trained.model.settings
    if settings.longest is not None and tokens.shape[1] > settings.longest:
        raise ValueError(
            f"tokens has shape {tokens.shape}: λ of {trained.variant} has levels for {settings.longest} tokens"
        )
    tree = jax.device_get(_sown(trained.model)(trained.params(seed, which), jnp.asarray(tokens)))

    def find(node):
        return node if "queries" in node else next(find(child) for child in node.values() if isinstance(child, dict))

    sown = {layer: find(tree[f"layer_{layer}"]) for layer in layers}
    return {
        layer: {name: np.asarray(value[0], np.float32) for name, value in of_layer.items()}
        for layer, of_layer in sown.items()
    }


def lam_values(
    trained: TrainedVariant, seed: int, tokens: Int[np.ndarray, "num T"], which: Which = "best"
) -> Float[np.ndarray, "layers num T H L"]:
    """Compute λ at each of these tokens, in the layers that have λ.

    Args:
        trained: the variant.
        seed: whose parameters are taken.
        tokens: sequences of the task.
        which: parameters at the seed's best evaluation, or at the end.

    Returns:
        λ; L is the number of levels of the model, or of T tokens for a λ without parameters per level.

    Raises:
        ValueError: for a model without λ, and for more tokens than λ has levels for.
    """
    layers = _layers(trained, "has_lam", "λ")
    values = mixer_values(trained, seed, tokens, which)
    return np.stack([values[layer]["lam_value"] for layer in layers])


def static_lam(
    trained: TrainedVariant, seed: int, which: Which = "best"
) -> tuple[Float[np.ndarray, "layers H L"], str]:
    """Compute what λ has learned apart from its input, in the layers that have λ.

    Args:
        trained: the variant.
        seed: whose parameters are taken.
        which: parameters at the seed's best evaluation, or at the end.

    Returns:
        The values, nan for levels that no trained sequence reached; and what they are: λ itself for `fixed`, the
        weights Λ for `linear` (as in the figures of *Adaptive Memory Decay* for its baseline), λ for an input of 0 for
        the others.

    Raises:
        ValueError: for a model without λ, and for a content-aware λ, which has no such part.
    """
    layers, settings = _layers(trained, "has_lam", "λ"), trained.model.settings
    mixer = settings.mixers[layers[0] % len(settings.mixers)]
    traits = lam_traits(mixer.lam)
    if traits.needs_scores:
        raise ValueError(
            f"{trained.variant} of {trained.workdir} has no static part of λ: lam={mixer.lam} is content-aware"
        )
    levels = num_levels(settings.max_length)
    reached = np.arange(levels) < num_levels(trained.task.trained_on.longest + settings.random_first_position)
    params = trained.params(seed, which)["params"]
    of_layers = [mixer_params(params[f"layer_{layer}"]) for layer in layers]
    if mixer.lam == "linear":
        return np.where(reached, np.stack([of["lam"]["scale"] for of in of_layers]), np.nan), "Λ of softplus(Λ ⊙ d)"
    zeros, at_zero = (
        np.zeros((settings.heads, levels), np.float32),
        _at_zero(mixer.lam_module(implementation="xla", parent=None)),
    )
    values = [at_zero(of.get("lam", {}), zeros) * np.exp(of.get("lam_log_scale", 0.0)) for of in of_layers]
    what = "λ where its input is 0" if traits.needs_input else "λ itself"
    return np.where(reached, np.stack(values), np.nan), what


@functools.cache
def _at_zero(module: nn.Module):
    return jax.jit(lambda params, zeros: module.apply({"params": params}, zeros))


def mixer_params(layer: dict[str, Any]) -> dict[str, Any]:
    """Finds the TokenMixer's parameters among those of a layer of either model."""
    return layer if "a_log" in layer else mixer_params(layer["mixer"])
