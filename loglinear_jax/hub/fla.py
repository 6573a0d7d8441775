"""Parameters of flash-linear-attention's LogLinearMamba2ForCausalLM, as ours and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from loglinear_jax.fenwick import capacity
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.models.params import flat_params, param_shapes

PREFIX = "backbone."
FIRST = f"{PREFIX}layers.0.mixer."
HEAD = "lm_head.weight"
MAX_LEVELS = 32  # those of int32 positions
# Of a block: fla's name -> (ours, how the array is turned).
_BLOCK = {
    "mixer_norm.weight": ("mixer_norm/scale", "same"),
    "mixer.in_proj.weight": ("mixer/in_proj/kernel", "transposed"),
    "mixer.conv1d.weight": ("mixer/conv/kernel", "conv"),
    "mixer.conv1d.bias": ("mixer/conv/bias", "same"),
    "mixer.dt_bias": ("mixer/mixer/dt_bias", "same"),
    "mixer.A_log": ("mixer/mixer/a_log", "same"),
    "mixer.L": ("mixer/mixer/lam/scale", "same"),
    "mixer.D": ("mixer/skip", "same"),
    "mixer.norm.weight": ("mixer/norm/scale", "same"),
    "mixer.out_proj.weight": ("mixer/out_proj/kernel", "transposed"),
    "mlp_norm.weight": ("mlp_norm/scale", "same"),
    "mlp.gate_proj.weight": ("gate_proj/kernel", "transposed"),
    "mlp.up_proj.weight": ("up_proj/kernel", "transposed"),
    "mlp.down_proj.weight": ("down_proj/kernel", "transposed"),
}
_OUTSIDE = {
    f"{PREFIX}embeddings.weight": ("embed/embedding", "same"),
    f"{PREFIX}norm_f.weight": ("norm/scale", "same"),
    HEAD: ("head", "transposed"),
}
_TURN = {"same": lambda x: x, "transposed": np.transpose, "conv": lambda x: x[:, 0].T}
_TURN_BACK = {"same": lambda x: x, "transposed": np.transpose, "conv": lambda x: x.T[:, None]}

# Of fla's config: what of ours each field is, and the values of others with which its model is ours.
_SIZES = {
    "norm_eps": "norm_epsilon",
    "n_groups": "key_groups",
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_heads": "heads",
    "head_dim": "head_dim",
    "state_size": "key_dim",
    "conv_kernel": "conv_width",
    "use_conv_bias": "conv_bias",
}
_ONLY = {
    "model_type": ("log_linear_mamba2",),
    "hidden_act": ("silu", "swish"),
    "use_bias": (False,),
    "rmsnorm": (True,),
    "norm_before_gate": (False,),
    "D_has_hdim": (False,),
    "residual_in_fp32": (False,),
    "tie_word_embeddings": (False,),
    "attnres_block_size": (None,),
    # In JSON infinity is spelled in two ways.
    "dt_limit": ([0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}]),
}


def import_fla(
    state_dict: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    key_groups: int | None = None,
    norm_epsilon: float | None = None,
    dtype: str = "float32",
) -> tuple[LanguageSettings, dict[str, Any]]:
    """(settings, params) of a LanguageModel with λ "linear" that computes what fla's model does.

    state_dict: names to arrays (NumPy, JAX or torch; from safetensors, say). config: the model's config.json as a mapping.
    key_groups, norm_epsilon: its n_groups and norm_eps, which the arrays do not tell; if None, the config's, or 1 and 1e-5
    without one. dtype: of the activations. Parameters come out in float32.

    Raises ValueError naming the array that is missing, unknown, not floating, not finite, or of another shape than in our
    model; the invalid argument; or the field of config that differs from the arrays or an argument, or that our model lacks.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict is of type {type(state_dict).__name__}: expected a mapping of names to arrays")
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"config is of type {type(config).__name__}: expected a mapping, as json.load gives it")
    layers = _count_layers(state_dict)
    names = _names(layers, conv_bias=f"{FIRST}conv1d.bias" in state_dict)
    if missing := sorted(names.keys() - state_dict.keys()):
        raise ValueError(f"state_dict has no {missing[0]}: expected the parameters of a LogLinearMamba2ForCausalLM")
    if unknown := sorted(map(str, state_dict.keys() - names.keys())):
        raise ValueError(f"state_dict has {unknown[0]}, for which LanguageModel has no place")
    arrays = {name: _as_float32(name, x) for name, x in state_dict.items()}
    settings = _settings(
        arrays,
        layers,
        _configured(config, "n_groups", "key_groups", key_groups, 1),
        _configured(config, "norm_eps", "norm_epsilon", norm_epsilon, 1e-5),
        dtype,
    )
    shapes = param_shapes(LanguageModel(settings))
    for name, (path, turn) in names.items():
        expected = _TURN_BACK[turn](np.broadcast_to(0.0, shapes[path])).shape
        if arrays[name].shape != expected:
            raise ValueError(
                f"{name} has shape {arrays[name].shape}: expected {expected} beside {HEAD} and the mixer of layer 0, with "
                f"key_groups={settings.key_groups}"
            )
    if config is not None:
        _check_config(config, settings)
    ours = {path: _TURN[turn](arrays[name]) for name, (path, turn) in names.items()}
    return settings, {"params": unflatten_dict(ours, sep="/")}


