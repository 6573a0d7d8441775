"""Models, from token ids to logits: one file each; and how a kind of model is found."""

from __future__ import annotations

import dataclasses

from loglinear_jax.components import parse_call
from loglinear_jax.models.language import LanguageModel, LanguageSettings
from loglinear_jax.models.own import OwnModel, OwnSettings
from loglinear_jax.models.recall import RecallModel, RecallSettings
from loglinear_jax.settings import SettingError


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """A kind of model: the Linen class, and the class of its settings."""

    model: type
    settings: type


MODEL_KINDS = {
    "recall": ModelKind(RecallModel, RecallSettings),
    "language": ModelKind(LanguageModel, LanguageSettings),
}
OWN_KIND = ModelKind(OwnModel, OwnSettings)


def find_kind(kind: str) -> ModelKind:
    """The kind of model that `kind` names, one of MODEL_KINDS, or a class by import path with arguments.

    Raises SettingError for a name that there is not. Whether there is such a class, its settings' `check` finds out.
    """
    if kind in MODEL_KINDS:
        return MODEL_KINDS[kind]
    if isinstance(kind, str) and ":" in parse_call(kind).name:
        return OWN_KIND
    raise SettingError(f"model.kind must be one of {', '.join(MODEL_KINDS)}, or my_module:MyModel, got {kind!r}")


def is_own(kind: str) -> bool:
    """Whether that is a model of the user's own."""
    return kind not in MODEL_KINDS


__all__ = [
    "MODEL_KINDS",
    "LanguageModel",
    "LanguageSettings",
    "OwnModel",
    "OwnSettings",
    "RecallModel",
    "RecallSettings",
    "find_kind",
    "is_own",
]
