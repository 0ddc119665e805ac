"""Reductions over negatives without the matrix: plain blocks, GPU kernels (interpreted), and a ring of devices."""

import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ssl_jax import kernels, losses, pairs, stream, temperature
from tests.helpers import mapped, of_pairs
from tests.test_blocks import LEARNED, LOSSES, assert_same, embeddings, values_and_gradients

STREAMED = [name for name, loss in LOSSES.items() if loss.properties.streamed]
TILES = kernels.Tiles(16, 16, 4, 2)


def assert_near(actual, expected, tolerance=1e-4):
  """To the precision of the kernels' products, relative to the largest entry."""
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def of_loss(loss, tau, form, **block):
  """values and gradients of a loss of two views of 21 instances: 42 queries, three tiles, the last one half empty."""

  def of(z, params):
    with stream.form(form):
      return of_pairs(loss, pairs.in_batch(*z, **block), tau(params))

  return jax.jit(lambda z, params: values_and_gradients(of, z, params))(embeddings(2, 21, width=5), LEARNED.init())


class SmallTiles(chex.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.multiple(kernels, FORWARD=TILES, BACKWARD=TILES))  # several tiles for few queries


class KernelTest(SmallTiles):
  def test_accuracy_at_a_low_temperature(self):
    """Against float64, at tau 0.05: the error of float32, and not that of bfloat16 or TF32."""
    z, tau = embeddings(2, 64, width=128), temperature.cosine(0.05, 0.1)

    def mean(z, block=0):
      return losses.nt_xent(*z, tau, block=block).mean()

    with jax.enable_x64(True):
      expected = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(mean))(jnp.asarray(z, jnp.float64)))
    with stream.form('interpret'):
      value, gradient = jax.jit(jax.value_and_grad(functools.partial(mean, block=1)))(z)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    assert np.linalg.norm(gradient - expected[1]) < 1e-5 * np.linalg.norm(expected[1])

  def test_a_temperature_without_a_derivative_at_the_query_itself(self):
    """The similarity of a query with itself is 1, and does not count."""
    tau, z = (lambda s: 0.1 + 0.1 * jnp.arccos(s) / jnp.pi), embeddings(2, 6)
    for tau_of_s in (tau, temperature.with_gradient(tau)):
      mean = lambda z, block, tau=tau_of_s: losses.nt_xent(*z, tau, block=block).mean()
      of_block = lambda block, mean=mean: jax.jit(jax.value_and_grad(functools.partial(mean, block=block)))(z)
      expected = of_block(0)
      for form in ('plain', 'interpret'):
        with stream.form(form):
          assert_near(of_block(5), expected)

  def test_values_that_are_not_finite_at_the_query_itself(self):
    (x,) = embeddings(1, 8)
    x, ids = x / jnp.linalg.norm(x, axis=1, keepdims=True), jnp.arange(8)
    function = lambda s: 1 / jnp.maximum(0.999 - s, 0)
    keep = ~jnp.eye(8, dtype=bool)
    expected = jax.value_and_grad(lambda x: jnp.sum(function(jnp.where(keep, x @ x.T, 0)), where=keep))(x)
    assert not np.isfinite(function(1.0)) and np.isfinite(expected[0])
    for form in ('plain', 'interpret'):
      with stream.form(form):
        sums = lambda x: stream.Stream(stream.Source(x, None, ids, ids, block=3), function).sum()
        assert_near(jax.jit(jax.value_and_grad(lambda x, sums=sums: sums(x).sum()))(x), expected)

  def test_float32_embeddings_in_float64_mode(self):
    z = embeddings(2, 6)
    mean = lambda z, block: losses.nt_xent(*z, 0.2, block=block).mean()
    of_block = lambda block: jax.jit(jax.value_and_grad(functools.partial(mean, block=block)))
    expected = of_block(0)(z)
    with jax.enable_x64(True), stream.form('interpret'):
      assert_near(of_block(5)(jnp.asarray(z)), expected)

  def test_a_query_without_negatives_counts_nothing(self):
    z, index, drawn = embeddings(2, 7), jnp.arange(7), jnp.array([1, 1])  # all of query 1's are its own
    for form in ('plain', 'interpret'):
      with stream.form(form):
        of = lambda z: losses.info_nce(*pairs.with_bank(*z, index, drawn, block=2)[:2], 0.2)
        found, gradient = jax.jit(functools.partial(values_and_gradients, of))(z)
      self.assertEqual(found[1], 0)
      self.assertTrue(np.all(gradient[0][0][1] == 0))
      self.assertTrue(np.isfinite(gradient[0]).all())


