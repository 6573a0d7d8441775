"""How well a language model predicts windows of a text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.generate import tokens_at_a_time
from loglinear_jax.models import LanguageModel
from loglinear_jax.models.params import flat_params
from loglinear_jax.settings import SettingError


def window_losses(
    model: LanguageModel,
    params: Any,
    windows: Int[Array | np.ndarray, "N S"],
    tick: Callable[[int], Any] = lambda tokens: None,
) -> Float[np.ndarray, "N T"]:
    """Cross-entropy in nats of every token of a window except the first. Arguments and errors: see `window_scores`."""
    return window_scores(model, params, windows, tick)[0]


def window_scores(
    model: LanguageModel,
    params: Any,
    windows: Int[Array | np.ndarray, "N S"],
    tick: Callable[[int], Any] = lambda tokens: None,
) -> tuple[Float[np.ndarray, "N T"], Bool[np.ndarray, "N T"]]:
    """Cross-entropy in nats of every token of a window except the first, and whether it is the likeliest, given the
    tokens before it; T = S - 1.

    Memory is bounded: windows of any length need only the states and the activations of `tokens_at_a_time`. tick:
    called with the number of tokens that were done.

    Raises SettingError as `check_windows` does, and for losses that are not finite; ValueError for params that are not
    the model's.
    """
    check_windows(model, windows)
    flat_params(model, params)
    num, length = windows.shape[0], windows.shape[1] - 1
    params = jax.device_put(params)  # once, not for every part

    losses, right = np.empty((num, length), np.float32), np.empty((num, length), bool)
    tokens = tokens_at_a_time(model.settings, length)
    part = min(tokens, length)
    together = tokens // part
    for row in range(0, num, together):
        some, caches = slice(row, row + together), None
        for first in range(0, length, part):
            end = min(first + part, length)
            inputs, targets = windows[some, first:end], windows[some, first + 1 : end + 1]
            losses[some, first:end], right[some, first:end], caches = _scores_of(
                params, inputs, targets, caches, model=model, room=length if caches is None else None
            )
            tick(inputs.size)
            if not (finite := np.isfinite(losses[some, first:end])).all():
                window, position = (int(x) for x in np.argwhere(~finite)[0])
                raise SettingError(
                    f"params give losses that are not finite, first at position {first + position + 1} of window "
                    f"{row + window + 1}: expected a model that did not diverge"
                )
    return losses, right


def check_windows(model: LanguageModel, windows: Int[Array | np.ndarray, "N S"]) -> None:
    """Raises SettingError unless windows are arrays of token ids of the model's vocabulary, at least two in each and no more
    than its λ has levels for."""
    shape, dtype = getattr(windows, "shape", None), getattr(windows, "dtype", None)
    if dtype is None or not np.issubdtype(dtype, np.integer):
        what = f"of type {type(windows).__name__}" if dtype is None else f"of dtype {dtype}"
        raise SettingError(f"windows is {what}: expected an array [windows, tokens] of whole numbers")
    if len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
        raise SettingError(f"windows has shape {shape}: expected at least one window of at least two tokens")
    vocab = model.settings.vocab_size
    if windows.min() < 0 or windows.max() >= vocab:
        raise SettingError(f"windows has ids {windows.min()} to {windows.max()}: expected 0 to {vocab - 1}")
    model.settings.check_decoding(shape[1] - 1, "tokens in a window", "take shorter windows (a smaller --length)")


@functools.partial(jax.jit, static_argnames=("model", "room"), donate_argnums=(3,))
def _scores_of(params, tokens, targets, caches, *, model, room):
    return model.apply(params, tokens, targets, caches, room, method="continued_losses")
