"""Vision transformers match torch's encoder layers with the settings of MoCo v3."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssl_jax import models
from ssl_jax.models.transformer import LayerNorm, attend
from ssl_jax.models.vit import ViT, sine_position_embedding
from tests.models import torch_models

KEY = jax.random.key(0, impl='rbg')  # compiles several times faster than threefry
SMALL = dict(patch=4, width=24, depth=2, heads=3)


@pytest.mark.parametrize(
  'name, size, count, width',
  # timm's counts without the position embedding, which has no parameters here, and the last layer.
  [('vit_s16', 224, 21_665_664 - 197 * 384, 384), ('vit_b16', 224, 85_798_656 - 197 * 768, 768)],
)
def test_parameters_match_the_paper(name, size, count, width):
  module = models.create(name, axis_name='batch')
  images = jnp.zeros((1, size, size, 3))
  features, variables = jax.eval_shape(lambda: module.init_with_output(KEY, images, train=True))
  assert features.shape == (1, width)
  assert set(variables) == {'params'}
  assert sum(p.size for p in jax.tree.leaves(variables['params'])) == count


def test_small_images_become_64_patches():
  module = models.create('vit_tiny32')
  images = jnp.zeros((2, 32, 32, 3))
  init = lambda: module.init_with_output(KEY, images, True, capture_intermediates=True, mutable=True)
  features, variables = jax.eval_shape(init)
  assert features.shape == (2, 192)
  assert variables['intermediates']['blocks_11']['__call__'][0].shape == (2, 65, 192)


@pytest.mark.slow
def test_outputs_and_gradients_match_torch():
  """The gradient of the frozen patch projection is exactly 0; all others match torch."""
  torch_models.assert_same_network(ViT(**SMALL), torch_models.ViT(**SMALL), (3, 8, 12, 3))


def test_position_embedding():
  """Rows and columns differ, and every position is distinct; the first one is sin 0 and cos 0."""
  embedding = sine_position_embedding(3, 5, 8)
  assert embedding.shape == (15, 8)
  np.testing.assert_array_equal(embedding[0], [0, 0, 1, 1, 0, 0, 1, 1])
  np.testing.assert_allclose(embedding[2 * 5 + 4, [0, 1, 4, 7]], [np.sin(2), np.sin(0.02), np.sin(4), np.cos(0.04)])


def test_bfloat16_is_close():
  images = np.random.default_rng(0).normal(size=(4, 8, 12, 3)).astype(np.float32)
  variables = torch_models.from_torch(torch_models.scramble(torch_models.ViT(**SMALL)).state_dict())

  @jax.jit
  def features(variables):
    return [ViT(**SMALL, dtype=d).apply(variables, images, train=False) for d in (jnp.float32, jnp.bfloat16)]

  exact, close = features(variables)
  assert close.dtype == jnp.float32
  assert 0 < jnp.linalg.norm(close - exact) / jnp.linalg.norm(exact) < 0.03


def test_initialization_matches_moco_v3():
  """Xavier-uniform bounds, with queries, keys and values as separate matrices and a patch as one row of pixels."""
  module = ViT(patch=4, width=96, depth=1, heads=3)
  params = jax.jit(lambda: module.init(KEY, jnp.zeros((1, 8, 8, 3)), train=True))()['params']
  block = params['blocks_0']
  bounds = {'qkv': 96 + 96, 'proj': 96 + 96, 'fc1': 96 + 384, 'fc2': 384 + 96}
  for kernel, fans in [(block[k]['kernel'], v) for k, v in bounds.items()] + [
    (params['patch_embed']['kernel'], 48 + 96)
  ]:
    bound = (6 / fans) ** 0.5
    assert 0.99 * bound < np.abs(kernel).max() <= bound
    np.testing.assert_allclose(kernel.std(), bound / 3**0.5, rtol=0.03)
  assert 0 < np.abs(params['cls_token']).max() < 1e-5
  query, key, value = np.split(block['qkv']['kernel'], 3, axis=1)
  assert (query != key).any() and (key != value).any()


def test_layer_norm_and_attention_in_bfloat16_are_close_to_float64():
  rng = np.random.default_rng(0)
  x = rng.normal(100, 1, size=(4, 64)).astype(jnp.bfloat16)
  norm = LayerNorm()
  exact = np.float64(x)
  expected = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-6)
  y = norm.apply(norm.init(KEY, x), x)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float64(y), expected, rtol=2**-8, atol=1e-3)
  # Products of about 100, which a bfloat16 rounds to halves
  q, k, v = (np.asarray(10 * rng.normal(size=(2, 5, 1, 16)), jnp.bfloat16) for _ in range(3))
  logits = np.einsum('nqhd,nkhd->nhqk', np.float64(q), np.float64(k)) / 4
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  expected = np.einsum('nhqk,nkhd->nqhd', weights / weights.sum(-1, keepdims=True), np.float64(v)).reshape(2, 5, 16)
  np.testing.assert_allclose(np.float64(attend(q, k, v)), expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(patch=5), 'model.patch = 5 must be a divisor of the image size, 8 × 12 pixels'),
    (dict(heads=5), 'model.heads = 5 must be a divisor of width = 24'),
    (dict(depth=0), 'model.depth = 0 must be at least 1 and at most 200'),
    (dict(width=18), 'model.width = 18 must be a multiple of 4, for the sine position embedding'),
  ],
)
def test_invalid_sizes_are_rejected(changes, message):
  with pytest.raises(ValueError) as error:
    module = models.create('vit_tiny32', **SMALL | changes)
    jax.eval_shape(lambda: module.init(KEY, jnp.zeros((1, 8, 12, 3)), train=True))
  assert str(error.value) == message
