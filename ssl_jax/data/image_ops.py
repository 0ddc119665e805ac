"""Image operations in pure JAX, as functions of explicit parameters.

An image is float32 `[H, W, 3]` in [0, 1]. The operations match Pillow and torchvision, except that images are not
rounded to 8 bits between operations, and that the blur is an exact Gaussian: Pillow approximates it with box blurs, and
torchvision truncates it. Bicubic crops resize columns, clip, then resize rows, as Pillow does before version 13. Pillow
13 resizes rows first for some shapes: at sharp edges, a few pixels then differ by some levels.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def _triangle(x: jax.Array) -> jax.Array:
  return jnp.maximum(1 - jnp.abs(x), 0)


def _cubic(x: jax.Array) -> jax.Array:
  """Keys' cubic kernel with a = -1/2, as in Pillow's BICUBIC."""
  x = jnp.abs(x)
  near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
  return jnp.where(x < 1, near, jnp.where(x < 2, far, 0))


INTERPOLATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {'bilinear': _triangle, 'bicubic': _cubic}


def _resampling(start, length, inputs, outputs, kernel, mirror):
  """Weights `[outputs, inputs]` that resize the pixels `start ... start + length` to `outputs`, mirrored if `mirror`.

  As in Pillow, the kernel is widened for downsampling, to avoid aliasing, and ignores pixels outside of the crop.
  """
  scale = length / outputs
  position = jnp.arange(outputs, dtype=jnp.float32)
  position = jnp.where(mirror, outputs - 1 - position, position)
  pixel = jnp.arange(inputs, dtype=jnp.float32)
  distance = (pixel + 0.5)[None, :] - (start + (position + 0.5) * scale)[:, None]
  inside = (pixel >= start) & (pixel < start + length)
  weights = jnp.where(inside[None, :], kernel(distance / jnp.maximum(scale, 1.0)), 0)
  return weights / jnp.sum(weights, axis=1, keepdims=True)


def _separable(rows, columns, image, *, overshoots=False, clip=True):
  """rows @ image @ columns^T for each channel. `[H', H], [W', W], [H, W, C] -> [H', W', C]`"""
  # HIGHEST, because TF32 would round weights and pixels to 11 bits. With the channel axis in the middle, both products
  # are plain matrix products.
  product = functools.partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)
  image = product(jnp.swapaxes(image, 1, 2), columns, axes=(2, 1))
  if overshoots and clip:
    image = jnp.clip(image, 0, 1)  # as Pillow does between columns and rows
  image = product(rows, image, axes=(1, 0))
  return jnp.swapaxes(jnp.clip(image, 0, 1) if clip else image, 1, 2)


def crop_and_resize(
  image: jax.Array,
  top: ArrayLike,
  left: ArrayLike,
  height: ArrayLike,
  width: ArrayLike,
  size: int,
  *,
  flip: ArrayLike = False,
  interpolation: str = 'bilinear',
  clip: bool = True,
) -> jax.Array:
  """Resizes a box to `[size, size, C]`, then mirrors it if `flip`: Pillow's `crop(...).resize(...)`.

  The box has integer coordinates. `clip` limits the result to [0, 1]; turn it off for normalized images.
  """
  chex.assert_rank(image, 3)
  kernel = INTERPOLATIONS[interpolation]
  top, left, height, width = (jnp.asarray(x, jnp.float32) for x in (top, left, height, width))
  rows = _resampling(top, height, image.shape[0], size, kernel, False)
  columns = _resampling(left, width, image.shape[1], size, kernel, flip)
  return _separable(rows, columns, image, overshoots=interpolation == 'bicubic', clip=clip)


CROP_TRIES = 10
CROP_DRAWS = 2 * CROP_TRIES + 2


def sample_crop(
  u: Any,
  height: int,
  width: int,
  scale: tuple[float, float] = (0.08, 1.0),
  ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[Any, Any, Any, Any]:
  """The box of a random resized crop as in torchvision: int32 (top, left, height, width), each `[...]`.

  Each of ten tries draws an area (uniform) and an aspect ratio (log-uniform). The first box that fits is placed
  uniformly. If none fits, the result is the largest centered box with an allowed ratio.

  Args:
    u: uniform random numbers in [0, 1), `[..., CROP_DRAWS]`: a NumPy array on the host or a JAX array on a device.
    height, width: size of the image.
    scale: range of the area, as a fraction of the image area.
    ratio: range of the ratio of width to height.
  """
  xp = u.__array_namespace__()
  area = height * width * (scale[0] + (scale[1] - scale[0]) * u[..., :CROP_TRIES])
  aspect = xp.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * u[..., CROP_TRIES : 2 * CROP_TRIES])
  widths, heights = xp.round(xp.sqrt(area * aspect)), xp.round(xp.sqrt(area / aspect))
  fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
  # Iterate from the last try to the first, so that the first try that fits wins, without argmax or gather.
  w, h = max(1, min(width, round(height * ratio[1]))), max(1, min(height, round(width / ratio[0])))
  for k in reversed(range(CROP_TRIES)):
    w, h = xp.where(fits[..., k], widths[..., k], w), xp.where(fits[..., k], heights[..., k], h)
  fitted = xp.any(fits, axis=-1)
  top = xp.where(fitted, xp.floor(u[..., -2] * (height - h + 1)), xp.floor((height - h) / 2))
  left = xp.where(fitted, xp.floor(u[..., -1] * (width - w + 1)), xp.floor((width - w) / 2))
  return tuple(xp.asarray(x, dtype=xp.int32) for x in (top, left, h, w))


def center_box(height: int, width: int, fraction: float = 1.0) -> tuple[int, int, int, int]:
  """(top, left, side, side) of the centered square whose side is `fraction` of the shorter side."""
  side = max(1, round(fraction * min(height, width)))
  return (height - side) // 2, (width - side) // 2, side, side


def rotate(image: jax.Array, degrees: ArrayLike) -> jax.Array:
  """Rotates counterclockwise about the center, bilinear, black outside: Pillow's `rotate(degrees, BILINEAR)`."""
  chex.assert_rank(image, 3)
  height, width, _ = image.shape
  angle = jnp.deg2rad(jnp.asarray(degrees, jnp.float32))
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  y = jnp.arange(height, dtype=jnp.float32)[:, None] + (0.5 - height / 2)
  x = jnp.arange(width, dtype=jnp.float32)[None, :] + (0.5 - width / 2)
  # The source coordinates of each output pixel, [H, W], from the upper left corner.
  x, y = cos * x - sin * y + width / 2, sin * x + cos * y + height / 2
  inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
  x, y = x - 0.5, y - 0.5
  x0, y0 = jnp.floor(x), jnp.floor(y)

  def at(row, column):
    row = jnp.clip(row, 0, height - 1).astype(jnp.int32)
    return image[row, jnp.clip(column, 0, width - 1).astype(jnp.int32)]

  right, down = (x - x0)[..., None], (y - y0)[..., None]
  above = (1 - right) * at(y0, x0) + right * at(y0, x0 + 1)
  below = (1 - right) * at(y0 + 1, x0) + right * at(y0 + 1, x0 + 1)
  mixed = jnp.clip((1 - down) * above + down * below, 0, 1)  # rounding errors exceed the range by up to 2e-6
  return jnp.where(inside[..., None], mixed, 0)


