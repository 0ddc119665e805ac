"""Which similarity goes where, and the same gradients on any number of devices."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ssl_jax import losses, pairs
from tests.helpers import mapped

B, D = 4, 3


def embeddings(count, batch=B, seed=0):
  return list(np.random.default_rng(seed).normal(size=(count, batch, D)).astype(np.float32))


def similarity_of(kind):
  def cosine(x, y):
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)

  return {'cosine': cosine, 'dot': np.dot, 'euclidean': lambda x, y: -np.linalg.norm(x - y)}[kind]


class LayoutTest(chex.TestCase):
  def assert_pairs(self, actual, expected_pos, expected_neg):
    """`expected_pos` is a list of K values a query, `expected_neg` the sorted similarities of its negatives."""
    np.testing.assert_allclose(actual.pos, expected_pos, rtol=1e-4, atol=1e-5)
    self.assertLen(expected_neg, len(actual.neg))
    chex.assert_equal_shape([actual.neg, actual.where])
    chex.assert_type([actual.pos, actual.neg, actual.where], [jnp.float32, jnp.float32, bool])
    for neg, where, expected in zip(np.array(actual.neg), np.array(actual.where), expected_neg, strict=True):
      np.testing.assert_allclose(np.sort(neg[where]), np.sort(expected), rtol=1e-4, atol=1e-5)

  @parameterized.product(views=(2, 3), kind=('cosine', 'dot', 'euclidean'))
  def test_in_batch(self, views, kind):
    z = embeddings(views)
    s = similarity_of(kind)
    pos, neg = [], []
    for v in range(views):
      for i in range(B):
        pos.append([s(z[v][i], z[w][i]) for w in range(views) if w != v])
        neg.append([s(z[v][i], z[w][j]) for w in range(views) for j in range(B) if j != i])
    self.assert_pairs(jax.jit(functools.partial(pairs.in_batch, similarity=kind))(*z), pos, neg)

  def test_by_view_pair(self):
    z = embeddings(3)
    s = similarity_of('cosine')
    pos, neg = [], []
    for x, y in ((0, 1), (0, 2), (1, 2)):
      for v in (x, y):
        for i in range(B):
          pos.append([s(z[v][i], z[w][i]) for w in range(3) if w != v])
          neg.append([s(z[x][i], z[y][j]) for j in range(B) if j != i])
    self.assert_pairs(jax.jit(pairs.by_view_pair)(*z), pos, neg)

  def test_across_views(self):
    z = embeddings(3)
    s = similarity_of('cosine')
    pos, neg = [], []
    for x, y in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)):
      for i in range(B):
        pos.append([s(z[x][i], z[y][i])])
        neg.append([s(z[x][i], z[y][j]) for j in range(B) if j != i])
    self.assert_pairs(jax.jit(pairs.across_views)(*z), pos, neg)

  def test_with_keys(self):
    q, k = embeddings(2)
    s = similarity_of('cosine')
    neg = [[s(q[i], k[j]) for j in range(B) if j != i] for i in range(B)]
    self.assert_pairs(jax.jit(pairs.with_keys)(q, k), [[s(q[i], k[i])] for i in range(B)], neg)

  def test_with_keys_and_a_queue(self):
    q, k = embeddings(2)
    s = similarity_of('cosine')
    neg = [[s(q[i], k[j]) for j in range(B) if j != i] + [s(q[i], old) for old in QUEUE] for i in range(B)]
    self.assert_pairs(jax.jit(pairs.with_keys)(q, k, QUEUE), [[s(q[i], k[i])] for i in range(B)], neg)
    with pytest.raises(ValueError, match=r'^ring = True takes no queue'):
      pairs.with_keys(q, k, QUEUE, block=2, ring=True)

  def test_with_keys_of_several_views(self):
    q, *k = embeddings(4)
    s = similarity_of('cosine')
    pos = [[s(q[i], view[i]) for view in k] for i in range(B)]
    neg = [[s(q[i], view[j]) for j in range(B) if j != i for view in k] for i in range(B)]
    self.assert_pairs(jax.jit(pairs.with_keys)(q, np.stack(k, axis=1)), pos, neg)

  @parameterized.product(in_batch=(False, True), kind=('cosine', 'euclidean'))
  def test_with_queue(self, in_batch, kind):
    q, k1, k2 = embeddings(3)
    (queue,) = embeddings(1, batch=6, seed=1)
    s = similarity_of(kind)
    pos = [[s(q[i], k1[i]), s(q[i], k2[i])] for i in range(B)]
    neg = [[s(q[i], x) for x in queue] + [s(q[i], q[j]) for j in range(B) if j != i and in_batch] for i in range(B)]
    actual = jax.jit(functools.partial(pairs.with_queue, in_batch=in_batch, similarity=kind))
    self.assert_pairs(actual(q, np.stack([k1, k2], axis=1), queue), pos, neg)
    self.assert_pairs(actual(q, k1, queue), [row[:1] for row in pos], neg)

  @parameterized.parameters('all', 'shared', 'own')
  def test_with_bank(self, choice):
    (q,) = embeddings(1)
    (bank,) = embeddings(1, batch=9, seed=1)
    s = similarity_of('cosine')
    index = np.array([3, 0, 8, 5])
    drawn = np.random.default_rng(0).integers(9, size=(B, 6))
    entries = {'all': np.tile(np.arange(9), (B, 1)), 'shared': np.tile(drawn[0], (B, 1)), 'own': drawn}[choice]
    neg = [[s(q[i], bank[j]) for j in entries[i] if j != index[i]] for i in range(B)]
    given = {'all': None, 'shared': drawn[0], 'own': drawn}[choice]
    actual = jax.jit(pairs.with_bank)(q, bank, index, given)
    self.assert_pairs(actual, [[s(q[i], bank[index[i]])] for i in range(B)], neg)

  def test_entries_that_are_not_in_the_bank_are_refused(self):
    q, bank = jnp.eye(2), jnp.eye(4, 2)
    for entry in (-1, 4):
      with self.assertRaisesRegex(ValueError, f'^index has the entry {entry}, but the bank has 4'):
        pairs.with_bank(q, bank, np.array([0, entry]))
      with self.assertRaisesRegex(ValueError, f'^negatives has the entry {entry}, but the bank has 4'):
        pairs.with_bank(q, bank, np.array([0, 1]), np.array([entry]))

  def test_keys_of_another_width_are_refused(self):
    with self.assertRaises(AssertionError):
      pairs.with_queue(jnp.ones((4, 8)), jnp.ones((4, 1)), jnp.ones((5, 8)))

  def test_a_queue_or_bank_of_another_width_is_refused(self):
    """In blocks and with drawn negatives, jax would broadcast entries of one feature."""
    z, index = jnp.ones((4, 8)), jnp.arange(4)
    for keys in (jnp.ones((5, 1)), jnp.ones((5, 7)), jnp.ones(8)):
      message = rf'has shape {re.escape(str(keys.shape))}, but the queries have 8 features: give \[M, 8\]$'
      for block in (0, 2):
        with self.assertRaisesRegex(ValueError, f'^queue {message}'):
          pairs.with_queue(z, z, keys, block=block)
        with self.assertRaisesRegex(ValueError, f'^queue {message}'):
          pairs.with_keys(z, z, keys, block=block)
        with self.assertRaisesRegex(ValueError, f'^bank {message}'):
          pairs.with_bank(z, keys, index, block=block)
      with self.assertRaisesRegex(ValueError, f'^bank {message}'):
        pairs.with_bank(z, keys, index, index[:, None])

  def test_a_vector_whose_square_overflows_becomes_nan(self):
    x = pairs.normalize(jnp.array([[3e20, 4e20], [3.0, 4.0]]))
    np.testing.assert_allclose(x, [[np.nan] * 2, [0.6, 0.8]], rtol=1e-6)

  def test_normalize(self):
    x = jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-15, 0.0], [3e10, 4e10]])
    np.testing.assert_allclose(pairs.normalize(x), [[0.6, 0.8], [0, 0], [0, 0], [0.6, 0.8]], rtol=1e-6)
    gradient = jax.jit(jax.jacobian(pairs.normalize))(x)
    chex.assert_tree_all_finite(gradient)
    np.testing.assert_array_equal(gradient[1:3], 0)

  @parameterized.parameters('cosine', 'dot', 'euclidean')
  def test_finite_for_zero_identical_and_opposite_vectors(self, kind):
    z1 = jnp.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    z2 = jnp.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])

    @functools.partial(jax.jit, static_argnums=0)
    def both(dtype):
      def loss(z):
        pos, neg, where = pairs.in_batch(*z, similarity=kind)
        return losses.info_nce(pos, neg, 0.01, where=where).sum()

      return jax.value_and_grad(loss)([z.astype(dtype) for z in (z1, z2)])

    for dtype in (jnp.float32, jnp.bfloat16):
      chex.assert_tree_all_finite(both(dtype))

  def test_distances_far_from_the_origin_keep_their_digits(self):
    z = (10 + 0.01 * np.random.default_rng(0).normal(size=(2, 8, 128))).astype(np.float32)
    _, neg, where = jax.jit(functools.partial(pairs.in_batch, similarity='euclidean'))(*z)
    every = np.concatenate(z).astype(np.float64)
    distances = np.linalg.norm(every[:, None] - every[None], axis=2)
    np.testing.assert_allclose(neg, np.where(where, -distances, -np.inf), rtol=1e-4, atol=1e-3)

  def test_one_instance_is_contrasted_with_a_queue(self):
    z = jnp.ones((1, D))
    _, _, where = pairs.with_queue(z, z, jnp.ones((3, D)), in_batch=True)
    self.assertEqual(where.tolist(), [[True, True, True, False]])

  def test_refusals(self):
    z = jnp.ones((2, D))
    for message, call in (
      (r'^views = 1 cannot be contrasted: give at least 2 as separate arguments', lambda: pairs.in_batch(z)),
      (r'^batch = 1 instance leaves no negatives: give at least 2', lambda: pairs.in_batch(z[:1], z[:1])),
      (
        r"^similarity = 'cosin' is not a valid choice: did you mean 'cosine'",
        lambda: pairs.in_batch(z, z, similarity='cosin'),
      ),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()
    with self.assertRaises(AssertionError):
      pairs.in_batch(z, z[:, :2])


class MappingTest(absltest.TestCase):
  def test_embeddings_sharded_over_explicit_axes_are_refused(self):
    mesh = jax.make_mesh((2,), ('batch',), axis_types=(jax.sharding.AxisType.Explicit,))
    z = jax.device_put(jnp.ones((4, D)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('batch')))
    for call in (
      lambda z: losses.nt_xent(z, z, temperature=0.5),
      lambda z: losses.nt_xent(z, z, temperature=0.5, block=2),
      lambda z: losses.vicreg(z, z),
      lambda z: pairs.with_keys(z, z),
      lambda z: pairs.with_queue(z, z, jnp.ones((3, D))),
      lambda z: pairs.with_bank(z, jnp.ones((5, D)), jnp.arange(4)),
    ):
      for function in (call, jax.jit(call)):
        with self.assertRaisesRegex(ValueError, '^embeddings are sharded as .* explicit axes.*: make it with'):
          function(z)

  def test_shard_map_that_checks_is_refused(self):
    """With check_vma=True the gradient would be too large by the number of devices."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ('batch',), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    z = jnp.ones((4, D))
    for loss in (
      lambda z: losses.nt_xent(z, z, axis_name='batch').mean(),
      lambda z: losses.barlow_twins(z, z, axis_name='batch'),
      lambda z: losses.align_uniform(jnp.ones(len(z)), z, axis_name='batch').mean(),
      lambda z: pairs.with_queue(z, z, QUEUE, axis_name='batch').pos.mean(),
      lambda z: pairs.in_batch(z, z, axis_name='batch', block=2, ring=True).pos.mean(),
      lambda z: pairs.with_keys(z, z, axis_name='batch', block=2, ring=True).pos.mean(),
    ):
      mapped = jax.shard_map(
        lambda z, loss=loss: loss(z)[None], mesh=mesh, in_specs=spec('batch'), out_specs=spec('batch')
      )
      with self.assertRaisesRegex(
        ValueError, "^axis_name = 'batch' belongs to .*check_vma=True.*: give check_vma=False"
      ):
        jax.jit(mapped)(z)
    both = jax.make_mesh((2, 2), ('a', 'b'), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    loss = lambda z: losses.nt_xent(z, z, axis_name=('a', 'b')).mean()[None]
    with self.assertRaisesRegex(ValueError, r"^axis_name = \('a', 'b'\) belongs to .*check_vma=True"):
      jax.jit(jax.shard_map(loss, mesh=both, in_specs=spec(('a', 'b')), out_specs=spec(('a', 'b'))))(z)


QUEUE = np.random.default_rng(2).normal(size=(6, D)).astype(np.float32)


def contrast(loss, make_pairs, *, inside=False):
  """The loss over pairs of views; `inside`: it has a mean over the queries of all devices inside."""

  def values(*z, axis_name):
    pos, neg, where = make_pairs(*z, axis_name=axis_name)
    return loss(pos, neg, where=where, **({'axis_name': axis_name} if inside else {}))

  return values


def two_views(*z, axis_name):
  return pairs.in_batch(*z[:2], axis_name=axis_name)


SHARDED = {
  'nt_xent': lambda *z, axis_name: losses.nt_xent(*z[:2], 0.2, axis_name=axis_name),
  'by_view_pair': contrast(losses.cacr, pairs.by_view_pair),
  'across_views': contrast(functools.partial(losses.info_nce, temperature=0.2), pairs.across_views),
  'with_keys': contrast(losses.simple, lambda q, k, _, **to: pairs.with_keys(q, k, **to)),
  'with_keys_and_queue': contrast(losses.cacr, lambda q, k, _, **to: pairs.with_keys(q, k, QUEUE, **to)),
  'with_keys_of_views': contrast(losses.cacr, lambda q, *k, **to: pairs.with_keys(q, jnp.stack(k, axis=1), **to)),
  'with_queue': contrast(losses.cacr, lambda q, k, _, **to: pairs.with_queue(q, k, QUEUE, in_batch=True, **to)),
  'decoupled_weighted': contrast(
    functools.partial(losses.decoupled_weighted, temperature=0.2), pairs.in_batch, inside=True
  ),
  'macl': contrast(losses.macl, two_views, inside=True),
  'align_uniform': contrast(losses.align_uniform, two_views, inside=True),
  'cacr_rbf': contrast(functools.partial(losses.cacr, cost='rbf'), two_views, inside=True),
}


def means_and_gradients(params, batch, axis_name=None):
  """The mean of each loss over the queries of this device, and its gradient: each has an encoder of its own."""

  def total(params):
    means = {}
    for name in params:
      values = SHARDED[name]
      means[name] = jnp.mean(values(*(x @ params[name] for x in jnp.moveaxis(batch, 1, 0)), axis_name=axis_name))
    return sum(means.values()), means

  gradients, means = jax.grad(total, has_aux=True)(params)
  return (means, gradients) if axis_name is None else jax.lax.pmean((means, gradients), axis_name)


ENCODER = np.random.default_rng(1).normal(size=(D, D)).astype(np.float32)
BATCH = np.random.default_rng(0).normal(size=(8, 3, D)).astype(np.float32)  # three views of 8 instances


@functools.cache
def on_one_device(names):
  return jax.jit(means_and_gradients)(dict.fromkeys(names, ENCODER), BATCH)


class ShardingTest(chex.TestCase):
  """Differentiate the mean over this device's queries, then average the gradients: that of the whole batch."""

  def test_two_devices(self):
    """Gathered views, keys and queues, and a mean over all queries; the rest is slow."""
    self.compare(2, 'pmap', ('by_view_pair', 'with_keys', 'with_queue', 'macl'))

  @parameterized.product(devices=(1, 2, 4), how=('pmap', 'shard_map'))
  @pytest.mark.slow
  def test_loss_and_gradient_are_those_of_one_device(self, devices, how):
    self.compare(devices, how)

  def compare(self, devices, how, names=tuple(SHARDED)):
    on_devices = functools.partial(means_and_gradients, axis_name='batch')
    actual = mapped(on_devices, devices, how)(dict.fromkeys(names, ENCODER), BATCH)
    for device in range(devices):  # each has all of it
      one = jax.tree.map(lambda x, d=device: x[d], actual)
      chex.assert_trees_all_close(one, on_one_device(names), rtol=1e-6, atol=1e-6)


if __name__ == '__main__':
  absltest.main()
