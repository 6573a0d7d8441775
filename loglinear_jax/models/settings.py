"""Settings that every model has, and those of models that are built of layers with token mixers."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, get_args

import flax.core

from loglinear_jax.components import fields_of
from loglinear_jax.fenwick import num_levels
from loglinear_jax.lam import ACTIVATIONS, LAMS, MlpLam
from loglinear_jax.mixers import MIXERS, TokenMixer, find_mixer, make_mixer, parse_pattern
from loglinear_jax.ops.checks import Implementation
from loglinear_jax.settings import INT32_MAX, SettingError, check_fields, setting

MOST_LAYERS, MOST_CONV_WIDTH = 256, 256  # each is a part of the program, which takes that much longer to compile


@dataclasses.dataclass(frozen=True)
class MixerSettings:
    """Settings that every model with TokenMixers has; each model's own class adds to them. `vocab_size` and `max_length` come
    from the task, `dtype` from train.precision, if they are not given."""

    vocab_size: int
    max_length: int
    mixer: str = setting(
        "log_linear",
        "token mixer: `log_linear`, `gated_linear` (one state), the two with the delta rule, `log_linear_delta` and "
        "`gated_delta`, `delta` (the delta rule without decays), `softmax` (with rotary positions), or a class of your own as "
        "`my_module:MyMixer`, each with arguments or none, as in `gated_delta(beta_max=2)`; several with commas between them "
        "take turns over the layers",
    )
    lam: str = setting(
        "mlp_softplus",
        f"λ of `log_linear` and `log_linear_delta`: {', '.join(f'`{name}`' for name in LAMS)}, or a "
        "class of your own as `my_module:MyLam`, each with arguments or none, as in `my_module:MyLam(k=4)`",
    )
    lam_hidden: int | None = setting(MlpLam.hidden, "width d_h of the λ MLP; None: twice the number of levels")
    lam_activation: str = setting(
        MlpLam.activation, f"activation of the λ MLP: {', '.join(f'`{name}`' for name in ACTIVATIONS)} (equation 3)"
    )
    hidden: int = setting(64, "width of the model", least=1)
    layers: int = setting(2, "number of layers", least=1, most=MOST_LAYERS)
    heads: int = setting(2, "number of heads", least=1)
    head_dim: int = setting(32, "width V of a head's values", least=1)
    key_dim: int = setting(32, "width K of queries and keys", least=1)
    key_groups: int | None = setting(None, "groups of heads that share keys; None: one group a head")
    init_scheme: str = setting(
        MlpLam.init_scheme, "initial values of λ: `text`, as in the paper, or `released`, as in its released code"
    )
    beta_max: float = setting(
        1.0, "largest β of the delta rule, the factor of its sigmoid; 2 allows negative eigenvalues", above=0
    )
    chunk_size: int | None = setting(
        None, "tokens per chunk of the chunkwise forms, a power of two; None: by the shapes"
    )
    implementation: str | None = setting(
        None,
        "form of the attention, and of what λ looks at (`softmax` has one): "
        f"{', '.join(f'`{name}`' for name in get_args(Implementation))}; None: the best that works",
    )
    random_first_position: int = setting(
        0,
        "in training, mixers with λ let each sequence of a batch start at a position drawn from 0 .. N-1, so that more levels "
        "are trained; 0: all start at 0, as in evaluation",
        least=0,
    )
    dtype: str = "float32"
    # Not in configs, as training never needs it: so many levels have a λ of their own, and higher ones that of the highest of
    # them. None: all that max_length needs.
    lam_levels: int | None = None
    # Nor this: training by train.sequence_devices sets it. As axis_name of log_linear_attention.
    axis_name: str | None = None

    def __post_init__(self):
        if isinstance(self.mixer, str):  # each mixer by its present name
            object.__setattr__(self, "mixer", ",".join(parse_pattern(self.mixer)))

    @property
    def groups(self) -> int:
        return self.heads if self.key_groups is None else self.key_groups

    @property
    def pattern(self) -> list[str]:
        """The mixers that take turns over the layers."""
        return parse_pattern(self.mixer)

    @functools.cached_property
    def mixers(self) -> tuple[TokenMixer, ...]:
        """The mixers of `pattern`, made of these settings."""
        return tuple(make_mixer(mixer, **self.mixer_options, parent=None) for mixer in self.pattern)

    @functools.cached_property
    def mixer_options(self) -> flax.core.FrozenDict[str, Any]:
        """The settings that a mixer takes where it has such a field."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del settings["mixer"], settings["dtype"]
        return flax.core.FrozenDict(settings | {"num_levels": num_levels(self.max_length)})

    def layer_arguments(self, index: int) -> dict[str, Any]:
        """What every MixingLayer takes of these settings, for one layer of the model."""
        return {
            "features": self.hidden,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "key_dim": self.key_dim,
            "key_groups": self.key_groups,
            "mixer": self.pattern[index % len(self.pattern)],
            "lam": self.lam,
            "max_length": self.max_length,
            "chunk_size": self.chunk_size,
            "implementation": self.implementation,
            "mixer_options": self.mixer_options,
            "dtype": self.dtype,
            "axis_name": self.axis_name,
        }

    @property
    def has_lam(self) -> bool:
        """Whether every layer's mixer weighs levels by λ, which it sows."""
        return all(mixer.has_lam for mixer in self.mixers)

    @property
    def has_states(self) -> bool:
        """Whether every layer's mixer remembers states, and sows queries, keys, log decays and, with the delta rule, β."""
        return all(mixer.has_states for mixer in self.mixers)

    @property
    def longest(self) -> int | None:
        """The longest sequence that λ has levels for; None if there is none, as where nothing is indexed by level."""
        return None if all(mixer.longest is None for mixer in self.mixers) else self.max_length

    def numbers_kept(self, length: int) -> int | None:
        """How many numbers a layer's mixer keeps of a sequence of `length` tokens when it decodes, the mean over the pattern:
        its states and, with a content-aware λ, sums of keys; or all keys and values. What a short convolution keeps is not
        in it. None if one of the mixers does not say."""
        sizes = self.heads, self.groups, self.key_dim, self.head_dim
        kept = [mixer.numbers_kept(length, *sizes) for mixer in self.mixers]
        return None if None in kept else sum(kept) // len(kept)

    def extended(self):
        """The same for sequences of any length: levels that λ was not trained for take the λ of the last that it was. As they
        are if there is no longest sequence. `check` refuses it for a content-aware λ that has levels."""
        return self if self.longest is None else dataclasses.replace(self, lam_levels=num_levels(self.max_length))

    @property
    def takes_pallas(self) -> bool:
        """Whether GPU kernels may compute it."""
        return self.implementation in (None, "pallas")

    @property
    def unread(self) -> set[str]:
        """The settings that change nothing, given the others."""
        of_mixers = set().union(*(fields_of(mixer) for mixer in MIXERS.values()))
        settings = {field.name for field in dataclasses.fields(self)} & of_mixers
        read = set()
        for text, mixer in zip(self.pattern, self.mixers, strict=True):
            found, call = find_mixer(text)
            read |= set(fields_of(found)) - set(call.arguments) - mixer.unused
        return settings - read - {"dtype", "lam_levels", "axis_name"}

    def check(self) -> None:
        """Raises SettingError naming the first invalid setting."""
        check_fields(self, "model")
        for name in ("vocab_size", "max_length", "groups"):
            shown, value = "key_groups" if name == "groups" else name, getattr(self, name)
            if value < 1:
                raise SettingError(f"model.{shown} must be at least 1, got {value}")
            if value > INT32_MAX:
                raise SettingError(f"model.{shown} must be at most {INT32_MAX:,}, got {value:,}")
        self._check_mixers()
        if self.heads % self.groups:
            raise SettingError(
                f"model.heads must be a multiple of key_groups, got heads={self.heads}, key_groups={self.groups}"
            )
        self._check_matrices()

    def _check_mixers(self) -> None:
        for text in self.pattern:
            has_arguments = "(" in text
            try:
                make_mixer(text, **self.mixer_options, parent=None).check()
            except SettingError as error:
                shown = f"mixer={text}: " if has_arguments and not str(error).startswith("mixer") else ""
                raise SettingError(f"model.{shown}{error}") from error

    def _check_matrices(self) -> None:
        """Raises SettingError naming the sizes of a matrix that has more elements than can be indexed."""
        levels = f"num_levels({self.max_length})"
        matrices = [
            {"task.vocab_size": self.vocab_size, "model.hidden": self.hidden},
            {"model.hidden": self.hidden, "model.heads": self.heads, "model.head_dim": self.head_dim},
            {"model.hidden": self.hidden, "model.key_groups": self.groups, "model.key_dim": self.key_dim},
            {"model.hidden": self.hidden, "model.heads": self.heads, levels: num_levels(self.max_length)},
            {"model.lam_hidden": self.lam_hidden or 1, levels: num_levels(self.max_length)},
        ]
        for sizes in matrices:
            if (elements := math.prod(sizes.values())) > INT32_MAX:
                shown = " × ".join(f"{name}={size}" for name, size in sizes.items())
                raise SettingError(f"{shown} is a matrix of {elements:,} elements: expected at most {INT32_MAX:,}")
