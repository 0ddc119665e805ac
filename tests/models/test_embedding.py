"""Our embedding against flax's, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from ssl_jax.models.embedding import Embed, lookup, segment_sums


@pytest.mark.parametrize('shape', [(7,), (5, 9), (1, 1)])
@pytest.mark.parametrize('rows', [1, 4, 50])
def test_it_is_an_embedding(shape, rows):
  rng = np.random.default_rng(0)
  index, gradient = rng.integers(rows, size=shape), rng.normal(size=(*shape, 3)).astype(np.float32)
  variables = Embed(rows, 3).init(jax.random.key(0), index)
  of = lambda module: jax.vjp(lambda variables: module(rows, 3).apply(variables, index), variables)
  (actual, pull), (expected, other) = of(Embed), of(nn.Embed)
  np.testing.assert_array_equal(actual, expected)
  np.testing.assert_allclose(*(p(gradient)[0]['params']['embedding'] for p in (pull, other)), rtol=1e-5, atol=1e-6)


def test_sums_are_those_of_a_loop():
  rng = np.random.default_rng(0)
  index, values = rng.zipf(1.3, 2000) % 100, rng.normal(size=(2000, 4))
  expected = np.zeros((120, 4))
  for row, value in zip(index, values, strict=True):
    expected[row] += value
  np.testing.assert_allclose(segment_sums(index, jnp.asarray(values, jnp.float32), 120), expected, rtol=1e-4, atol=1e-5)


def test_a_bfloat16_gradient_is_added_in_float32():
  """In bfloat16, a sum of ones ends at 256."""
  _, pull = jax.vjp(lambda table: lookup(table, jnp.zeros(1000, jnp.int32)), jnp.ones((2, 1), jnp.bfloat16))
  (gradient,) = pull(jnp.ones((1000, 1), jnp.bfloat16))
  assert gradient.dtype == jnp.bfloat16 and gradient.tolist() == [[1000.0], [0.0]]
