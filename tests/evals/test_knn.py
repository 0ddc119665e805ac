"""kNN against scikit-learn and against float64 loops: votes, ties, blocks, errors."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from sklearn import datasets
from sklearn.neighbors import KNeighborsClassifier

from ssl_jax.evals import knn


def clusters(n=150, q=41, d=8, classes=5, seed=0):
  """A bank and queries with labels: overlapping classes of different sizes, features of different norms."""
  rng = np.random.default_rng(seed)
  centres = rng.normal(size=(classes, d))
  labels = np.sort(rng.choice(classes, size=n + q, p=np.arange(1, classes + 1) / (classes * (classes + 1) / 2)))
  x = centres[labels] + 1.2 * rng.normal(size=(n + q, d))
  order = rng.permutation(n + q)
  x, labels = x[order].astype(np.float32), labels[order]
  return x[:n], labels[:n], x[n:], labels[n:]


def unit(x):
  x = x.astype(np.float64)
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def loop_scores(bank, labels, queries, k, weight, classes):
  """Sums the weights of the k most similar, one query and one neighbor at a time, in float64."""
  scores = np.zeros((len(queries), classes))
  for row, query in enumerate(unit(queries)):
    similarities = [float(query @ b) for b in unit(bank)]
    nearest = sorted(range(len(bank)), key=lambda i: (-similarities[i], i))[:k]
    for i in nearest:
      scores[row, labels[i]] += weight(similarities[i], similarities[nearest[0]])
  return scores


WEIGHTS = {
  'cosine': lambda s, nearest: np.exp((s - nearest) / 0.1),
  'distance': lambda s, nearest: 1 / np.sqrt(2 - 2 * s),
  'majority': lambda s, nearest: 1.0,
}


class KnnTest(chex.TestCase):
  @parameterized.product(vote=knn.VOTES, block=(None, 7, 41))
  def test_every_k_of_one_search_equals_the_loop(self, vote, block):
    bank, labels, queries, _ = clusters()
    scores = knn.classify(bank, labels, queries, k=(1, 150, 10), vote=vote, block=block)
    self.assertEqual(list(scores), [1, 10, 150])
    for k, score in scores.items():
      np.testing.assert_allclose(score, loop_scores(bank, labels, queries, k, WEIGHTS[vote], 5), rtol=2e-4, atol=1e-6)

  @parameterized.product(k=(1, 10, 60))
  def test_accuracy_equals_scikit_learn(self, k):
    bank, labels, queries, query_labels = clusters(n=400, q=200)
    weights = {
      'cosine': lambda distance: np.exp((1 - distance**2 / 2) / 0.1),
      'distance': 'distance',
      'majority': 'uniform',
    }
    for vote in knn.VOTES:
      model = KNeighborsClassifier(k, weights=weights[vote]).fit(unit(bank), labels)
      probabilities = model.predict_proba(unit(queries))
      own = probabilities[np.arange(200), query_labels]
      # A class without a vote is not a hit, whatever its rank among the zeros.
      top2 = ((probabilities > own[:, None]).sum(axis=1) < 2) & (own > 0)
      measured = knn.accuracy(bank, labels, queries, query_labels, k=(k,), vote=vote, topk=(1, 2))
      self.assertEqual(set(measured), {f'knn{k}', f'knn{k}_top2'})
      self.assertAlmostEqual(measured[f'knn{k}'], 100 * (model.predict(unit(queries)) == query_labels).mean(), places=4)
      if vote != 'majority':  # scikit-learn breaks ties in the same way only for the first place
        self.assertAlmostEqual(measured[f'knn{k}_top2'], 100 * top2.mean(), places=4)

  @parameterized.parameters((1, 1), (7, 7), (50, 3), (1000, 1), (1000, 13), (997, 20), (64, 16), (300, 299))
  def test_two_short_searches_equal_one_long_one(self, n, k):
    # Few distinct values: ties follow the order of the bank, across groups and padding.
    rng = np.random.default_rng(n + k)
    rows = rng.integers(-3, 2, size=(40, n)).astype(np.float32)
    rows[:20] -= 2  # all negative: nothing that fills up a group may be found
    values, indices = knn.top_k(jnp.asarray(rows), k)
    expected = np.argsort(-rows, axis=1, kind='stable')[:, :k]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, expected, axis=1))

  def test_neighbors_are_the_most_similar_nearest_first(self):
    bank, _, queries, _ = clusters()
    indices, similarities = knn.neighbors(bank, queries, 12, block=9)
    expected = unit(queries) @ unit(bank).T
    np.testing.assert_array_equal(indices, np.argsort(-expected, axis=1)[:, :12])
    np.testing.assert_allclose(similarities, -np.sort(-expected, axis=1)[:, :12], atol=1e-6)

  def test_with_the_distance_vote_an_equal_vector_outvotes_the_rest(self):
    bank = np.concatenate([np.eye(4, dtype=np.float32)[:1], np.tile([[0.99, 0.1, 0.0, 0.0]], (9, 1))]).astype(
      np.float32
    )
    labels = np.array([1] + [0] * 9)
    query = np.array([[3.0, 0.0, 0.0, 0.0]], np.float32)
    self.assertEqual(knn.classify(bank, labels, query, k=(10,), vote='distance')[10].argmax(), 1)
    self.assertEqual(knn.classify(bank, labels, query, k=(10,), vote='majority')[10].argmax(), 0)

  def test_ties_go_to_the_lower_class_and_norms_do_not_matter(self):
    bank = np.array([[0, 5], [0, 1], [1, 0], [9, 0]], np.float32)
    scores = knn.classify(bank, np.array([2, 1, 0, 0]), np.array([[0, 2]], np.float32), k=(1, 2), vote='majority')
    np.testing.assert_array_equal(scores[1], [[0, 0, 1]])  # equal similarity: the lower index
    np.testing.assert_array_equal(scores[2], [[0, 1, 1]])
    self.assertTrue(knn.hits(scores[2], np.array([1]), 1))
    self.assertFalse(knn.hits(scores[2], np.array([2]), 1))
    self.assertTrue(knn.hits(scores[2], np.array([2]), 2))
    self.assertFalse(knn.hits(scores[2], np.array([0]), 3))

  def test_small_temperature_is_the_nearest_neighbor(self):
    bank, labels, queries, query_labels = clusters()
    one = knn.accuracy(bank, labels, queries, query_labels, k=(1,), topk=(1,))['knn1']
    sharp = knn.accuracy(bank, labels, queries, query_labels, k=(150,), temperature=1e-4, topk=(1,))['knn150']
    self.assertEqual(one, sharp)

  def test_two_calls_on_the_digits_agree_to_the_last_digit(self):
    x, y = datasets.load_digits(return_X_y=True)
    x = (x - 8).astype(np.float32)
    first = knn.accuracy(x[:1200], y[:1200], x[1200:], y[1200:], k=(1, 20))
    self.assertEqual(first, knn.accuracy(x[:1200], y[:1200], x[1200:], y[1200:], k=(20, 1)))
    self.assertGreater(first['knn20'], 94)
    self.assertGreater(first['knn20_top5'], 99)
    model = KNeighborsClassifier(20, weights=lambda d: np.exp((1 - d**2 / 2) / 0.1)).fit(unit(x[:1200]), y[:1200])
    self.assertAlmostEqual(first['knn20'], 100 * model.score(unit(x[1200:]), y[1200:]), places=4)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(k=(151,)), 'k = 151 must be from 1 to 150'),
    (dict(k=()), r'k = \(\) must be a tuple of numbers'),
    (dict(k=(0, 3)), r'k = \(0, 3\) must be'),
    (dict(k=5), 'k = 5 must be a tuple of numbers of neighbors'),
    (dict(vote='loud'), "vote = 'loud' is not a valid choice: give one of cosine"),
    (dict(temperature=0.0), 'temperature = 0.0 must be positive'),
    (dict(bank_labels=None), 'bank_labels = None'),
    (dict(query_labels=None), 'query_labels = None'),
    (dict(bank_labels=np.zeros(150, int)), 'bank_labels: every example is of class 0'),
    (dict(bank_labels=np.zeros(149, int)), r'bank_labels: shape \(149,\), expected \(150,\)'),
    (dict(bank_labels=np.arange(150) - 1), 'bank_labels: 1 negative'),
    (dict(bank_labels=np.zeros(150)), 'bank_labels: dtype float64'),
    (dict(query_labels=np.full(41, 7)), r'query_labels: classes \[7\] do not occur in bank_labels'),
    (dict(query_features=np.ones((41, 9))), 'queries: 9 dimensions, but bank has 8'),
    (dict(query_features=np.full((41, 8), np.nan)), 'queries: holds NaN'),
    (dict(bank_features=np.ones(150)), r'bank: shape \(150,\)'),
  ],
)
def test_errors_name_the_argument(change, message):
  bank, labels, queries, query_labels = clusters()
  arguments = dict(bank_features=bank, bank_labels=labels, query_features=queries, query_labels=query_labels, k=(1,))
  with pytest.raises(ValueError, match=message) as error:
    knn.accuracy(**(arguments | change))
  assert '\n' not in str(error.value)


def test_num_classes_too_small_is_an_error():
  bank, labels, queries, _ = clusters()
  with pytest.raises(ValueError, match='num_classes = 3 must be above 4'):
    knn.classify(bank, labels, queries, k=(1,), num_classes=3)
  assert knn.classify(bank, labels, queries, k=(1,), num_classes=9)[1].shape == (41, 9)


def test_whitened_features_vary_alike_in_all_directions():
  rng = np.random.default_rng(0)
  bank, queries = (rng.normal(size=(n, 6)) * [3, 2, 1, 1, 0.5, 0.5] + 0.3 for n in (4000, 5))
  found, of_queries = knn.whitened(bank, queries)
  np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(found.T @ found / len(found), np.eye(6), atol=1e-3)
  # The queries are mapped as the bank is, which alone decides the map.
  np.testing.assert_allclose(knn.whitened(bank, bank[:5])[1], found[:5], atol=1e-5)
  np.testing.assert_allclose(knn.whitened(bank, queries[:1])[1], of_queries[:1], atol=1e-5)


def test_whitening_treats_variances_as_at_least_a_thousandth_of_the_largest():
  x = np.random.default_rng(0).normal(size=(4000, 3)) * [1, 0.3, 0.005]
  variances = np.linalg.eigvalsh(np.cov(unit(x).T, bias=True))
  found, _ = knn.whitened(x, x[:1])
  np.testing.assert_allclose(found.var(axis=0), [variances[0] / (1e-3 * variances[2]), 1, 1], rtol=1e-3)
  assert found.var(axis=0)[0] < 0.5


def test_whitening_finds_classes_in_a_direction_of_little_variance():
  rng = np.random.default_rng(0)
  labels = np.arange(600) % 2
  sign = 2 * labels[:, None] - 1
  x = np.concatenate([rng.normal(size=(600, 4)), 0.15 * sign + 0.03 * rng.normal(size=(600, 1))], axis=1)
  bank, queries = x[:500], x[500:]
  score = lambda bank, queries: knn.accuracy(bank, labels[:500], queries, labels[500:], k=(10,), topk=(1,))['knn10']
  assert score(*knn.whitened(bank, queries)) > score(bank, queries) + 5


def test_whitening_survives_a_collapsed_encoder():
  for x in knn.whitened(np.ones((8, 3)), np.ones((2, 3))):
    assert np.isfinite(x).all()
