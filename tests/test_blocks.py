"""Losses of blocks of queries: the values and gradients of the whole matrix, without its memory."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ssl_jax import losses, pairs, temperature
from tests.helpers import mapped, of_pairs

PARAMETERS = {
  'hard': dict(fraction=0.3),
  'hard_simple': dict(fraction=0.3),
  'balanced': dict(alpha=2.0, lam=4.0),
  'generalized_nt_xent': dict(alpha=5.0, lam=2.0),
  'hard_negative': dict(beta=1.0, tau_plus=0.1),
  'align_uniform': dict(weight=0.5),
  'cacr_margin': dict(margin=2.0),
  'triplet': dict(margin=1.0),
}
LOSSES = {name: losses.Loss(function, PARAMETERS.get(name, {})) for name, function in losses.CONTRASTIVE.items()}
LOSSES['cacr_rbf'] = losses.Loss(losses.cacr, dict(cost='rbf'))
LEARNED = temperature.from_config(
  dict(name='cosine', tau_min=dict(name='learnable', tau=0.1, tau_max=0.5), tau_max=0.5)
)


def embeddings(views, batch, width=3, seed=0):
  return np.random.default_rng([seed, views, batch]).normal(size=(views, batch, width)).astype(np.float32)


def values_and_gradients(values, *arguments):
  """What `values` gives, and the gradients of a sum in which each counts differently."""

  def total(arguments):
    found = values(*arguments)
    return jnp.sum(found * jnp.arange(1, found.size + 1, dtype=found.dtype)), found

  gradients, found = jax.grad(total, has_aux=True)(arguments)
  return found, gradients


def assert_same(actual, expected):
  """To the rounding of float32: gradients are sums, whose rounding is that of their largest terms."""
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize('name', LOSSES)
@pytest.mark.parametrize('block', [0, 2])
def test_nan_in_a_negative_is_not_hidden(name, block):
  z = embeddings(2, 4)
  queue = embeddings(1, 5)[0]
  queue[2, 0] = np.nan
  pos, neg, where = pairs.with_queue(*z, queue, block=block)
  tau = {'temperature': 0.5} if LOSSES[name].takes_temperature else {}
  assert np.isnan(LOSSES[name](pos, neg, where=where, **tau)).any()


def test_the_number_of_hard_negatives_is_the_same_in_float32():
  for fraction in (0.07, np.float32(0.07), jnp.float32(0.07)):
    assert losses.hard_simple(jnp.zeros(1), jnp.ones((1, 100)), fraction=fraction) == 7


def test_positives_and_one_hardest_negative():
  assert losses.hard(jnp.ones(2), jnp.zeros((2, 3)), 0.5, fraction=1e-10).shape == (2,)


def test_a_batch_of_one_has_the_negatives_of_the_queue():
  one = embeddings(1, 1)[0]
  assert pairs.with_keys(one, one, embeddings(1, 5)[0]).where.sum() == 5


ENCODER = embeddings(1, 3)[0]
BATCH = embeddings(2, 8).swapaxes(0, 1)  # two views of 8 instances


def means_and_gradients(params, batch, axis_name=None, block=0):
  def total(params):
    means = {}
    for name in params:  # an encoder for each
      loss = LOSSES[name]
      found = pairs.in_batch(*(x @ params[name] for x in batch.swapaxes(0, 1)), axis_name=axis_name, block=block)
      tau = temperature.cosine(0.1, 0.5) if loss.takes_temperature else None
      means[name] = jnp.mean(of_pairs(loss, found, tau, axis_name=axis_name))
    return sum(means.values()), means

  gradients, means = jax.grad(total, has_aux=True)(params)
  return (means, gradients) if axis_name is None else jax.lax.pmean((means, gradients), axis_name)


@functools.cache
def whole_batch(names):
  return jax.jit(means_and_gradients)(dict.fromkeys(names, ENCODER), BATCH)


class SameTest(chex.TestCase):
  @parameterized.parameters(*LOSSES)
  def test_every_loss_with_every_kind_of_temperature(self, name):
    """Three views of 5 instances are 15 queries: four blocks, of which the last is a query short."""
    loss, z = LOSSES[name], embeddings(3, 5)
    kinds = {
      'constant': lambda params: 0.2,
      'cosine, learned in part': lambda params: LEARNED.at(params, step=0),
      'one a query': lambda params: jnp.linspace(0.1, 1, 15) * LEARNED.at(params, step=0)(jnp.zeros(15)),
    }
    kinds = kinds if loss.takes_temperature else {'none': lambda params: None}

    @jax.jit
    def of(z, params):
      def values(z, params, tau, block):
        return of_pairs(loss, pairs.in_batch(*z, block=block), tau(params))

      return [
        [values_and_gradients(lambda z, p, t=tau, b=block: values(z, p, t, b), z, params) for tau in kinds.values()]
        for block in (0, 4)
      ]

    whole, blocks = of(z, LEARNED.init())
    for kind, actual, expected in zip(kinds, blocks, whole, strict=True):
      with self.subTest(kind):
        assert_same(actual, expected)

  @hypothesis.settings(deadline=None, max_examples=8)
  @hypothesis.given(
    views=st.integers(2, 3),
    batch=st.integers(2, 9),
    block=st.integers(1, 40),
    similarity=st.sampled_from(['cosine', 'dot', 'euclidean']),
  )
  @pytest.mark.slow
  def test_any_size_of_batch_and_block(self, views, batch, block, similarity):
    def values(z, block):
      pos, neg, where = pairs.in_batch(*z, similarity=similarity, block=block)
      return losses.info_nce(pos, neg, 0.5, where=where)

    both = jax.jit(lambda z: [values_and_gradients(functools.partial(values, block=b), z) for b in (0, block)])
    whole, blocks = both(embeddings(views, batch))
    assert_same(blocks, whole)

  @parameterized.parameters('with_keys', 'with_queue', 'with_queue_in_batch', 'with_bank', 'with_drawn_bank')
  def test_other_pairs(self, name):
    make = {
      'with_keys': pairs.with_keys,
      'with_queue': lambda q, k, **to: pairs.with_queue(q, k, embeddings(1, 4)[0], **to),
      'with_queue_in_batch': lambda q, k, **to: pairs.with_queue(q, k, embeddings(1, 4)[0], in_batch=True, **to),
      'with_bank': lambda q, k, **to: pairs.with_bank(q, k, jnp.array([3, 0, 6, 5, 1, 2, 4]), **to),
      'with_drawn_bank': lambda q, k, **to: pairs.with_bank(q, k, jnp.arange(7), jnp.array([1, 1, 6, 0]), **to),
    }[name]

    @jax.jit
    def of(z):
      values = lambda z, block: of_pairs(LOSSES['info_nce'], make(*z, block=block), 0.2)
      return [values_and_gradients(functools.partial(values, block=block), z) for block in (0, 3)]

    whole, blocks = of(embeddings(2, 7))
    assert_same(blocks, whole)

  # pmap trains with blocks in tests/methods/test_state.py.
  def test_losses_over_devices(self):
    """A stream, blocks one after the other, and a mean over all queries."""
    self.compare_devices(('info_nce', 'hard', 'align_uniform'))

  @pytest.mark.slow
  def test_every_loss_over_devices(self):
    self.compare_devices(tuple(LOSSES))

  def compare_devices(self, names, devices=4, how='shard_map'):
    """The gradient of the mean over all queries, as `ssl_jax.pairs` has it, from blocks on each device."""
    on_devices = mapped(functools.partial(means_and_gradients, axis_name='batch', block=3), devices, how)
    blocks = on_devices(dict.fromkeys(names, ENCODER), BATCH)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[-1], blocks), whole_batch(names), rtol=2e-6, atol=2e-6)

  @parameterized.parameters('info_nce', 'macl', 'cacr_rbf', 'hard')
  def test_in_shard_map_that_checks(self, name):
    """Without an axis name, each device has its own loss, and check_vma=True is valid."""
    tau = 0.2 if LOSSES[name].takes_temperature else None
    both = lambda block: (
      lambda z: values_and_gradients(lambda z: of_pairs(LOSSES[name], pairs.in_batch(*z, block=block), tau), z)
    )
    mesh = jax.make_mesh((2,), ('batch',), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec(None, 'batch')
    of = lambda z: jax.tree.map(lambda x: x if x.ndim == 3 else x.reshape(2, -1), both(3)(z))
    z = embeddings(2, 8)
    found, (gradients,) = jax.jit(
      jax.shard_map(of, mesh=mesh, in_specs=spec, out_specs=(spec, (spec,)), check_vma=True)
    )(z)
    whole = jax.jit(both(0))
    for device, own in enumerate(np.split(z, 2, axis=1)):
      expected = whole(own)
      part = slice(4 * device, 4 * device + 4)
      assert_same((found[:, part].ravel(), (gradients[:, part],)), expected)

  def test_a_query_without_negatives_counts_nothing(self):
    z, index, drawn = embeddings(2, 7), jnp.arange(7), jnp.array([1, 1])  # all of query 1's are its own
    for loss in ('align_uniform', 'decoupled_weighted', 'macl', 'cacr'):
      tau = 0.2 if LOSSES[loss].takes_temperature else None
      of = jax.jit(
        lambda z, block, f=LOSSES[loss], t=tau: of_pairs(f, pairs.with_bank(*z, index, drawn, block=block), t),
        static_argnums=1,
      )
      np.testing.assert_allclose(of(z, 2), of(z, 0), rtol=1e-5, atol=1e-6)
      self.assertEqual(of(z, 2)[1], 0)

  def test_nt_xent(self):
    z = embeddings(2, 5)
    nt_xent = jax.jit(losses.nt_xent, static_argnames='block')
    np.testing.assert_allclose(nt_xent(*z, 0.2, block=4), nt_xent(*z, 0.2), rtol=1e-6)


class MemoryTest(absltest.TestCase):
  def memory(self, loss, queries, block):
    """Bytes that the compiled gradient of a loss of so many queries and keys needs in addition to its arguments."""

    def mean(z):
      pos, neg, where = pairs.in_batch(*z, block=block)
      return jnp.mean(loss(pos, neg, where=where))

    z = jax.ShapeDtypeStruct((2, queries // 2, 16), jnp.float32)
    return jax.jit(jax.grad(mean)).lower(z).compile().memory_analysis().temp_size_in_bytes

  def test_it_grows_with_the_block_and_not_with_the_square_of_the_queries(self):
    for loss in (functools.partial(losses.info_nce, temperature=0.2), losses.align_uniform):
      whole, blocks = (self.memory(loss, 4096, block) for block in (0, 256))
      self.assertLess(blocks, whole / 5)
      self.assertLess(self.memory(loss, 8192, 256), 2.2 * blocks)
      self.assertGreater(self.memory(loss, 4096, 512), 1.5 * blocks)


class OneTemperatureTest(absltest.TestCase):
  def test_an_array_of_one_temperature_holds_for_all_queries(self):
    taus = (0.2, [0.2], jnp.array([0.2]), np.array([[0.2]]), [0.2] * 8)
    for loss in (losses.info_nce, losses.sigmoid, functools.partial(losses.hard, fraction=0.5)):
      for block in (0, 3):

        @jax.jit
        def of(z, loss=loss, block=block):
          pos, neg, where = pairs.in_batch(*z, block=block)
          return [loss(pos, neg, tau, where=where) for tau in taus]

        expected, *others = of(embeddings(2, 4))
        for found in others:
          np.testing.assert_allclose(found, expected, rtol=1e-6)


class RefusalTest(absltest.TestCase):
  def test_refusals(self):
    z, own = embeddings(2, 4), jnp.zeros((4, 4), int)
    pos, blocks, _ = pairs.in_batch(*z, block=2)
    whole = jnp.ones((8, 8), bool)
    hard = functools.partial(losses.hard, pos, blocks, fraction=0.5)
    for message, call in (
      (r'^temperature has shape \(3,\), but there are 8 queries', lambda: hard(jnp.full(3, 0.1))),
      (r'^temperature is the temperature of a run', lambda: hard(temperature.learnable())),
      (r'^keys have shape \(0, 3\), so no query', lambda: pairs.with_queue(*z, np.ones((0, 3)), block=2)),
      (r'^block = -1 must be a number of queries, or 0', lambda: pairs.in_batch(*z, block=-1)),
      (r'^block = 2 needs negatives that all queries share', lambda: pairs.with_bank(*z, own[0], own, block=2)),
      (r'^where has shape \(8, 8\), but blocks', lambda: losses.simple(pos, blocks, where=jnp.ones((8, 8), bool))),
      (r'^neg comes in blocks, but penalties are a whole', lambda: losses.penalties(blocks, 0.2)),
      (r'^neg comes in blocks, but false negatives are', lambda: losses.fnc(pos, blocks, whole, whole, 0.2)),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()


if __name__ == '__main__':
  absltest.main()
