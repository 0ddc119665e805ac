"""Our max-pool against flax's, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from ssl_jax.models.pool import max_pool


@pytest.mark.parametrize('window, stride, padding', [(3, 2, 0), (3, 2, 1), (2, 2, 0), (3, 1, 1), (2, 3, 0)])
@pytest.mark.parametrize('size', [(7, 8), (12, 9)])
def test_it_is_max_pool(window, stride, padding, size):
  """Of equal maxima the first gets the gradient: after a ReLU, most windows with zeros have several."""
  rng = np.random.default_rng(0)
  shape = (2, *size, 3)

  def theirs(x):
    return nn.max_pool(x, (window, window), strides=(stride, stride), padding=((padding, padding),) * 2)

  @jax.jit
  def both(x, gradient):
    """Values and gradients of both."""
    pulled = [jax.vjp(pool, x) for pool in (lambda x: max_pool(x, window, stride, padding), theirs)]
    return [(value, pull(gradient)[0]) for value, pull in pulled]

  gradient = rng.normal(size=jax.eval_shape(theirs, jnp.zeros(shape)).shape).astype(np.float32)
  for x in (rng.normal(size=shape), rng.integers(-2, 2, shape).clip(0)):  # distinct, and ties
    (actual, ours), (expected, other) = both(x.astype(np.float32), gradient)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-6)


def test_bfloat16_and_nan():
  x = jnp.arange(49, dtype=jnp.bfloat16).reshape(1, 7, 7, 1)
  y, pull = jax.vjp(lambda x: max_pool(x, 3, 2), x)
  assert y.dtype == pull(y)[0].dtype == jnp.bfloat16
  for row, column in ((0, 0), (1, 1), (2, 2)):
    assert jnp.isnan(max_pool(x.at[0, row, column, 0].set(jnp.nan), 3, 2)[0, 0, 0, 0])


def test_a_bfloat16_gradient_is_added_in_float32():
  """The center is the maximum of all nine windows. In bfloat16, 256 + 1 is 256."""
  x = jnp.zeros((1, 3, 3, 1), jnp.bfloat16).at[0, 1, 1, 0].set(1)
  _, pull = jax.vjp(lambda x: max_pool(x, 3, 1, 1), x)
  gradient = jnp.ones_like(x).at[0, 2, 2, 0].set(256)  # the first that is added
  np.testing.assert_array_equal(pull(gradient)[0], 264 * x)


def test_its_gradient_does_not_scatter():
  x = jnp.zeros((1, 9, 9, 2))
  text = jax.jit(jax.grad(lambda x: max_pool(x, 3, 2).sum())).lower(x).as_text()
  assert 'scatter' not in text
