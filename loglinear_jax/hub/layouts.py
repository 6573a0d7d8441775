"""Layouts of external checkpoints: their configs as our settings, and their arrays as our parameters.

One `Layout` for each architecture, by the name that its config.json has: those of flash-linear-attention 0.6.0, and of Guo et
al. (HanGuo97/log-linear-attention).
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loglinear_jax.models import LanguageSettings
from loglinear_jax.settings import SettingError, kind_of

NO_LIMIT = ([0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])  # as JSON spells infinity
SILU = ("silu", "swish")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the arrays of one of our parameters are: the names of those that, one behind the other, make it up, and how it is
    turned: "same", "transposed" (from [outputs, inputs] to ours) or "conv" (from [channels, 1, width])."""

    names: tuple[str, ...]
    turn: str = "same"


class Field(typing.NamedTuple):
    """The field of a config that is one of our settings. default: where the config does not say (... if it must). also: another
    name that it goes by."""

    name: str
    default: Any = ...
    also: str | None = None

    def read(self, config: Mapping[str, Any], setting: str) -> Any:
        found = {name: config[name] for name in (self.name, self.also) if name in config}
        if len(set(map(repr, found.values()))) > 1:
            raise ValueError(
                f"config has {', '.join(f'{k}={v}' for k, v in found.items())}: expected one of them, or the same"
            )
        value = next(iter(found.values()), self.default)
        if value is ...:
            raise ValueError(f"config has no {self.name}: expected it")
        kind = kind_of(typing.get_type_hints(LanguageSettings)[setting])
        if not (value is None is self.default or is_a(kind, value)):
            raise ValueError(f"config has {self.name}={shown(value)}: expected {EXPECTED[kind]}")
        return value if value is None else kind(value)


EXPECTED = {int: "a whole number from 1 on", float: "a positive number", bool: "true or false"}


def is_a(kind: type, value: Any) -> bool:
    """Whether a config's value is of this kind: null, "400" and 400.0 are no sizes, and "false" is not False."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, kind)) and 0 < value < math.inf and (kind is float or value >= 1)


def number(config: Mapping[str, Any], name: str, default: Any, kind: type = float) -> Any:
    """The value of a field by which sizes are made; the default also for null."""
    value = config.get(name)
    if value is not None and not is_a(kind, value):
        raise ValueError(f"config has {name}={shown(value)}: expected {EXPECTED[kind]}")
    return default if value is None else value


def size_from(name: str, value: float) -> int:
    """The size that the ratio, or divisor, `name` makes with others; the nearest whole number, as ratios are rounded."""
    nearest = round(value) if math.isfinite(value) else 0
    if nearest < 1 or not math.isclose(value, nearest, rel_tol=1e-5):
        raise ValueError(f"config has {name}, which makes {value!r}: expected a whole number from 1 on")
    return nearest


def ratio_to(size: int, of: int, times: int = 1) -> float:
    """A ratio r, about size / of, with int(r · of) = size, as others compute it, and int(r · of · times) = size · times."""
    ratio = size / of
    while int(ratio * of) < size or int(ratio * (of * times)) < size * times:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def shown(value: Any) -> str:
    """A value in a message: cut, if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclasses.dataclass(frozen=True)
class Layout:
    """model_type: config.json's. prefix: of the arrays of the blocks, which a number follows. block, outside: our parameters'
    paths, in a block and outside of blocks, and their places. fields: the config's field for each of our settings. only: other
    fields, and the values with which the model is ours. fixed: of our settings, those that all its models have. sizes: function
    of the config and of the settings that `fields` found, to more of them. config: function of our settings to more of the
    config, which `sizes` undoes."""

    model_type: str
    prefix: str
    outside: Mapping[str, Place]
    block: Mapping[str, Place]
    fields: Mapping[str, Field]
    only: Mapping[str, tuple]
    fixed: Mapping[str, Any]
    sizes: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    config: Callable[[LanguageSettings], dict[str, Any]]

    def places(self, settings: LanguageSettings) -> dict[str, Place]:
        """Of every parameter of a model of these settings."""
        found = dict(self.outside)
        for layer in range(settings.layers):
            for path, place in self.block.items():
                if path == "mixer/conv/bias" and not settings.conv_bias:
                    continue
                names = tuple(f"{self.prefix}{layer}.{name}" for name in place.names)
                found[f"layer_{layer}/{path}"] = dataclasses.replace(place, names=names)
        return found

    @property
    def levels_name(self) -> str | None:
        """The array whose second axis has the levels; None without λ."""
        scale = self.block.get("mixer/mixer/lam/scale")
        return None if scale is None else f"{self.prefix}0.{scale.names[0]}"


