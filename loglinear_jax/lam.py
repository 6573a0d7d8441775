"""λ parameterisations: how much each level of the Fenwick tree counts, per token, head and level.

Each is a Linen module that maps d [..., H, L], a linear projection of the token, to λ [..., H, L] in float32. A new λ is
such a class in any module, named as "my_module:MyLam". Its fields are its arguments: "my_module:MyLam(k=4)", as in
"mlp_softplus(hidden=32)". Fields with the name of one of `make_lam`'s settings get its value from the model. Class attributes,
or properties that depend on its fields, say more:

- needs_input = False: it gets only d's shape.
- needs_scores = True: it is content-aware and called with (d, scores, occupied): scores [..., H, L] are the `bucket_scores` of
  unit queries and keys, and occupied [..., 1, L] says where a level has a bucket.
- has_levels = False: nothing in it is indexed by level. It returns as many levels as the sequence has, those of scores, so it
  has no longest sequence; d, if it needs any, has the levels of model.max_length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import pallas_kernels
from loglinear_jax.components import Call, fields_of, find_class, instantiate, parse_call
from loglinear_jax.ops.checks import Implementation, check_implementation
from loglinear_jax.settings import SettingError, did_you_mean, is_of

INITS = ("text", "released")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "identity": lambda x: x,
}

FIRST_SCALE = 5.0  # of bucket scores in λ
# softplus of this is 1.
UNIT = float(np.log(np.e - 1))
# The released code re-initialises every linear layer: weights normal(0.02), biases 0.
released_weights = nn.initializers.normal(0.02)


class FixedLam(nn.Module):
    """λ = softplus(Λ) with Λ [H, L] learned: the same for every token. Starts at λ = 1, plain linear attention."""

    needs_input = False

    @nn.compact
    def __call__(self, d: Float[Array, "... H L"]) -> Float[Array, "... H L"]:
        bias = self.param("bias", nn.initializers.constant(UNIT), d.shape[-2:])
        return jnp.broadcast_to(nn.softplus(bias), d.shape)


class LinearLam(nn.Module):
    """λ = softplus(Λ ⊙ d) with Λ [H, L] starting at 1 (Guo et al.): the "baseline λ" of *Adaptive Memory Decay*. λ
    starts near softplus(0) = 0.69."""

    @nn.compact
    def __call__(self, d: Float[Array, "... H L"]) -> Float[Array, "... H L"]:
        scale = self.param("scale", nn.initializers.ones, d.shape[-2:])
        return nn.softplus(scale * d.astype(jnp.float32))


class ContentLam(nn.Module):
    """Content-aware λ: softmax of γ_h s[ℓ] over the occupied levels; s: bucket scores of unit q and k, γ_h > 0 learned.

    Where the decayed sum of a bucket's keys matches the query, λ is large. One parameter per head.

    implementation: with None on a GPU, and with "pallas", one kernel from KERNEL_ROWS tokens times heads on. It takes
    float32 and L up to 31. Where it cannot run, and with other values, plain JAX runs, with one warning if the value is
    None on a GPU.
    """

    needs_input = False
    needs_scores = True
    has_levels = False

    implementation: str | None = None

    @nn.compact
    def __call__(
        self, d: Float[Array, "... H L"], scores: Float[Array, "... H L"], occupied: Bool[Array, "... 1 L"]
    ) -> Float[Array, "... H L"]:
        del d
        scale = _sharpness(self, scores.shape[-2])
        if self._takes_kernel(scores, occupied):
            return pallas_kernels.content_lam(scores, scale, occupied)
        return softmax_of_occupied(scale[:, None] * scores, occupied)

    def _takes_kernel(self, scores: Float[Array, "... H L"], occupied: Bool[Array, "... 1 L"]) -> bool:
        if (scores.ndim, occupied.ndim) != (4, 3) or _has_few_rows(scores):
            return False
        kernel = pallas_kernels.KERNELS["content_lam"]
        return kernel.is_chosen(self.implementation, scores.shape[-1], scores.dtype)


def _sharpness(module: nn.Module, heads: int) -> Float[Array, " H"]:
    """γ_h, inside a module of which it is a parameter."""
    return jnp.exp(module.param("log_scale", nn.initializers.constant(np.log(FIRST_SCALE)), (heads,)))


def softmax_of_occupied(logits: Float[Array, "... H L"], occupied: Bool[Array, "... 1 L"]) -> Float[Array, "... H L"]:
    """Softmax of logits over the occupied levels, with 0 at the other levels."""
    return nn.softmax(jnp.where(occupied, logits, -jnp.inf), axis=-1)


KERNEL_ROWS = 512  # heads times tokens


def _has_few_rows(x: Float[Array, "... N"]) -> bool:
    """Whether kernels and matrix units cost more than they save, as when decoding."""
    return x.size // x.shape[-1] < KERNEL_ROWS


def _product(x: Float[Array, "... N"], w: Float[Array | np.ndarray, "N M"]) -> Float[Array, "... M"]:
    """x @ w; for few rows as a sum, which XLA fuses with what is around it."""
    return jnp.sum(x[..., None] * w, axis=-2) if _has_few_rows(x) else x @ w


class MlpLam(nn.Module):
    """λ = out(W2 · activation(W1 · d + b1) + b2) over the levels, shared by the heads (Adaptive Memory Decay, eq. 3).

    out is softplus (levels independent; b2 = 0.54, so λ ≈ 1.0 at the start) or softmax over the levels (b2 = 0: uniform at
    the start). 2·L·d_h weights and d_h + L biases. With init_scheme = "released" every weight is normal(0.02) and every bias 0.

    implementation, as in log_linear_attention: "pallas" is one kernel, or pallas_kernels.UnsupportedError where it
    cannot run (it takes L up to 31, d_h up to 128); None is that kernel on a GPU, or plain JAX with one warning if it
    cannot run there, and plain JAX below KERNEL_ROWS tokens times heads.
    """

    out: str
    hidden: int | None = 64  # d_h; None: 2 L
    activation: str = "gelu"
    init_scheme: str = "text"
    implementation: str | None = None

    @nn.compact
    def __call__(self, d: Float[Array, "... H L"]) -> Float[Array, "... H L"]:
        levels = d.shape[-1]
        width = self.hidden or 2 * levels
        start = 0.54 if self.init_scheme == "text" and self.out == "softplus" else 0.0
        w1, b1, w2, b2 = _mlp_weights(levels, width, self.init_scheme, start)
        d = d.astype(jnp.float32)
        if self.implementation == "pallas" or (
            self.implementation is None and not _has_few_rows(d) and self._kernel_is_best(levels, width)
        ):
            return pallas_kernels.lam_mlp(d, w1, b1, w2, b2, out=self.out, activation=self.activation)
        logits = _product(ACTIVATIONS[self.activation](_product(d, w1) + b1), w2) + b2
        return nn.softplus(logits) if self.out == "softplus" else nn.softmax(logits, axis=-1)

    def _kernel_is_best(self, levels: int, width: int) -> bool:
        return pallas_kernels.KERNELS["lam_mlp"].is_best(levels, width, self.out, self.activation)


class ContentMlpLam(nn.Module):
    """Content-aware λ: the MLP of `MlpLam` is added to the logits of `ContentLam`.

    With init_scheme "text" the MLP's last weights and biases start at 0, so it starts as `ContentLam`.
    """

    needs_scores = True

    hidden: int | None = 64  # d_h; None: 2 L
    activation: str = "gelu"
    init_scheme: str = "text"

    @nn.compact
    def __call__(
        self, d: Float[Array, "... H L"], scores: Float[Array, "... H L"], occupied: Bool[Array, "... 1 L"]
    ) -> Float[Array, "... H L"]:
        levels = d.shape[-1]
        w1, b1, w2, b2 = _mlp_weights(levels, self.hidden or 2 * levels, self.init_scheme, 0.0)
        of_token = _product(ACTIVATIONS[self.activation](_product(d.astype(jnp.float32), w1) + b1), w2) + b2
        scale = _sharpness(self, scores.shape[-2])
        return softmax_of_occupied(scale[:, None] * scores + of_token, occupied)


def _mlp_weights(levels: int, width: int, init_scheme: str, start: float) -> tuple[Any, ...]:
    """W1, b1, W2, b2 of the MLP, inside a compact method; b2 starts at `start`."""
    text = init_scheme == "text"
    hidden_init = nn.initializers.xavier_uniform() if text else released_weights
    out_init = nn.initializers.zeros if text else released_weights
    w1, b1 = _Affine(levels, width, hidden_init, name="hidden")()
    return w1, b1, *_Affine(width, levels, out_init, start, name="out_proj")()


class _Affine(nn.Module):
    """The parameters of a linear map with bias: (kernel [inputs, outputs], bias [outputs])."""

    inputs: int
    outputs: int
    kernel_init: Callable
    start: float = 0.0

    @nn.compact
    def __call__(self) -> tuple[Array | np.ndarray, Array | np.ndarray]:
        kernel = self.param("kernel", self.kernel_init, (self.inputs, self.outputs))
        return kernel, self.param("bias", nn.initializers.constant(self.start), (self.outputs,))


class RopeLam(nn.Module):
    """λ_ℓ = softplus(a_ℓ c_ℓ) with a_ℓ = w0 · rope(Λ, ℓ) + b and c_ℓ = w1 · rope(d, ℓ) + b'.

    rope(x, ℓ) rotates the pairs of a head's L-vector x by angles ℓ · 10000^(-2j/L): the position is the level's index.
    Guo et al. tried this variant and set it aside (equation 2 of *Adaptive Memory Decay*). Λ [H, L] starts at 1, w0 at
    0 and b at 1, so a = 1; w1 is normal(1/√L) and b' = 0.54, so that λ starts near 1.0, as in `mlp_softplus`.
    """

    init_scheme: str = "text"

    @nn.compact
    def __call__(self, d: Float[Array, "... H L"]) -> Float[Array, "... H L"]:
        levels = d.shape[-1]
        text = self.init_scheme == "text"
        weight_init = nn.initializers.normal(levels**-0.5) if text else released_weights
        base = self.param("base", nn.initializers.ones, d.shape[-2:])
        w0 = self.param("w0", nn.initializers.zeros if text else released_weights, (levels,))
        w1 = self.param("w1", weight_init, (levels,))
        b0 = self.param("b0", nn.initializers.constant(1.0 if text else 0.0), ())
        b1 = self.param("b1", nn.initializers.constant(0.54 if text else 0.0), ())
        # w · rope(x, ℓ) = rope(w, -ℓ) · x: rotate the few weights, not every token.
        a = base @ rotate_by_level(w0, levels) + b0
        c = d.astype(jnp.float32) @ rotate_by_level(w1, levels) + b1
        return nn.softplus(a * c)


def rotate_by_level(weight: Float[Array | np.ndarray, " D"], levels: int) -> Float[Array, "D L"]:
    """Column ℓ is `weight` rotated by -ℓ, pair by pair, so that x @ result = weight · rope(x, ℓ) for every ℓ."""
    pairs = weight.shape[0] // 2
    frequency = 10000.0 ** (-2.0 * np.arange(pairs) / weight.shape[0])
    angle = jnp.asarray(frequency[:, None] * np.arange(levels), jnp.float32)
    even, odd = weight[: 2 * pairs : 2, None], weight[1 : 2 * pairs : 2, None]
    rotated = jnp.stack(
        [even * jnp.cos(angle) + odd * jnp.sin(angle), odd * jnp.cos(angle) - even * jnp.sin(angle)], axis=1
    )
    unpaired = jnp.broadcast_to(weight[2 * pairs :, None], (weight.shape[0] - 2 * pairs, levels))
    return jnp.concatenate([rotated.reshape(2 * pairs, levels), unpaired])


LAMS: dict[str, Callable[..., nn.Module]] = {
    "fixed": FixedLam,
    "linear": LinearLam,
    "mlp_softplus": functools.partial(MlpLam, out="softplus"),
    "mlp_softmax": functools.partial(MlpLam, out="softmax"),
    "rope": RopeLam,
    "content": ContentLam,
    "content_mlp": ContentMlpLam,
}


SETTINGS_OF_LAM = ("hidden", "activation", "init_scheme", "implementation", "name")  # of make_lam


def find_lam(lam: str) -> tuple[Callable[..., nn.Module], Call]:
    """The λ module that `lam` names, one of `LAMS` or a class by import path, and the call with its keyword arguments.

    Raises SettingError for a name that there is not, and for text that is no such call. An error that the module raises on
    import is not caught.
    """
    if not isinstance(lam, str):
        raise SettingError(f"lam must be one of {', '.join(LAMS)}, or my_module:MyLam, got {lam!r}")
    call = parse_call(lam)
    return find_class(call.name, LAMS, "lam", "my_module:MyLam", nn.Module), call


def make_lam(lam: str, **settings: Any) -> nn.Module:
    """Make a λ module by name or import path, such as "mlp_softplus(hidden=32)" or "my_lam:MyLam".

    Settings for which the module has no field are ignored.

    settings: hidden (width of the MLP; None: 2 L), activation ("gelu" or "identity"), init_scheme ("text" or "released"),
    implementation (as in log_linear_attention), name (the module's). Other fields have the module's own defaults.

    Raises SettingError for an unknown λ, setting, argument, implementation, activation or init_scheme, a hidden width below 1,
    and a λ with a field that gets no value and has no default.
    """
    module, call = find_lam(lam)
    if unknown := sorted(set(settings) - {*SETTINGS_OF_LAM, "parent"}):
        known = ", ".join(SETTINGS_OF_LAM) + did_you_mean(unknown[0].removeprefix("lam_"), SETTINGS_OF_LAM)
        raise SettingError(f"a λ has no setting {unknown[0]}: expected some of {known}")
    of_linen = {key: settings.pop(key) for key in ("name", "parent") if key in settings}
    for given, of_model in ((settings, True), (call.arguments if call.name in LAMS else {}, False)):
        _check_settings(given, "lam_" if of_model else f"lam={lam!r}: ")
    return instantiate(module, call, "lam", settings, **of_linen)


def _check_settings(given: Mapping[str, Any], prefix: str) -> None:
    try:
        check_implementation(given.get("implementation"), Implementation)
    except ValueError as error:
        raise SettingError(str(error)) from error
    for argument, known in (("activation", ACTIVATIONS), ("init_scheme", INITS)):
        if argument in given and given[argument] not in known:
            shown = argument if (prefix, argument) == ("lam_", "init_scheme") else f"{prefix}{argument}"
            raise SettingError(f"{shown} must be one of {', '.join(known)}, got {given[argument]!r}")
    hidden = given.get("hidden")
    if hidden is not None and not (is_of(hidden, int) and hidden >= 1):
        raise SettingError(
            f"{prefix}hidden must be a whole number from 1 on, or None for twice the number of levels, got {hidden!r}"
        )


def lam_arguments(lam: str) -> set[str]:
    """The fields that the λ called `lam` has and does not set itself: those of `make_lam`'s settings that it reads, and its
    own."""
    module, call = find_lam(lam)
    return set(fields_of(module)) - set(call.arguments)


@dataclasses.dataclass(frozen=True)
class LamTraits:
    """What a λ needs: its input d, bucket scores, parameters per level."""

    needs_input: bool = True
    needs_scores: bool = False
    has_levels: bool = True


def lam_traits(lam: str) -> LamTraits:
    """What the λ named `lam` needs: whether it uses its input, bucket scores and levels. Raises SettingError as `make_lam`
    does."""
    module = make_lam(lam, parent=None)  # inside another module it would become a part of it
    own = {
        trait.name: getattr(module, trait.name)
        for trait in dataclasses.fields(LamTraits)
        if hasattr(module, trait.name)
    }
    return LamTraits(**own)


LAM_PARAMS = ("lam", "lam_log_scale")  # λ's module in a model, and the parameter that some models multiply λ by


def count_lam_params(params: Any) -> tuple[int, int]:
    """Count the parameters of λ, and all others, in a model's parameter tree. The projection of the token to d, if λ
    needs one, counts among the others, as in the share that *Adaptive Memory Decay* gives for λ."""
    lam = other = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        size = int(np.prod(leaf.shape))
        if any(getattr(key, "key", None) in LAM_PARAMS for key in path):
            lam += size
        else:
            other += size
    return lam, other
