"""Blocks recomputed in the backward pass: the same features, gradients and statistics in less memory."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssl_jax import models

pytestmark = pytest.mark.slow  # it compiles each network twice

KEY = jax.random.key(0, impl='rbg')  # compiles several times faster than threefry
ENCODERS = {
  'basic': dict(name='resnet_tiny', width=8, stage_sizes=(1, 2)),
  'bottleneck': dict(name='resnet50', width=8, stage_sizes=(1, 1)),
  'vit': dict(name='vit_tiny32', width=24, depth=2),
}


def images(batch=8, size=16):
  return np.random.default_rng(0).normal(size=(batch, size, size, 3)).astype(np.float32)


def step(module, variables, images, axis_name=None):
  """Features, gradients of all parameters and of the images, and the new running statistics."""

  def loss(params, images):
    given = {**variables, 'params': params}
    features, changed = module.apply(given, images, train=True, mutable=['batch_stats'])
    return jnp.mean(jnp.square(features - 1)), (features, changed)

  gradients, (features, changed) = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables['params'], images)
  if axis_name is not None:
    gradients = (jax.lax.pmean(gradients[0], axis_name), gradients[1])
  return features, gradients, changed


@pytest.mark.parametrize(('name', 'devices'), [('basic', 2), ('bottleneck', 1), ('vit', 1)])
def test_the_same_step(name, devices):
  with jax.enable_x64(True):  # in float32 the gradients of the ViT's first token are nearly all rounding
    settings = dict(ENCODERS[name], axis_name='batch', dtype=jnp.float64)
    plain, remat = (models.create(**settings, remat=remat) for remat in (False, True))
    variables, other = (jax.jit(lambda m=m: m.init(KEY, images()[:2], train=True))() for m in (plain, remat))
    chex.assert_trees_all_equal(other, variables)  # names and values: checkpoints are interchangeable
    variables = jax.tree.map(lambda x: x.astype(jnp.float64), variables)
    parts = images().astype(np.float64).reshape(devices, -1, *images().shape[1:])
    both = lambda variables, x: [step(m, variables, x, 'batch') for m in (plain, remat)]
    run = jax.pmap(both, axis_name='batch', in_axes=(None, 0), devices=jax.devices()[:devices])
    expected, actual = run(variables, parts)
    chex.assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-12)
  if name != 'vit':
    assert jax.tree.leaves(expected[2]), 'there are running statistics'


def test_features_are_the_same():
  plain, remat = (models.create(**ENCODERS['basic'], remat=remat) for remat in (False, True))
  variables = jax.jit(lambda: plain.init(KEY, images()[:2], train=True))()
  of = jax.jit(lambda v: [m.apply(v, images(), train=False) for m in (plain, remat)])
  np.testing.assert_array_equal(*of(variables))


@pytest.mark.parametrize(('name', 'size', 'share'), [('resnet18_cifar', 64, 0.3), ('vit_tiny32', 32, 0.1)])
def test_less_is_stored_for_the_backward_pass(name, size, share):
  """Before compilation: on a CPU, XLA merges the recomputed block with the first one and stores it after all."""

  def stored(remat):
    module = models.create(name, remat=remat)

    def backward(images):
      variables = module.init(KEY, images, train=True)
      apply = lambda params: module.apply({**variables, 'params': params}, images, train=True, mutable=['batch_stats'])
      return jax.vjp(apply, variables['params'])[1]

    shapes = jax.eval_shape(backward, jax.ShapeDtypeStruct((32, size, size, 3), jnp.float32))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

  assert stored(remat=True) < share * stored(remat=False)
