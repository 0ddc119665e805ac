"""Batch norm matches torch, on one device and sharded over several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from ssl_jax.models.norm import BatchNorm
from tests.models import torch_models


@pytest.mark.parametrize('shape', [(8, 5), (6, 4, 4, 3), (4, 8, 8, 130), (3, 5, 7, 2)])
def test_values_gradients_and_running_statistics_match_torch(shape):
  reference = (torch.nn.BatchNorm1d if len(shape) == 2 else torch.nn.BatchNorm2d)(shape[-1])
  torch_models.scramble(reference)
  x_torch, x = torch_models.images(shape)
  x_torch, x = x_torch + 2, x + 2  # the mean must matter
  x_torch.requires_grad_()
  w_torch, w = torch_models.images(shape, seed=1)
  variables = torch_models.from_torch(reference.state_dict())
  module = BatchNorm()

  def loss(params, x):
    y, updates = module.apply({**variables, 'params': params}, x, train=True, mutable=['batch_stats'])
    return (y * w).sum(), (y, updates['batch_stats'])

  gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  (params_gradient, x_gradient), (y, stats) = gradients(variables['params'], x)
  y_torch = reference(x_torch)
  (y_torch * w_torch).sum().backward()
  channels_last = lambda t: t.detach().movedim(1, -1).numpy()
  torch_models.assert_close(y, channels_last(y_torch), 1e-5)
  torch_models.assert_close(x_gradient, channels_last(x_torch.grad), 1e-5)
  expected = torch_models.from_torch({k: p.grad for k, p in reference.named_parameters()})['params']
  torch_models.assert_close(params_gradient, expected, 1e-5)
  torch_models.assert_close(stats, torch_models.from_torch(reference.state_dict())['batch_stats'], 1e-6)

  y = module.apply({**variables, 'batch_stats': stats}, x, train=False)
  torch_models.assert_close(y, channels_last(reference.eval()(x_torch)), 1e-5)


@pytest.mark.parametrize('mapping', ['pmap', 'shard_map'])
@pytest.mark.parametrize('devices', [2, 4])
def test_sharded_equals_unsharded(mapping, devices):
  """Local mean loss, then the mean of the gradients over devices: values, statistics and gradients of one device."""
  shape, channels = (8, 4, 4, 6), 6
  rng = np.random.default_rng(0)
  x, target = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
  x += np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1)  # shards differ, so local statistics would show
  params = {'scale': rng.normal(size=channels).astype(np.float32), 'bias': rng.normal(size=channels).astype(np.float32)}
  stats = {'mean': np.zeros(channels, np.float32), 'var': np.ones(channels, np.float32)}

  def gradients(params, x, target, axis_name):
    # A parameter before the norm, so that the gradient through the statistics reaches a parameter as well; behind a
    # tanh, because batch norm undoes a mere gain.
    def loss(params, gain):
      variables = {'params': params, 'batch_stats': stats}
      module = BatchNorm(axis_name=axis_name)
      h = jnp.tanh(x * gain.reshape(1, 1, 1, -1))
      y, updates = module.apply(variables, h, train=True, mutable=['batch_stats'])
      return jnp.square(jnp.tanh(y) - target).mean(), (y, updates['batch_stats'])

    gain = jnp.linspace(0.5, 1.5, channels)
    out, (y, new_stats) = jax.grad(loss, (0, 1), has_aux=True)(params, gain)
    return (out if axis_name is None else jax.lax.pmean(out, axis_name)), new_stats, y

  expected = jax.jit(functools.partial(gradients, axis_name=None))(params, x, target)
  local = functools.partial(gradients, axis_name='batch')
  if mapping == 'pmap':
    split = lambda v: v.reshape(devices, -1, *v.shape[1:])
    mapped = jax.pmap(local, 'batch', in_axes=(None, 0, 0), devices=jax.devices()[:devices])
    out, new_stats, y = mapped(params, split(x), split(target))
    for d in range(devices):
      actual = jax.tree.map(lambda v, d=d: np.asarray(v[d]), (out, new_stats))
      torch_models.assert_close(actual, jax.tree.map(np.asarray, expected[:2]), 1e-5)
    y = y.reshape(shape)
  else:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ('batch',), devices=jax.devices()[:devices], axis_types=auto)
    whole, sharded = PartitionSpec(), PartitionSpec('batch')
    mapped = jax.shard_map(
      local, mesh=mesh, in_specs=(whole, sharded, sharded), out_specs=(whole, whole, sharded), check_vma=False
    )
    out, new_stats, y = jax.jit(mapped)(params, x, target)
    torch_models.assert_close((out, new_stats), jax.tree.map(np.asarray, expected[:2]), 1e-5)
  torch_models.assert_close(np.asarray(y), np.asarray(expected[2]), 1e-5)


def test_bfloat16_has_float32_statistics():
  """Activations in bfloat16: statistics and gradient are those of the rounded activations, to float32's precision."""
  rng = np.random.default_rng(0)
  x = rng.normal(3, 1, size=(16, 8, 8, 4)).astype(jnp.bfloat16)
  w = rng.normal(size=x.shape).astype(jnp.bfloat16)
  variables = {
    'params': {'scale': np.ones(4, np.float32), 'bias': np.zeros(4, np.float32)},
    'batch_stats': {'mean': np.zeros(4, np.float32), 'var': np.ones(4, np.float32)},
  }

  @jax.jit
  def apply(x):
    module = BatchNorm()
    y, back, updates = jax.vjp(
      lambda x: module.apply(variables, x, train=True, mutable=['batch_stats']), x, has_aux=True
    )
    return y, updates['batch_stats'], back(w)[0]

  y, stats, gradient = apply(x)
  assert y.dtype == gradient.dtype == jnp.bfloat16
  assert stats['mean'].dtype == stats['var'].dtype == jnp.float32
  x, dy = x.astype(np.float64), w.astype(np.float64)
  mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
  np.testing.assert_allclose(stats['mean'], 0.1 * mean, rtol=1e-5)
  np.testing.assert_allclose(stats['var'], 0.9 + 0.1 * x.var((0, 1, 2), ddof=1), rtol=1e-5)
  # y is rounded once, to the eight bits of a bfloat16; each of the gradient's three parts is, and so is their sum.
  xhat = (x - mean) / np.sqrt(var + 1e-5)
  np.testing.assert_allclose(np.asarray(y, np.float64), xhat, rtol=2**-8, atol=1e-5)
  dx = (dy - dy.mean((0, 1, 2)) - xhat * (dy * xhat).mean((0, 1, 2))) / np.sqrt(var + 1e-5)
  np.testing.assert_allclose(np.asarray(gradient, np.float64), dx, rtol=0, atol=2**-7 * np.abs(dx).max())


