"""The losses without negatives against torch, and on any number of devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import absltest, parameterized

from ssl_jax import losses
from tests.helpers import mapped
from tests.reference import redundancy as reference

N, D = 8, 4


def wider(loss, join):
  """The loss of more features than examples."""
  return lambda *views, **given: loss(*(join([z, z**2, z**3], 1) for z in views), **given)


CASES = {
  'barlow_twins': (losses.barlow_twins, reference.barlow_twins, {'lam': 0.05}),
  'vicreg': (losses.vicreg, reference.vicreg, {'invariance': 20.0, 'variance': 30.0, 'covariance': 2.0}),
  'w_mse': (losses.w_mse, reference.w_mse, {}),
  'w_mse_eps': (losses.w_mse, reference.w_mse, {'eps': 0.1}),
  'zero_cl': (losses.zero_cl, reference.zero_cl, {}),
  'zero_cl_instance': (losses.zero_cl, reference.zero_cl, {'kind': 'instance'}),
  'zero_cl_feature': (losses.zero_cl, reference.zero_cl, {'kind': 'feature', 'eps': 0.1}),
  'emp_ssl': (losses.emp_ssl, reference.emp_ssl, {'invariance': 3.0}),
  'emp_ssl_wider': (wider(losses.emp_ssl, jnp.concatenate), wider(reference.emp_ssl, torch.cat), {'eps': 0.5}),
  'arb': (losses.arb, reference.arb, {}),
  'arb_groups': (losses.arb, reference.arb, {'groups': 2}),
}


def views(seed=0, batch=N):
  """Two views that resemble each other, with features that correlate."""
  rng = np.random.default_rng(seed)
  z = rng.normal(size=(batch, D)) @ rng.normal(size=(D, D))
  return [(z + 0.5 * rng.normal(size=z.shape)).astype(np.float32) for _ in range(2)]


def assert_is_torch_s(at, oracle, seen):
  """Compares (value, gradient of each view) with those of the oracle in float64.  -> the value"""
  tensors = [torch.tensor(z, dtype=torch.float64, requires_grad=True) for z in seen]
  expected = oracle(*tensors)
  expected.backward()
  value, gradients = at(*seen)
  np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
  for gradient, tensor in zip(gradients, tensors, strict=True):
    np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-4, atol=1e-4 * float(tensor.grad.abs().max()))
  return value


class OracleTest(chex.TestCase):
  @parameterized.parameters(*CASES)
  def test_value_and_gradient_are_torch_s(self, name):
    loss, oracle, parameters = CASES[name]
    z1, z2 = views()
    at = jax.jit(jax.value_and_grad(functools.partial(loss, **parameters), argnums=(0, 1)))
    value = assert_is_torch_s(at, functools.partial(oracle, **parameters), (z1, z2))

    # Neither the order of the views nor that of the examples matters.
    np.testing.assert_allclose(at(z2, z1)[0], value, rtol=1e-4)
    np.testing.assert_allclose(at(z1[::-1], z2[::-1])[0], value, rtol=1e-4)
    # A constant feature and two equal ones are no trouble, unless the covariance must have a Cholesky factor.
    if name != 'w_mse':
      z1[:, 0], z1[:, 1] = 3.0, z1[:, 2]
      chex.assert_tree_all_finite(at(z1, z2))

  @parameterized.parameters(*CASES)
  def test_float32_inside(self, name):
    loss, _, parameters = CASES[name]
    z = jax.ShapeDtypeStruct((N, D), jnp.bfloat16)
    value, gradient = jax.eval_shape(jax.value_and_grad(functools.partial(loss, **parameters)), z, z)
    self.assertEqual((value.dtype, gradient.dtype), (jnp.float32, jnp.bfloat16))

  @parameterized.parameters(2, 3, 5)
  def test_emp_ssl_takes_any_number_of_views(self, number):
    seen = [z for seed in range(number) for z in views(seed)][:number]
    assert_is_torch_s(jax.jit(jax.value_and_grad(losses.emp_ssl, argnums=range(number))), reference.emp_ssl, seen)

  def test_refusals(self):
    z = jnp.ones((N, D))
    for message, call in (
      (r'^lam = -1 must be', lambda: losses.barlow_twins(z, z, lam=-1)),
      (r'^variance = 0 must be', lambda: losses.vicreg(z, z, variance=0)),
      ('^batch = 1 example has no variance: give at least 2', lambda: losses.vicreg(z[:1], z[:1])),
      (r'^eps = 1.0 must be in \[0, 1\)', lambda: losses.w_mse(z, z, eps=1.0)),
      (r'^eps = 0.0 needs more than 4 examples', lambda: losses.w_mse(z[:4], z[:4])),
      (
        r"^kind = 'features' is not a valid choice: did you mean 'feature'",
        lambda: losses.zero_cl(z, z, kind='features'),
      ),
      (r'^eps = 0 must be', lambda: losses.emp_ssl(z, z, eps=0)),
      ('^views = 1 cannot be compared: give at least 2', lambda: losses.emp_ssl(z)),
      (r'^groups = 3 must be a divisor of D = 4', lambda: losses.arb(z, z, groups=3)),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()


SHARDED = ('barlow_twins', 'vicreg', 'w_mse', 'zero_cl', 'emp_ssl', 'emp_ssl_wider', 'arb_groups')
FASTEST = ('barlow_twins', 'w_mse')  # to compile


def values_and_gradients(params, batch, axis_name=None):
  """Each loss and its gradient, each with an encoder of its own."""

  def total(params):
    values = {}
    for name in params:
      loss, _, parameters = CASES[name]
      z1, z2 = (x @ params[name] for x in jnp.moveaxis(batch, 1, 0))
      values[name] = loss(z1, z2, axis_name=axis_name, **parameters)
    return sum(values.values()), values

  gradients, values = jax.grad(total, has_aux=True)(params)
  return values, gradients if axis_name is None else jax.lax.pmean(gradients, axis_name)


ENCODER = np.random.default_rng(1).normal(size=(D, D))
BATCH = np.stack(views(), axis=1).astype(np.float64)


@functools.cache
def on_one_device(names):
  return jax.jit(values_and_gradients)(dict.fromkeys(names, ENCODER), BATCH)


class ShardingTest(chex.TestCase):
  """In float64: whitening magnifies the rounding of float32."""

  def test_two_devices(self):
    self.compare(2, 'pmap', FASTEST)

  @parameterized.product(devices=(1, 2, 4), how=('pmap', 'shard_map'))
  @pytest.mark.slow
  def test_value_and_gradient_are_those_of_one_device(self, devices, how):
    self.compare(devices, how)

  def compare(self, devices, how, names=SHARDED):
    on_devices = functools.partial(values_and_gradients, axis_name='batch')
    with jax.enable_x64(True):
      actual = mapped(on_devices, devices, how)(dict.fromkeys(names, ENCODER), BATCH)
      for device in range(devices):
        one = jax.tree.map(lambda x, d=device: x[d], actual)
        chex.assert_trees_all_close(one, on_one_device(names), rtol=1e-9, atol=1e-9)


if __name__ == '__main__':
  absltest.main()