@pytest.mark.slow
class EveryKernelTest(SmallTiles):
  @parameterized.parameters(*STREAMED)
  def test_every_loss(self, name):
    loss = LOSSES[name]
    tau = (lambda params: LEARNED.at(params, step=0)) if loss.takes_temperature else (lambda params: None)
    expected = of_loss(loss, tau, 'plain')
    assert_same(of_loss(loss, tau, 'plain', block=10), expected)
    assert_near(of_loss(loss, tau, 'interpret', block=10), expected)

  @parameterized.parameters('number', 'one a query', 'with its gradient', 'shifted')
  def test_every_kind_of_temperature(self, kind):
    tau = {
      'number': lambda params: 0.05,
      'one a query': lambda params: jnp.linspace(0.1, 1, 42) * jnp.exp(params['tau_min']['log_inverse_tau'] / 10),
      'with its gradient': lambda params: temperature.with_gradient(LEARNED.at(params, step=0)),
      'shifted': lambda params: temperature.shifted_cosine(0.05, 0.2, shift=-0.4, scale=0.7),
    }[kind]
    expected = of_loss(LOSSES['info_nce'], tau, 'plain')
    assert_near(of_loss(LOSSES['info_nce'], tau, 'interpret', block=10), expected)

  @parameterized.parameters('with_keys', 'with_queue', 'with_bank')
  def test_keys_that_are_not_the_queries(self, name):
    make = {
      'with_keys': pairs.with_keys,
      'with_queue': lambda q, k, **to: pairs.with_queue(q, k, embeddings(1, 40)[0], in_batch=True, **to),
      'with_bank': lambda q, k, **to: pairs.with_bank(q, k, jnp.arange(21)[::-1], **to),
    }[name]

    def of(z, block, form):
      with stream.form(form):
        return of_pairs(LOSSES['cacr'], make(*z, block=block))

    expected, actual = (
      jax.jit(lambda z, b=block, f=form: values_and_gradients(lambda z: of(z, b, f), z))(embeddings(2, 21))
      for block, form in ((0, 'plain'), (10, 'interpret'))
    )
    assert_near(actual, expected)

  def test_it_can_be_compiled_for_a_gpu(self):
    """The lowering finds operations that GPU kernels do not have."""
    z = jax.ShapeDtypeStruct((2, 64, 32), jnp.float32)
    device = jax.sharding.AbstractDevice(device_kind='NVIDIA H200', num_cores=132, platform='gpu')
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    for name in STREAMED:
      tau = temperature.with_gradient(temperature.cosine(0.1, 0.2)) if LOSSES[name].takes_temperature else None

      def total(z, loss=LOSSES[name], tau=tau):
        with stream.form('kernel'):
          return of_pairs(loss, pairs.in_batch(*z, block=1), tau).sum()

      with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(jax.grad(total)).trace(z).lower(lowering_platforms=('cuda',))
      self.assertIn('triton', lowered.as_text())


