"""Each contrastive loss against a float64 loop of its equation, in value and gradient, and what all losses keep."""

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
from tests.reference import contrastive as reference
from tests.test_losses_config import PARAMETERS

TAUS = (0.01, 0.05, 0.2, 1.0)

# name -> (the loss at a temperature or at what it has in its place, the loop, whether the loop can hold a part fixed)
CASES = {
  'info_nce': (losses.info_nce, reference.info_nce, False),
  'multi_positive': (losses.multi_positive, reference.info_nce, False),
  'decoupled': (losses.decoupled, reference.decoupled, False),
  'sigmoid': (functools.partial(losses.sigmoid, bias=-2.0), functools.partial(reference.sigmoid, bias=-2.0), False),
  'decoupled_weighted': (losses.decoupled_weighted, reference.decoupled_weighted, True),
  'simple': (
    lambda pos, neg, tau, where=None: losses.simple(pos, neg, weight=tau, where=where),
    reference.simple,
    False,
  ),
  'hard': (functools.partial(losses.hard, fraction=0.3), functools.partial(reference.hard, fraction=0.3), False),
  'hard_simple': (
    lambda pos, neg, tau, where=None: losses.hard_simple(pos, neg, fraction=0.3, weight=tau, where=where),
    lambda pos, neg, tau: reference.hard_simple(pos, neg, 0.3, weight=tau),
    False,
  ),
  'balanced': (
    lambda pos, neg, tau, where=None: losses.balanced(pos, neg, alpha=1 / tau, lam=4.0, where=where),
    lambda pos, neg, tau: reference.balanced(pos, neg, 1 / tau, lam=4.0),
    False,
  ),
  'generalized_nt_xent': (
    lambda pos, neg, tau, where=None: losses.generalized_nt_xent(pos, neg, alpha=1 / tau, lam=2.0, where=where),
    lambda pos, neg, tau: reference.generalized_nt_xent(pos, neg, 1 / tau, lam=2.0),
    False,
  ),
  'macl': (
    lambda pos, neg, tau, where=None: losses.macl(pos, neg, tau0=tau, where=where),
    reference.macl,
    True,
  ),
  'hard_negative': (
    functools.partial(losses.hard_negative, beta=1.0),
    functools.partial(reference.hard_negative, beta=1.0),
    False,
  ),
  'hard_negative_debiased': (
    functools.partial(losses.hard_negative, beta=0.5, tau_plus=0.1),
    functools.partial(reference.hard_negative, beta=0.5, tau_plus=0.1),
    False,
  ),
  'align_uniform': (
    lambda pos, neg, tau, where=None: losses.align_uniform(pos, neg, t=1 / tau, weight=0.5, where=where),
    lambda pos, neg, tau: reference.align_uniform(pos, neg, 1 / tau, weight=0.5),
    False,
  ),
  'cacr': (
    lambda pos, neg, tau, where=None: losses.cacr(pos, neg, t_pos=1.5, t_neg=1 / tau, where=where),
    lambda pos, neg, tau: reference.cacr(pos, neg, t_pos=1.5, t_neg=1 / tau),
    False,
  ),
  'cacr_inner': (
    lambda pos, neg, tau, where=None: losses.cacr(
      pos,
      neg,
      t_pos=1 / tau,
      t_neg=2.0,
      cost='inner',
      positive_weights='near',
      negative_weights='far',
      where=where,
    ),
    lambda pos, neg, tau: reference.cacr(pos, neg, 1 / tau, 2.0, 'inner', 'near', 'far'),
    False,
  ),
  'cacr_rbf': (
    lambda pos, neg, tau, where=None: losses.cacr(pos, neg, cost='rbf', t_rbf=1 / tau, where=where),
    lambda pos, neg, tau: reference.cacr(pos, neg, 1.0, 2.0, 'rbf', t_rbf=1 / tau),
    False,
  ),
  'cacr_margin': (
    lambda pos, neg, tau, where=None: losses.cacr_margin(
      pos, neg, margin=0.3 + tau, t_pos=1.5, t_neg=2.0, cost='inner', where=where
    ),
    lambda pos, neg, tau: reference.cacr_margin(pos, neg, 0.3 + tau, 1.5, 2.0, 'inner'),
    False,
  ),
  'triplet': (
    lambda pos, neg, tau, where=None: losses.triplet(pos, neg, margin=tau, where=where),
    reference.triplet,
    False,
  ),
}
PER_QUERY = tuple(name for name in CASES if name not in ('decoupled_weighted', 'macl', 'align_uniform', 'cacr_rbf'))


