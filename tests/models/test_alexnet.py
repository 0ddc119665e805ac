"""The small AlexNet matches that of Wang & Isola."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ssl_jax import models
from tests.models import torch_models

KEY = jax.random.key(0, impl='rbg')  # compiles several times faster than threefry


def test_parameters_match_the_paper():
  """fc6 takes 7 × 7 × 192 values at the authors' 64 px, and 3 × 3 × 192 at CIFAR's 32 px."""
  module = models.create('alexnet_small')
  for size in (64, 32):
    images = jnp.zeros((2, size, size, 3))
    variables = jax.eval_shape(lambda images=images: module.init(KEY, images, train=True))
    with torch.device('meta'):
      expected = sum(p.numel() for p in torch_models.AlexNet(size).parameters())
    assert sum(p.size for p in jax.tree.leaves(variables['params'])) == expected
    assert variables['params']['fc6']['kernel'].shape == ({64: 49, 32: 9}[size] * 192, 4096)


@pytest.mark.slow
def test_initialization_is_that_of_the_authors():
  """Every kernel is normal with a standard deviation of 0.02."""
  params = jax.jit(lambda: models.create('alexnet_small').init(KEY, jnp.zeros((2, 15, 15, 3)), train=True))()['params']
  kernels = [layer['kernel'] for layer in params.values() if 'kernel' in layer]
  assert len(kernels) == 7
  for kernel in kernels:
    np.testing.assert_allclose(kernel.std(), 0.02, rtol=0.05)


@pytest.mark.slow
def test_outputs_and_gradients_match_torch():
  torch_models.assert_same_network(models.create('alexnet_small'), torch_models.AlexNet(24), (16, 24, 24, 3))


def test_bfloat16_is_close():
  images = np.random.default_rng(0).normal(size=(16, 15, 15, 3)).astype(np.float32)
  variables = torch_models.from_torch(torch_models.scramble(torch_models.AlexNet(15)).state_dict())

  @jax.jit
  def features(variables):
    encoders = [models.create('alexnet_small', dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    return [encoder.apply(variables, images, train=False) for encoder in encoders]

  exact, close = features(variables)
  assert exact.shape == (16, 4096) and close.dtype == jnp.float32
  assert 0 < jnp.linalg.norm(close - exact) / jnp.linalg.norm(exact) < 0.02


def test_images_that_are_too_small_are_rejected():
  with pytest.raises(ValueError, match=r'^model.name = alexnet_small needs images of at least 15 × 15 pixels, not 14'):
    jax.eval_shape(lambda: models.create('alexnet_small').init(KEY, jnp.zeros((1, 14, 32, 3)), train=True))
