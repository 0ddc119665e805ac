"""The small AlexNet of Wang & Isola (2020), which CACR (Zheng et al. 2023) uses on small images."""

import functools

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from ssl_jax.arrays import to_float32
from ssl_jax.models.encoder import Encoder
from ssl_jax.models.norm import BatchNorm
from ssl_jax.models.pool import max_pool

_NORMAL = nn.initializers.normal(0.02)


class AlexNet(Encoder):
  """Images [N, H, W, 3] -> features [N, 4096] in float32: fc7 after batch norm and ReLU.

  Five 3×3 convolutions of 96, 192, 384, 384 and 192 channels, with a 3×3 max-pool of stride 2 (no padding) after the
  first, second and fifth, then fc6 and fc7 of width 4,096. Each layer has no bias and is followed by batch norm and
  ReLU. The last layer, fc8 of width 128, is the projector 'alexnet'.
  """

  dtype: DTypeLike = jnp.float32
  axis_name: str | None = None

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    chex.assert_shape(images, (None, None, None, 3))
    if min(images.shape[1:3]) < 15:  # three max-pools reduce 15 to 7, 3 and 1
      size = f'{images.shape[1]} × {images.shape[2]}'
      raise ValueError(f'model.name = alexnet_small needs images of at least 15 × 15 pixels, not {size}')
    layer = functools.partial(nn.Dense, use_bias=False, kernel_init=_NORMAL, dtype=self.dtype)
    conv = functools.partial(
      nn.Conv, kernel_size=(3, 3), padding=((1, 1), (1, 1)), use_bias=False, kernel_init=_NORMAL, dtype=self.dtype
    )
    norm = functools.partial(BatchNorm, axis_name=self.axis_name)

    x = images.astype(self.dtype)
    for i, channels in enumerate((96, 192, 384, 384, 192), start=1):
      x = conv(channels, name=f'conv{i}')(x)
      x = norm(name=f'bn{i}')(x, train, relu=True)
      if i in (1, 2, 5):
        x = max_pool(x, window=3, stride=2)
    # Flatten channels first, as torch does, so that torch weights only need to be transposed.
    x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
    for i in (6, 7):
      x = layer(4096, name=f'fc{i}')(x)
      x = norm(name=f'bn{i}')(x, train, relu=True)
    return to_float32(x)
