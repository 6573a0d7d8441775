"""Parameters of flash-linear-attention's LogLinearMamba2ForCausalLM, as ours and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loglinear_jax.fenwick import capacity
from loglinear_jax.models import LanguageSettings

PREFIX = "backbone."
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
    "lm_head.weight": ("head", "transposed"),
}
_TURN = {"same": lambda x: x, "transposed": np.transpose, "conv": lambda x: x[:, 0].T}
_TURN_BACK = {"same": lambda x: x, "transposed": np.transpose, "conv": lambda x: x.T[:, None]}


def import_fla(
    state_dict: Mapping[str, Any], *, key_groups: int = 1, norm_epsilon: float = 1e-5, dtype: str = "float32"
) -> tuple[LanguageSettings, dict[str, Any]]:
    """(settings, params) of a LanguageModel with λ "linear" that computes what fla's model does.

    state_dict: names to arrays (NumPy, JAX or torch; from safetensors, say). key_groups, norm_epsilon: n_groups and norm_eps
    of its config, which the arrays do not tell. dtype: of the activations. Parameters come out in float32.

    Raises ValueError naming what is missing, unknown, or of a shape that our model does not have.
    """
    arrays = {name: _to_numpy(x) for name, x in state_dict.items()}
    layers = _count_layers(arrays)
    names = _names(layers)
    if missing := sorted(names.keys() - arrays.keys() - {n for n in names if n.endswith("conv1d.bias")}):
        raise ValueError(f"state_dict has no {missing[0]}: expected the parameters of a LogLinearMamba2ForCausalLM")
    if unknown := sorted(arrays.keys() - names.keys()):
        raise ValueError(f"state_dict has {unknown[0]}, for which LanguageModel has no place")

    first = f"{PREFIX}layers.0.mixer."
    heads, levels = arrays[f"{first}L"].shape
    hidden, inner = arrays[f"{first}out_proj.weight"].shape
    channels, _, width = arrays[f"{first}conv1d.weight"].shape
    if arrays[f"{first}D"].shape != (heads,):
        raise ValueError(f"{first}D has shape {arrays[f'{first}D'].shape}: expected one for each of {heads} heads")
    settings = LanguageSettings(
        vocab_size=arrays["lm_head.weight"].shape[0],
        max_length=capacity(levels),
        lam="linear",
        hidden=hidden,
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        key_dim=(channels - inner) // (2 * key_groups),
        key_groups=key_groups,
        conv_width=width,
        conv_bias=f"{first}conv1d.bias" in arrays,
        norm_epsilon=norm_epsilon,
        dtype=dtype,
    )
    for name, expected in {
        "mlp.gate_proj.weight": (settings.mlp_hidden, hidden),
        "mixer.in_proj.weight": (inner + channels + heads * (1 + levels), hidden),
        "mixer.conv1d.weight": (inner + 2 * key_groups * settings.key_dim, 1, width),
    }.items():
        found = arrays[f"{PREFIX}layers.0.{name}"].shape
        if found != expected:
            raise ValueError(f"{PREFIX}layers.0.{name} has shape {found}: expected {expected}")

    params: dict[str, Any] = {}
    for name, (path, turn) in names.items():
        if name in arrays:
            _put(params, path, _TURN[turn](arrays[name]))
    return settings, {"params": params}


def export_fla(settings: LanguageSettings, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """fla's state_dict, in float32, of a LanguageModel with λ "linear"; what `import_fla` undoes.

    fla's model always has λ for 16,384 positions; ours must have been built with max_length=16384 to be loaded there.

    Raises ValueError for another mixer or λ, of which fla has none.
    """
    if settings.mixer != "log_linear" or settings.lam != "linear":
        raise ValueError(
            f"flash-linear-attention has only the log_linear mixer with linear λ, got mixer={settings.mixer!r} "
            f"and lam={settings.lam!r}"
        )
    exported = {}
    for name, (path, turn) in _names(settings.layers).items():
        if name.endswith("conv1d.bias") and not settings.conv_bias:
            continue
        x = params["params"]
        for key in path.split("/"):
            x = x[key]
        exported[name] = np.ascontiguousarray(_TURN_BACK[turn](np.asarray(x, np.float32)))
    return exported


def _names(layers: int) -> dict[str, tuple[str, str]]:
    blocks = {
        f"{PREFIX}layers.{i}.{name}": (f"layer_{i}/{path}", turn)
        for i in range(layers)
        for name, (path, turn) in _BLOCK.items()
    }
    return _OUTSIDE | blocks


def _count_layers(arrays: Mapping[str, Any]) -> int:
    start = f"{PREFIX}layers."
    found = {int(name[len(start) :].split(".")[0]) for name in arrays if name.startswith(start)}
    if not found or found != set(range(len(found))):
        raise ValueError(f"state_dict has no {start}0: expected the parameters of a LogLinearMamba2ForCausalLM")
    return len(found)


def _put(tree: dict[str, Any], path: str, value: np.ndarray) -> None:
    *parents, leaf = path.split("/")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[leaf] = value


def _to_numpy(x: Any) -> np.ndarray:
    if hasattr(x, "detach"):  # torch, whose bfloat16 NumPy does not know
        x = x.detach().cpu().float().numpy()
    return np.asarray(x).astype(np.float32)
