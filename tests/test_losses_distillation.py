"""The losses with a target against torch, and what they need of the batch on any number of devices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized

from ssl_jax import losses, temperature
from tests.helpers import mapped
from tests.reference import distillation as reference

N, K = 8, 6
CASES = {
  'byol': (losses.byol, reference.byol, ()),
  'simsiam': (losses.simsiam, reference.simsiam, ()),
  'dino': (losses.dino, reference.dino, (np.linspace(-0.2, 0.3, K, dtype=np.float32), 0.1, 0.04)),
  'swav': (losses.swav, reference.swav, (0.1,)),
}


def arrays(count=2, seed=0, rows=N):
  rng = np.random.default_rng(seed)
  return [rng.uniform(-1, 1, (rows, K)).astype(np.float32) for _ in range(count)]


def arguments(name):
  prediction, target = arrays()
  if name == 'swav':
    target = np.exp(target) / np.exp(target).sum(axis=1, keepdims=True)
  return prediction, target


class OracleTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*CASES)
  def test_value_and_gradient_are_torch_s(self, name):
    loss, oracle, rest = CASES[name]
    prediction, target = arguments(name)
    tensor = torch.tensor(prediction, dtype=torch.float64, requires_grad=True)
    others = [torch.tensor(x, dtype=torch.float64) if isinstance(x, np.ndarray) else x for x in (target, *rest)]
    expected = oracle(tensor, *others)
    weights = np.linspace(0.5, 2, N, dtype=np.float32)  # each example's gradient counts
    (expected * torch.tensor(weights, dtype=torch.float64)).sum().backward()

    values = self.variant(lambda p, z: loss(p, z, *rest))(prediction, target)
    np.testing.assert_allclose(values, expected.detach(), rtol=1e-5, atol=1e-6)
    total = lambda p, z: jnp.sum(weights * loss(p, z, *rest))
    gradient, of_target = self.variant(jax.grad(total, argnums=(0, 1)))(prediction, target)
    np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(of_target, np.zeros_like(target))

  @parameterized.parameters(*CASES)
  def test_bfloat16_is_computed_in_float32(self, name):
    loss, _, rest = CASES[name]
    prediction, target = (jnp.asarray(x, jnp.bfloat16) for x in arguments(name))
    chex.assert_type(loss(prediction, target, *rest), jnp.float32)

  def test_a_temperature_may_depend_on_the_score(self):
    scores, codes = arguments('swav')
    tau = temperature.cosine(0.1, 0.3)
    logits = scores / np.asarray(tau(scores))
    expected = -np.sum(codes * (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))), axis=1)
    np.testing.assert_allclose(losses.swav(scores, codes, tau), expected, rtol=1e-5)

  def test_a_vanishing_prediction_has_a_finite_gradient(self):
    zero = jnp.zeros((1, K))
    chex.assert_tree_all_finite(jax.grad(lambda p: jnp.sum(losses.byol(p, zero + 1)))(zero))


class SinkhornTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(epsilon=(0.05, 0.5), iterations=(1, 3))
  def test_codes_are_torch_s(self, epsilon, iterations):
    (scores,) = arrays(1)
    expected = reference.sinkhorn(torch.tensor(scores, dtype=torch.float64), epsilon, iterations)
    codes = self.variant(lambda s: losses.sinkhorn(s, epsilon=epsilon, iterations=iterations))(scores)
    np.testing.assert_allclose(codes, expected, rtol=1e-4, atol=1e-6)

  def test_others_take_part_without_being_returned(self):
    scores, others = arrays(1)[0], arrays(1, seed=1, rows=5)[0]
    whole = reference.sinkhorn(torch.tensor(np.concatenate([scores, others]), dtype=torch.float64))
    codes = losses.sinkhorn(scores, others=others)
    np.testing.assert_allclose(codes, whole[:N], rtol=1e-4, atol=1e-6)
    assert not np.allclose(codes, losses.sinkhorn(scores), atol=1e-3)

  def test_prototypes_are_used_equally_after_many_iterations(self):
    codes = losses.sinkhorn(arrays(1)[0], epsilon=0.5, iterations=200)
    np.testing.assert_allclose(codes.sum(axis=0), np.full(K, N / K), rtol=1e-4)
    np.testing.assert_allclose(codes.sum(axis=1), np.ones(N), rtol=1e-5)

  def test_small_epsilon_stays_finite_and_no_gradient_passes(self):
    (scores,) = arrays(1)
    chex.assert_tree_all_finite(losses.sinkhorn(scores, epsilon=0.001))
    gradient = jax.grad(lambda s: jnp.sum(losses.sinkhorn(s) ** 2))(scores)
    np.testing.assert_array_equal(gradient, np.zeros_like(scores))

  def test_a_wrong_epsilon_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'epsilon = 0 must be'):
      losses.sinkhorn(arrays(1)[0], epsilon=0)


class DevicesTest(chex.TestCase):
  @parameterized.product(kind=('pmap', 'shard_map'), devices=(1, 2, 4))
  def test_codes_and_centre_are_those_of_the_whole_batch(self, kind, devices):
    scores, teacher = arrays()
    others, centre = arrays(1, seed=1, rows=5)[0], np.linspace(0, 1, K, dtype=np.float32)

    def both(_, batch):
      scores, teacher = batch[:, 0], batch[:, 1]
      codes = losses.sinkhorn(scores, others=others, axis_name='batch')
      return codes, losses.dino_centre(centre, teacher, axis_name='batch')

    codes, centres = mapped(both, devices, kind)({}, np.stack([scores, teacher], axis=1))
    expected = losses.sinkhorn(scores, others=others)
    np.testing.assert_allclose(codes.reshape(N, K), expected, rtol=1e-4, atol=1e-6)
    expected = 0.9 * centre.astype(np.float64) + 0.1 * teacher.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(centres, np.tile(expected, (devices, 1)), rtol=1e-5)


if __name__ == '__main__':
  absltest.main()
