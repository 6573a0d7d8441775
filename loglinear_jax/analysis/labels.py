"""What runs and variants are called in titles, and which colour a variant has."""

from __future__ import annotations

from collections.abc import Iterable

from ml_collections import ConfigDict

from loglinear_jax.runs.loading import Run

# Okabe and Ito's colours, safe for the colour-blind: a λ has the same one in every figure.
COLORS = {
    "fixed": "#56B4E9",
    "linear": "#0072B2",
    "mlp_softmax": "#E69F00",
    "mlp_softplus": "#D55E00",
    "rope": "#009E73",
    "mixer=linear": "#CC79A7",
    "mixer=softmax": "#000000",
}
OTHER_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")


def setting_of(config: ConfigDict) -> str:
    """ "text" or "released": which of the paper's two sources the model's initial values follow."""
    return config.model.init_scheme


def describe_run(run: Run) -> str:
    """The task, the setting if it is not text, and the label if there is one."""
    setting = setting_of(run.config)
    shown = "" if setting == "text" else f", {setting} setting"
    return run.task.describe() + shown + (f" ({run.label})" if run.label else "")


def describe_variant(variant: str) -> str:
    """A variant's name for titles and legends."""
    names = {"mixer=softmax": "softmax attention", "mixer=linear": "linear attention, λ ≡ 1"}
    return names.get(variant, variant if "=" in variant else f"λ: {variant}")


def sentence(text: str) -> str:
    """text with a capital first letter; λ stays λ, as Λ is another quantity."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def colors_of(variants: Iterable[str]) -> dict[str, str]:
    """A colour for each variant: its own if it has one, else the next that none of them has."""
    variants = list(variants)
    taken = {COLORS[v] for v in variants if v in COLORS}
    free = [color for color in OTHER_COLORS if color not in taken] or list(OTHER_COLORS)
    others = [v for v in variants if v not in COLORS]
    return {v: COLORS[v] if v in COLORS else free[others.index(v) % len(free)] for v in variants}