def part_sizes(path: str, settings: LanguageSettings) -> list[int]:
    """Outputs of each array that one of our parameters is made of, where it is made of several."""
    keys = settings.groups * settings.key_dim
    if path.endswith("conv/kernel"):
        return [settings.inner, keys, keys]
    inputs = (settings.heads * n for n in settings.mixers[0].inputs.values())
    return [settings.inner, settings.inner, keys, keys, *inputs]


_LOG_LINEAR = {"lam": "linear", "lam_levels": None}  # of all that have λ


# --- The blocks of Mamba-2 --------------------------------------------------------------------------------------------------

_MAMBA_MIXER = {
    "mixer/in_proj/kernel": Place(("mixer.in_proj.weight",), "transposed"),
    "mixer/conv/kernel": Place(("mixer.conv1d.weight",), "conv"),
    "mixer/conv/bias": Place(("mixer.conv1d.bias",)),
    "mixer/mixer/dt_bias": Place(("mixer.dt_bias",)),
    "mixer/mixer/a_log": Place(("mixer.A_log",)),
    "mixer/skip": Place(("mixer.D",)),
    "mixer/norm/scale": Place(("mixer.norm.weight",)),
    "mixer/out_proj/kernel": Place(("mixer.out_proj.weight",), "transposed"),
}
_MLP = {
    "mlp_norm/scale": Place(("mlp_norm.weight",)),
    "gate_proj/kernel": Place(("mlp.gate_proj.weight",), "transposed"),
    "up_proj/kernel": Place(("mlp.up_proj.weight",), "transposed"),
    "down_proj/kernel": Place(("mlp.down_proj.weight",), "transposed"),
}
_MAMBA_OUTSIDE = {
    "embed/embedding": Place(("backbone.embeddings.weight",)),
    "norm/scale": Place(("backbone.norm_f.weight",)),
    "head": Place(("lm_head.weight",), "transposed"),
}
_MAMBA_FIELDS = {
    "vocab_size": Field("vocab_size"),
    "hidden": Field("hidden_size"),
    "layers": Field("num_hidden_layers"),
    "heads": Field("num_heads", None),
    "head_dim": Field("head_dim", 64),
    "key_dim": Field("state_size", 128),
    "key_groups": Field("n_groups", 1),
    "conv_width": Field("conv_kernel", 4),
    "conv_bias": Field("use_conv_bias", True),
    "norm_epsilon": Field("norm_eps", 1e-5, also="layer_norm_epsilon"),
}
_MAMBA_ONLY = {
    "hidden_act": SILU,
    "use_bias": (False,),
    "rmsnorm": (True,),
    "rms_norm": (True,),
    "norm_before_gate": (False,),
    "D_has_hdim": (False,),
    "attnres_block_size": (None,),
    "dt_limit": NO_LIMIT,
    "time_step_limit": NO_LIMIT,
}


