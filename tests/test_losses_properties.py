"""What the papers prove of their losses."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ssl_jax import losses, temperature
from tests.reference import contrastive as reference

M = 5


def similarities(seed, positives=1):
  rng = np.random.default_rng(seed)
  return [rng.uniform(-1, 1, (3, n)).astype(np.float32) for n in (positives, M)]


def given_similarities(test):
  return hypothesis.settings(deadline=None, max_examples=20)(hypothesis.given(seed=st.integers(0, 2**32 - 1))(test))


@jax.jit
def info_nce_gradients(pos, neg, tau):
  return jax.grad(lambda pos, neg: losses.info_nce(pos, neg, tau).sum(), argnums=(0, 1))(pos, neg)


info_nce = jax.jit(losses.info_nce)
penalties = jax.jit(losses.penalties)
penalty_entropy = jax.jit(losses.penalty_entropy)
triplet = jax.jit(functools.partial(losses.triplet, margin=0.0))
simple = jax.jit(functools.partial(losses.simple, weight=1 / M))
simple_gradients = jax.jit(jax.grad(lambda pos, neg: simple(pos, neg).sum(), argnums=(0, 1)))
balanced = jax.jit(functools.partial(losses.balanced, lam=3.0))
generalized_nt_xent = jax.jit(functools.partial(losses.generalized_nt_xent, lam=1.0))


class BehaviourTest(absltest.TestCase):
  @given_similarities
  def test_a_vanishing_temperature_gives_the_triplet_loss(self, seed):
    """Eq. 6: tau · info_nce -> max(s_max - s, 0), at most tau · log(M + 1) away; half the squared-distance triplet."""
    pos, neg = similarities(seed)
    limit = np.maximum(neg.max(axis=1) - pos[:, 0], 0)
    np.testing.assert_allclose(triplet(pos, neg) / 2, limit, atol=1e-6)
    for tau in (1e-1, 1e-2, 1e-3):
      above = tau * info_nce(pos, neg, tau) - limit
      self.assertTrue((above > -1e-6).all() and (above <= tau * np.log(M + 1) + 1e-6).all(), above)

  @given_similarities
  def test_a_growing_temperature_gives_the_simple_loss(self, seed):
    """Eq. 7 with N = M + 1: the gradient times tau -> that of (N - 1) / N · simple with weight 1 / (N - 1)."""
    pos, neg = similarities(seed)
    limit = jax.tree.map(lambda g: M / (M + 1) * np.asarray(g), simple_gradients(pos, neg))
    for tau in (1e1, 1e2, 1e3):
      gradients = jax.tree.map(lambda g, tau=tau: tau * np.asarray(g), info_nce_gradients(pos, neg, tau))
      chex.assert_trees_all_close(gradients, limit, atol=2 / tau)
    # And the value: log N and, a factor of 1 / tau smaller, that loss.
    expected = np.log(M + 1) + M / (M + 1) * np.asarray(simple(pos, neg)) / 1e2
    np.testing.assert_allclose(info_nce(pos, neg, 1e2), expected, atol=1e-4)

  @given_similarities
  def test_gradients_are_probabilities_and_cancel(self, seed):
    """Eq. 4: dL/ds_k = P_k / tau, and the sum over the negatives is minus the one of the positive."""
    pos, neg = similarities(seed)
    for tau in (0.05, 0.2, 1.0):
      grad_pos, grad_neg = info_nce_gradients(pos, neg, tau)
      both = np.concatenate([pos, neg], axis=1).astype(float) / tau
      probabilities = np.exp(both) / np.exp(both).sum(axis=1, keepdims=True)
      np.testing.assert_allclose(grad_neg, probabilities[:, 1:] / tau, rtol=1e-4, atol=1e-6)
      np.testing.assert_allclose(grad_neg.sum(axis=1), -grad_pos[:, 0], rtol=1e-4, atol=1e-6)

  @given_similarities
  def test_penalties_are_ratios_of_gradients(self, seed):
    """Eq. 5."""
    pos, neg = similarities(seed)
    grad_pos, grad_neg = info_nce_gradients(pos, neg, 0.3)
    np.testing.assert_allclose(penalties(neg, 0.3), np.abs(grad_neg) / np.abs(grad_pos), rtol=1e-4)
    np.testing.assert_allclose(penalties(neg, 0.3), reference.penalties(neg.tolist(), 0.3), rtol=1e-5)

  @given_similarities
  def test_entropy_of_penalties_grows_with_the_temperature(self, seed):
    """Supplement, sec. 2: strictly, unless all similarities are equal."""
    _, neg = similarities(seed)
    hypothesis.assume(np.diff(np.sort(neg, axis=1)).min() > 1e-2)
    entropies = np.stack([penalty_entropy(neg, tau) for tau in np.geomspace(0.1, 3, 8, dtype=np.float32)])
    self.assertTrue((np.diff(entropies, axis=0) > 0).all(), entropies)
    self.assertLess(entropies.max(), np.log(M))

  def test_entropy_of_equal_similarities(self):
    for tau in (0.01, 1.0):
      np.testing.assert_allclose(losses.penalty_entropy(jnp.full((1, M), 0.7), tau), np.log(M), rtol=1e-5)

  def test_masked_negatives_have_no_penalty(self):
    neg, where = jnp.array([[0.1, 0.9, -0.3]]), jnp.array([[True, False, True]])
    entropy = jax.jit(jax.value_and_grad(lambda neg, tau: losses.penalty_entropy(neg, tau, where).sum()))
    for tau in (0.01, 0.5):
      (first, last), *_ = reference.penalties([[0.1, -0.3]], tau)
      np.testing.assert_allclose(losses.penalties(neg, tau, where), [[first, 0, last]], rtol=1e-5)
      value, gradient = entropy(neg, tau)
      np.testing.assert_allclose(value, -first * np.log(first) - last * np.log(last), rtol=1e-4, atol=1e-30)
      chex.assert_tree_all_finite(gradient)
    nothing = jnp.zeros((1, 3), bool)
    np.testing.assert_array_equal(losses.penalties(neg, 0.5, nothing), 0)
    np.testing.assert_array_equal(losses.penalty_entropy(neg, 0.5, nothing), 0)

  def test_hard_with_all_negatives_is_info_nce(self):
    pos, neg = similarities(0)
    np.testing.assert_allclose(losses.hard(pos, neg, 0.2, fraction=1.0), losses.info_nce(pos, neg, 0.2), rtol=1e-6)

  def test_hard_takes_the_ceil_of_the_fraction(self):
    pos, neg = np.array([[0.5]], np.float32), np.arange(100, dtype=np.float32)[None] / 100
    first_half = np.arange(100)[None] < 50
    for fraction, of_100, of_50 in ((0.07, 7, 4), (0.0819, 9, 5), (1e-3, 1, 1)):
      hard = jax.jit(functools.partial(losses.hard, temperature=0.2, fraction=fraction))
      for where, expected in ((first_half | True, neg[:, 100 - of_100 :]), (first_half, neg[:, 50 - of_50 : 50])):
        np.testing.assert_allclose(hard(pos, neg, where=where), reference.info_nce(pos, expected, 0.2), rtol=1e-5)


class DystressTest(chex.TestCase):
  @parameterized.parameters(
    temperature.cosine(0.07, 0.2),
    temperature.shifted_cosine(0.1, 0.2, -0.4, 0.7),
    temperature.linear(0.1, 0.3),
    temperature.exponential(0.1, 0.3, 2.0),
    temperature.monotonic_cosine(0.1, 0.2),
  )
  def test_gradients_of_eq_6_and_7(self, function):
    pos, neg = similarities(0)
    slope = jax.jit(jax.vmap(jax.vmap(jax.grad(function))))
    tau_pos, tau_neg = (np.array(function(s), float) for s in (pos, neg))
    exps = np.exp(np.concatenate([pos / tau_pos, neg / tau_neg], axis=1))
    p = exps / exps.sum(axis=1, keepdims=True)

    def gradients(temperature):
      return jax.jit(jax.grad(lambda p, n: losses.info_nce(p, n, temperature).sum(), argnums=(0, 1)))(pos, neg)

    flowing = gradients(temperature.with_gradient(function))
    expected = (
      -(tau_pos - pos * slope(pos)) / tau_pos**2 * (1 - p[:, :1]),
      (tau_neg - neg * slope(neg)) / tau_neg**2 * p[:, 1:],
    )
    chex.assert_trees_all_close(flowing, jax.tree.map(np.float32, expected), rtol=1e-4, atol=1e-5)
    # Detached, as in Alg. 3, the slopes are absent.
    expected = -(1 - p[:, :1]) / tau_pos, p[:, 1:] / tau_neg
    chex.assert_trees_all_close(gradients(function), jax.tree.map(np.float32, expected), rtol=1e-4, atol=1e-5)


class SupervisedTest(absltest.TestCase):
  @given_similarities
  def test_repelling_term_is_a_smooth_maximum(self, seed):
    """Lemma A.1: between max and max + log(n) / alpha."""
    pos, neg = similarities(seed, positives=2)
    for alpha in (0.5, 2.0, 8.0, 100.0):
      repelling = (balanced(pos, neg, alpha=alpha) + pos.mean(axis=1)) / 3.0
      above = repelling - neg.max(axis=1)
      self.assertTrue((above > -1e-6).all() and (above <= np.log(M) / alpha + 1e-6).all(), above)

  @given_similarities
  def test_generalized_nt_xent_generalizes(self, seed):
    """Sec. 6: with lam = 1 and alpha = 1 / tau it is tau · NT-Xent."""
    pos, neg = similarities(seed, positives=2)
    for tau in (0.05, 0.5):
      actual = generalized_nt_xent(pos, neg, alpha=1 / tau)
      np.testing.assert_allclose(actual, tau * info_nce(pos, neg, tau), rtol=1e-4, atol=1e-6)

  def test_balanced_generalizes_decoupled(self):
    """Eq. 14: with lam = 1 and alpha = 1 / tau it is tau · DCL."""
    pos, neg = similarities(0)
    actual = losses.balanced(pos, neg, alpha=1 / 0.2, lam=1.0)
    np.testing.assert_allclose(actual, 0.2 * losses.decoupled(pos, neg, 0.2), rtol=1e-5)


class CACRTest(absltest.TestCase):
  def test_uniform_weights_are_uaur(self):
    """Eq. 11."""
    pos, neg = similarities(0, positives=4)
    for cost, c in (('euclidean', lambda s: 2 - 2 * s), ('inner', lambda s: -s)):
      actual = losses.cacr(pos, neg, cost=cost, positive_weights='uniform', negative_weights='uniform')
      np.testing.assert_allclose(actual, c(pos).mean(axis=1) - c(neg).mean(axis=1), rtol=1e-5)

  def test_attraction_is_reweighted_alignment(self):
    """Lemma 4.1: E[-s π⁺/p], which is the alignment E[-s] iff π⁺ = p."""
    pos, neg = similarities(0, positives=4)
    repulsion = losses.cacr(jnp.zeros((3, 1)), neg, cost='inner')  # of a positive with cost 0
    attraction = losses.cacr(pos, neg, t_pos=1.5, cost='inner') - repulsion
    ratio = 4 * np.exp(1.5 * (2 - 2 * pos)) / np.exp(1.5 * (2 - 2 * pos)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(attraction, (-pos * ratio).mean(axis=1), rtol=1e-4)
    self.assertTrue((attraction > -pos.mean(axis=1) + 1e-3).all())
    aligned = losses.cacr(pos, neg, cost='inner', positive_weights='uniform') - repulsion
    np.testing.assert_allclose(aligned, -pos.mean(axis=1), rtol=1e-4, atol=1e-6)

  def test_with_one_positive_weights_of_positives_do_not_matter(self):
    pos, neg = similarities(0)
    for weights in ('far', 'near', 'uniform'):
      actual = losses.cacr(pos, neg, t_pos=3.0, positive_weights=weights)
      np.testing.assert_allclose(actual, losses.cacr(pos, neg), rtol=1e-6)

  def test_sharp_weights_give_the_triplet_loss(self):
    """B.5: max c(pos) - min c(neg)."""
    pos, neg = similarities(0, positives=4)
    sharp = losses.cacr(pos, neg, t_pos=1e4, t_neg=1e4)
    np.testing.assert_allclose(jax.nn.relu(sharp + 0.5), losses.triplet(pos, neg, margin=0.5), rtol=1e-5, atol=1e-6)

  def test_attraction_is_least_when_positives_agree(self):
    """Property 1: 0, and only where all positives have similarity 1."""
    _, neg = similarities(0)
    at = lambda *s: losses.cacr(jnp.array([s] * 3), neg)
    self.assertTrue((at(0.99, 1.0) > at(1.0, 1.0)).all())
    np.testing.assert_allclose(at(1.0, 1.0) - at(0.0, 0.0), -2.0, rtol=1e-5)

  def test_repulsion_is_below_uniformity_and_information(self):
    """Lemma 4.3 with tau = 1 and c = -s: E log E e^s + I >= E_π[s], an equality where π ∝ e^s."""
    pos, neg = similarities(0)
    repulsion = losses.cacr(jnp.zeros_like(pos), neg, t_neg=0.5, cost='inner')
    pi = np.array(losses.penalties(neg, 1.0), float)  # softmax(-t_neg · (2 - 2s)) = softmax(s) at t_neg = 1/2
    information = (pi * np.log(pi * M)).sum(axis=1)
    uniformity = np.log(np.exp(neg.astype(float)).mean(axis=1))
    np.testing.assert_allclose(uniformity + information, repulsion, rtol=1e-4, atol=1e-6)


class OtherLossesTest(absltest.TestCase):
  def test_gradient_of_macl_is_that_of_decoupled_at_its_temperature(self):
    """-log P / (1 - P) with the denominator held: the 1 - P of InfoNCE's gradient cancels."""
    pos, neg = similarities(0, positives=2)
    tau = temperature.macl(pos, tau0=0.2)
    np.testing.assert_allclose(tau, 0.2 * (1 + 0.5 * pos.mean()), rtol=1e-6)
    gradients = [
      jax.jit(jax.grad(lambda p, n, loss=loss: loss(p, n).sum(), argnums=(0, 1)))(pos, neg)
      for loss in (functools.partial(losses.macl, tau0=0.2), functools.partial(losses.decoupled, temperature=tau))
    ]
    chex.assert_trees_all_close(*gradients, rtol=1e-5)

  def test_macl_adapts_to_the_alignment_of_the_positives(self):
    tau = functools.partial(temperature.macl, tau0=0.1, alpha=0.5, threshold=0.2)
    np.testing.assert_allclose(tau(jnp.array([0.2, 0.2])), 0.1, rtol=1e-6)
    self.assertGreater(tau(jnp.array([0.9, 0.8])), tau(jnp.array([0.1, 0.2])))
    np.testing.assert_allclose(temperature.macl(jnp.array([-1.0]), tau0=0.1, alpha=1.0), 0.001, rtol=1e-5)

  def test_gradients_are_finite_where_debiasing_leaves_next_to_nothing(self):
    # e^x of the logarithms' difference rounds to 1 at the second of these, and is just below it at the others.
    pos = jnp.float32([0.1466321498155594]) + jnp.float32([-1e-6, 0, 1e-6])
    neg = jnp.full((3, 3), -0.19994144141674042, jnp.float32)
    total = lambda pos, neg: losses.hard_negative(pos, neg, 0.5, beta=1.0, tau_plus=0.5).sum()
    value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(pos, neg)
    chex.assert_tree_all_finite((value, gradients))

  def test_hard_negative_without_its_parameters_is_info_nce(self):
    pos, neg = similarities(0)
    np.testing.assert_allclose(losses.hard_negative(pos, neg, 0.2, beta=0.0), losses.info_nce(pos, neg, 0.2), rtol=1e-5)

  def test_weights_of_decoupled_weighted_average_to_one(self):
    pos, neg = similarities(0)
    weights = (losses.decoupled(0 * pos, neg, 1.0) - losses.decoupled_weighted(pos, neg, 1.0)) / pos[:, 0]
    np.testing.assert_allclose(weights.mean(), 1.0, rtol=1e-5)
    equal = jnp.full_like(pos, 0.3)
    actual = losses.decoupled_weighted(equal, neg, 0.2)
    np.testing.assert_allclose(actual, losses.decoupled(equal, neg, 0.2), rtol=1e-5)

  def test_the_queries_of_each_pair_of_views_are_a_group(self):
    rng = np.random.default_rng(0)
    pos, neg = (jnp.asarray(rng.uniform(-1, 1, size=(6, n)), jnp.float32) for n in (2, 5))
    for loss in (losses.align_uniform, functools.partial(losses.cacr, cost='rbf')):
      both = jax.jit(lambda pos, neg, loss=loss: (loss(pos, neg, view_pairs=3), loss(pos[:2], neg[:2])))
      actual = both(pos, neg)[0]
      expected = np.concatenate([both(*(np.roll(x, -i, axis=0) for x in (pos, neg)))[1] for i in (0, 2, 4)])
      np.testing.assert_allclose(actual, expected, rtol=1e-5)
      with self.assertRaisesRegex(ValueError, r'^view_pairs = 4 must be a divisor of the 6 queries'):
        loss(pos, neg, view_pairs=4)

  def test_align_uniform_of_equal_negatives(self):
    """With all negatives at one distance, uniformity is -t · ‖x - x⁻‖²."""
    actual = losses.align_uniform(jnp.array([1.0]), jnp.full((1, 3), -0.5), t=2.0)
    np.testing.assert_allclose(actual, -2 * 3.0, rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