def similarities(negatives, positives=1, queries=3, columns=None, seed=0):
  """Random pos [Q, K], neg [Q, columns] and where, which keeps some of the first M negatives of each query."""
  rng = np.random.default_rng([seed, negatives, positives, queries])
  pos, neg = (rng.uniform(-1, 1, (queries, n)).astype(np.float32) for n in (positives, columns or negatives))
  where = (rng.random(neg.shape) < 0.7) & (np.arange(neg.shape[1]) < negatives)
  where[np.arange(queries), rng.integers(negatives, size=queries)] = True
  return pos, neg, where


def rows(pos, neg, where):
  """The arrays as the loops take them: lists of Python floats, without masked negatives."""
  return pos.astype(float).tolist(), [row[keep].astype(float).tolist() for row, keep in zip(neg, where, strict=True)]


def difference_quotient(loop, pos, neg, where, entries, step=1e-6):
  """The derivatives of the mean of the loop's values with respect to entries of [pos | neg], by central differences."""
  both = np.concatenate([pos, neg], axis=1).astype(float)
  derivatives = []
  for entry in entries:
    mean = {}
    for sign in (1, -1):
      moved = both.copy()
      moved[entry] += sign * step
      mean[sign] = np.mean(loop(*rows(moved[:, : pos.shape[1]], moved[:, pos.shape[1] :], where)))
    derivatives.append((mean[1] - mean[-1]) / (2 * step))
  return np.array(derivatives)


