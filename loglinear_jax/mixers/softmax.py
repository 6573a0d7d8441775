"""Causal softmax attention with rotary positions: a baseline that keeps every key and value."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from loglinear_jax.mixers.base import TokenMixer, unit
from loglinear_jax.ops import softmax_attention
from loglinear_jax.ops.softmax import attend_to_cache, key_value_cache
from loglinear_jax.settings import SettingError, is_of


class SoftmaxMixer(TokenMixer):
    """o = softmax_attention(q, k, v). It has no other sense of order than its rotary positions.

    window: how many tokens each attends to, the last of them itself; None: all before it, and itself. The cache holds no more.

    qk_norm: divide q and k by their lengths; logits are then g (q · k), g > 0 learned for each group, from 10 (Henry et al.
    2020; cosine attention of Swin V2): within ±1/√K attention could not choose.
    """

    window: int | None = None
    qk_norm: bool = False
    axis_name: str | None = None

    def check(self) -> None:
        super().check()
        if self.window is not None and not (is_of(self.window, int) and self.window >= 1):
            raise SettingError(f"window must be None or a whole number from 1 on, got {self.window!r}")

    def numbers_kept(self, length: int, heads: int, groups: int, key_dim: int, value_dim: int) -> int:
        return min(length, self.window or length) * (groups * key_dim + heads * value_dim)

    def mix(self, q, k, v, *, cache, max_length, segment_ids=None):
        if self.qk_norm:
            q, k = unit(q), unit(k)
            log_scale = self.param("log_scale", nn.initializers.constant(np.log(10)), q.shape[2:3], self.param_dtype)
            q = (q * (jnp.exp(log_scale) * q.shape[-1] ** 0.5)[:, None]).astype(q.dtype)
        if cache is not None:
            return attend_to_cache(cache, q, k, v, self.window, segment_ids)
        out = softmax_attention(q, k, v, segment_ids=segment_ids, window=self.window, axis_name=self.axis)
        return out if max_length is None else (out, key_value_cache(k, v, max_length, self.window, segment_ids))