def test_constant_features_have_no_negative_variance():
  """In float32 the mean of x² may be less than the square of the mean, by more than epsilon."""
  x = np.tile(np.linspace(100, 5000, 50, dtype=np.float32), (64, 1))
  module = BatchNorm()
  variables = module.init(jax.random.key(0), x, train=True)
  y, changed = module.apply(variables, x, train=True, mutable=['batch_stats'])
  assert jnp.isfinite(y).all() and (changed['batch_stats']['var'] >= 0.9).all()


def test_epsilon_is_added_to_the_running_variance():
  variables = {'params': {'scale': np.ones(1), 'bias': np.zeros(1)}, 'batch_stats': {'mean': np.ones(1)}}
  variables['batch_stats']['var'] = np.zeros(1)
  y = BatchNorm().apply(jax.tree.map(np.float32, variables), np.full((2, 1), 3, np.float32), train=False)
  np.testing.assert_allclose(y, 2 / np.sqrt(1e-5), rtol=1e-5)


def test_without_affine_there_are_no_parameters():
  module = BatchNorm(affine=False)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
  variables = module.init(jax.random.key(0), x, train=True)
  assert 'params' not in variables
  y, _ = module.apply(variables, x, train=True, mutable=['batch_stats'])
  np.testing.assert_allclose(y, torch.nn.BatchNorm1d(3, affine=False)(torch.tensor(np.asarray(x))), atol=1e-5)


def test_initialization_does_not_update_the_running_statistics():
  x = jnp.full((4, 3), 7.0)
  stats = BatchNorm(axis_name='batch').init(jax.random.key(0), x, train=True)['batch_stats']
  np.testing.assert_array_equal(stats['mean'], 0)
  np.testing.assert_array_equal(stats['var'], 1)


def test_a_mapping_that_checks_is_refused():
  """With check_vma=True the gradient would be too large by the number of devices."""
  mesh = jax.make_mesh((2,), ('batch',), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
  module, x = BatchNorm(axis_name='batch'), np.ones((4, 3), np.float32)
  variables = BatchNorm().init(jax.random.key(0), x, train=True)
  apply = lambda x: module.apply(variables, x, train=True, mutable=['batch_stats'])[0]
  mapped = jax.shard_map(apply, mesh=mesh, in_specs=PartitionSpec('batch'), out_specs=PartitionSpec('batch'))
  with pytest.raises(ValueError, match=r'check_vma=True.*: give check_vma=False'):
    jax.jit(mapped)(x)