class EquationTest(chex.TestCase):
  @parameterized.product(name=tuple(CASES), positives=(1, 4))
  def test_value_and_gradient_are_those_of_the_loop(self, name, positives):
    loss, loop, can_fix = CASES[name]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, None, None, 0))
    def at_all_taus(pos, neg, where, tau):
      def mean(pos, neg):
        values = loss(pos, neg, tau, where=where)
        return jnp.mean(values), values

      gradients, values = jax.grad(mean, argnums=(0, 1), has_aux=True)(pos, neg)
      return values, jnp.concatenate(gradients, axis=1)

    for negatives in (1, 2, 7, 64):
      pos, neg, where = similarities(negatives, positives, columns=64)
      values, gradients = jax.device_get(at_all_taus(pos, neg, where, np.array(TAUS, np.float32)))
      chex.assert_shape(values, (len(TAUS), 3))
      np.testing.assert_array_equal(gradients[:, :, positives:][:, ~where], 0)

      differentiable = np.concatenate([np.ones(pos.shape, bool), where], axis=1)
      entries = np.random.default_rng(0).permutation(np.argwhere(differentiable))[:12]
      entries = [tuple(entry) for entry in entries]
      for value, gradient, tau in zip(values, gradients, np.array(TAUS, np.float32).astype(float), strict=True):
        # Losses below 1e-30 are below what float32 can hold.
        np.testing.assert_allclose(value, loop(*rows(pos, neg, where), tau), rtol=1e-5, atol=1e-30)
        held = {'fixed': rows(pos, neg, where)} if can_fix else {}
        at_tau = functools.partial(loop, **held)
        expected = difference_quotient(lambda p, n, f=at_tau, tau=tau: f(p, n, tau), pos, neg, where, entries)
        actual = np.array([gradient[entry] for entry in entries])
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max() + 1e-8)

  @parameterized.parameters(*CASES)
  def test_outside_jit_with_one_positive_as_a_vector(self, name):
    loss, loop, _ = CASES[name]
    pos, neg, where = similarities(2, queries=4)
    actual = loss(pos[:, 0], neg, 0.2)
    np.testing.assert_allclose(actual, loop(*rows(pos, neg, where | True), 0.2), rtol=1e-5)
    chex.assert_type(actual, jnp.float32)
    where[1] = False
    with self.assertRaisesRegex(ValueError, r'^where is False for every negative of query 1: .*give it a negative$'):
      loss(pos, neg, 0.2, where=where)

  @parameterized.parameters(*CASES)
  def test_no_columns(self, name):
    loss, _, _ = CASES[name]
    with self.assertRaisesRegex(ValueError, 'give each query a positive and a negative'):
      loss(jnp.zeros((2, 1)), jnp.zeros((2, 0)), 0.1)

  @parameterized.parameters(*CASES)
  def test_finite_at_the_ends(self, name):
    """Identical, opposite, collapsed, perfect and ordinary bfloat16 similarities; 0 for a query without negatives."""
    loss, _, _ = CASES[name]
    ends = [(0.3, 0.3), (1, 1), (-1, -1), (-1, 1), (1, -1)]
    pos = np.array([[p] for p, _ in ends], jnp.bfloat16)
    neg = np.array([[n] * 3 for _, n in ends], jnp.bfloat16)
    every = np.ones(neg.shape, bool)
    masks = np.stack([every, every & np.array([[False, True, False]]), every & (np.arange(len(ends)) > 0)[:, None]])

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def both(where, tau):
      def total(pos, neg):
        values = loss(pos, neg, tau, where=where)
        return values.sum(), values

      return jax.grad(total, argnums=(0, 1), has_aux=True)(pos, neg)

    for tau in (0.01, 1.0):
      (grad_pos, grad_neg), values = jax.device_get(both(masks, tau))
      chex.assert_tree_all_finite((grad_pos, grad_neg, values))
      chex.assert_type(values, jnp.float32)
      self.assertEqual(values[2, 0], 0)
      np.testing.assert_array_equal(grad_neg[2, 0], 0)
      if name in PER_QUERY:  # where the others have a part in a mean over all queries
        np.testing.assert_array_equal(grad_pos[2, 0], 0)
        np.testing.assert_array_equal(values[2, 1:], values[0, 1:])

  def test_one_array_temperature_a_query(self):
    pos, neg, where = similarities(7, positives=4)
    taus = jnp.array([0.01, 0.1, 1.0])
    for name in ('info_nce', 'decoupled', 'hard', 'hard_negative'):
      loss, _, _ = CASES[name]
      loss = jax.jit(loss)
      expected = [loss(pos, neg, tau, where=where)[query] for query, tau in enumerate(taus)]
      np.testing.assert_allclose(loss(pos, neg, taus, where=where), expected, rtol=1e-5)

  @parameterized.parameters('info_nce', 'decoupled_weighted', 'hard', 'hard_negative')
  def test_temperature_functions_act_on_each_similarity(self, name):
    loss, loop, _ = CASES[name]
    pos, neg, where = similarities(7, positives=4)
    functions = (
      temperature.cosine(0.07, 0.2),
      temperature.shifted_cosine(0.1, 0.2, -0.4, 0.7),
      temperature.linear(0.1, 0.2),
      temperature.exponential(0.1, 0.2),
      temperature.monotonic_cosine(0.1, 0.2),
    )
    at_all = jax.jit(lambda pos, neg: [loss(pos, neg, function, where=where) for function in functions])
    for actual, function in zip(at_all(pos, neg), functions, strict=True):
      scaled = [x / np.array(function(x)) for x in (pos, neg)]
      if name == 'decoupled_weighted':  # its weights look at the positives as they are
        weights = 2 - np.exp(pos / 0.5) / np.exp(pos / 0.5).mean()
        expected = reference.decoupled(*rows(scaled[0] * weights, scaled[1], where), 1.0)
      elif name == 'hard_negative':  # so does its floor
        expected = loop(*rows(*scaled, where), 1.0, least=-1 / float(function(-1.0)))
      else:
        expected = loop(*rows(*scaled, where), 1.0)
      np.testing.assert_allclose(actual, expected, rtol=2e-5)


@jax.jit
def every_loss(pos, neg, where, tau):
  return {name: loss(pos, neg, tau, where=where) for name, (loss, _, _) in CASES.items()}


