"""Augmentations in pure JAX, on the device.

An example is `[H, W, 3]`: uint8 where it comes in, float32 in [0, 1] inside. Kernels (`adjust_hue`, `blur`, ...) are
plain functions of explicit parameters and follow Pillow and torchvision, without their rounding to 8 bits between two
operations. `make(settings)` returns one example's random augmentation:

    augment = make(PRESETS['simclr'])
    views = jax.vmap(augment)(keys, images)  # keys [B], images uint8 [B, H, W, 3] -> float32 [B, size, size, 3]

With one threefry key an example, made from (seed, step, index in the global batch, view), a view depends neither on the
device nor on the rest of the batch.

The order is: crop with flip, rotation, colour jitter, grey, blur, solarise, noise, cutout, normalise. A flip commutes
in distribution with all that follows it (but for the odd pixel of a cutout), so recipes that flip last are the same
recipe.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax.registry import nearest

MEAN_STD = {
  'cifar10': dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
  'cifar100': dict(mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761)),
  'stl10': dict(mean=(0.4409, 0.4279, 0.3868), std=(0.2683, 0.2610, 0.2687)),
  'imagenet': dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
}

# Every setting with its value where nothing is augmented: a probability of 0 keeps the operation out of the graph.
OFF = dict(
  size=None,  # pixels a side of the view; None: as the image
  crop=False,  # random resized crop; False where the host has cropped already
  crop_scale=(0.08, 1.0),  # area of the crop, of the image's
  crop_ratio=(3 / 4, 4 / 3),  # width by height
  interpolation='bilinear',  # or 'bicubic', of the crop
  flip=0.0,
  jitter=0.0,  # the probability of all four below, in random order
  brightness=0.4,  # factor from [max(0, 1 - value), 1 + value]; contrast and saturation alike
  contrast=0.4,
  saturation=0.4,
  hue=0.1,  # shift from [-value, value] of a full turn
  grey=0.0,
  blur=0.0,
  blur_sigma=(0.1, 2.0),  # pixels
  solarize=0.0,
  solarize_threshold=0.5,
  cutout=0.0,
  cutout_size=0.5,  # of the view's side
  rotation=0.0,
  rotation_degrees=30.0,  # angle from [-value, value]
  noise=0.0,
  noise_std=0.05,
  mean=(0.0, 0.0, 0.0),
  std=(1.0, 1.0, 1.0),
)

_SIMCLR = dict(OFF, crop=True, flip=0.5, jitter=0.8, grey=0.2, blur=0.5)
_JITTER = dict(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2)
_MOCO_V2 = dict(_SIMCLR, crop_scale=(0.2, 1.0), **MEAN_STD['imagenet'])
_BYOL = dict(_SIMCLR, interpolation='bicubic', saturation=0.2, **MEAN_STD['imagenet'])
_CACR_SMALL = dict(_SIMCLR, crop_scale=(0.2, 1.0), jitter=1.0, hue=0.4, blur=0.0, **MEAN_STD['cifar10'])
_SUPERVISED_CIFAR = dict(_SIMCLR, blur=0.0, **MEAN_STD['imagenet'])
# Section 5.2 of supervised names what it adds but gives no numbers: the probabilities and sizes are our choice.
_VARIANTS = dict(
  no_blur=dict(blur=0.0),
  no_color=dict(jitter=0.0, grey=0.0),
  cutout=dict(cutout=0.5),
  rotation=dict(rotation=0.5),
  noise=dict(noise=0.5),
)

PRESETS = {
  'none': dict(OFF),
  'simclr': _SIMCLR,  # Chen et al. 2020 with half the colour, as for CIFAR
  'simclr_imagenet': dict(_SIMCLR, **_JITTER, **MEAN_STD['imagenet']),  # with all of it: dystress sec. 4, lightly
  'moco_v2': dict(_MOCO_V2),
  'byol_1': dict(_BYOL, blur=1.0),  # Grill et al. 2020, Table 6: T for one view, T' for the other
  'byol_2': dict(_BYOL, blur=0.1, solarize=0.2),
  'dystress_cifar': dict(_SIMCLR, blur=0.0, **MEAN_STD['cifar10']),  # its code
  'cacr_small': _CACR_SMALL,  # cacr Alg. 1, CIFAR-10
  'cacr_cifar100': dict(_CACR_SMALL, **MEAN_STD['cifar100']),
  'cacr_stl10': dict(_CACR_SMALL, crop_scale=(0.08, 1.0), **MEAN_STD['stl10']),  # cacr Alg. 1, with size 64
  'cacr_large': dict(_MOCO_V2),  # cacr Alg. 2
  'supervised_cifar': _SUPERVISED_CIFAR,  # supervised A.4.1
  'supervised_imagenet': dict(_MOCO_V2),  # supervised A.3.1
  **{f'supervised_cifar_{name}': _SUPERVISED_CIFAR | _VARIANTS[name] for name in _VARIANTS if name != 'no_blur'},
  **{f'supervised_imagenet_{name}': _MOCO_V2 | change for name, change in _VARIANTS.items()},
}


def _triangle(x):
  return jnp.maximum(1 - jnp.abs(x), 0)


def _cubic(x):
  """Keys' kernel with a = -1/2, as Pillow's BICUBIC."""
  x = jnp.abs(x)
  near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
  return jnp.where(x < 1, near, jnp.where(x < 2, far, 0))


INTERPOLATIONS = {'bilinear': _triangle, 'bicubic': _cubic}


def _resampling(start, length, inputs, outputs, kernel, mirror):
  """Weights `[outputs, inputs]` that resize pixels `start ... start + length` to `outputs`, mirrored or not.

  As Pillow: the kernel widens where it shrinks (no aliasing) and, as after a crop, sees nothing outside.
  """
  scale = length / outputs
  position = jnp.arange(outputs, dtype=jnp.float32)
  position = jnp.where(mirror, outputs - 1 - position, position)
  pixel = jnp.arange(inputs, dtype=jnp.float32)
  distance = (pixel + 0.5)[None, :] - (start + (position + 0.5) * scale)[:, None]
  inside = (pixel >= start) & (pixel < start + length)
  weights = jnp.where(inside[None, :], kernel(distance / jnp.maximum(scale, 1.0)), 0)
  return weights / jnp.sum(weights, axis=1, keepdims=True)


def _separable(rows, columns, image, *, overshoots=False):
  """rows @ image @ columns^T for each channel. `[H', H], [W', W], [H, W, C] -> [H', W', C]`, clipped to [0, 1]."""
  # TF32 would round weights and pixels to 11 bits. With the channel in the middle both are plain matrix products.
  product = functools.partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)
  image = product(jnp.swapaxes(image, 1, 2), columns, axes=(2, 1))
  if overshoots:
    image = jnp.clip(image, 0, 1)  # so does Pillow, between its columns and its rows
  return jnp.swapaxes(jnp.clip(product(rows, image, axes=(1, 0)), 0, 1), 1, 2)


def crop_and_resize(image, top, left, height, width, size, *, flip=False, interpolation='bilinear'):
  """The box of whole pixels, resized to `[size, size, C]`: Pillow's `crop(...).resize(...)`, then its mirror image."""
  chex.assert_rank(image, 3)
  kernel = INTERPOLATIONS[interpolation]
  top, left, height, width = (jnp.asarray(x, jnp.float32) for x in (top, left, height, width))
  rows = _resampling(top, height, image.shape[0], size, kernel, False)
  columns = _resampling(left, width, image.shape[1], size, kernel, flip)
  return _separable(rows, columns, image, overshoots=interpolation == 'bicubic')


