"""ResNets match torchvision: parameter counts, outputs, running statistics and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssl_jax import models
from tests.models import torch_models

KEY = jax.random.key(0, impl='rbg')  # compiles several times faster than threefry
BASIC, BOTTLENECK = torch_models.BasicBlock, torch_models.Bottleneck
TORCH = {
  'resnet18': (BASIC, (2, 2, 2, 2)),
  'resnet34': (BASIC, (3, 4, 6, 3)),
  'resnet50': (BOTTLENECK, (3, 4, 6, 3)),
  'resnet101': (BOTTLENECK, (3, 4, 23, 3)),
}


def shapes(module, size=32):
  return jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((2, size, size, 3)), train=True))


def init(module, size=32):
  return jax.jit(lambda: module.init(KEY, jnp.zeros((2, size, size, 3)), train=True))()


def number_of_parameters(variables):
  return sum(p.size for p in jax.tree.leaves(variables['params']))


@pytest.mark.parametrize(
  'name, count',
  [('resnet18', 11_176_512), ('resnet34', 21_284_672), ('resnet50', 23_508_032), ('resnet101', 42_500_160)],
)
@pytest.mark.slow
def test_parameters_match_torchvision(name, count):
  """Counts without the last layer of torchvision's models, and every shape under its name, for both stems."""
  assert number_of_parameters(shapes(models.create(name))) == count
  for stem, suffix in (('imagenet', ''), ('cifar', '_cifar')):
    expected = torch_models.from_torch(torch_models.ResNet(*TORCH[name], stem=stem).state_dict())
    actual = shapes(models.create(name + suffix))
    shape = lambda tree: jax.tree.map(lambda v: v.shape, tree)
    assert shape(actual) == shape(expected)


@pytest.mark.parametrize(
  'name, stem, stage_sizes, shape',
  [
    # odd sizes: padding on the wrong side would show
    pytest.param('resnet18', 'imagenet', (2, 2, 2, 2), (8, 33, 47, 3), marks=pytest.mark.slow),
    ('resnet18', 'cifar', (1, 2), (8, 16, 16, 3)),
    pytest.param('resnet50', 'imagenet', (2, 2), (8, 32, 32, 3), marks=pytest.mark.slow),
  ],
)
def test_outputs_and_gradients_match_torch(name, stem, stage_sizes, shape):
  """Narrow, and shallow if blocks repeat: the test above checks the shapes of the whole networks."""
  module = models.create(name + ('_cifar' if stem == 'cifar' else ''), stage_sizes=stage_sizes, width=16)
  reference = torch_models.ResNet(TORCH[name][0], stage_sizes, stem=stem, width=16)
  torch_models.assert_same_network(module, reference, shape)


def test_the_tiny_resnet_matches_torch():
  module = models.create('resnet_tiny', stage_sizes=(1, 1), stem_stride=1)
  reference = torch_models.ResNet(BASIC, (1, 1), stem='cifar', width=32)
  torch_models.assert_same_network(module, reference, (8, 8, 8, 3))


def test_bfloat16_is_close_and_keeps_float32_parameters():
  images = np.random.default_rng(0).normal(size=(8, 16, 16, 3)).astype(np.float32)
  exact, close = (
    models.create('resnet_tiny', dtype=dtype, stage_sizes=(1, 1)) for dtype in (jnp.float32, jnp.bfloat16)
  )
  variables = init(close)

  @jax.jit
  def apply(variables):
    return [module.apply(variables, images, train=True, mutable=['batch_stats']) for module in (exact, close)]

  (exact_features, _), (features, updates) = apply(variables)
  assert all(v.dtype == jnp.float32 for v in jax.tree.leaves((variables, features, updates)))
  assert 0 < jnp.linalg.norm(features - exact_features) / jnp.linalg.norm(exact_features) < 0.02