def export_fla(settings: LanguageSettings, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """fla's state_dict, in float32, of a LanguageModel with λ "linear" and one seed's parameters; what `import_fla` undoes.

    fla's model always has λ for 16,384 positions; ours must have been built with max_length=16384 to be loaded there.

    Raises ValueError for another model, mixer or λ, of which fla has none, and naming the parameter that is missing, unknown,
    not floating, not finite, or of another shape than in the model of these settings.
    """
    if not isinstance(settings, LanguageSettings):
        raise ValueError(
            f"settings is of type {type(settings).__name__}: expected the LanguageSettings of a LanguageModel"
        )
    if settings.mixer != "log_linear" or settings.lam != "linear":
        raise ValueError(
            f"flash-linear-attention has only the log_linear mixer with linear λ, got mixer={settings.mixer!r} "
            f"and lam={settings.lam!r}"
        )
    settings.check()
    ours = flat_params(LanguageModel(settings), params)
    return {
        name: np.ascontiguousarray(_TURN_BACK[turn](_as_float32(path, ours[path])))
        for name, (path, turn) in _names(settings.layers, settings.conv_bias).items()
    }


def _names(layers: int, conv_bias: bool) -> dict[str, tuple[str, str]]:
    blocks = {
        f"{PREFIX}layers.{i}.{name}": (f"layer_{i}/{path}", turn)
        for i in range(layers)
        for name, (path, turn) in _BLOCK.items()
        if conv_bias or name != "mixer.conv1d.bias"
    }
    return _OUTSIDE | blocks


def _settings(
    arrays: Mapping[str, np.ndarray], layers: int, key_groups: Any, norm_epsilon: Any, dtype: str
) -> LanguageSettings:
    """What the sizes of the head and of layer 0's mixer make of our settings."""

    def sizes(name: str, axes: str) -> tuple[int, ...]:
        shape = arrays[name].shape
        if len(shape) != len(axes.split(", ")) or 0 in shape:
            raise ValueError(f"{name} has shape {shape}: expected [{axes}]")
        return shape

    heads, levels = sizes(f"{FIRST}L", "heads, levels")
    hidden, inner = sizes(f"{FIRST}out_proj.weight", "hidden, heads · head_dim")
    channels, _, width = sizes(f"{FIRST}conv1d.weight", "heads · head_dim + 2 · groups · state_size, 1, width")
    vocab_size, _ = sizes(HEAD, "vocabulary, hidden")
    if levels > MAX_LEVELS:
        raise ValueError(f"{FIRST}L has shape {(heads, levels)}: expected at most {MAX_LEVELS} levels")
    if isinstance(key_groups, bool) or not isinstance(key_groups, Integral) or key_groups < 1 or heads % key_groups:
        raise ValueError(f"key_groups is {key_groups!r}: expected a divisor of the {heads} heads of {FIRST}L")
    if isinstance(norm_epsilon, bool) or not isinstance(norm_epsilon, Real) or not 0 < norm_epsilon < math.inf:
        raise ValueError(f"norm_epsilon is {norm_epsilon!r}: expected a finite number above 0")
    if not isinstance(dtype, str) or dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise ValueError(f"dtype is {dtype!r}: expected float32, bfloat16, float16 or float64")
    if inner % heads:
        raise ValueError(
            f"{FIRST}out_proj.weight has shape {(hidden, inner)}: expected a multiple of the {heads} heads of {FIRST}L behind"
        )
    keys = channels - inner
    if keys < 1 or keys % (2 * key_groups):
        raise ValueError(
            f"{FIRST}conv1d.weight has shape {arrays[f'{FIRST}conv1d.weight'].shape}: expected {inner} channels and a multiple "
            f"of 2 · key_groups = {2 * key_groups} more"
        )
    settings = LanguageSettings(
        vocab_size=vocab_size,
        max_length=capacity(levels),
        lam="linear",
        hidden=hidden,
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        key_dim=keys // (2 * key_groups),
        key_groups=int(key_groups),
        conv_width=width,
        conv_bias=f"{FIRST}conv1d.bias" in arrays,
        norm_epsilon=float(norm_epsilon),
        dtype=dtype,
    )
    settings.check()
    return settings


def _configured(config: Mapping[str, Any] | None, field: str, argument: str, given: Any, default: Any) -> Any:
    """What the argument or, if it is None, the config says."""
    if given is None and config is not None and field not in config:
        raise ValueError(f"config has no {field}: expected it, or the argument {argument}")
    return (default if config is None else config[field]) if given is None else given


def _check_config(config: Mapping[str, Any], settings: LanguageSettings) -> None:
    """Raises ValueError naming the first field of fla's config with which its model is not ours of these settings."""
    for field, values in _ONLY.items():
        if field in config and config[field] not in values:
            raise ValueError(f"config has {field}={config[field]!r}: LanguageModel has only {values[0]!r}")
    for field, name in _SIZES.items():
        if field in config and config[field] != getattr(settings, name):
            raise ValueError(
                f"config has {field}={config[field]!r}: expected {getattr(settings, name)!r}, by state_dict and the arguments"
            )
    expand = config.get("expand", settings.inner / settings.hidden)
    if not isinstance(expand, Real) or int(expand * settings.hidden) != settings.inner:
        raise ValueError(f"config has expand={expand!r}: expected {settings.inner / settings.hidden:g}, by state_dict")


def _count_layers(names: Mapping[str, Any]) -> int:
    found = {int(m[1]) for name in names if (m := re.match(rf"{re.escape(PREFIX)}layers\.(\d+)\.", str(name)))}
    missing = next(i for i in range(len(found) + 1) if i not in found)
    if missing < max(len(found), 1):
        raise ValueError(
            f"state_dict has no {PREFIX}layers.{missing}: expected the parameters of a LogLinearMamba2ForCausalLM"
        )
    return len(found)


def _as_float32(name: str, x: Any) -> np.ndarray:
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