CROP_TRIES = 10
CROP_DRAWS = 2 * CROP_TRIES + 2


def sample_crop(u, height, width, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)):
  """A box for the random resized crop, from uniforms `[..., CROP_DRAWS]` in [0, 1): numpy on the host, jax on a device.

  As torchvision: ten tries of an area (uniform) and a ratio (log-uniform); the first that fits, at a uniform place;
  else the largest centred box whose ratio is allowed. Returns int32 (top, left, height, width), each `[...]`.
  """
  xp = u.__array_namespace__()
  area = height * width * (scale[0] + (scale[1] - scale[0]) * u[..., :CROP_TRIES])
  aspect = xp.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * u[..., CROP_TRIES : 2 * CROP_TRIES])
  widths, heights = xp.round(xp.sqrt(area * aspect)), xp.round(xp.sqrt(area / aspect))
  fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
  # From the last try to the first, so that the first stays: no argmax and no gather on the device.
  w, h = max(1, min(width, round(height * ratio[1]))), max(1, min(height, round(width / ratio[0])))
  for k in reversed(range(CROP_TRIES)):
    w, h = xp.where(fits[..., k], widths[..., k], w), xp.where(fits[..., k], heights[..., k], h)
  fitted = xp.any(fits, axis=-1)
  top = xp.where(fitted, xp.floor(u[..., -2] * (height - h + 1)), xp.floor((height - h) / 2))
  left = xp.where(fitted, xp.floor(u[..., -1] * (width - w + 1)), xp.floor((width - w) / 2))
  return tuple(xp.asarray(x, dtype=xp.int32) for x in (top, left, h, w))


