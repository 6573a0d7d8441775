"""Sequences of a task, drawn as training draws them, or as validation and test do."""

import functools

import jax
import numpy as np


@functools.cache
def sample(task, num=400, seed=0, method="sample"):
    draw = getattr(task, method)
    return tuple(np.asarray(x) for x in jax.jit(lambda key: draw(key, num))(jax.random.key(seed)))
