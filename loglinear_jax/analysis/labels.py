"""What runs and variants are called in titles, and which colour a variant has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loglinear_jax.analysis.experiments import setting_of
from loglinear_jax.runs.loading import Run

# Okabe and Ito's colours and two of Paul Tol's, safe for the colour-blind: a λ has the same one in every figure.
COLORS = {
    "fixed": "#56B4E9",
    "linear": "#0072B2",
    "mlp_softmax": "#E69F00",
    "mlp_softplus": "#D55E00",
    "rope": "#009E73",
    "content": "#882255",
    "content_mlp": "#999933",
    "mixer=linear": "#CC79A7",
    "mixer=softmax": "#000000",
    "mixer=gated_delta": "#117733",
    "mixer=delta": "#88CCEE",
}
MIXER_NAMES = {
    "mixer=softmax": "softmax attention",
    "mixer=linear": "linear attention, λ ≡ 1",
    "mixer=gated_delta": "Gated DeltaNet",
    "mixer=delta": "DeltaNet",
    "mixer=log_linear_delta": "log-linear Gated DeltaNet",
}
OTHER_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")


def describe_run(run: Run) -> str:
    """The task, the setting if it is released, and the label if there is one."""
    shown = ", setting released" if setting_of(run.config) == "released" else ""
    return run.task.describe() + shown + (f" ({run.label})" if run.label else "")


def short_names(runs: Sequence[Run]) -> dict[str, str]:
    """By what `describe_run` calls each of several runs, the words of it that not all of them have; of one run none."""
    names = [describe_run(run) for run in runs]
    words = {name: name.removesuffix(")").replace(" (", ", ").split(", ") for name in names}
    shared = set.intersection(*map(set, words.values()))
    short = {name: ", ".join(word for word in words[name] if word not in shared) or name for name in names}
    return short if len(runs) > 1 else {}


def describe_variant(variant: str) -> str:
    """A variant's name for titles and legends."""
    mixer, _, settings = variant.partition("+")
    if mixer in MIXER_NAMES:
        return ", ".join([MIXER_NAMES[mixer], *filter(None, settings.replace("lam=", "λ: ").split("+"))])
    return variant if "=" in variant else f"λ: {variant}"


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