def rotate(image, degrees):
  """Counter-clockwise about the centre, bilinear, black outside: Pillow's `rotate(degrees, BILINEAR)`."""
  chex.assert_rank(image, 3)
  height, width, _ = image.shape
  angle = jnp.deg2rad(jnp.asarray(degrees, jnp.float32))
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  y = jnp.arange(height, dtype=jnp.float32)[:, None] + (0.5 - height / 2)
  x = jnp.arange(width, dtype=jnp.float32)[None, :] + (0.5 - width / 2)
  # Where each pixel comes from, [H, W], in pixels from the upper left corner.
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
  mixed = jnp.clip((1 - down) * above + down * below, 0, 1)  # rounding leads up to 2e-6 beyond
  return jnp.where(inside[..., None], mixed, 0)


def _luma(image):
  """ITU-R 601, as Pillow.  `[H, W, 3] -> [H, W, 1]`"""
  chex.assert_shape(image, (None, None, 3))
  return 0.299 * image[..., :1] + 0.587 * image[..., 1:2] + 0.114 * image[..., 2:]


def _blend(image, base, factor):
  """Away from `base` by `factor`, clipped: Pillow's ImageEnhance. At 1 exactly the image."""
  return jnp.clip(factor * image + (1 - factor) * base, 0, 1)


def greyscale(image):
  """The luma in all three channels: Pillow's convert('L')."""
  return jnp.broadcast_to(_luma(image), image.shape)


def adjust_brightness(image, factor):
  """Blend with black."""
  return _blend(image, 0.0, factor)


def adjust_contrast(image, factor):
  """Blend with the mean of the luma."""
  return _blend(image, jnp.mean(_luma(image)), factor)


def adjust_saturation(image, factor):
  """Blend with the grey image."""
  return _blend(image, _luma(image), factor)


def adjust_hue(image, shift):
  """The hue of HSV moved by `shift` of a full turn; value and saturation stay."""
  chex.assert_shape(image, (None, None, 3))
  red, green, blue = image[..., :1], image[..., 1:2], image[..., 2:]
  value = jnp.maximum(red, jnp.maximum(green, blue))
  chroma = value - jnp.minimum(red, jnp.minimum(green, blue))
  inverse = 1 / jnp.where(chroma > 0, chroma, 1)  # a grey pixel has no hue, and keeps its colour whatever this gives
  hue = jnp.where(
    value == red,
    (green - blue) * inverse,
    jnp.where(value == green, (blue - red) * inverse + 2, (red - green) * inverse + 4),
  )
  # From HSV to each channel: value - chroma * trapezium(hue), the same trapezium a third of a turn apart.
  turn = hue + (6 * shift + jnp.array([[[5.0, 3.0, 1.0]]]))
  turn = turn - 6 * jnp.floor(turn / 6)
  return value - chroma * jnp.clip(jnp.minimum(turn, 4 - turn), 0, 1)


_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
_ORDERS = np.array(list(itertools.permutations(range(4))), np.int32)


def color_jitter(image, brightness, contrast, saturation, hue, order):
  """The four adjustments in the given order: int `[4]`, a permutation of their places among the arguments.

  The order differs between examples. A switch under vmap would compute all 24; one of the four in each turn is 4 x 4.
  """
  chex.assert_shape(order, (4,))

  def turn(image, operation):
    luma = _luma(image)
    bright, contrasty = operation == _BRIGHTNESS, operation == _CONTRAST
    base = jnp.where(bright, 0, jnp.where(contrasty, jnp.mean(luma), luma))
    factor = jnp.where(bright, brightness, jnp.where(contrasty, contrast, saturation))
    return jnp.where(operation == _HUE, adjust_hue(image, hue), _blend(image, base, factor)), None

  # Unrolled, XLA on a CPU fuses the chain and computes the first turns over and over: it takes 10 times as long.
  image, _ = jax.lax.scan(turn, image, order, unroll=1 if jax.default_backend() == 'cpu' else 4)
  return image


def _gaussian(sigma, pixels):
  """Weights `[pixels, pixels]` of a Gaussian, its borders mirrored once (the border pixel is not repeated)."""
  output = jnp.arange(pixels, dtype=jnp.float32)[:, None]
  pixel = jnp.arange(pixels, dtype=jnp.float32)[None, :]
  last = pixels - 1
  density = lambda distance: jnp.exp(-0.5 * (distance / sigma) ** 2)
  weights = density(pixel - output)
  weights += jnp.where(pixel > 0, density(pixel + output), 0)
  weights += jnp.where(pixel < last, density((last - pixel) + (last - output)), 0)
  return weights / jnp.sum(weights, axis=1, keepdims=True)


