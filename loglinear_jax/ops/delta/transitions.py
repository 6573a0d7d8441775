"""What the gated delta rule, S ← exp(g_t) (I - β_t k_t k_tᵀ) S + β_t k_t v_tᵀ, does over a run of tokens, as a few matrices.

The WY form (Bischof and Van Loan 1987; Yang et al. 2024 for linear attention): with Γ[t, s] the decay from token s to t and
M = (I + strictly lower part of diag(β) (K Kᵀ ∘ Γ))⁻¹ diag(β), a state S before the tokens becomes γ S - K̃ᵀ W S after them, with
W = M diag(Γ₀) K, Γ₀ the decay since the start, K̃ the keys decayed to the end, and γ the decay over all.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.decays import decay_matrix, decay_since_start, decay_to_end
from loglinear_jax.ops.levels import dot


@flax.struct.dataclass
class Maps:
    """Of states [..., K, V]: S to γ S - D S. Apart, so that what is rounded is only what is lost.

    decay [...]: γ, in float32 or wider. lost [..., K, K]: D, in the dtype of the keys.
    """

    decay: Float[Array, "*N"]
    lost: Float[Array, "*N K K"]

    def apply(self, states: Float[Array, "*N K V"], precision=None) -> Float[Array, "*N K V"]:
        """In float32 or wider."""
        return self.decay[..., None, None] * states - dot("...jk,...kv->...jv", self.lost, states, precision)

    def after(self, other: Maps, precision=None) -> Maps:
        """This map of what the other has made."""
        product = dot("...jk,...km->...jm", self.lost, other.lost, precision)
        decays = (x[..., None, None] for x in (self.decay, other.decay))
        own, others = (x * y.lost for x, y in zip(decays, (other, self), strict=True))
        return Maps(self.decay * other.decay, (own + others - product).astype(self.lost.dtype))


@flax.struct.dataclass
class Transitions:
    """Of runs of C tokens, in the dtype of their keys. Axes: [B, G, R, ...], then any, as in the arguments of `transitions`.

    weights [..., C, C]: of each value in each output, M included. reads [..., C, K]: what the queries make of a state before
    the run. inner [..., C, C]: M. erase [..., C, K]: W. keys_to_end [..., C, K]: K̃. decay [...]: γ, in float32 or wider.
    """

    weights: Float[Array, "B G R *N C C"]
    reads: Float[Array, "B G R *N C K"]
    inner: Float[Array, "B G R *N C C"]
    erase: Float[Array, "B G R *N C K"]
    keys_to_end: Float[Array, "B G R *N C K"]
    decay: Float[Array, "B G R *N"]

    def own(self, values: Float[Array, "B G R *N L C V"], precision=None) -> Float[Array, "B G R *N L K V"]:
        """The states after the run, each from its own values alone."""
        written = dot("...ts,...lsv->...ltv", self.inner, values, precision)
        return dot("...tk,...ltv->...lkv", self.keys_to_end, written, precision)

    def own_by_level(
        self, values: Float[Array, "B G R C V"], level: Int[Array, " C"], levels: int, precision=None
    ) -> Float[Array, "B G R L K V"]:
        """The state of the tokens of each level; those of level -1 are in none."""
        return self.own((level == jnp.arange(levels)[:, None])[:, :, None] * values[:, :, :, None], precision)

    def maps(self, precision=None) -> Maps:
        """What makes of a state before each run that after it."""
        return Maps(
            self.decay, dot("...tj,...tk->...jk", self.keys_to_end, self.erase, precision).astype(self.erase.dtype)
        )

    def after(self, states: Float[Array, "B G R *N L K V"], precision=None) -> Float[Array, "B G R *N L K V"]:
        """What states before the run have become after it."""
        erased = dot("...tk,...lkv->...ltv", self.erase, states, precision)
        left = dot("...tk,...ltv->...lkv", self.keys_to_end, erased, precision)
        return self.decay[..., None, None, None] * states - left


def transitions(
    q: Float[Array, "B G *N C K"],
    k: Float[Array, "B G *N C K"],
    log_decay: Float[Array, "B G R *N C"],
    beta: Float[Array, "B G R *N C"],
    precision=None,
    begin: Int[Array, "B 1 1 *N C"] | None = None,
) -> Transitions:
    """Those of runs of C tokens. A token with log_decay and beta 0 changes no state.

    begin: where the segment of each token begins, if there are several (see `ops.positions`). Then M has a block for each, and
    nothing is left of a state before a run in which a segment begins.
    """
    dtype, size = log_decay.dtype, log_decay.shape[-1]
    stored = k.dtype
    decay, since_start = decay_matrix(log_decay, begin), decay_since_start(log_decay, begin)
    of_queries = dot("bg...tk,bg...sk->bg...ts", q, k, precision)[:, :, None] * decay
    of_keys = dot("bg...tk,bg...sk->bg...ts", k, k, precision)[:, :, None] * decay
    q, k = (x.astype(dtype)[:, :, None] for x in (q, k))
    identity = jnp.eye(size, dtype=dtype)
    system = identity + jnp.tril(beta[..., None] * of_keys, -1)
    inner = _inverse(system) * beta[..., None, :]

    def product(x, y):
        return dot("...ts,...sk->...tk", x.astype(stored), y, precision)

    erase = product(inner, since_start[..., None] * k).astype(stored)
    return Transitions(
        weights=product(of_queries, inner).astype(stored),
        reads=(since_start[..., None] * q - product(of_queries, erase)).astype(stored),
        inner=inner.astype(stored),
        erase=erase,
        keys_to_end=(decay_to_end(log_decay, begin)[..., None] * k).astype(stored),
        decay=since_start[..., -1],
    )


@jax.custom_jvp
def _inverse(system: Float[Array, "*N C C"]) -> Float[Array, "*N C C"]:
    """Of matrices with ones on the diagonal and zeros above: of [[A, 0], [B, D]] it is [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]], for
    blocks on the diagonal that grow from one element to the whole."""
    *batch, size, _ = system.shape
    whole = 1 << (size - 1).bit_length()
    system = jnp.pad(system, [(0, 0)] * len(batch) + [(0, whole - size)] * 2)
    # Ones, but not as a constant: what vmap maps has to be mapped in a matrix of one element, too, as in its derivative.
    inverse = jnp.diagonal(system, axis1=-2, axis2=-1)[..., None, None]
    for block in (1 << i for i in range((size - 1).bit_length())):
        pairs = whole // (2 * block)
        tiles = system.reshape(*batch, pairs, 2, block, pairs, 2, block)[..., :, 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        first, last = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product(last, _product(below, first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, last], axis=-1)], axis=-2)
    return inverse[..., 0, :size, :size]


def _product(x, y):
    return jnp.einsum("...ij,...jk->...ik", x, y, precision="highest")


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
    inverse = _inverse(*primals)
    return inverse, -_product(inverse, _product(jnp.tril(tangents[0], -1), inverse))
