"""The loss with a temperature of each image's own, against its definition."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssl_jax.methods.isogclr import robust_contrastive

RNG = np.random.default_rng(0)
H, TAU, RHO = RNG.uniform(-1.5, 0.5, size=(5, 7)), RNG.uniform(0.1, 0.6, size=5), 0.4
WHERE = RNG.uniform(size=H.shape) < 0.7


def objective(h, tau):
  """τ (log E exp(h/τ) + ρ) of each image, its negatives those of WHERE"""
  rows = [jnp.mean(jnp.exp(row[keep] / t)) for row, t, keep in zip(h, tau, WHERE, strict=True)]
  return tau * (jnp.log(jnp.stack(rows)) + RHO)


def test_an_image_that_was_not_met_has_the_loss_of_the_batch_and_its_derivatives():
  with jax.enable_x64(True):
    loss = lambda h: robust_contrastive(h, TAU, np.zeros(5), where=WHERE, momentum=0.1, rho=RHO)
    ours = jax.jit(lambda h: (loss(h), jax.grad(lambda h: loss(h)[0].sum())(h)))
    theirs = jax.jit(lambda h, tau: (objective(h, tau), jax.grad(lambda *x: objective(*x).sum(), (0, 1))(h, tau)))
    (value, s, slope), found = ours(H)
    batch, (expected, expected_slope) = theirs(H, TAU)
    np.testing.assert_allclose(value, batch, rtol=1e-12)
    np.testing.assert_allclose(TAU * (np.log(s) + RHO), value, rtol=1e-12)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-10)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-15)
    assert not found[~WHERE].any()


def test_the_average_takes_the_place_of_the_batch_in_the_gradient():
  with jax.enable_x64(True):
    old = np.linspace(0.5, 2, 5)
    loss = lambda h, momentum: robust_contrastive(h, TAU, old, where=WHERE, momentum=momentum, rho=RHO)
    batch, g, _ = loss(jnp.asarray(H), 0.0)
    _, s, _ = loss(jnp.asarray(H), 0.8)
    np.testing.assert_allclose(s, 0.8 * old + 0.2 * g, rtol=1e-12)
    plain, averaged = (jax.grad(lambda h, m=m: loss(h, m)[0].sum())(jnp.asarray(H)) for m in (0.0, 0.8))
    np.testing.assert_allclose(averaged, plain * (g / s)[:, None], rtol=1e-10)
    chex.assert_tree_all_finite((batch, averaged))


def test_the_temperature_is_best_where_the_weights_are_rho_from_equal_ones():
  """At the minimum over τ the softmax of h/τ has a KL divergence of ρ from equal weights: what ρ says."""
  h = np.sort(RNG.uniform(-1, 1, size=64))[None]
  taus = np.linspace(0.03, 0.7, 2000)
  slopes = np.array(
    [robust_contrastive(h, np.array([t]), np.zeros(1), where=h < 2, momentum=0.0)[2][0] for t in taus[::50]]
  )
  best = np.interp(0, slopes, taus[::50])
  p = np.exp(h[0] / best) / np.exp(h[0] / best).sum()
  assert np.sum(p * np.log(p * 64)) == pytest.approx(0.3, abs=0.01)