def blur(image, sigma):
  """Gaussian blur of standard deviation `sigma` pixels, borders mirrored; the kernel is as wide as the image."""
  chex.assert_rank(image, 3)
  return _separable(_gaussian(sigma, image.shape[0]), _gaussian(sigma, image.shape[1]), image)


def solarize(image, threshold):
  """Inverts what is at least `threshold`."""
  return jnp.where(image >= threshold, 1 - image, image)


def cutout(image, top, left, height, width, fill=(0.0, 0.0, 0.0)):
  """Paints a box of whole pixels, as much of it as lies inside the image (DeVries & Taylor 2017)."""
  chex.assert_shape(image, (None, None, 3))
  y = jnp.arange(image.shape[0])[:, None, None]
  x = jnp.arange(image.shape[1])[None, :, None]
  inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
  return jnp.where(inside, jnp.asarray(fill, jnp.float32)[None, None, :], image)


def add_noise(image, noise, std):
  """Noise of the image's shape times `std`, clipped."""
  chex.assert_equal_shape([image, noise])
  return jnp.clip(image + std * noise, 0, 1)


def normalize(image, mean, std):
  """(image - mean) / std, a channel each."""
  chex.assert_shape(image, (None, None, 3))
  mean, std = (jnp.asarray(x, jnp.float32)[None, None, :] for x in (mean, std))
  return (image - mean) / std


_PROBABILITY = (lambda p: 0 <= p <= 1, 'give a probability in [0, 1].')
_STRENGTH = (lambda strength: 0 <= strength < math.inf, 'give a strength of at least 0, such as 0.4.')
_RULES = dict(
  size=(lambda n: n is None or (n >= 1 and n == int(n)), "give a positive number of pixels, or None for the image's."),
  crop=(lambda crop: isinstance(crop, bool), 'give True or False.'),
  crop_scale=(lambda r: 0 < r[0] <= r[1] <= 1 and len(r) == 2, 'give 0 < low <= high <= 1, such as (0.08, 1.0).'),
  crop_ratio=(lambda r: 0 < r[0] <= r[1] < math.inf and len(r) == 2, 'give 0 < low <= high, such as (0.75, 1.333).'),
  interpolation=(lambda name: name in INTERPOLATIONS, f'give one of {", ".join(INTERPOLATIONS)}.'),
  flip=_PROBABILITY,
  jitter=_PROBABILITY,
  brightness=_STRENGTH,
  contrast=_STRENGTH,
  saturation=_STRENGTH,
  hue=(lambda hue: 0 <= hue <= 0.5, 'give a share of a full turn in [0, 0.5].'),
  grey=_PROBABILITY,
  blur=_PROBABILITY,
  blur_sigma=(lambda r: 0 < r[0] <= r[1] < math.inf and len(r) == 2, 'give 0 < low <= high, such as (0.1, 2.0).'),
  solarize=_PROBABILITY,
  solarize_threshold=(lambda threshold: 0 <= threshold <= 1, 'give a value in [0, 1].'),
  cutout=_PROBABILITY,
  cutout_size=(lambda size: 0 < size <= 1, "give a share of the view's side in (0, 1]."),
  rotation=_PROBABILITY,
  rotation_degrees=(lambda degrees: 0 <= degrees <= 180, 'give degrees in [0, 180].'),
  noise=_PROBABILITY,
  noise_std=(lambda std: 0 <= std < math.inf, 'give a standard deviation of at least 0, such as 0.05.'),
  mean=(lambda mean: len(mean) == 3 and all(map(math.isfinite, mean)), 'give three numbers, red, green and blue.'),
  std=(lambda std: len(std) == 3 and all(0 < s < math.inf for s in std), 'give three positive numbers.'),
)


def validate(settings: Mapping[str, Any], section: str = 'augment') -> dict[str, Any]:
  """The settings with `OFF` for those not given; ValueError for a key or a value that cannot be."""
  for key in settings:
    if key not in OFF:
      raise ValueError(f'{section}.{key} = {settings[key]!r} does not exist: {nearest(key, OFF)}')
  settings = {**OFF, **settings}
  for key, (holds, mend) in _RULES.items():
    try:
      valid = holds(settings[key])
    except (TypeError, ValueError, IndexError):  # a value of another type
      valid = False
    if not valid:
      raise ValueError(f'{section}.{key} = {settings[key]!r}: {mend}')
  return settings


