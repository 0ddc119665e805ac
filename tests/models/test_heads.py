"""Heads have the layers of the papers and match torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from ssl_jax.models import heads
from tests.models import torch_models

KEY = jax.random.key(0, impl='rbg')  # compiles several times faster than threefry


class TorchMLP(nn.Module):
  """An MLP from a list of words: 'fc 512', 'fc 512 bias', 'bn', 'bn plain', 'relu', 'gelu'."""

  def __init__(self, channels, layers):
    super().__init__()
    self.layers, i = [], 0
    for layer in layers:
      kind, *rest = layer.split()
      if kind == 'fc':
        i += 1
        self.add_module(f'fc{i}', nn.Linear(channels, int(rest[0]), bias='bias' in rest))
        channels = int(rest[0])
      elif kind == 'bn':
        self.add_module(f'bn{i}', nn.BatchNorm1d(channels, affine='plain' not in rest))
      self.layers.append(f'{kind}{i}' if kind in ('fc', 'bn') else getattr(nn.functional, kind))

  def forward(self, x):
    for layer in self.layers:
      x = getattr(self, layer)(x) if isinstance(layer, str) else layer(x)
    return x


# Name, changes, width of the features, layers. Narrower than in the papers if that only saves time.
HEADS = [
  ('simclr', {}, 512, ['fc 512', 'bn', 'relu', 'fc 128', 'bn']),
  ('moco', {}, 24, ['fc 24 bias', 'relu', 'fc 128 bias']),
  (
    'balanced_imagenet',
    dict(features=(32, 16, 16)),
    24,
    ['fc 32', 'bn', 'relu', 'fc 16', 'bn', 'relu', 'fc 16', 'bn'],
  ),
  ('balanced_cifar', dict(features=(32, 16)), 24, ['fc 32', 'bn', 'relu', 'fc 16', 'bn']),
  ('byol', dict(features=(32, 16)), 24, ['fc 32', 'bn', 'relu', 'fc 16']),
  ('simsiam', dict(features=(32, 16, 8)), 24, ['fc 32', 'bn', 'relu', 'fc 16', 'bn', 'relu', 'fc 8', 'bn plain']),
  ('simsiam_predictor', dict(features=(8, 32)), 24, ['fc 8', 'bn', 'relu', 'fc 32 bias']),
  ('moco_v3', dict(features=(32, 16)), 24, ['fc 32', 'bn', 'relu', 'fc 16', 'bn plain']),
  ('moco_v3_vit', dict(features=(32, 16, 8)), 24, ['fc 32', 'bn', 'relu', 'fc 16', 'bn', 'relu', 'fc 8', 'bn plain']),
  ('barlow_twins', dict(features=(32, 16, 8)), 24, ['fc 32', 'bn', 'relu', 'fc 16', 'bn', 'relu', 'fc 8']),
  ('vicreg', dict(features=(32, 16, 8)), 24, ['fc 32', 'bn', 'relu', 'fc 16', 'bn', 'relu', 'fc 8']),
  ('swav', dict(features=(32, 16)), 24, ['fc 32', 'bn', 'relu', 'fc 16 bias']),
  ('alexnet', {}, 24, ['fc 128 bias']),
  ('clip', {}, 24, ['fc 1024']),
]


@pytest.mark.parametrize('name, changes, width, layers', HEADS)
def test_outputs_and_gradients_match_torch(name, changes, width, layers):
  torch_models.assert_same_network(heads.create(name, **changes), TorchMLP(width, layers), (16, width))


@pytest.mark.parametrize(
  'name, width, features',
  [
    ('simclr', 512, (512, 128)),
    ('moco', 2048, (2048, 128)),
    ('balanced_imagenet', 2048, (2048, 2048, 2048)),
    ('balanced_cifar', 512, (2048, 2048)),
    ('byol', 2048, (4096, 256)),
    ('simsiam', 2048, (2048, 2048, 2048)),
    ('simsiam_predictor', 2048, (512, 2048)),
    ('moco_v3', 2048, (4096, 256)),
    ('moco_v3_vit', 384, (4096, 4096, 256)),
    ('barlow_twins', 2048, (8192, 8192, 8192)),
    ('vicreg', 2048, (8192, 8192, 8192)),
    ('swav', 2048, (2048, 128)),
    ('alexnet', 4096, (128,)),
  ],
)
def test_widths_match_the_papers(name, width, features):
  module = heads.create(name)
  params = jax.eval_shape(lambda: module.init(KEY, jnp.zeros((2, width)), train=True))['params']
  kernels = [params[f'fc{i + 1}']['kernel'].shape for i in range(len(features))]
  assert kernels == list(zip((width, *features), features, strict=False))


class TorchDINOHead(nn.Module):
  def __init__(self, layers):
    super().__init__()
    self.mlp = TorchMLP(24, layers)
    self.prototypes = nn.Linear(8, 40, bias=False)

  def forward(self, x):
    unit = nn.functional.normalize
    return unit(self.mlp(x)) @ unit(self.prototypes.weight).T


@pytest.mark.parametrize(
  'batch_norm, layers',
  [
    ('none', ['fc 32 bias', 'gelu', 'fc 16 bias', 'gelu', 'fc 8 bias']),
    ('hidden', ['fc 32', 'bn', 'gelu', 'fc 16', 'bn', 'gelu', 'fc 8 bias']),
  ],
)
def test_dino_matches_torch(batch_norm, layers):
  module = heads.create('dino', features=(32, 16, 8), prototypes=40, batch_norm=batch_norm)
  torch_models.assert_same_network(module, TorchDINOHead(layers), (16, 24))


@pytest.mark.parametrize(
  ('name', 'std'),
  [('alexnet', 0.02), ('bert', 0.02), ('clip', 400**-0.5), ('simclr', (3 * 400) ** -0.5)],
)
def test_initial_weights_have_the_size_of_the_papers(name, std):
  params = jax.jit(lambda: heads.create(name).init(KEY, jnp.zeros((2, 400)), train=True))()['params']
  first = params['fc' if name == 'bert' else 'fc1']
  np.testing.assert_allclose(first['kernel'].std(), std, rtol=0.02)


def test_the_pooler_of_bert_is_the_tanh_of_a_linear_layer():
  x = np.random.default_rng(0).normal(size=(4, 24)).astype(np.float32)
  module = heads.create('bert')
  variables = module.init(KEY, x, train=True)
  fc = jax.tree.map(lambda w: w + np.float32(0.1), variables['params']['fc'])
  found = module.apply({'params': {'fc': fc}}, x, train=True)
  np.testing.assert_allclose(found, np.tanh(x @ fc['kernel'] + fc['bias'][None]), rtol=1e-4, atol=1e-5)


def test_dino_is_initialized_as_in_the_paper():
  module = heads.create('dino', features=(256, 64), prototypes=8)
  kernels = jax.tree.leaves(module.init(jax.random.key(0), jnp.zeros((2, 256)), train=False)['params']['mlp'])
  wide = [x for x in kernels if x.ndim == 2]
  assert len(wide) == 2
  np.testing.assert_allclose([x.std() for x in wide], 0.02, rtol=0.05)


def test_dino_and_swav_have_the_sizes_of_the_papers():
  for name, width, shape in (('dino', 384, (256, 65536)), ('prototypes', 128, (128, 3000))):
    module = heads.create(name)
    x = jnp.zeros((2, width))
    params = jax.eval_shape(lambda m=module, x=x: m.init(KEY, x, train=True))['params']
    assert params.get('prototypes', params)['kernel'].shape == shape
  assert heads.create('dino').features == (2048, 2048, 256)


def test_prototypes_are_cosines_and_a_zero_has_no_gradient():
  module = heads.Prototypes(number=5)
  x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  variables = module.init(KEY, x, train=True)
  kernel = np.asarray(variables['params']['kernel'])
  expected = [[r @ c / np.linalg.norm(r) / np.linalg.norm(c) for c in kernel.T] for r in x]
  np.testing.assert_allclose(module.apply(variables, x, train=True), expected, atol=1e-6)
  gradient = jax.grad(lambda x: module.apply(variables, x, train=True).sum())(jnp.zeros((1, 3)))
  np.testing.assert_array_equal(gradient, 0)


def test_initialization_matches_torch():
  x = jnp.zeros((2, 400))
  kernel = heads.create('moco').init(KEY, x, train=True)['params']['fc1']['kernel']
  expected = torch.nn.Linear(400, 400).weight
  np.testing.assert_allclose(np.abs(kernel).max(), expected.abs().max().item(), rtol=1e-3)
  np.testing.assert_allclose(kernel.std(), expected.std().item(), rtol=0.01)


def test_bfloat16_is_close():
  x = np.random.default_rng(0).normal(size=(32, 24)).astype(np.float32)
  exact, close = (heads.create('simclr', dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))

  @jax.jit
  def apply():
    variables = close.init(KEY, x, train=True)
    return variables, [module.apply(variables, x, train=True, mutable=['batch_stats'])[0] for module in (exact, close)]

  variables, (y, y_close) = apply()
  assert all(v.dtype == jnp.float32 for v in jax.tree.leaves((variables, y_close)))
  assert 0 < jnp.linalg.norm(y_close - y) / jnp.linalg.norm(y) < 0.02


@pytest.mark.parametrize(
  'arguments, message',
  [
    (dict(name='simcrl'), "projector.name = 'simcrl' is not a known projector: did you mean 'simclr'?"),
    (dict(name='dino', prototype=8), "projector.prototype = 8 is not a parameter of 'dino': did you mean 'prototypes'"),
    (dict(name='dino', batch_norm='last'), "projector.batch_norm = 'last' is not a valid choice: give one of none, "),
    (dict(name='simclr', batch_norm='last'), "projector.batch_norm = 'last' is not a valid choice: give one of none, "),
  ],
)
def test_a_wrong_name_suggests_a_right_one(arguments, message):
  with pytest.raises(ValueError) as error:
    heads.create(**arguments)
  assert str(error.value).startswith(message)
