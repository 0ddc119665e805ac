"""The forms for GPUs equal a plain convolution, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ssl_jax.models import conv
from ssl_jax.models.resnet import BasicBlock, Bottleneck, ResNet

HIGHEST = lax.Precision.HIGHEST
NUMBERS = ('NHWC', 'HWIO', 'NHWC')
FORMS = {conv.by_columns: (3, 3, 1), conv.by_cells: (7, 3, 2), conv.by_pixels: (1, 5, 2)}  # kernel, channels, stride


@pytest.mark.parametrize('form', FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize('size', [(8, 12), (6, 10), (2, 2)])
def test_form(form, size):
  width, channels, stride = FORMS[form]
  rng = np.random.default_rng(0)
  x, kernel = (rng.normal(size=s).astype(np.float32) for s in ((2, *size, channels), (width, width, channels, 4)))
  pad = (width - 1) // 2
  plain = functools.partial(
    lax.conv_general_dilated,
    window_strides=(stride, stride),
    padding=((pad, pad),) * 2,
    dimension_numbers=NUMBERS,
    precision=HIGHEST,
  )
  expected, pull = jax.vjp(plain, x, kernel)
  actual, ours = jax.vjp(lambda x, kernel: form(x, kernel, HIGHEST), x, kernel)
  direction = rng.normal(size=expected.shape).astype(np.float32)
  for a, b in zip((actual, *ours(direction)), (expected, *pull(direction)), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize('stem, stride, size, block, used', [
  ('imagenet', None, (32, 32), Bottleneck, {'by_cells', 'by_pixels'}),
  ('imagenet', None, (33, 33), BasicBlock, {'by_pixels'}),
  ('imagenet', None, (32, 33), BasicBlock, {'by_pixels'}),
  ('imagenet', 1, (16, 16), BasicBlock, {'by_pixels'}),
  ('cifar', None, (9, 9), BasicBlock, {'by_columns', 'by_pixels'}),
  ('cifar', 2, (9, 9), BasicBlock, {'by_pixels'}),
])  # fmt: skip
def test_resnet_uses_them_on_a_gpu(monkeypatch, stem, stride, size, block, used):
  """The features of a whole network are the same with and without them."""
  network = ResNet((1, 1), block, width=4, stem=stem, stem_stride=stride)
  images = jax.random.normal(jax.random.key(0), (2, *size, 3))
  variables = network.init(jax.random.key(1), images, train=False)
  expected = network.apply(variables, images, train=False)
  called = set()

  def spy(name, form, *args):
    called.add(name)
    return form(*args)

  for form in FORMS:
    monkeypatch.setattr(conv, form.__name__, functools.partial(spy, form.__name__, form))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  actual = network.apply(variables, images, train=False)
  assert called == used
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))