# Uniforms of an example, all drawn at once: a key split and a draw for every operation would cost an accelerator more
# kernels than the pixels do. Each operation has its own, whether it is on or not (its coin, then its parameters), so an
# ablation changes that operation alone.
_DRAWS = dict(crop=CROP_DRAWS, flip=1, rotation=2, jitter=6, grey=1, blur=2, solarize=1, noise=1, cutout=3)
_ENDS = list(itertools.accumulate(_DRAWS.values()))


def _between(u, low, high):
  return low + u * (high - low)


def _factor(u, strength):
  return _between(u, max(0.0, 1 - strength), 1 + strength)


def make(settings: Mapping[str, Any]) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """One example's augmentation: key, uint8 `[H, W, 3]` -> float32 `[size, size, 3]`, normalised.

  With a single operation on, it is that operation's random version: `make(dict(blur=0.5))`.
  """
  s = validate(settings)

  def jitter(u, x):
    order = jnp.asarray(_ORDERS)[jnp.floor(u[4] * len(_ORDERS)).astype(jnp.int32)]
    factors = (_factor(u[k], s[name]) for k, name in enumerate(('brightness', 'contrast', 'saturation')))
    return color_jitter(x, *factors, _between(u[3], -s['hue'], s['hue']), order)

  def cut(u, x):
    side = round(s['cutout_size'] * min(x.shape[:2]))
    top, left = (jnp.floor(v * n).astype(jnp.int32) - side // 2 for v, n in zip(u, x.shape[:2], strict=True))
    return cutout(x, top, left, side, side, s['mean'])  # the mean, which is 0 once normalised

  def augment(key, image):
    chex.assert_shape(image, (None, None, 3))
    chex.assert_type(image, jnp.uint8)
    height, width, _ = image.shape
    u = dict(zip(_DRAWS, jnp.split(jax.random.uniform(key, _ENDS[-1:]), _ENDS[:-1]), strict=True))
    x = image.astype(jnp.float32) / 255
    if s['crop']:
      box = sample_crop(u['crop'], height, width, s['crop_scale'], s['crop_ratio'])
      mirror = u['flip'][0] < s['flip']
      x = crop_and_resize(x, *box, s['size'] or min(height, width), flip=mirror, interpolation=s['interpolation'])
    elif s['size'] not in (None, height) or s['size'] not in (None, width):
      raise ValueError(f'augment.size = {s["size"]}: the images are {height}x{width}; set augment.crop = True.')

    operations = dict(
      flip=lambda u, x: x[:, ::-1],
      rotation=lambda u, x: rotate(x, _between(u[0], -s['rotation_degrees'], s['rotation_degrees'])),
      jitter=jitter,
      grey=lambda u, x: greyscale(x),
      blur=lambda u, x: blur(x, _between(u[0], *s['blur_sigma'])),
      solarize=lambda u, x: solarize(x, s['solarize_threshold']),
      # A block of the generator that the uniforms above do not use.
      noise=lambda u, x: add_noise(x, jax.random.normal(jax.random.fold_in(key, _ENDS[-1]), x.shape), s['noise_std']),
      cutout=cut,
    )
    if s['crop']:
      del operations['flip']  # the crop's weights have it already
    for name, operation in operations.items():
      if s[name]:
        x = jnp.where(u[name][0] < s[name], operation(u[name][1:], x), x)
    return normalize(x, s['mean'], s['std'])

  return augment


def center_box(height, width, fraction=1.0):
  """(top, left, side, side) of the centred square whose side is `fraction` of the shorter side."""
  side = max(1, round(fraction * min(height, width)))
  return (height - side) // 2, (width - side) // 2, side, side


def make_eval(size=None, mean=OFF['mean'], std=OFF['std'], *, crop=1.0) -> Callable[[jax.Array], jax.Array]:
  """One example's view for an evaluation: uint8 `[H, W, 3]` -> the centre, `[size, size, 3]`, normalised.

  A `crop` of 0.875 is ImageNet's "shorter side to 256, centre 224"; at 1.0 a square image of `size` stays as it is.
  """
  s = validate(dict(size=size, mean=mean, std=std))
  if not 0 < crop <= 1:
    raise ValueError(f'crop = {crop!r}: give a share of the shorter side in (0, 1].')

  def view(image):
    chex.assert_shape(image, (None, None, 3))
    chex.assert_type(image, jnp.uint8)
    x = image.astype(jnp.float32) / 255
    box = center_box(*image.shape[:2], crop)
    side = s['size'] or box[-1]
    if (*box, *image.shape[:2]) != (0, 0, side, side, side, side):
      x = crop_and_resize(x, *box, side)
    return normalize(x, s['mean'], s['std'])

  return view
