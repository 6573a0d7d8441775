"""Token mixers: one file each, with its settings, its module, its cache and the size of that.

A mixer is chosen by text, as a λ is: "log_linear", "gated_delta(beta_max=2)" or, of one's own, "my_mixer:Hyena(order=2)". A
pattern names several, which take turns over the layers of a model: "log_linear,log_linear,softmax".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loglinear_jax.components import Call, fields_of, find_class, instantiate, parse_call, split_outside
from loglinear_jax.mixers.base import DECAY_PARAMS, DT_MAX, DT_MIN, MixerCache, TokenMixer, init_dt_bias, unit
from loglinear_jax.mixers.delta import DeltaMixer, GatedDeltaMixer, LogLinearDeltaMixer
from loglinear_jax.mixers.mamba2 import GatedLinearMixer, LogLinearMixer
from loglinear_jax.mixers.softmax import SoftmaxMixer

MIXERS: dict[str, type[TokenMixer]] = {
    "log_linear": LogLinearMixer,
    "log_linear_delta": LogLinearDeltaMixer,
    "gated_linear": GatedLinearMixer,
    "gated_delta": GatedDeltaMixer,
    "delta": DeltaMixer,
    "softmax": SoftmaxMixer,
}
FORMER_NAMES = {"linear": "gated_linear"}  # by which configs may still call a mixer


def parse_pattern(pattern: str) -> list[str]:
    """The mixers of a pattern, "log_linear,softmax", which may stand in parentheses; each by its present name."""
    return [_present_name(mixer.strip()) for mixer in _parts(pattern)]


def former_names(pattern: str) -> list[str]:
    """The names in a pattern that mixers had once."""
    names = [text.partition("(")[0].strip() for text in _parts(pattern)]
    return [name for name in names if name in FORMER_NAMES]


def find_mixer(mixer: str) -> tuple[Callable[..., TokenMixer], Call]:
    """The class that `mixer` names, one of `MIXERS` or a TokenMixer by import path, and the call with its arguments.

    Raises SettingError for a name that there is not, and for text that is no such call.
    """
    call = parse_call(_present_name(mixer))
    return find_class(call.name, MIXERS, "mixer", "my_module:MyMixer", TokenMixer), call


def make_mixer(mixer: str, **settings: Any) -> TokenMixer:
    """Make a mixer by name or import path, such as "gated_delta(beta_max=2)".

    Settings for which it has no field are ignored. Raises SettingError for an argument without a field."""
    found, call = find_mixer(mixer)
    of_linen = {key: settings.pop(key) for key in ("name", "parent") if key in settings}
    return instantiate(found, call, "mixer", settings, **of_linen)


def takes_pieces(mixer: str) -> bool:
    """Whether it takes the pieces of a sequence that is cut over devices."""
    return "axis_name" in fields_of(find_mixer(mixer)[0])


def _parts(pattern: str) -> list[str]:
    pattern = pattern.strip()
    if pattern.startswith("(") and pattern.endswith(")"):
        pattern = pattern[1:-1]
    return split_outside(pattern, ",")


def _present_name(mixer: str) -> str:
    name, opening, rest = mixer.partition("(")
    return FORMER_NAMES.get(name.strip(), name) + opening + rest


__all__ = [
    "DECAY_PARAMS",
    "DT_MAX",
    "DT_MIN",
    "FORMER_NAMES",
    "MIXERS",
    "MixerCache",
    "TokenMixer",
    "find_mixer",
    "former_names",
    "init_dt_bias",
    "make_mixer",
    "parse_pattern",
    "unit",
]
