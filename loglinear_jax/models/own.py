"""A model of one's own, by import path: `--config.model.kind='my_model:Tiny(width=64)'`."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.components import find_class, instantiate, parse_call
from loglinear_jax.losses import token_losses
from loglinear_jax.modules.positions import Losses, Positions, Tokens, at_positions
from loglinear_jax.settings import INT32_MAX, SettingError


@dataclasses.dataclass(frozen=True)
class OwnSettings:
    """Settings of an OwnModel. Its own are the arguments in `kind`; it also gets `vocab_size`, `max_length` and `dtype`, if it
    has such fields."""

    vocab_size: int
    max_length: int
    kind: str = ""
    dtype: str = "float32"

    # What nothing is known of: λ, states and the form of an attention.
    has_lam = has_states = takes_pallas = False
    longest = implementation = lam_levels = None
    random_first_position = 0
    unread = frozenset()

    def extended(self):
        """The settings as they are: nothing is known of a longest sequence."""
        return self

    def make(self) -> nn.Module:
        """The user's module. Raises SettingError for a path at which there is none, and for arguments that it does not take."""
        call = parse_call(self.kind)
        module = find_class(call.name, {}, "model.kind", "my_module:MyModel", nn.Module)
        given = {"vocab_size": self.vocab_size, "max_length": self.max_length, "dtype": jnp.dtype(self.dtype)}
        return instantiate(module, call, "model.kind", given, parent=None)

    def check(self) -> None:
        """Raises SettingError naming the first invalid setting."""
        if not 1 <= self.max_length <= INT32_MAX:
            raise SettingError(f"model.max_length must be from 1 to {INT32_MAX:,}, got {self.max_length}")
        self.make()


class OwnModel(nn.Module):
    """A user's module, from tokens [B, T] to logits [B, T, vocab_size], with the losses that training needs. Its parameters are
    the module's own."""

    settings: OwnSettings

    def setup(self):
        self.model = self.settings.make()
        nn.share_scope(self, self.model)

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions = slice(None),
        segment_ids: Tokens | None = None,
    ) -> Float[Array, "B P vocab"]:
        """Logits in float32 at `positions` (all T). segment_ids: for a module that takes them."""
        logits = self.model(tokens) if segment_ids is None else self.model(tokens, segment_ids=segment_ids)
        expected = (*tokens.shape, self.settings.vocab_size)
        if getattr(logits, "shape", None) != expected:
            got = f"shape {logits.shape}" if hasattr(logits, "shape") else f"a {type(logits).__name__}"
            raise SettingError(
                f"model.kind={self.settings.kind!r} returns {got}: expected logits [B, T, vocab_size] = {expected}"
            )
        return at_positions(logits, positions).astype(jnp.float32)

    def token_losses(
        self,
        tokens: Tokens,
        targets: Tokens,
        positions: Positions = slice(None),
        segment_ids: Tokens | None = None,
    ) -> Losses:
        """(cross-entropy in nats, whether argmax is right) at `positions` (all T); 0 and False where the target is < 0."""
        return token_losses(self(tokens, positions, segment_ids), at_positions(targets, positions))

    def summed_loss(
        self,
        tokens: Tokens,
        targets: Tokens,
        positions: Positions = slice(None),
        z_loss: float = 0.0,
        segment_ids: Tokens | None = None,
    ) -> Float[Array, ""]:
        """The sum of `token_losses`, for training, with the z_loss of each."""
        logits = self(tokens, positions, segment_ids)
        return jnp.sum(token_losses(logits, at_positions(targets, positions), z_loss)[0])
