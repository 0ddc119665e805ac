"""ResNets (He et al. 2016) for ImageNet and CIFAR, with the padding, initialization and names of torchvision."""

import functools

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from ssl_jax.arrays import to_float32
from ssl_jax.models.conv import convolve
from ssl_jax.models.encoder import Encoder
from ssl_jax.models.norm import BatchNorm
from ssl_jax.models.pool import max_pool
from ssl_jax.registry import is_whole, require, require_choice

# The initialization is torchvision's (He et al. 2015, fan-out). Padding is explicit, because torch pads a 3×3
# convolution by (1, 1) at every stride, whereas 'SAME' pads by (0, 1) at stride 2.
_KAIMING = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')


def _conv(features: int, kernel: int, stride: int = 1, *, dtype: DTypeLike, name: str) -> nn.Conv:
  pad = (kernel - 1) // 2
  return nn.Conv(
    features,
    (kernel, kernel),
    strides=(stride, stride),
    padding=((pad, pad), (pad, pad)),
    use_bias=False,
    kernel_init=_KAIMING,
    dtype=dtype,
    conv_general_dilated=convolve,
    name=name,
  )


class _Block(nn.Module):
  """A residual block: relu(shortcut(x) + residual(x)).  [N, H, W, C] -> [N, H/stride, W/stride, width·expansion]"""

  width: int
  stride: int
  conv: functools.partial
  norm: functools.partial
  zero_init_residual: bool

  def last_norm(self, name: str) -> BatchNorm:
    """The last norm of the residual branch. With zero scale, the block starts as the identity (Goyal et al. 2017)."""
    init = nn.initializers.zeros if self.zero_init_residual else nn.initializers.ones
    return self.norm(scale_init=init, name=name)

  def shortcut(self, x: jax.Array, shape: tuple[int, ...], train: bool) -> jax.Array:
    if x.shape == shape:
      return x
    x = self.conv(shape[-1], 1, self.stride, name='downsample_conv')(x)
    return self.norm(name='downsample_bn')(x, train)


class BasicBlock(_Block):
  """Two 3×3 convolutions."""

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    y = self.conv(self.width, 3, self.stride, name='conv1')(x)
    y = self.norm(name='bn1')(y, train, relu=True)
    y = self.conv(self.width, 3, name='conv2')(y)
    return self.last_norm('bn2')(y, train, add=self.shortcut(x, y.shape, train), relu=True)


class Bottleneck(_Block):
  """1×1, 3×3 and 1×1 convolutions, with the stride on the 3×3 (v1.5, as in torchvision)."""

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    y = self.conv(self.width, 1, name='conv1')(x)
    y = self.norm(name='bn1')(y, train, relu=True)
    y = self.conv(self.width, 3, self.stride, name='conv2')(y)
    y = self.norm(name='bn2')(y, train, relu=True)
    y = self.conv(4 * self.width, 1, name='conv3')(y)
    return self.last_norm('bn3')(y, train, add=self.shortcut(x, y.shape, train), relu=True)


class ResNet(Encoder):
  """Images [N, H, W, 3] -> features [N, D] in float32: the spatial mean of the last stage.

  Stage i has `stage_sizes[i]` blocks of width `width`·2^i; every stage but the first halves the resolution. The
  'imagenet' stem is a 7×7 convolution of stride 2 followed by a 3×3 max-pool of stride 2; the 'cifar' stem is one 3×3
  convolution of stride 1. `stem_stride` overrides the stride of the stem's convolution. `remat` recomputes each block
  in the backward pass instead of storing its activations: the same results with less memory and more time.
  """

  stage_sizes: tuple[int, ...]
  block: type[_Block] = BasicBlock
  width: int = 64
  stem: str = 'imagenet'
  stem_stride: int | None = None
  zero_init_residual: bool = False
  remat: bool = False
  dtype: DTypeLike = jnp.float32
  axis_name: str | None = None

  def __post_init__(self) -> None:
    require_choice('stem', self.stem, ('imagenet', 'cifar'))
    counts = lambda x: 0 < len(x) <= 8 and all(is_whole(size) and 1 <= size <= 200 for size in x)
    require('stage_sizes', self.stage_sizes, counts, 'block counts from 1 to 200, such as (2, 2), of at most 8 stages')
    require('stem_stride', self.stem_stride, lambda x: x is None or 1 <= x <= 64, 'at least 1 and at most 64')
    require('width', self.width, lambda x: 1 <= x <= 2**20, f'at least 1 and at most {2**20}')
    super().__post_init__()

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    chex.assert_shape(images, (None, None, None, 3))
    conv = functools.partial(_conv, dtype=self.dtype)
    norm = functools.partial(BatchNorm, axis_name=self.axis_name)

    kernel, stride = (7, 2) if self.stem == 'imagenet' else (3, 1)
    x = images.astype(self.dtype)
    x = conv(self.width, kernel, self.stem_stride or stride, name='conv1')(x)
    x = norm(name='bn1')(x, train, relu=True)
    if self.stem == 'imagenet':
      x = max_pool(x, window=3, stride=2, padding=1)
    block = nn.remat(self.block, static_argnums=(2,)) if self.remat else self.block  # static: train
    for i, size in enumerate(self.stage_sizes):
      for j in range(size):
        stride = 2 if i > 0 and j == 0 else 1
        x = block(self.width * 2**i, stride, conv, norm, self.zero_init_residual, name=f'layer{i + 1}_{j}')(x, train)
    if not train:  # on a CPU, XLA in jax 0.11 fuses this mean with the bfloat16 convolutions before it and returns NaN
      x = jax.lax.optimization_barrier(x)
    return to_float32(x).mean((1, 2))