class InvarianceTest(chex.TestCase):
  @hypothesis.settings(deadline=None, max_examples=20)
  @hypothesis.given(seed=st.integers(0, 2**32 - 1), tau=st.sampled_from(TAUS))
  def test_order_of_negatives_and_of_positives(self, seed, tau):
    pos, neg, where = similarities(6, positives=3, seed=seed)
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(6) for _ in neg])
    permuted = [np.take_along_axis(x, orders, axis=1) for x in (neg, where)]
    chex.assert_trees_all_close(
      every_loss(pos[:, rng.permutation(3)], *permuted, tau), every_loss(pos, neg, where, tau), rtol=1e-4, atol=1e-4
    )

  @hypothesis.settings(deadline=None, max_examples=20)
  @hypothesis.given(seed=st.integers(0, 2**32 - 1), tau=st.sampled_from(TAUS))
  def test_what_is_no_negative_has_no_say(self, seed, tau):
    pos, neg, where = similarities(6, positives=3, seed=seed)
    more = np.random.default_rng(seed).uniform(-1, 1, (3, 3)).astype(np.float32)
    extended = np.concatenate([neg, more], axis=1), np.concatenate([where, np.zeros(more.shape, bool)], axis=1)
    chex.assert_trees_all_close(every_loss(pos, *extended, tau), every_loss(pos, neg, where, tau), rtol=1e-4, atol=1e-4)

  @hypothesis.settings(deadline=None, max_examples=20)
  @hypothesis.given(seed=st.integers(0, 2**32 - 1), tau=st.sampled_from(TAUS))
  def test_order_of_queries(self, seed, tau):
    arrays = similarities(6, positives=3, seed=seed)
    order = np.random.default_rng(seed).permutation(3)
    actual = every_loss(*(x[order] for x in arrays), tau)
    expected = jax.tree.map(lambda x: x[order], every_loss(*arrays, tau))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4)

  @hypothesis.settings(deadline=None, max_examples=20)
  @hypothesis.given(seed=st.integers(0, 2**32 - 1), tau=st.sampled_from(TAUS))
  def test_order_of_views(self, seed, tau):
    z1, z2 = np.random.default_rng(seed).normal(size=(2, 4, 5)).astype(np.float32)
    nt_xent = jax.jit(losses.nt_xent)
    np.testing.assert_allclose(nt_xent(z2, z1, tau), np.roll(nt_xent(z1, z2, tau), 4), rtol=1e-5, atol=1e-5)


class MisuseTest(absltest.TestCase):
  def test_what_is_not_a_temperature_is_given_by_name(self):
    pos, neg, _ = similarities(3)
    with self.assertRaisesRegex(TypeError, '^simple takes pos, neg by position: give weight, where by name$'):
      losses.simple(pos, neg, 0.5)
    with self.assertRaisesRegex(
      TypeError, '^hard takes pos, neg, temperature by position: give fraction, where by name$'
    ):
      losses.hard(pos, neg, 0.5, 0.3)

  def test_a_traced_fraction_is_refused(self):
    pos, neg, _ = similarities(3)
    for loss in (functools.partial(losses.hard, temperature=0.5), losses.hard_simple):
      with self.assertRaisesRegex(ValueError, '^fraction is traced, .*: give a number, or make it static in jit$'):
        jax.jit(lambda fraction, loss=loss: loss(pos, neg, fraction=fraction))(0.5)

  def test_an_array_as_the_temperature_may_be_a_constant_of_a_jitted_loss(self):
    pos, neg, _ = similarities(3)
    tau = jnp.float32(0.2)
    values = jax.jit(lambda pos, neg: losses.info_nce(pos, neg, tau))(pos, neg)
    np.testing.assert_allclose(values, losses.info_nce(pos, neg, 0.2), rtol=1e-6)
    wrong = jnp.float32(-0.2)
    with self.assertRaisesRegex(ValueError, 'must be positive and finite'):
      jax.jit(lambda pos, neg: losses.info_nce(pos, neg, wrong))(pos, neg)

  @pytest.mark.slow
  def test_negatives_carry_their_mask(self):
    """A loss of pairs without `where` is the loss with it, in value and gradient."""
    views = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    for name, function in losses.CONTRASTIVE.items():
      loss = losses.Loss(function, PARAMETERS.get(name, {}))
      tau = temperature.cosine(0.1, 0.2) if loss.takes_temperature else None

      def total(views, masked, loss=loss, tau=tau):
        pos, neg, where = pairs.in_batch(*views)
        return loss(pos, neg, tau, where=where if masked else None).sum()

      expected, actual = (jax.value_and_grad(total)(views, masked) for masked in (True, False))
      chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)

  def test_a_schedule_or_a_learnable_temperature_is_refused(self):
    pos, neg, _ = similarities(3)
    schedule = temperature.cosine_schedule(0.1, 1.0, period=9)
    for tau, message in (
      (schedule, r'^temperature is a schedule of the step, .*: pass schedule\(step\)'),
      (temperature.macl, r'^temperature = macl is a function of the positives: pass macl\(pos\)'),
      (temperature.learnable(), r'^temperature is the temperature of a run, .*: pass schedule\.at\(params, step\)'),
      ('0.2', "^temperature = '0.2' must be positive and finite"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        losses.info_nce(pos, neg, tau)


if __name__ == '__main__':
  absltest.main()