def _luma(image):
  """Luma by ITU-R 601, as in Pillow.  `[H, W, 3] -> [H, W, 1]`"""
  chex.assert_shape(image, (None, None, 3))
  return 0.299 * image[..., :1] + 0.587 * image[..., 1:2] + 0.114 * image[..., 2:]


def _blend(image, base, factor):
  """factor · image + (1 - factor) · base, clipped, as in Pillow's ImageEnhance. Factor 1 is exactly the image."""
  return jnp.clip(factor * image + (1 - factor) * base, 0, 1)


def greyscale(image: jax.Array) -> jax.Array:
  """The luma in all three channels: Pillow's convert('L')."""
  return jnp.broadcast_to(_luma(image), image.shape)


def adjust_hue(image: jax.Array, shift: ArrayLike) -> jax.Array:
  """Shifts the HSV hue by `shift`, a fraction of a full turn. Value and saturation stay the same."""
  chex.assert_shape(image, (None, None, 3))
  red, green, blue = image[..., :1], image[..., 1:2], image[..., 2:]
  value = jnp.maximum(red, jnp.maximum(green, blue))
  chroma = value - jnp.minimum(red, jnp.minimum(green, blue))
  inverse = 1 / jnp.where(chroma > 0, chroma, 1)  # a gray pixel has no hue, and its chroma of 0 keeps it gray
  hue = jnp.where(
    value == red,
    (green - blue) * inverse,
    jnp.where(value == green, (blue - red) * inverse + 2, (red - green) * inverse + 4),
  )
  # HSV to RGB: each channel is value - chroma * trapezoid(hue), with the trapezoids a third of a turn apart.
  turn = hue + (6 * shift + jnp.array([[[5.0, 3.0, 1.0]]]))
  turn = turn - 6 * jnp.floor(turn / 6)
  return value - chroma * jnp.clip(jnp.minimum(turn, 4 - turn), 0, 1)