def _mamba_sizes(config: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """heads, where the config has none; and the inner width held against them."""
    width = size_from("expand", number(config, "expand", 2) * found["hidden"])
    heads = found["heads"] or size_from("head_dim", width / found["head_dim"])
    if heads * found["head_dim"] != width:
        raise ValueError(
            f"config has num_heads={heads}, head_dim={found['head_dim']}: expected {width} together, expand · hidden_size"
        )
    return {"heads": heads}


def _mamba_config(settings: LanguageSettings) -> dict[str, Any]:
    return {"expand": ratio_to(settings.inner, settings.hidden), "residual_in_fp32": False}


_LOG_LINEAR_MAMBA = Layout(
    model_type="log_linear_mamba2",
    prefix="backbone.layers.",
    outside=_MAMBA_OUTSIDE,
    block={
        "mixer_norm/scale": Place(("mixer_norm.weight",)),
        **_MAMBA_MIXER,
        "mixer/mixer/lam/scale": Place(("mixer.L",)),
        **_MLP,
    },
    fields=_MAMBA_FIELDS,
    only=_MAMBA_ONLY,
    fixed={"mixer": "log_linear", **_LOG_LINEAR, "norm_groups": None, "mlp": True, "mlp_hidden": None},
    sizes=_mamba_sizes,
    config=_mamba_config,
)

# --- The blocks of Gated DeltaNet -------------------------------------------------------------------------------------------


def _delta_block(inputs: tuple[str, ...]) -> dict[str, Place]:
    """inputs: the projections of dt, d and b."""
    return {
        "mixer_norm/scale": Place(("attn_norm.weight",)),
        "mixer/in_proj/kernel": Place(
            tuple(f"attn.{name}_proj.weight" for name in ("g", "v", "k", "q", *inputs)), "transposed"
        ),
        "mixer/conv/kernel": Place(tuple(f"attn.{name}_conv1d.weight" for name in "vkq"), "conv"),
        "mixer/mixer/dt_bias": Place(("attn.dt_bias",)),
        "mixer/mixer/a_log": Place(("attn.A_log",)),
        "mixer/norm/scale": Place(("attn.o_norm.weight",)),
        "mixer/out_proj/kernel": Place(("attn.o_proj.weight",), "transposed"),
        **_MLP,
    }


def _delta_sizes(config: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """heads, head_dim, β's largest value and the MLP's width."""
    usual = -(-int(found["hidden"] * number(config, "hidden_ratio", 4) * 2 / 3) // 256) * 256
    return {
        "heads": found["heads"] or found["key_groups"],
        "head_dim": size_from("expand_v", number(config, "expand_v", 2.0) * found["key_dim"]),
        "beta_max": 2.0 if number(config, "allow_neg_eigval", False, bool) else 1.0,
        "mlp_hidden": number(config, "intermediate_size", usual, int),
    }


def _delta_config(settings: LanguageSettings) -> dict[str, Any]:
    if settings.beta_max not in (1, 2):
        raise ValueError(f"settings have beta_max={settings.beta_max}: expected 1 or 2, which is what others have")
    return {
        "expand_v": ratio_to(settings.head_dim, settings.key_dim, times=settings.groups),
        "allow_neg_eigval": settings.beta_max == 2,
        "intermediate_size": settings.mlp_width,
    }


_GATED_DELTA = Layout(
    model_type="gated_deltanet",
    prefix="model.layers.",
    outside={
        "embed/embedding": Place(("model.embeddings.weight",)),
        "norm/scale": Place(("model.norm.weight",)),
        "head": Place(("lm_head.weight",), "transposed"),
    },
    block=_delta_block(("a", "b")),
    fields={
        "vocab_size": Field("vocab_size"),
        "hidden": Field("hidden_size"),
        "layers": Field("num_hidden_layers"),
        "key_groups": Field("num_heads", 6),
        "heads": Field("num_v_heads", None),
        "key_dim": Field("head_dim", 256),
        "conv_width": Field("conv_size", 4),
        "norm_epsilon": Field("norm_eps", 1e-6),
    },
    only={
        "hidden_act": SILU,
        "output_gate_activation": SILU,
        "use_gate": (True,),
        "use_short_conv": (True,),
        "attn": (None,),
        "attnres_block_size": (None,),
    },
    fixed={"mixer": "gated_delta", "conv_bias": False, "mlp": True},
    sizes=_delta_sizes,
    config=_delta_config,
)

LAYOUTS = {
    "LogLinearMamba2ForCausalLM": _LOG_LINEAR_MAMBA,
    "Mamba2ForCausalLM": dataclasses.replace(
        _LOG_LINEAR_MAMBA,
        model_type="mamba2",
        block={"mixer_norm/scale": Place(("norm.weight",)), **_MAMBA_MIXER},
        fixed={"mixer": "gated_linear", "norm_groups": None, "mlp": False},
    ),
    "GatedDeltaNetForCausalLM": _GATED_DELTA,
    # Guo et al.'s: λ for 16,384 tokens.
    "HAttentionForCausalLM": dataclasses.replace(
        _LOG_LINEAR_MAMBA,
        model_type="hattention",
        fields=_MAMBA_FIELDS
        | {"key_groups": Field("n_groups"), "norm_epsilon": Field("layer_norm_epsilon", 1e-5, also="norm_eps")},
        fixed=_LOG_LINEAR_MAMBA.fixed | {"norm_groups": 1},
    ),
    "HGatedDeltaNetForCausalLM": dataclasses.replace(
        _GATED_DELTA,
        model_type="h_gated_deltanet",
        block=_delta_block(("a", "l", "b")) | {"mixer/mixer/lam/scale": Place(("attn.L",))},
        only=_GATED_DELTA.only | {"allow_neg_eigval": (False,)},
        fixed=_GATED_DELTA.fixed | {"mixer": "log_linear_delta", **_LOG_LINEAR, "key_groups": None, "beta_max": 1.0},
    ),
}


def find_layout(config: Mapping[str, Any]) -> tuple[str, Layout]:
    """(its name, the layout) of a config. Raises ValueError for an architecture that there is none of."""
    named = config.get("architectures")
    if named not in (None, []):
        if not isinstance(named, (list, tuple)) or len(named) != 1 or named[0] not in list(LAYOUTS):
            raise ValueError(f"config has architectures={shown(named)}: expected one of {', '.join(LAYOUTS)}")
        return named[0], LAYOUTS[named[0]]
    for name, layout in LAYOUTS.items():
        if config.get("model_type") == layout.model_type:
            return name, layout
    known = ", ".join(layout.model_type for layout in LAYOUTS.values())
    raise ValueError(f"config has model_type={shown(config.get('model_type'))}: expected one of {known}")


def settings_of(layout: Layout, config: Mapping[str, Any], levels: int | None, dtype: str) -> LanguageSettings:
    """Our settings of a model with this config, whose λ has so many levels.

    Raises ValueError naming the first field of the config that is missing, or with which the model is not ours.
    """
    for name, values in layout.only.items():
        if name in config and not any(
            config[name] == x and isinstance(config[name], bool) == isinstance(x, bool) for x in values
        ):
            raise ValueError(
                f"config has {name}={shown(config[name])}: expected {values[0]!r}, the only value implemented"
            )
    found = {setting: field.read(config, setting) for setting, field in layout.fields.items()}
    found |= layout.sizes(config, found)
    heads, groups = (f"{layout.fields[name].name}={found[name]}" for name in ("heads", "key_groups"))
    if found["heads"] % found["key_groups"]:
        raise ValueError(f"config has {heads}, {groups}: expected a multiple of {groups}")
    max_length = 1 << (levels - 1) if levels else number(config, "max_position_embeddings", 16_384, int)
    settings = LanguageSettings(max_length=max_length, dtype=dtype, **(found | layout.fixed))
    if settings.groups != found["key_groups"]:
        raise ValueError(f"config has {heads}, {groups}: expected as many, as the model has no heads that share keys")
    if settings.mlp_hidden == dataclasses.replace(settings, mlp_hidden=None).mlp_width:
        settings = dataclasses.replace(settings, mlp_hidden=None)
    try:
        settings.check()
    except SettingError as error:
        raise ValueError(f"config makes no model of ours: {error}") from error
    return settings


def config_of(name: str, layout: Layout, settings: LanguageSettings) -> dict[str, Any]:
    """What config.json says of a model of these settings."""
    config = {"architectures": [name], "model_type": layout.model_type, "tie_word_embeddings": False}
    if layout.levels_name is None:
        config["max_position_embeddings"] = settings.max_length
    for setting, field in layout.fields.items():
        config[field.name] = settings.groups if setting == "key_groups" else getattr(settings, setting)
    return config | layout.config(settings)


def layout_for(settings: LanguageSettings, architecture: str | None) -> tuple[str, Layout]:
    """(its name, the layout) in which a model of these settings can be written: the first, if `architecture` is None.

    Raises ValueError for an architecture that is unknown, or that does not have such models.
    """
    if architecture is not None and architecture not in tuple(LAYOUTS):
        raise ValueError(f"architecture is {architecture!r}: expected one of {', '.join(LAYOUTS)}")
    mixers = dict.fromkeys(layout.fixed["mixer"] for layout in LAYOUTS.values())
    if settings.mixer not in mixers:
        raise ValueError(
            f"settings have mixer={settings.mixer!r}, of which there is no layout: expected {', '.join(mixers)}"
        )
    others = {
        name: [key for key, value in LAYOUTS[name].fixed.items() if not _means(settings, key, value)]
        for name in (LAYOUTS if architecture is None else (architecture,))
    }
    name = min(others, key=lambda name: ("mixer" in others[name], len(others[name])))
    if not others[name]:
        return name, LAYOUTS[name]
    given = {key: getattr(settings, key) for key in dict.fromkeys(["mixer", *others[name]])}
    raise ValueError(f"settings have {_in_words(given)}: expected what a {name} has, {_in_words(LAYOUTS[name].fixed)}")


def _means(settings: LanguageSettings, key: str, value: Any) -> bool:
    """Whether the model would be the same with this value of a setting, however it is spelled."""
    filled = {"key_groups": "groups", "mlp_hidden": "mlp_width", "norm_groups": "norm_parts"}.get(key, key)
    return getattr(settings, filled) == getattr(dataclasses.replace(settings, **{key: value}), filled)


def _in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in settings.items())


TURN = {"same": lambda x: x, "transposed": np.transpose, "conv": lambda x: x[:, 0].T}
TURN_BACK = {"same": lambda x: x, "transposed": np.transpose, "conv": lambda x: x.T[:, None]}
