"""Layouts of external checkpoints, and conversion by them: their configs as our settings, and their arrays as our parameters.

One `Layout` for each architecture, by the name that its config.json has: those of flash-linear-attention 0.6.0, and of Guo et
al. (HanGuo97/log-linear-attention).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.models.params import flat_params, param_shapes
from loglinear_jax.settings import INT32_MAX, SettingError, is_of, kind_of

DTYPES = ("float32", "bfloat16", "float16", "float64")
HEAD, EMBEDDING = "head", "embed/embedding"
MAX_LEVELS = 32  # those of int32 positions
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


EXPECTED = {
    int: f"a whole number from 1 to {INT32_MAX:,}",
    float: f"a positive number, at most {INT32_MAX:,}",
    bool: "true or false",
}


def is_a(kind: type, value: Any) -> bool:
    """Whether a config's value is of this kind: null, "400" and 400.0 are no sizes, and "false" is not False."""
    return is_of(value, kind) and (kind is bool or 0 < value <= INT32_MAX)


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


# --- Conversion ---------------------------------------------------------------------------------------------------------


def import_params(
    state_dict: Mapping[str, Any], config: Mapping[str, Any], *, dtype: str = "float32"
) -> tuple[LanguageSettings, dict[str, Any]]:
    """Convert a state dict and config of an external model to (settings, params) of a LanguageModel that computes the same.

    state_dict: names to arrays (NumPy, JAX or torch). config: the model's config.json as a mapping; its `architectures` or
    `model_type` say which of `loglinear_jax.hub.layouts.LAYOUTS` it is. dtype: of the activations; logits are in float32.
    Parameters come out in float32. If word embeddings are tied, the head is a copy of them.

    Raises ValueError naming the array that is missing, unknown, not floating, not finite, or not of the shape that
    config gives; the field of config that is missing or that our model does not have; or the invalid argument.
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

    architecture: None means the first that has such models. `import_params` is the inverse.

    Guo et al.'s models, and flash-linear-attention's log-linear one, always have λ for 16,384 positions; ours must have been
    built with max_length=16384 to be loaded there.

    Raises ValueError for a model that the architecture does not have, or naming the parameter that is missing, unknown,
    not floating, not finite, or not of the shape that these settings give.
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
