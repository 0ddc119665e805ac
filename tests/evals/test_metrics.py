"""Metrics against float64 loops over pairs, on imbalanced classes, with any block size, and against theory."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from ssl_jax import temperature
from ssl_jax.evals import knn, metrics, row_blocks
from tests.reference import pairwise

LABELS = np.repeat([0, 2, 3, 7], [19, 10, 5, 3])  # imbalanced, and some numbers are not classes
N, D = len(LABELS), 6


def make_views(v=3, noise=0.4, seed=0):
  """Views [v, N, D] of clustered images, shuffled, with different norms."""
  rng = np.random.default_rng(seed)
  images = 1.5 * rng.normal(size=(8, D))[LABELS] + rng.normal(size=(N, D))
  views = (images + noise * rng.normal(size=(v, N, D))) * rng.uniform(0.2, 4, size=(v, N, 1))
  order = rng.permutation(N)
  return views[:, order].astype(np.float32), LABELS[order]


VIEWS, Y = make_views()
X = VIEWS[0]
COSINE = temperature.cosine(0.07, 0.3)


def cosine_loop(s):
  return 0.07 + 0.5 * (0.3 - 0.07) * (1 + math.cos(math.pi * (1 + s)))


class PairsTest(chex.TestCase):
  @parameterized.product(t=(0.5, 2.0), block=(None, 1, 8, N))
  def test_uniformity(self, t, block):
    self.assertAlmostEqual(metrics.uniformity(X, t=t, block=block), pairwise.uniformity(X, t), places=5)

  def test_features_that_are_all_zero_are_not_uniform(self):
    self.assertAlmostEqual(metrics.uniformity(np.zeros((4, 3))), 0.0)

  def test_uniformity_of_a_uniform_circle_is_the_integral(self):
    # On the circle E exp(−2‖x − y‖²) = E exp(4 cos θ − 4) = e⁻⁴ I₀(4); each example is not paired with itself.
    n = 500
    angle = 2 * np.pi * np.arange(n) / n
    mean = math.exp(-4) * np.i0(4.0)
    expected = math.log((n * mean - 1) / (n - 1))
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    self.assertAlmostEqual(metrics.uniformity(x), expected, places=5)

  @parameterized.parameters(2, 3)
  def test_alignment(self, v):
    self.assertAlmostEqual(metrics.alignment(VIEWS[:v]), pairwise.alignment(VIEWS[:v]), places=5)
    self.assertLess(metrics.alignment(np.stack([X, 3 * X])), 1e-12)

  def test_tolerance_and_same_label_similarity_differ_and_equal_the_loops(self):
    self.assertAlmostEqual(metrics.tolerance(X, Y), pairwise.tolerance(X, Y), places=5)
    self.assertAlmostEqual(metrics.same_label_similarity(X, Y), pairwise.same_label_similarity(X, Y), places=5)
    # With balanced classes the two differ by a factor: about C, the number of classes.
    balanced, labels = X[:30], np.arange(30) % 3
    ratio = metrics.same_label_similarity(balanced, labels) / metrics.tolerance(balanced, labels)
    self.assertAlmostEqual(ratio, 30 * 29 / (3 * 10 * 9), places=4)

  @parameterized.parameters(1, 5, 36, N)
  def test_class_sums_count_every_row_once(self, block):
    _, labels = np.unique(Y, return_inverse=True)
    sums = metrics.classes._class_sums(jnp.asarray(X), jnp.asarray(labels, jnp.int32), num_classes=4, block=block)
    np.testing.assert_allclose(sums, [X[labels == c].sum(axis=0, dtype=np.float64) for c in range(4)], atol=1e-4)

  def test_inter_class_uniformity(self):
    self.assertAlmostEqual(metrics.inter_class_uniformity(X, Y), pairwise.inter_class_uniformity(X, Y, 2.0), places=5)
    # Two opposite classes, each one point: exp(−2·4).
    self.assertAlmostEqual(
      metrics.inter_class_uniformity(np.array([[1.0, 0], [-3, 0]]), np.array([0, 1])), -8, places=5
    )
    self.assertAlmostEqual(  # exp(−400·4) underflows
      metrics.inter_class_uniformity(np.array([[1.0, 0], [-3, 0]]), np.array([0, 1]), t=400.0), -1600, places=5
    )

  def test_the_similarity_of_the_only_pair_among_many_examples(self):
    x = np.random.default_rng(0).normal(size=(20_000, 16)).astype(np.float32)
    labels = np.r_[0, np.arange(len(x) - 1)]
    expected = x[0] @ x[1] / np.linalg.norm(x[0]) / np.linalg.norm(x[1])
    self.assertAlmostEqual(metrics.same_label_similarity(x, labels), expected, places=6)

  def test_prototype_bias(self):
    self.assertAlmostEqual(metrics.prototype_bias(VIEWS, Y), pairwise.prototype_bias(VIEWS, Y), places=5)

  def test_sampled_prototype_bias_averages_to_the_mean_over_all_pairs(self):
    rng = np.random.default_rng(0)
    partners = (metrics.same_label_partners(Y, rng) for _ in range(200))
    draws = np.array([metrics.prototype_bias_sampled(VIEWS, VIEWS[:, others]) for others in partners])
    expected = pairwise.prototype_bias_pairs(VIEWS, Y)
    self.assertLess(abs(draws.mean() - expected), 4 * draws.std() / math.sqrt(200))
    self.assertGreater(draws.std(), 0)
    with self.assertRaisesRegex(ValueError, 'partners: shape'):
      metrics.prototype_bias_sampled(VIEWS, VIEWS[:1])

  def test_partners_have_the_same_label_and_are_uniform(self):
    rng = np.random.default_rng(0)
    draws = np.stack([metrics.same_label_partners(Y, rng) for _ in range(2000)])
    np.testing.assert_array_equal(Y[draws], np.broadcast_to(Y, draws.shape))
    i = np.flatnonzero(Y == 7)
    frequency = np.bincount(draws[:, i[0]], minlength=N)[i] / 2000
    np.testing.assert_allclose(frequency, 1 / 3, atol=0.05)

  def test_attracting_gap(self):
    gap = metrics.attracting_gap(X, VIEWS[1:])
    self.assertAlmostEqual(gap, pairwise.attracting_gap(X, VIEWS[1:]), places=5)
    self.assertGreater(gap, 0)
    # Equality if all views are the same vector (A.4.5).
    self.assertAlmostEqual(metrics.attracting_gap(X, np.stack([X, 2 * X])), 0, places=6)

  @parameterized.product(alpha=(1.0, 8.0), block=(None, 4))
  def test_repelling_gap_on_balanced_classes_equals_eq_10(self, alpha, block):
    bank, labels = VIEWS[1][:36], np.arange(36) % 4 * 3
    gap = metrics.repelling_gap(X, Y // 7 * 3, bank, labels, alpha=alpha, block=block)
    self.assertAlmostEqual(gap, pairwise.repelling_gap(X, Y // 7 * 3, bank, labels, alpha), places=4)

  def test_repelling_bound_holds_on_imbalanced_classes(self):
    # Class 7 has 3 of 37 examples and is the nearest prototype of these queries: Eq. 10 fails, Eq. 46 does not.
    query = np.array([[1.0, 0.1, 0, 0]])
    bank = np.concatenate([np.tile([[-1.0, 0, 0, 0]], (34, 1)), np.tile([[1.0, 0, 0, 0]], (3, 1))])
    labels = np.repeat([0, 7], [34, 3])
    self.assertLess(pairwise.repelling_gap(query, np.array([0]), bank, labels, 2.0), 0)
    self.assertGreater(metrics.repelling_gap(query, np.array([0]), bank, labels, alpha=2.0), 0)

  @parameterized.product(block=(None, 5))
  def test_penalty_entropy(self, block):
    measured = metrics.penalty_entropy(X, COSINE, block=block)
    self.assertAlmostEqual(measured, pairwise.penalty_entropy(X, cosine_loop), places=4)

  def test_penalty_entropy_rises_with_the_temperature_to_its_maximum(self):
    entropies = [metrics.penalty_entropy(X, tau) for tau in (0.01, 0.1, 1.0, 100.0)]
    self.assertEqual(entropies, sorted(entropies))
    self.assertAlmostEqual(entropies[-1], math.log(N - 1), places=3)

  def test_conditional_entropy(self):
    batches = [X[:12], X[12:24], X[24:36]]
    expected = np.mean([pairwise.conditional_entropy(batch, 2.0) for batch in batches])
    self.assertAlmostEqual(metrics.conditional_entropy(X, batch=12), expected, places=5)
    # π⁻ is the penalty distribution of temperature 1 / (2 t⁻).
    whole = metrics.conditional_entropy(X, t_neg=1.5, batch=N)
    self.assertAlmostEqual(whole, metrics.penalty_entropy(X, 1 / 3), places=5)
    # Equal distances, as between the vertices of a simplex, give the maximum.
    self.assertAlmostEqual(metrics.conditional_entropy(np.eye(5), batch=5), math.log(4), places=5)

  @parameterized.product(k=(1, 10, N - 1), block=(None, 6))
  def test_local_separation(self, k, block):
    measured = metrics.local_separation(X, VIEWS[1], k=k, block=block)
    np.testing.assert_allclose(measured, pairwise.local_separation(X, VIEWS[1], k), atol=1e-5)

  @parameterized.product(block=(None, 6))
  def test_similarity_histograms(self, block):
    measured = metrics.similarity_histograms(X, VIEWS[1], Y, bins=17, block=block)
    for name, counts in pairwise.similarity_histograms(X, VIEWS[1], Y, 17).items():
      np.testing.assert_array_equal(measured[name], counts, name)
    self.assertEqual(sum(measured[name].sum() for name in ('TP', 'FN', 'TN')), N**2)
    np.testing.assert_allclose(measured['edges'][[0, -1]], [-1, 1])
    # Similarity 1, even if rounding exceeds it, is in the last bin, and −1 in the first.
    ends = metrics.similarity_histograms(X, X, Y, bins=4)
    self.assertEqual(ends['TP'].tolist(), [0, 0, 0, N])
    self.assertEqual(metrics.similarity_histograms(X, -X, Y, bins=4)['TP'].tolist(), [N, 0, 0, 0])

  @parameterized.product(block=(None, 6))
  def test_penalty_distribution(self, block):
    measured = metrics.penalty_distribution(X, COSINE, bins=13, block=block)
    np.testing.assert_allclose(measured['penalty'], pairwise.penalty_distribution(X, cosine_loop, 13), atol=1e-5)
    self.assertAlmostEqual(measured['penalty'].sum(), 1, places=6)


class SpectrumTest(chex.TestCase):
  @parameterized.parameters((60, 7), (7, 60), (20, 20))
  def test_rankme(self, n, d):
    x = np.random.default_rng(0).normal(size=(n, d)) * np.exp(-np.arange(d) / 3)
    self.assertAlmostEqual(metrics.rankme(x), pairwise.rankme(x), places=3)

  def test_rankme_is_the_rank_of_orthogonal_features(self):
    x = np.zeros((30, 8))
    x[np.arange(30), np.arange(30) % 5] = 2.0
    self.assertAlmostEqual(metrics.rankme(x), 5, places=3)

  def test_alpha_req_is_the_exponent_of_a_power_law(self):
    x = np.random.default_rng(0).normal(size=(400, 120))
    orthogonal, _ = np.linalg.qr(x - x.mean(axis=0))  # also centred, as combinations of centred columns
    for alpha in (0.5, 1.0, 2.0):
      x = 5 + 30 * orthogonal * np.arange(1.0, 121) ** (-alpha / 2)
      self.assertAlmostEqual(metrics.alpha_req(x), alpha, places=3)

  def test_alpha_req_keeps_small_eigenvalues_of_many_examples(self):
    """Only float32 noise is left out: features that have collapsed to 30 dimensions do not look like a power law."""
    i, rng = np.arange(1, 111), np.random.default_rng(0)
    x = (rng.normal(size=(10_000, 110)) * np.sqrt(np.where(i <= 30, 1 / i, 1e-6))).astype(np.float32)
    self.assertAlmostEqual(metrics.alpha_req(x), self._exponent(x, 100), places=3)
    self.assertGreater(metrics.alpha_req(x), 4)
    x = (rng.normal(size=(50_000, 5)) @ rng.normal(size=(5, 8)) + 10).astype(np.float32)
    self.assertAlmostEqual(metrics.alpha_req(x), self._exponent(x, 5), places=3)

  def _exponent(self, x, last):
    eigenvalues = np.linalg.eigvalsh(np.cov(x.astype(np.float64).T))[::-1]
    i = np.arange(3, last + 1)
    return -np.polyfit(np.log(i), np.log(eigenvalues[i - 1]), 1, w=i**-0.5)[0]

  def test_alpha_req_weights_ranks_by_their_inverse(self):
    x = np.random.default_rng(1).normal(size=(50, 9)) * np.exp(-np.arange(9) / 2)
    eigenvalues = np.sort(np.linalg.eigvalsh(np.cov(x.T)))[::-1]
    i = np.arange(3, 10)
    design = np.stack([-np.log(i), np.ones(7)], axis=1)
    w = 1 / i
    expected = np.linalg.solve(design.T * w @ design, design.T * w @ np.log(eigenvalues[2:]))[0]
    self.assertAlmostEqual(metrics.alpha_req(x), expected, places=4)

  def test_lidar(self):
    self.assertAlmostEqual(metrics.lidar(VIEWS), pairwise.lidar(VIEWS, 1e-4), places=3)
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(4, 6, 20))  # fewer images than dimensions: rank at most 5
    self.assertAlmostEqual(metrics.lidar(wide), pairwise.lidar(wide, 1e-4), places=3)
    self.assertLess(metrics.lidar(wide), 5.01)


def test_lidar_of_features_of_any_norm():
  """Views in a plane with norm 10⁴, whose covariance in float32 would not be positive definite."""
  flat = VIEWS[..., :2] @ np.random.default_rng(0).normal(size=(2, 12)).astype(np.float32)
  assert metrics.lidar(1e4 * flat, delta=1e4) == pytest.approx(metrics.lidar(flat, delta=1e-4), rel=1e-3)


def test_two_calls_agree_to_the_last_digit():
  def measure():
    return [
      metrics.uniformity(X),
      metrics.tolerance(X, Y),
      metrics.prototype_bias(VIEWS, Y),
      metrics.repelling_gap(X, Y, VIEWS[1], Y),
      metrics.penalty_entropy(X, COSINE),
      metrics.rankme(X),
      metrics.lidar(VIEWS),
      *metrics.penalty_distribution(X, COSINE, bins=13)['penalty'].tolist(),
    ]

  assert measure() == measure()


def test_memory_does_not_grow_as_the_square_of_the_examples():
  """For 50,000 × 2,048 features, the compiler reports under 2 GB of further memory."""
  n, d = 50_000, 2_048
  x, y = jax.ShapeDtypeStruct((n, d), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
  small = jax.ShapeDtypeStruct((1000,), jnp.float32)
  weights, prototypes = jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((1000, d), jnp.float32)
  block = row_blocks.rows(n, n)
  programs = {
    'uniformity': metrics.geometry._uniformity.lower(x, 2.0, block=block),
    'class_sums': metrics.classes._class_sums.lower(x, y, num_classes=1000, block=row_blocks.rows(n, d)),
    'repelling_gap': metrics.classes._repelling_gap.lower(x, y, x, weights, prototypes, small, 2.0, block=block),
    'penalty_entropy': metrics.negatives._penalty_entropy.lower(x, metrics.negatives._argument(COSINE), block=block),
    'penalty_distribution': metrics.negatives._penalty_distribution.lower(
      x, metrics.negatives._argument(COSINE), bins=100, block=block
    ),
    'conditional_entropy': metrics.negatives._conditional_entropy.lower(x, 2.0, batch=768),
    'local_separation': metrics.negatives._local_separation.lower(x, x, k=10, block=block),
    'similarity_histograms': metrics.negatives._similarity_histograms.lower(x, x, y, bins=100, block=block),
    'rankme': metrics.geometry._singular_values.lower(x),
    'knn': knn._classify.lower(
      x, y, x, 0.1, k=(1, 200), vote='cosine', num_classes=1000, block=row_blocks.rows(n, 200 * 1000)
    ),
  }
  for name, program in programs.items():
    memory = program.compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2e9, name


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: metrics.uniformity(X[:1]), 'features: 1 example'),
    (lambda: metrics.uniformity(np.full((3, 2), np.inf)), 'features: holds NaN'),
    (lambda: metrics.alignment(VIEWS[:1]), 'views: 1 view'),
    (lambda: metrics.alignment(X), r'views: shape \(37, 6\)'),
    (lambda: metrics.tolerance(X, None), 'labels = None'),
    (lambda: metrics.tolerance(X, Y * 10**6), 'labels: classes up to .*; number the classes from 0'),
    (lambda: metrics.penalty_entropy(X, -0.5), 'temperature = -0.5 must be positive'),
    (
      lambda: metrics.penalty_entropy(X, temperature.cosine_schedule(0.1, 1.0, period=9)),
      'temperature is a schedule of the step',
    ),
    (lambda: metrics.penalty_distribution(X, temperature.learnable()), 'temperature is the temperature of a run'),
    (lambda: metrics.uniformity(X, t=-1.0), r't = -1\.0 must be positive'),
    (lambda: metrics.inter_class_uniformity(X, Y, t=0.0), r't = 0\.0 must be positive'),
    (lambda: metrics.conditional_entropy(X, t_neg=-1.0, batch=10), r't_neg = -1\.0 must be positive'),
    (lambda: metrics.repelling_gap(X, Y, X, Y, alpha=0.0), r'alpha = 0\.0 must be positive'),
    (lambda: metrics.tolerance(X, Y[:5]), r'labels: shape \(5,\), expected \(37,\)'),
    (lambda: metrics.same_label_similarity(X[:3], np.arange(3)), 'labels: no class has two'),
    (lambda: metrics.inter_class_uniformity(X, np.zeros(N, int)), 'labels: every example is of class 0'),
    (lambda: metrics.repelling_gap(X, Y, X[:9], np.arange(9) % 2), r'query_labels: classes \[2, 3, 7\]'),
    (lambda: metrics.repelling_gap(X, Y, VIEWS[1][:, :3], Y), 'query: 6 dimensions, but bank has 3'),
    (lambda: metrics.attracting_gap(X, VIEWS[:, :4]), r'views: shape \(3, 4, 6\), expected \[views, 37, 6\]'),
    (lambda: metrics.conditional_entropy(X, batch=38), 'batch = 38 must be from 3 to 37'),
    (lambda: metrics.penalty_entropy(X[:2], 0.1), 'features: 2 examples'),
    (lambda: metrics.penalty_distribution(X[:1], 0.1), 'features: 1 example'),
    (lambda: metrics.local_separation(X, VIEWS[1], k=37), 'k = 37 must be from 1 to 36'),
    (lambda: metrics.local_separation(X, VIEWS[1][:4]), r'positives: shape \(4, 6\), expected \(37, 6\)'),
    (
      lambda: metrics.alpha_req(X[:, :3]),
      r'ranks = \(3, 100\) must include two eigenvalues, but the covariance has rank 3',
    ),
    (lambda: metrics.lidar(VIEWS[:1]), r'views: shape \(1, 37, 6\)'),
  ],
)
def test_errors_name_the_argument(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert '\n' not in str(error.value)