_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
JITTER_ORDERS = np.array(list(itertools.permutations(range(4))), np.int32)


def color_jitter(
  image: jax.Array, brightness: ArrayLike, contrast: ArrayLike, saturation: ArrayLike, hue: ArrayLike, order: jax.Array
) -> jax.Array:
  """Applies the four adjustments in the given order, int `[4]`: a permutation of 0 (brightness) to 3 (hue).

  Brightness blends the image with black, contrast with the mean of its luma, saturation with the grayscale image.

  The order differs between examples, and a switch under vmap would compute all 24 orders. It is cheaper to compute all
  four adjustments in each of four steps and select one.
  """
  chex.assert_shape(order, (4,))

  def turn(image, operation):
    luma = _luma(image)
    bright, contrasty = operation == _BRIGHTNESS, operation == _CONTRAST
    base = jnp.where(bright, 0, jnp.where(contrasty, jnp.mean(luma), luma))
    factor = jnp.where(bright, brightness, jnp.where(contrasty, contrast, saturation))
    return jnp.where(operation == _HUE, adjust_hue(image, hue), _blend(image, base, factor)), None

  # On a CPU, XLA fuses an unrolled loop and recomputes its first steps many times, which takes 10 times as long.
  image, _ = jax.lax.scan(turn, image, order, unroll=1 if jax.default_backend() == 'cpu' else 4)
  return image


def _gaussian(sigma, pixels):
  """Weights `[pixels, pixels]` of a Gaussian blur. Borders are mirrored once, without repeating the edge pixel."""
  output = jnp.arange(pixels, dtype=jnp.float32)[:, None]
  pixel = jnp.arange(pixels, dtype=jnp.float32)[None, :]
  last = pixels - 1
  density = lambda distance: jnp.exp(-0.5 * (distance / sigma) ** 2)
  weights = density(pixel - output)
  weights += jnp.where(pixel > 0, density(pixel + output), 0)
  weights += jnp.where(pixel < last, density((last - pixel) + (last - output)), 0)
  return weights / jnp.sum(weights, axis=1, keepdims=True)


def blur(image: jax.Array, sigma: ArrayLike) -> jax.Array:
  """Gaussian blur of standard deviation `sigma` pixels, with mirrored borders and a kernel as wide as the image."""
  chex.assert_rank(image, 3)
  return _separable(_gaussian(sigma, image.shape[0]), _gaussian(sigma, image.shape[1]), image)


def solarize(image: jax.Array, threshold: ArrayLike) -> jax.Array:
  """Inverts values of at least `threshold`."""
  return jnp.where(image >= threshold, 1 - image, image)


def cutout(
  image: jax.Array,
  top: ArrayLike,
  left: ArrayLike,
  height: ArrayLike,
  width: ArrayLike,
  fill: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> jax.Array:
  """Fills a box of whole pixels, which may extend beyond the image (DeVries & Taylor 2017)."""
  chex.assert_shape(image, (None, None, 3))
  y = jnp.arange(image.shape[0])[:, None, None]
  x = jnp.arange(image.shape[1])[None, :, None]
  inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
  return jnp.where(inside, jnp.asarray(fill, jnp.float32)[None, None, :], image)


def add_noise(image: jax.Array, noise: jax.Array, std: ArrayLike) -> jax.Array:
  """image + std · noise, clipped."""
  chex.assert_equal_shape([image, noise])
  return jnp.clip(image + std * noise, 0, 1)


def normalize(image: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
  """(image - mean) / std per channel."""
  chex.assert_shape(image, (None, None, 3))
  mean, std = (jnp.asarray(x, jnp.float32)[None, None, :] for x in (mean, std))
  return (image - mean) / std
