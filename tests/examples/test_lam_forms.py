"""The forms of λ in examples/length_forms.py and examples/harmless_forms.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.lam import lam_traits, make_lam

LENGTH = ["TopTied(levels=3)", "Smooth", "Smooth(width=4)", "FromTop"]
HARMLESS = ["GatedContent(gamma=0.1)", "TokenGatedContent", "NormalisedReads", "NormalisedReads(power=-1.0)"]
POSITIONS = np.array([0, 5, 12, 31])


def made(form, levels=6):
    """(the λ module, its arguments: d, scores and which levels are occupied)"""
    file = "length_forms" if form in LENGTH else "harmless_forms"
    name = f"examples.{file}:{form}"
    d, scores = np.random.default_rng(0).normal(size=(2, 1, 4, 2, levels))
    occupied = occupied_levels(POSITIONS, levels)[None, :, None]
    scores = np.where(occupied, scores, 0)
    arguments = (d, scores, occupied) if lam_traits(name).needs_scores else (d,)
    return make_lam(name), tuple(map(jnp.asarray, arguments))


@pytest.mark.parametrize("form", LENGTH + HARMLESS)
def test_lam_is_finite_of_each_token_and_all_its_parameters_learn(form):
    module, arguments = made(form)
    lam, params = jax.jit(module.init_with_output)(jax.random.key(0), *arguments)
    assert lam.shape == (1, 4, 2, 6)
    if form.startswith("TopTied"):
        np.testing.assert_array_equal(lam[..., 3:], np.broadcast_to(lam[..., 2:3], lam[..., 3:].shape))
    weights = np.random.default_rng(1).normal(size=lam.shape)

    @jax.jit
    @jax.grad
    def gradients(params):
        return jnp.sum(jnp.square(module.apply(params, *arguments)) * weights)

    # A first step moves what starts at 0 and stops others' gradients.
    moved = jax.tree.map(lambda x, g: x - 0.01 * g, params, gradients(params))
    for path, grad in jax.tree_util.tree_leaves_with_path(gradients(moved)):
        assert np.isfinite(grad).all() and np.any(grad), path


@pytest.mark.parametrize("form", HARMLESS)
def test_a_harmless_form_has_mean_1_over_the_occupied_levels_and_starts_near_it(form):
    module, (d, scores, occupied) = made(form)
    lam, _ = module.init_with_output(jax.random.key(0), 0 * d, scores, occupied)
    of_occupied = np.where(occupied, lam, 0)
    np.testing.assert_allclose(of_occupied.sum(-1), np.broadcast_to(occupied.sum(-1), lam.shape[:3]), rtol=1e-5)
    most = {"GatedContent(gamma=0.1)": 0.1, "TokenGatedContent": 0.5, "NormalisedReads": 0}.get(form, 2)
    assert np.abs(of_occupied - occupied)[np.broadcast_to(occupied, lam.shape)].max() <= most
