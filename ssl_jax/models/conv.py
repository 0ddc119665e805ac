"""Convolutions in other forms that are faster on a GPU, with the same results up to rounding.

cuDNN is slow if there are three input channels, as in the first convolution of a network, and for 1×1 convolutions with
a stride on arrays of up to 128 MiB. benchmarks/README.md has the measurements. All forms pad by (K - 1) / 2 pixels on
each side.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = 2**27  # bytes: `by_pixels` is slower than cuDNN on larger arrays, as in a ResNet-50 at 224 pixels


def convolve(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: Any, **kwargs) -> jax.Array:
  """A convolution, for the argument `conv_general_dilated` of flax.linen.Conv: without groups and dilation.

  Shapes: [N, H, W, C], [K, K, C, D] -> [N, H / stride, W / stride, D].
  """
  if jax.default_backend() == 'gpu':
    precision = kwargs['precision']
    if kernel.shape[:3] == (3, 3, 3) and strides == (1, 1):
      return by_columns(x, kernel, precision)
    if kernel.shape[:3] == (7, 7, 3) and strides == (2, 2) and x.shape[1] % 2 == x.shape[2] % 2 == 0:
      return by_cells(x, kernel, precision)
    if kernel.shape[:2] == (1, 1) and strides == (2, 2) and x.size * x.dtype.itemsize <= LARGEST:
      return by_pixels(x, kernel, precision)
  return lax.conv_general_dilated(x, kernel, strides, padding, **kwargs)


def by_columns(x: jax.Array, kernel: jax.Array, precision: Any = None) -> jax.Array:
  """A 3×3 convolution of 3 channels as one matrix product: 27 numbers for each pixel, padded to 32."""
  height, width = x.shape[1:3]
  padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  columns = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
  columns = jnp.concatenate([*columns, jnp.zeros((*x.shape[:3], 5), x.dtype)], -1)
  rows = jnp.pad(kernel.reshape(27, -1), ((0, 5), (0, 0)))
  return jnp.tensordot(columns, rows, 1, precision=precision)


def by_cells(x: jax.Array, kernel: jax.Array, precision: Any = None) -> jax.Array:
  """A 7×7 convolution of 3 channels and stride 2 as a 4×4 convolution of 16: 4 for each pixel of a 2×2 cell."""
  x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)))
  n, height, width, channels = x.shape
  x = x.reshape(n, height // 2, 2, width // 2, 2, channels).swapaxes(2, 3)
  x = x.reshape(n, height // 2, width // 2, 4 * channels)
  kernel = jnp.pad(kernel, ((1, 0), (1, 0), (0, 1), (0, 0)))
  kernel = kernel.reshape(4, 2, 4, 2, channels, -1).swapaxes(1, 2).reshape(4, 4, 4 * channels, -1)
  numbers = ('NHWC', 'HWIO', 'NHWC')
  return lax.conv_general_dilated(x, kernel, (1, 1), ((2, 1), (2, 1)), dimension_numbers=numbers, precision=precision)


def by_pixels(x: jax.Array, kernel: jax.Array, precision: Any = None) -> jax.Array:
  """A 1×1 convolution of stride 2 as a matrix product of every second pixel."""
  return jnp.tensordot(x[:, ::2, ::2], kernel[0, 0], 1, precision=precision)