class FormTest(absltest.TestCase):
  def test_a_temperature_that_closes_over_an_array(self):
    """It cannot be traced into a kernel; the loss then sees blocks of queries."""
    knots, taus = jnp.linspace(-1, 1, 5), jnp.array([0.2, 0.15, 0.1, 0.15, 0.2])
    z = embeddings(2, 6)
    values = lambda z, block: losses.nt_xent(*z, lambda s: jnp.interp(s, knots, taus), block=block)
    both = jax.jit(lambda z: [values_and_gradients(functools.partial(values, block=b), z) for b in (0, 4)])
    expected, actual = both(z)
    assert_same(actual, expected)

  def test_arithmetic(self):
    source = stream.Source(jnp.eye(3), None, jnp.arange(3), jnp.arange(3), block=2)
    x = stream.Stream(source)
    queries = jnp.arange(1.0, 4.0)
    for of, expected in (
      (3 - 2 * x, [6, 6, 6]),
      ((1 + x) * queries, [2, 4, 6]),
      (x / 2 - x + 1, [2, 2, 2]),
      ((x + queries) - (x - queries), [4, 8, 12]),
      (-(x - 1), [2, 2, 2]),
    ):
      np.testing.assert_allclose(of.sum(), expected, rtol=1e-6)

  def test_refusals(self):
    pos, blocks, _ = pairs.in_batch(*embeddings(2, 4), block=2)
    with self.assertRaisesRegex(ValueError, r'^temperature has shape \(3,\), but there are 8 queries'):
      losses.info_nce(pos, blocks, jnp.ones(3))
    with self.assertRaisesRegex(ValueError, r'^ring = True must be False without a block'):
      pairs.in_batch(*embeddings(2, 4), ring=True)


@pytest.mark.slow
class RingTest(chex.TestCase):
  @parameterized.product(devices=(1, 2, 4), form=('plain', 'interpret'))
  def test_the_same_as_gathered_keys(self, devices, form):
    """Values and gradients of the mean over all queries, for every loss: those that need all keys gather them."""
    names = list(LOSSES) if form == 'plain' else ['info_nce', 'cacr']
    batch = embeddings(2, 8).swapaxes(0, 1)
    params = {name: embeddings(1, 3)[0] for name in names}

    def means(params, batch, axis_name=None, **block):
      def total(params):
        found = {}
        for name in names:
          z = [x @ params[name] for x in batch.swapaxes(0, 1)]
          tau = temperature.cosine(0.1, 0.5) if LOSSES[name].takes_temperature else None
          made = pairs.in_batch(*z, axis_name=axis_name, **block)
          found[name] = jnp.mean(of_pairs(LOSSES[name], made, tau, axis_name=axis_name))
        return sum(found.values()), found

      with stream.form(form):
        gradients, found = jax.grad(total, has_aux=True)(params)
      return (found, gradients) if axis_name is None else jax.lax.pmean((found, gradients), axis_name)

    expected = jax.jit(means)(params, batch)
    ring = mapped(functools.partial(means, axis_name='batch', block=3, ring=True), devices, 'shard_map')(params, batch)
    assert_near(jax.tree.map(lambda x: x[-1], ring), expected, 2e-6 if form == 'plain' else 1e-4)

  def test_a_parameter_of_float64(self):
    batch = embeddings(2, 8).swapaxes(0, 1)

    def gradient(alpha, batch, axis_name=None, **block):
      def mean(alpha):
        pos, neg, where = pairs.in_batch(*batch.swapaxes(0, 1), axis_name=axis_name, **block)
        return losses.balanced(pos, neg, where=where, alpha=alpha, lam=2.0).mean()

      found = jax.grad(mean)(alpha)
      return found if axis_name is None else jax.lax.pmean(found, axis_name)

    with jax.enable_x64(True), jax.numpy_dtype_promotion('standard'):
      alpha = jnp.asarray(2.0, jnp.float64)
      ring = mapped(functools.partial(gradient, axis_name='batch', block=3, ring=True), 2, 'shard_map')(alpha, batch)
      np.testing.assert_allclose(ring, gradient(alpha, batch), rtol=1e-5)

  def test_keys_of_another_encoder(self):
    batch = embeddings(2, 8).swapaxes(0, 1)

    def mean(params, batch, **how):
      q, k = batch.swapaxes(0, 1)
      return jnp.mean(losses.info_nce(*pairs.with_keys(q @ params, k, **how)[:2], 0.2))

    def of(params, batch):
      gradient = jax.grad(functools.partial(mean, axis_name='batch', block=3, ring=True))(params, batch)
      return jax.lax.pmean(gradient, 'batch')

    expected = jax.grad(mean)(embeddings(1, 3)[0], batch)
    assert_same(mapped(of, 4, 'shard_map')(embeddings(1, 3)[0], batch)[-1], expected)


if __name__ == '__main__':
  absltest.main()
