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

from loglinear_jax.ops.decays import decay_matrix, decay_to_end
from loglinear_jax.ops.heads import dot


@flax.struct.dataclass
class Transitions:
    """Of runs of C tokens. Axes: [B, G, R, ...], then any, as in the arguments of `transitions`.

    weights [..., C, C]: of each value in each output, M included. reads [..., C, K]: what the queries make of a state before
    the run. inner [..., C, C]: M. erase [..., C, K]: W. keys_to_end [..., C, K]: K̃. decay [...]: γ.
    """

    weights: Float[Array, "B G R *N C C"]
    reads: Float[Array, "B G R *N C K"]
    inner: Float[Array, "B G R *N C C"]
    erase: Float[Array, "B G R *N C K"]
    keys_to_end: Float[Array, "B G R *N C K"]
    decay: Float[Array, "B G R *N"]

    def own(self, values: Float[Array, "B G R *N L C V"], precision=None) -> Float[Array, "B G R *N L K V"]:
        """The states after the run, each from its own values alone."""
        written = jnp.einsum("...ts,...lsv->...ltv", self.inner, values.astype(self.inner.dtype), precision=precision)
        return jnp.einsum("...tk,...ltv->...lkv", self.keys_to_end, written, precision=precision)

    def own_by_level(
        self, values: Float[Array, "B G R C V"], level: Int[Array, " C"], levels: int, precision=None
    ) -> Float[Array, "B G R L K V"]:
        """The state of the tokens of each level; those of level -1 are in none."""
        return self.own((level == jnp.arange(levels)[:, None])[:, :, None] * values[:, :, :, None], precision)

    def matrices(self, precision=None) -> Float[Array, "B G R *N K K"]:
        """γ I - K̃ᵀ W: what makes of a state before the run that after it."""
        left = jnp.einsum("...tj,...tk->...jk", self.keys_to_end, self.erase, precision=precision)
        return self.decay[..., None, None] * jnp.eye(left.shape[-1], dtype=left.dtype) - left

    def after(self, states: Float[Array, "B G R *N L K V"], precision=None) -> Float[Array, "B G R *N L K V"]:
        """What states before the run have become after it."""
        erased = jnp.einsum("...tk,...lkv->...ltv", self.erase, states, precision=precision)
        left = jnp.einsum("...tk,...ltv->...lkv", self.keys_to_end, erased, precision=precision)
        return self.decay[..., None, None, None] * states - left


def transitions(
    q: Float[Array, "B G *N C K"],
    k: Float[Array, "B G *N C K"],
    log_decay: Float[Array, "B G R *N C"],
    beta: Float[Array, "B G R *N C"],
    precision=None,
) -> Transitions:
    """Those of runs of C tokens, in the dtype of log_decay. A token with log_decay and beta 0 changes no state."""
    dtype, size = log_decay.dtype, log_decay.shape[-1]
    decay, since_start = decay_matrix(log_decay), jnp.exp(jnp.cumsum(log_decay, axis=-1))
    of_queries = dot("bg...tk,bg...sk->bg...ts", q, k, precision)[:, :, None] * decay
    of_keys = dot("bg...tk,bg...sk->bg...ts", k, k, precision)[:, :, None] * decay
    q, k = (x.astype(dtype)[:, :, None] for x in (q, k))
    identity = jnp.eye(size, dtype=dtype)
    system = identity + jnp.tril(beta[..., None] * of_keys, -1)
    inverse = jax.scipy.linalg.solve_triangular(
        system, jnp.broadcast_to(identity, system.shape), lower=True, unit_diagonal=True
    )
    inner = inverse * beta[..., None, :]

    def product(x, y):
        return jnp.einsum("...ts,...sk->...tk", x, y, precision=precision)

    erase = product(inner, since_start[..., None] * k)
    return Transitions(
        weights=product(of_queries, inner),
        reads=since_start[..., None] * q - product(of_queries, erase),
        inner=inner,
        erase=erase,
        keys_to_end=decay_to_end(log_decay)[..., None] * k,
        decay=since_start[..., -1],
    )
