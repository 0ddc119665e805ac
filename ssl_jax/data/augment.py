"""Random image augmentations on the device: settings, presets, and the function that samples and applies them.

`make(settings)` returns a function that augments one image, from uint8 to float32:

    augment = make(PRESETS['simclr'])
    views = jax.vmap(augment)(keys, images)  # keys [B], images uint8 [B, H, W, 3] -> float32 [B, size, size, 3]

Each view has its own threefry key, derived from (seed, step, index in the global batch, view). A view therefore depends
neither on the device nor on the rest of the batch.

The order is: crop with flip, rotation, color jitter, grayscale, blur, solarize, noise, cutout, normalize. A flip
commutes in distribution with the operations after it (up to one pixel of a cutout), so recipes that flip last are
equivalent.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from ssl_jax.data import image_ops
from ssl_jax.registry import in_float32, is_whole, nearest, require, show

# Of each channel. The std of CIFAR-10 is the mean over images of their own std, as in the code of DySTreSS; over all
# pixels, it is (0.2470, 0.2435, 0.2616).
MEAN_STD = {
  'cifar10': dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
  'cifar100': dict(mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761)),
  'stl10': dict(mean=(0.4409, 0.4279, 0.3868), std=(0.2683, 0.2610, 0.2687)),
  'imagenet': dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
}

# Every setting, with defaults that augment nothing. An operation with probability 0 is not compiled.
OFF: dict[str, Any] = dict(
  size=None,  # pixels per side of the view; None: the size of the image
  crop=False,  # random resized crop; False if the host has already cropped
  crop_scale=(0.08, 1.0),  # area of the crop, as a fraction of the image area
  crop_ratio=(3 / 4, 4 / 3),  # width / height
  interpolation='bilinear',  # of the crop: 'bilinear' or 'bicubic'
  flip=0.0,
  jitter=0.0,  # probability that the four adjustments below are applied, in random order
  brightness=0.4,  # factor in [max(0, 1 - value), 1 + value]; likewise contrast and saturation
  contrast=0.4,
  saturation=0.4,
  hue=0.1,  # shift in [-value, value] of a full turn
  grey=0.0,
  blur=0.0,
  blur_sigma=(0.1, 2.0),  # pixels
  solarize=0.0,
  solarize_threshold=0.5,
  cutout=0.0,
  cutout_size=0.5,  # side of the square, as a fraction of the view's side
  rotation=0.0,
  rotation_degrees=30.0,  # angle in [-value, value]
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
_BALANCED_CIFAR = dict(_SIMCLR, blur=0.0, **MEAN_STD['imagenet'])
_EMP_SSL = dict(_SIMCLR, crop_scale=(0.25, 0.25), crop_ratio=(1.0, 1.0), hue=0.2, blur=0.1, solarize=0.1)
_EMP_SSL |= dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
# Lee 2025, sec. 5.2, names these augmentations without parameters: the probabilities and sizes are our choice.
_VARIANTS = dict(
  no_blur=dict(blur=0.0),
  no_color=dict(jitter=0.0, grey=0.0),
  cutout=dict(cutout=0.5),
  rotation=dict(rotation=0.5),
  noise=dict(noise=0.5),
)

PRESETS: dict[str, dict[str, Any]] = {
  'none': dict(OFF),
  'simclr': _SIMCLR,  # Chen et al. 2020, with half the color strength, as for CIFAR
  'simclr_imagenet': dict(_SIMCLR, **_JITTER, **MEAN_STD['imagenet']),  # full color strength: DySTreSS, sec. 4
  'moco_v2': dict(_MOCO_V2),
  'byol_1': dict(_BYOL, blur=1.0),  # Grill et al. 2020, Table 6: T for one view, T' for the other
  'byol_2': dict(_BYOL, blur=0.1, solarize=0.2),
  'dystress_cifar': dict(_SIMCLR, blur=0.0, **MEAN_STD['cifar10']),  # DySTreSS (Manna et al. 2024), the authors' code
  'cacr_small': _CACR_SMALL,  # CACR (Zheng et al. 2023), Alg. 1, CIFAR-10
  'cacr_cifar100': dict(_CACR_SMALL, **MEAN_STD['cifar100']),
  'cacr_stl10': dict(_CACR_SMALL, crop_scale=(0.08, 1.0), **MEAN_STD['stl10']),  # CACR, Alg. 1, with size 64
  'cacr_large': dict(_MOCO_V2),  # CACR, Alg. 2
  'balanced_cifar': _BALANCED_CIFAR,  # Lee 2025, A.4.1
  'balanced_imagenet': dict(_MOCO_V2),  # Lee 2025, A.3.1
  'emp_ssl': _EMP_SSL,  # Tong et al. 2023, the authors' code
  **{f'balanced_cifar_{name}': _BALANCED_CIFAR | _VARIANTS[name] for name in _VARIANTS if name != 'no_blur'},
  **{f'balanced_imagenet_{name}': _MOCO_V2 | change for name, change in _VARIANTS.items()},
}


_PROBABILITIES = ('flip', 'jitter', 'grey', 'blur', 'solarize', 'cutout', 'rotation', 'noise')
_STRENGTHS = ('brightness', 'contrast', 'saturation', 'noise_std')
_STRONGEST = 100.0  # upper limit of strengths, blur sigmas and aspect ratios
_increasing = lambda r: len(r) == 2 and all(map(in_float32, r)) and 0 < r[0] <= r[1] <= _STRONGEST
_within = lambda low, high: lambda x: in_float32(x) and low <= x <= high
_RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
  **dict.fromkeys(_PROBABILITIES, (_within(0, 1), 'a probability in [0, 1]')),
  **dict.fromkeys(_STRENGTHS, (_within(0, _STRONGEST), f'finite and at least 0, and at most {_STRONGEST:g}')),
  'size': (lambda n: n is None or (is_whole(n) and n >= 1), "a positive number of pixels, or None for the image's"),
  'crop': (lambda crop: isinstance(crop, bool), 'True or False'),
  'crop_scale': (lambda r: _increasing(r) and r[1] <= 1, '(low, high) with 0 < low <= high <= 1'),
  'crop_ratio': (_increasing, f'(low, high) with 0 < low <= high <= {_STRONGEST:g}'),
  'interpolation': (lambda name: name in image_ops.INTERPOLATIONS, ' or '.join(image_ops.INTERPOLATIONS)),
  'hue': (_within(0, 0.5), 'a fraction of a full turn in [0, 0.5]'),
  'blur_sigma': (_increasing, f'(low, high) with 0 < low <= high <= {_STRONGEST:g}'),
  'solarize_threshold': (_within(0, 1), 'in [0, 1]'),
  'cutout_size': (lambda size: in_float32(size) and 0 < size <= 1, "a fraction of the view's side in (0, 1]"),
  'rotation_degrees': (_within(0, 180), 'in [0, 180]'),
  'mean': (lambda mean: len(mean) == 3 and all(map(_within(-1e3, 1e3), mean)), 'three finite numbers, one per channel'),
  'std': (lambda std: len(std) == 3 and all(map(_within(1e-6, 1e6), std)), 'three positive numbers, one per channel'),
}


def validate(settings: Mapping[str, Any], section: str = 'augment') -> dict[str, Any]:
  """The settings, with defaults from `OFF`. Raises a ValueError for an unknown key or an invalid value."""
  for key, value in settings.items():
    if key not in OFF:
      raise ValueError(f'{section}.{key} = {show(value)} is not a known setting: {nearest(key, OFF)}')
  settings = {**OFF, **settings}
  for key, (holds, must_be) in _RULES.items():
    require(f'{section}.{key}', settings[key], holds, must_be)
  return settings


# All uniform random numbers of an example are drawn at once: splitting the key and drawing for each operation would
# launch more kernels than the image operations themselves. Each operation has its own numbers (first whether it is
# applied, then its parameters), even when it is off. Turning one operation off therefore leaves the others unchanged.
_DRAWS = dict(crop=image_ops.CROP_DRAWS, flip=1, rotation=2, jitter=6, grey=1, blur=2, solarize=1, noise=1, cutout=3)
_ENDS = list(itertools.accumulate(_DRAWS.values()))


def _between(u: jax.Array, low: float, high: float) -> jax.Array:
  return low + u * (high - low)


def _factor(u: jax.Array, strength: float) -> jax.Array:
  return _between(u, max(0.0, 1 - strength), 1 + strength)


def make(settings: Mapping[str, Any]) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """A function that augments one image: key, uint8 `[H, W, 3]` -> float32 `[size, size, 3]`, normalized.

  Omitted operations are off: `make(dict(blur=0.5))` only blurs.
  """
  s = validate(settings)

  def jitter(u: jax.Array, x: jax.Array) -> jax.Array:
    orders = jnp.asarray(image_ops.JITTER_ORDERS)
    order = orders[jnp.floor(u[4] * len(orders)).astype(jnp.int32)]
    bright, contrast, saturation = (_factor(u[k], s[n]) for k, n in enumerate(('brightness', 'contrast', 'saturation')))
    return image_ops.color_jitter(x, bright, contrast, saturation, _between(u[3], -s['hue'], s['hue']), order)

  def cut(u: jax.Array, x: jax.Array) -> jax.Array:
    side = round(s['cutout_size'] * min(x.shape[:2]))
    top, left = (jnp.floor(v * n).astype(jnp.int32) - side // 2 for v, n in zip(u, x.shape[:2], strict=True))
    return image_ops.cutout(x, top, left, side, side, s['mean'])  # normalization maps the mean to 0

  def augment(key: jax.Array, image: jax.Array) -> jax.Array:
    chex.assert_shape(image, (None, None, 3))
    chex.assert_type(image, jnp.uint8)
    height, width, _ = image.shape
    u = dict(zip(_DRAWS, jnp.split(jax.random.uniform(key, _ENDS[-1:]), _ENDS[:-1]), strict=True))
    x = image.astype(jnp.float32) / 255
    if s['crop']:
      box = image_ops.sample_crop(u['crop'], height, width, s['crop_scale'], s['crop_ratio'])
      mirror = u['flip'][0] < s['flip']
      size = s['size'] or min(height, width)
      x = image_ops.crop_and_resize(x, *box, size, flip=mirror, interpolation=s['interpolation'])
    elif s['size'] not in (None, height) or s['size'] not in (None, width):
      raise ValueError(f'augment.size = {s["size"]} differs from the images, {height} × {width}: set augment.crop=True')

    def noise(u: jax.Array, x: jax.Array) -> jax.Array:
      own = jax.random.fold_in(key, _ENDS[-1])  # independent of the uniform numbers above
      return image_ops.add_noise(x, jax.random.normal(own, x.shape), s['noise_std'])

    operations = dict(
      flip=lambda u, x: x[:, ::-1],
      rotation=lambda u, x: image_ops.rotate(x, _between(u[0], -s['rotation_degrees'], s['rotation_degrees'])),
      jitter=jitter,
      grey=lambda u, x: image_ops.greyscale(x),
      blur=lambda u, x: image_ops.blur(x, _between(u[0], *s['blur_sigma'])),
      solarize=lambda u, x: image_ops.solarize(x, s['solarize_threshold']),
      noise=noise,
      cutout=cut,
    )
    if s['crop']:
      del operations['flip']  # part of the crop
    for name, operation in operations.items():
      if s[name]:
        x = jnp.where(u[name][0] < s[name], operation(u[name][1:], x), x)
    return image_ops.normalize(x, s['mean'], s['std'])

  return augment


def make_eval(
  size: int | None = None,
  mean: tuple[float, ...] = OFF['mean'],
  std: tuple[float, ...] = OFF['std'],
  *,
  crop: float = 1.0,
) -> Callable[[jax.Array], jax.Array]:
  """The deterministic view for evaluations: uint8 `[H, W, 3]` -> center crop `[size, size, 3]`, normalized.

  `crop` is the side of the crop as a fraction of the shorter side: 0.875 is ImageNet's "shorter side to 256, center
  224". With 1.0, a square image of side `size` is only normalized.
  """
  s = validate(dict(size=size, mean=mean, std=std))
  require('eval.crop', crop, lambda x: 0 < x <= 1, 'a fraction of the shorter side in (0, 1]')

  def view(image: jax.Array) -> jax.Array:
    chex.assert_shape(image, (None, None, 3))
    chex.assert_type(image, jnp.uint8)
    x = image.astype(jnp.float32) / 255
    box = image_ops.center_box(image.shape[0], image.shape[1], crop)
    side = s['size'] or box[-1]
    if (*box, *image.shape[:2]) != (0, 0, side, side, side, side):
      x = image_ops.crop_and_resize(x, *box, side)
    return image_ops.normalize(x, s['mean'], s['std'])

  return view