def test_the_mean_of_bfloat16_activations_is_float32():
  images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
  module = models.create('resnet_tiny', dtype=jnp.bfloat16, stage_sizes=(1,), width=8)
  settings = dict(train=False, capture_intermediates=True, mutable='intermediates')
  features, state = jax.jit(lambda v: module.apply(v, images, **settings))(init(module))
  (last,) = state['intermediates']['layer1_0']['__call__']
  assert last.dtype == jnp.bfloat16
  np.testing.assert_allclose(features, np.float64(last).mean((1, 2)), rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_features_are_close_with_all_compiler_optimizations():
  """Other tests disable most of them (tests/conftest.py)."""
  images = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)
  exact, close = (models.create('resnet_tiny', dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
  variables = init(close)
  jax.config.update('jax_disable_most_optimizations', False)
  try:
    expected, features = (jax.jit(lambda v, m=m: m.apply(v, images, train=False))(variables) for m in (exact, close))
  finally:
    jax.config.update('jax_disable_most_optimizations', True)
  assert 0 < jnp.linalg.norm(features - expected) / jnp.linalg.norm(expected) < 0.02


def test_initialization_is_kaiming_fan_out():
  params = init(models.create('resnet_tiny'))['params']
  for layer, fan_out in (('layer1_0', 9 * 32), ('layer3_0', 9 * 128)):
    kernel, std = params[layer]['conv1']['kernel'], (2 / fan_out) ** 0.5
    np.testing.assert_allclose(kernel.std(), std, rtol=0.02)
    assert jnp.abs(kernel).max() > 3 * std, 'not truncated'
    np.testing.assert_array_equal(params[layer]['bn2']['scale'], 1)


def test_zero_init_residual_starts_as_the_identity():
  images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 3)), jnp.float32)
  deep = models.create('resnet_tiny', width=8, stage_sizes=(2,), zero_init_residual=True)
  variables = init(deep)
  short = models.create('resnet_tiny', width=8, stage_sizes=(1,), zero_init_residual=True)
  first = {c: {k: v for k, v in tree.items() if k != 'layer1_1'} for c, tree in variables.items()}
  np.testing.assert_array_equal(deep.apply(variables, images, train=False), short.apply(first, images, train=False))


def test_tiny_is_adjustable():
  """Two stages of two and one blocks on a stem of stride 4, from 8 channels: 16 features from a 4 × 4 map."""
  module = models.create('resnet_tiny', width=8, stage_sizes=(2, 1), stem_stride=4)
  images = jnp.ones((2, 32, 32, 3))

  def apply():
    variables = module.init(jax.random.key(0), images, train=True)
    return variables, module.apply(variables, images, train=False, capture_intermediates=True, mutable='intermediates')

  variables, (features, state) = jax.eval_shape(apply)
  assert features.shape == (2, 16)
  assert state['intermediates']['conv1']['__call__'][0].shape == (2, 8, 8, 8)
  assert state['intermediates']['layer2_0']['__call__'][0].shape == (2, 4, 4, 16)
  assert set(variables['params']) == {'conv1', 'bn1', 'layer1_0', 'layer1_1', 'layer2_0'}
  tiny = models.create('resnet_tiny')
  assert (tiny.stage_sizes, tiny.width, tiny.stem, tiny.stem_stride) == ((1, 1, 1), 32, 'cifar', 2)


@pytest.mark.parametrize(
  'arguments, message',
  [
    (dict(name='resnet81'), "model.name = 'resnet81' is not a known model: did you mean 'resnet18'?"),
    (dict(name='resnet18', widht=8), "model.widht = 8 is not a parameter of 'resnet18': did you mean 'width'?"),
    (dict(name='resnet18', remat='yes'), "model.remat = 'yes' must be True or False"),
  ],
)
def test_a_wrong_argument_is_rejected(arguments, message):
  with pytest.raises(ValueError) as error:
    models.create(**arguments)
  assert str(error.value) == message


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (dict(stem='cifar10'), "model.stem = 'cifar10' is not a valid choice: did you mean 'cifar'"),
    (dict(stem_stride=-1), 'model.stem_stride = -1 must be at least 1'),
    (dict(stage_sizes=(1, -1)), r'model.stage_sizes = \(1, -1\) must be block counts'),
  ],
)
def test_invalid_sizes_are_rejected(arguments, message):
  with pytest.raises(ValueError, match=message):
    models.create('resnet18', **arguments)
