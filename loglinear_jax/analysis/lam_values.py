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


def sample_tokens(
    trained: TrainedVariant, num: int, seq_len: int | None = None
) -> tuple[Int[np.ndarray, "num T"], Int[np.ndarray, "num T"]]:
    """(tokens, targets) of the run's task to look at: see `TrainedVariant.inspection_sequences`."""
    return trained.inspection_sequences(num, seq_len)


@functools.cache
def _sown(model: nn.Module):
    @jax.jit
    def apply(params, tokens):
        return model.apply(params, tokens, mutable=["intermediates"])[1]["intermediates"]

    return apply


def mixer_values(
    trained: TrainedVariant, seed: int, tokens: Int[np.ndarray, "num T"], which: Literal["best", "last"] = "best"
) -> list[dict[str, np.ndarray]]:
    """What each layer's TokenMixer sows for these tokens: by name, float32, from the first layer on.

    Raises ValueError for softmax attention, which has no states.
    """
    settings = trained.model.settings
    if not settings.has_states:
        raise ValueError(f"{trained.variant} of {trained.workdir} has no states: its mixer is {settings.mixer}")
    if settings.longest is not None and tokens.shape[1] > settings.longest:
        raise ValueError(
            f"tokens has shape {tokens.shape}: λ of {trained.variant} has levels for {settings.longest} tokens"
        )
    tree = jax.device_get(_sown(trained.model)(trained.params(seed, which), jnp.asarray(tokens)))

    def find(node):
        return node if "queries" in node else next(find(child) for child in node.values() if isinstance(child, dict))

    layers = [find(tree[f"layer_{index}"]) for index in range(settings.layers)]
    return [{name: np.asarray(value[0], np.float32) for name, value in layer.items()} for layer in layers]


def lam_values(
    trained: TrainedVariant, seed: int, tokens: Int[np.ndarray, "num T"], which: Literal["best", "last"] = "best"
) -> Float[np.ndarray, "layers num T H L"]:
    """λ at each of these tokens. L: the levels of the model, or of T tokens for a λ of which nothing is indexed by level.

    Raises ValueError for a model without λ, or more tokens than it has levels for.
    """
    if not trained.model.settings.has_lam:
        raise ValueError(
            f"{trained.variant} of {trained.workdir} has no λ: its mixer is {trained.model.settings.mixer}"
        )
    return np.stack([layer["lam_value"] for layer in mixer_values(trained, seed, tokens, which)])


def static_lam(
    trained: TrainedVariant, seed: int, which: Literal["best", "last"] = "best"
) -> tuple[Float[np.ndarray, "layers H L"], str]:
    """What λ has learned apart from its input, and what that is: λ itself for `fixed`, the weights Λ for `linear` (what the
    paper's figures of its baseline show), λ where the input is 0 for the others. nan for levels that no trained sequence
    reached.

    Raises ValueError for a model without λ, and for a λ that looks into its buckets, which has no such part.
    """
    settings = trained.model.settings
    if not settings.has_lam:
        raise ValueError(f"{trained.variant} of {trained.workdir} has no λ: its mixer is {settings.mixer}")
    lam = settings.mixers[0].lam
    if lam_traits(lam).needs_scores:
        raise ValueError(
            f"{trained.variant} of {trained.workdir} has no static part of λ: lam={lam} looks into its buckets"
        )
    reached = np.arange(num_levels(settings.max_length)) < num_levels(trained.task.trained_on.longest)
    params = trained.params(seed, which)["params"]
    mixers = [mixer_params(params[f"layer_{index}"]) for index in range(settings.layers)]
    if lam == "linear":
        return np.where(reached, np.stack([mixer["lam"]["scale"] for mixer in mixers]), np.nan), "Λ of softplus(Λ ⊙ d)"
    zeros = np.zeros((settings.heads, num_levels(settings.max_length)), np.float32)
    module = settings.mixers[0].lam_module(implementation="xla", parent=None)
    at_zero = _at_zero(module)
    values = [at_zero(mixer.get("lam", {}), zeros) * np.exp(mixer.get("lam_log_scale", 0.0)) for mixer in mixers]
    what = "λ where its input is 0" if lam_traits(lam).needs_input else "λ itself"
    return np.where(reached, np.stack(values), np.nan), what


@functools.cache
def _at_zero(module: nn.Module):
    return jax.jit(lambda params, zeros: module.apply({"params": params}, zeros))


def mixer_params(layer: dict[str, Any]) -> dict[str, Any]:
    """The TokenMixer's parameters among those of a layer of either model."""
    return layer if "a_log" in layer else mixer_params(layer["mixer"])


def check_index(name: str, value: int, size: int) -> None:
    """Raises ValueError if there is no such index, from 0 or from the end."""
    if not -size <= value < size:
        raise ValueError(f"{name}={value}: expected -{size} to {size - 1}")
