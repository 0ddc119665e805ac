"""Kernels against Pillow, colorsys, scipy and torch; random versions against their distributions."""

import colorsys
import functools
import itertools
import math
import pathlib
from unittest import mock

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ssl_jax.data import augment
from tests.data import REAL, needs_real_data

EVERYTHING = dict(
  crop=True, flip=0.5, jitter=0.5, grey=0.5, blur=0.5, solarize=0.5, cutout=0.5, rotation=0.5, noise=0.5, size=8
)


def picture(height=40, width=48, seed=0):
  """A uint8 picture with smooth regions, edges, saturated and grey pixels, and noise."""
  rng = np.random.default_rng(seed)
  smooth = scipy.ndimage.gaussian_filter(rng.standard_normal((height, width, 3)), (5, 5, 0)) * 6 + 0.5
  smooth[: height // 4] = np.round(smooth[: height // 4])
  smooth[:, : width // 6] = smooth[:, : width // 6, :1]
  return np.round(255 * np.clip(smooth + 0.05 * rng.standard_normal(smooth.shape), 0, 1)).astype(np.uint8)


def photographs():
  """Two real photographs of different shapes, as PIL images."""
  paths = sorted((pathlib.Path(REAL) / 'imagewoof' / 'val').glob('*/*.JPEG'))
  return [Image.open(path).convert('RGB') for path in (paths[0], paths[-1])]


def images():
  """Names of pictures that Pillow is compared on."""
  return pytest.mark.parametrize('source', ['synthetic', pytest.param('photograph', marks=needs_real_data)])


def load(source):
  if source == 'synthetic':
    return picture()
  photograph = photographs()[0]
  return np.asarray(photograph.crop((60, 50, 60 + 48, 50 + 40)))


def to_float(array):
  return jnp.asarray(array, jnp.float32) / 255


def levels(image):
  """In the units of 8 bits: Pillow rounds to them after each operation."""
  return np.asarray(image, np.float64) * 255


@functools.cache
def kernel(name):
  return jax.jit(getattr(augment, name), static_argnames=('size', 'interpolation') if 'crop' in name else ())


def keys(number, seed=0):
  return jax.random.split(jax.random.key(seed), number)


def views(settings, image, number, seed=0):
  """`number` views of the one image."""
  return np.asarray(jax.jit(jax.vmap(augment.make(settings), (0, None)))(keys(number, seed), jnp.asarray(image)))


# Kernels.

BOXES = [(0, 0, 40, 48), (3, 5, 7, 9), (10, 2, 30, 45), (39, 47, 1, 1), (0, 40, 40, 3)]


@images()
@pytest.mark.parametrize('size', [16, 56])
def test_bilinear_crop_is_pillow_s_in_floats(source, size):
  array = load(source)
  for (top, left, height, width), flip in itertools.product(BOXES, (False, True)):
    actual = kernel('crop_and_resize')(to_float(array), top, left, height, width, size=size, flip=flip)
    for channel in range(3):
      plane = Image.fromarray(array[..., channel].astype(np.float32))  # mode F: Pillow does not round it
      expected = plane.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
      expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else expected
      np.testing.assert_allclose(levels(actual)[..., channel], np.asarray(expected), atol=5e-3)


@images()
@pytest.mark.parametrize('interpolation', ['bilinear', 'bicubic'])
def test_crop_is_pillow_s_in_8_bits(source, interpolation):
  array = load(source)
  resampling = dict(bilinear=Image.Resampling.BILINEAR, bicubic=Image.Resampling.BICUBIC)[interpolation]
  for size in (16, 56):
    # Not the last box: where the height shrinks much more than the width, Pillow 13 resizes rows before columns, and
    # bicubic weights are clipped in between.
    for top, left, height, width in BOXES[:-1]:
      actual = kernel('crop_and_resize')(
        to_float(array), top, left, height, width, size=size, interpolation=interpolation
      )
      box = (left, top, left + width, top + height)
      expected = np.asarray(Image.fromarray(array).crop(box).resize((size, size), resampling), np.float64)
      assert np.abs(levels(actual) - expected).max() < 1.5  # it rounds twice
      assert np.abs(levels(actual) - expected).mean() < 0.5


@needs_real_data
def test_crop_of_a_whole_photograph_to_224_is_pillow_s():
  for seed, photograph in enumerate(photographs()):
    array = np.asarray(photograph)
    uniforms = np.random.default_rng(seed).random(augment.CROP_DRAWS)
    top, left, height, width = (int(x) for x in augment.sample_crop(uniforms, *array.shape[:2]))
    actual = kernel('crop_and_resize')(to_float(array), top, left, height, width, size=224)
    expected = photograph.crop((left, top, left + width, top + height)).resize((224, 224), Image.Resampling.BILINEAR)
    assert np.abs(levels(actual) - np.asarray(expected, np.float64)).max() < 1.5


@images()
@pytest.mark.parametrize('factor', [0.0, 0.35, 1.0, 1.8])
@pytest.mark.parametrize('name', ['brightness', 'contrast', 'saturation'])
def test_adjustments_are_pillow_s(source, name, factor):
  array = load(source)
  enhance = dict(brightness=ImageEnhance.Brightness, contrast=ImageEnhance.Contrast, saturation=ImageEnhance.Color)
  actual = kernel(f'adjust_{name}')(to_float(array), factor)
  expected = enhance[name](Image.fromarray(array)).enhance(factor)
  assert np.abs(levels(actual) - np.asarray(expected, np.float64)).max() < 2  # it rounds the base, and cuts the result


@pytest.mark.parametrize('factor', [0.0, 0.35, 1.0, 1.8])
def test_adjustments_are_the_formula(factor):
  x = picture().astype(np.float64) / 255
  luma = x @ np.array([0.299, 0.587, 0.114])
  bases = dict(brightness=0.0, contrast=luma.mean(), saturation=luma[..., None])
  for name, base in bases.items():
    actual = kernel(f'adjust_{name}')(to_float(picture()), factor)
    np.testing.assert_allclose(actual, np.clip(factor * x + (1 - factor) * base, 0, 1), atol=1e-6)


@pytest.mark.parametrize('shift', [-0.5, -0.13, 0.0, 0.1, 0.4, 1.0])
def test_hue_is_colorsys_s(shift):
  array = picture(12, 15)
  array[0, :6] = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (7, 7, 7), (0, 0, 0), (255, 255, 255)]

  def turned(pixel):
    hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
    return colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)

  expected = np.apply_along_axis(turned, -1, array)
  np.testing.assert_allclose(kernel('adjust_hue')(to_float(array), shift), expected, atol=2e-6)


@images()
@pytest.mark.parametrize('steps', [-100, -26, 13, 127])
def test_hue_is_pillow_s(source, steps):
  # As torchvision on PIL images. Pillow cuts the hue to 1/255 of a turn, which is 6 levels of a saturated colour, and
  # adding modulo 256 what has a period of 255 is another such step.
  array = load(source)
  hue, saturation, value = Image.fromarray(array).convert('HSV').split()
  hue = Image.fromarray(((np.asarray(hue, np.int64) + steps) % 256).astype(np.uint8))
  expected = np.asarray(Image.merge('HSV', (hue, saturation, value)).convert('RGB'), np.float64)
  difference = np.abs(levels(kernel('adjust_hue')(to_float(array), steps / 255)) - expected)
  assert difference.max() < 14
  assert difference.mean() < 2.5


@images()
def test_greyscale_is_pillow_s(source):
  array = load(source)
  expected = np.asarray(Image.fromarray(array).convert('L'), np.float64)
  actual = levels(kernel('greyscale')(to_float(array)))
  for channel in range(3):
    assert np.abs(actual[..., channel] - expected).max() < 0.51


@images()
@pytest.mark.parametrize('sigma', [0.1, 0.7, 2.0])
def test_blur_is_an_exact_gaussian(source, sigma):
  image = to_float(load(source))
  actual = kernel('blur')(image, sigma)
  exact = scipy.ndimage.gaussian_filter(np.asarray(image, np.float64), (sigma, sigma, 0), mode='mirror', truncate=19)
  np.testing.assert_allclose(actual, exact, atol=2e-6)
  # torchvision's: a depthwise convolution over a reflected border; 23 taps as SimCLR at 224 pixels.
  taps = torch.exp(-0.5 * (torch.arange(-11.0, 12.0) / sigma) ** 2)
  square = torch.outer(taps, taps) / taps.sum() ** 2
  planes = torch.nn.functional.pad(torch.tensor(np.asarray(image)).permute(2, 0, 1)[None], (11,) * 4, mode='reflect')
  convolved = torch.nn.functional.conv2d(planes, square.expand(3, 1, 23, 23), groups=3)
  np.testing.assert_allclose(actual, convolved[0].permute(1, 2, 0).numpy(), atol=2e-6)


def test_blur_is_close_to_pillow_s_box_approximation():
  array = picture()
  expected = np.asarray(Image.fromarray(array).filter(ImageFilter.GaussianBlur(1.5)), np.float64)
  difference = np.abs(levels(kernel('blur')(to_float(array), 1.5)) - expected)[8:-8, 8:-8]  # it extends the border
  assert difference.max() < 6
  assert difference.mean() < 1


@images()
@pytest.mark.parametrize('threshold', [0, 1, 64, 128, 255, 256])
def test_solarize_is_pillow_s(source, threshold):
  array = load(source)
  expected = np.asarray(ImageOps.solarize(Image.fromarray(array), threshold), np.float64)
  actual = augment.solarize(to_float(array), (threshold - 0.5) / 255)
  np.testing.assert_allclose(levels(actual), expected, atol=1e-4)


def test_solarize_s_default_threshold_is_pillow_s_128():
  array = np.arange(255, dtype=np.uint8).reshape(5, 17, 3)
  actual = augment.solarize(to_float(array), augment.OFF['solarize_threshold'])
  np.testing.assert_allclose(levels(actual), np.asarray(ImageOps.solarize(Image.fromarray(array), 128)), atol=1e-4)


@images()
@pytest.mark.parametrize('degrees', [0, 90, 180, -90, 10, -37.3, 123.4])
def test_rotate_is_pillow_s(source, degrees):
  array = load(source)
  for region in (array, array[:31, :31]):
    expected = Image.fromarray(region).rotate(degrees, Image.Resampling.BILINEAR)
    difference = np.abs(levels(kernel('rotate')(to_float(region), degrees)) - np.asarray(expected, np.float64)).max(-1)
    if degrees == -90 or (degrees == 90 and len(set(region.shape[:2])) > 1):
      # The border of the source lies on pixel centres of the result, where rounding says which side it is.
      assert np.mean(difference > 1.01) < 0.06
    else:
      assert difference.max() < 1.01


def test_rotated_white_is_white_or_black():
  angles = np.linspace(-180, 180, 64, dtype=np.float32)
  rotated = jax.jit(jax.vmap(lambda degrees: augment.rotate(jnp.ones((32, 32, 3)), degrees)))(angles)
  assert rotated.min() == 0 and rotated.max() == 1


def test_cutout_paints_what_lies_inside():
  array = picture(10, 12)
  for top, left, height, width in [(2, 3, 4, 5), (-2, -1, 4, 3), (8, 10, 5, 5), (-9, 0, 4, 4)]:
    expected = array.astype(np.float32) / 255
    expected[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = (0.1, 0.2, 0.3)
    actual = augment.cutout(to_float(array), top, left, height, width, (0.1, 0.2, 0.3))
    np.testing.assert_allclose(actual, expected, atol=1e-7)


def test_noise_and_normalize_are_the_formula():
  x, noise = picture(10, 12) / 255, np.random.default_rng(0).standard_normal((10, 12, 3))
  actual = augment.add_noise(to_float(picture(10, 12)), jnp.asarray(noise, jnp.float32), 0.2)
  np.testing.assert_allclose(actual, np.clip(x + 0.2 * noise, 0, 1), atol=1e-6)
  mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.2)
  actual = augment.normalize(to_float(picture(10, 12)), mean, std)
  np.testing.assert_allclose(actual, (x - np.array(mean)) / np.array(std), atol=1e-6)


def test_color_jitter_is_the_four_adjustments_one_after_the_other():
  image, factors = to_float(picture(14, 10)), (1.3, 0.7, 1.5, 0.2)
  adjust = ['adjust_brightness', 'adjust_contrast', 'adjust_saturation', 'adjust_hue']
  orders = list(itertools.permutations(range(4)))
  actual = jax.jit(jax.vmap(lambda order: augment.color_jitter(image, *factors, order)))(jnp.asarray(orders))
  results = []
  for order in orders:
    expected = image
    for operation in order:
      expected = kernel(adjust[operation])(expected, factors[operation])
    results.append(np.asarray(expected))
  np.testing.assert_allclose(actual, results, atol=1e-5)
  # The order matters, all the more by the clipping: none of the 24 is another.
  assert min(np.abs(a - b).max() for a, b in itertools.combinations(results, 2)) > 1e-3


# The box of the random resized crop.


def torchvision_s_loop(uniforms, height, width, scale, ratio):
  """RandomResizedCrop.get_params, one number at a time."""
  areas, aspects, (down, right) = uniforms[:10], uniforms[10:20], uniforms[20:]
  for k in range(10):
    area = height * width * (scale[0] + (scale[1] - scale[0]) * areas[k])
    aspect = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * aspects[k])
    w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if 0 < w <= width and 0 < h <= height:
      return math.floor(down * (height - h + 1)), math.floor(right * (width - w + 1)), h, w
  if width / height < ratio[0]:
    w, h = width, round(width / ratio[0])
  elif width / height > ratio[1]:
    w, h = round(height * ratio[1]), height
  else:
    w, h = width, height
  return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(
  'height, width, scale',
  [(32, 32, (0.08, 1.0)), (320, 481, (0.2, 1.0)), (20, 300, (0.5, 1.0)), (300, 20, (0.9, 1.0)), (2, 3, (0.08, 1.0))],
)
def test_sample_crop_is_torchvision_s_loop(height, width, scale):
  uniforms = np.random.default_rng(0).random((300, augment.CROP_DRAWS))
  boxes = np.stack(augment.sample_crop(uniforms, height, width, scale), axis=-1)
  expected = [torchvision_s_loop(row, height, width, scale, (3 / 4, 4 / 3)) for row in uniforms]
  np.testing.assert_array_equal(boxes, expected)


@pytest.mark.parametrize('height, width, scale', [(32, 32, (0.08, 1.0)), (20, 300, (0.5, 1.0))])
def test_sample_crop_on_the_device_is_that_on_the_host(height, width, scale):
  uniforms = np.random.default_rng(0).random((2000, augment.CROP_DRAWS), np.float32)
  host = np.stack(augment.sample_crop(uniforms, height, width, scale), axis=-1)
  sample = jax.jit(lambda u: jnp.stack(augment.sample_crop(u, height, width, scale), axis=-1))
  device = np.asarray(sample(jnp.asarray(uniforms)))
  assert host.dtype == device.dtype == np.int32
  assert np.mean(np.all(host == device, axis=-1)) > 0.998  # a half rounds either way


@hypothesis.given(
  height=st.integers(1, 600),
  width=st.integers(1, 600),
  uniforms=hypothesis.extra.numpy.arrays(
    np.float32, augment.CROP_DRAWS, elements=st.floats(0, 1, exclude_max=True, width=32)
  ),
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_a_crop_lies_inside_the_image(height, width, uniforms):
  top, left, h, w = (int(x) for x in augment.sample_crop(uniforms, height, width))
  assert h >= 1 and w >= 1
  assert 0 <= top <= height - h
  assert 0 <= left <= width - w


def test_crops_are_uniform_in_area_place_and_logarithm_of_ratio():
  uniforms = np.random.default_rng(0).random((4000, augment.CROP_DRAWS))
  top, left, h, w = augment.sample_crop(uniforms, 1000, 1000, (0.1, 0.5), (0.5, 2.0))  # any such box fits
  log2_ratio = np.log2(w / h)
  assert scipy.stats.kstest(h * w / 1e6, scipy.stats.uniform(0.1, 0.4).cdf).pvalue > 1e-3
  assert scipy.stats.kstest(log2_ratio, scipy.stats.uniform(-1, 2).cdf).pvalue > 1e-3
  for start, length in ((top, h), (left, w)):
    assert scipy.stats.kstest(start / (1000 - length), 'uniform').pvalue > 1e-3
  assert np.abs(np.corrcoef([h * w, log2_ratio, top / (1000 - h), left / (1000 - w)]) - np.eye(4)).max() < 0.08


# The random versions.


def within_binomial(count, number, probability):
  return abs(count - number * probability) < 4.5 * math.sqrt(number * probability * (1 - probability))


@pytest.mark.parametrize('name', ['flip', 'jitter', 'grey', 'blur', 'solarize', 'cutout', 'rotation'])
def test_an_operation_happens_with_its_probability(name):
  image = picture(8, 8, seed=3)
  changed = np.abs(views({name: 0.3}, image, 3000) - image / 255).max(axis=(1, 2, 3)) > 1e-6
  assert within_binomial(changed.sum(), 3000, 0.3)


def test_the_crop_flips_with_its_probability():
  image = picture(8, 8)
  result = views(dict(crop=True, crop_scale=(1, 1), crop_ratio=(1, 1), flip=0.3), image, 3000)
  straight = np.abs(result - image / 255).max(axis=(1, 2, 3)) < 1e-5
  flipped = np.abs(result - image[:, ::-1] / 255).max(axis=(1, 2, 3)) < 1e-5
  assert np.all(straight ^ flipped)
  assert within_binomial(flipped.sum(), 3000, 0.3)


def parameters(kernel, settings, number=2400):
  """What `make` passes to the kernel, `[number, parameters]`: the kernel is replaced by one that returns it."""

  def recorder(image, *arguments, **_):
    flat = jnp.concatenate([jnp.ravel(jnp.asarray(a, jnp.float32)) for a in arguments])
    return jnp.zeros(image.size).at[: flat.size].set(flat).reshape(image.shape)

  with mock.patch.object(augment, kernel, recorder):
    return views(settings, picture(8, 8), number).reshape(number, -1)


def is_uniform(values, low, high):
  assert low <= values.min() and values.max() <= high
  return scipy.stats.kstest(values, scipy.stats.uniform(low, high - low).cdf).pvalue > 1e-3


def test_jitter_draws_factors_and_orders_uniformly():
  settings = dict(jitter=1.0, brightness=0.4, contrast=0.8, saturation=1.5, hue=0.1)
  drawn = parameters('color_jitter', settings)
  assert is_uniform(drawn[:, 0], 0.6, 1.4)
  assert is_uniform(drawn[:, 1], 0.2, 1.8)
  assert is_uniform(drawn[:, 2], 0.0, 2.5)
  assert is_uniform(drawn[:, 3], -0.1, 0.1)
  orders, counts = np.unique(drawn[:, 4:8], axis=0, return_counts=True)
  np.testing.assert_array_equal(orders, list(itertools.permutations(range(4))))
  assert scipy.stats.chisquare(counts).pvalue > 1e-3
  codes = drawn[:, 4:8] @ np.array([64, 16, 4, 1])
  assert np.abs(np.corrcoef(np.column_stack([drawn[:, :4], codes]).T) - np.eye(5)).max() < 0.1


def test_blur_and_rotation_draw_uniformly():
  assert is_uniform(parameters('blur', dict(blur=1.0, blur_sigma=(0.5, 1.5)))[:, 0], 0.5, 1.5)
  assert is_uniform(parameters('rotate', dict(rotation=1.0, rotation_degrees=20.0))[:, 0], -20, 20)


def test_cutout_is_centred_on_a_uniform_pixel_and_becomes_zero():
  settings = dict(cutout=1.0, cutout_size=0.5, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2))
  drawn = parameters('cutout', dict(settings, mean=augment.OFF['mean'], std=augment.OFF['std']))
  assert np.all(drawn[:, 2:4] == 4)
  for start in (drawn[:, 0], drawn[:, 1]):
    centres, counts = np.unique(start + 2, return_counts=True)
    np.testing.assert_array_equal(centres, range(8))
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
  zeros = np.all(views(settings, np.full((8, 8, 3), 255, np.uint8), 200) == 0, axis=-1).sum(axis=(1, 2))
  assert zeros.max() == 16
  assert zeros.min() == 4  # a corner


def test_noise_has_bits_of_its_own():
  """Those of the crop and the others are of the key itself, those of the noise of a key that follows from it."""
  key, image = jax.random.key(3), np.full((8, 8, 3), 128, np.uint8)
  noisy = augment.make(dict(augment.OFF, noise=1.0, noise_std=0.05, size=8))(key, image)
  drawn = jax.random.normal(jax.random.fold_in(key, augment._ENDS[-1]), (8, 8, 3))
  np.testing.assert_allclose(noisy, 128 / 255 + 0.05 * drawn, atol=1e-6)


def test_noise_is_gaussian_has_its_probability_and_leaves_the_rest_alone():
  image, number, settings = 64 + picture(8, 8) // 2, 3000, dict(flip=0.5, grey=0.5)
  difference = views(dict(settings, noise=0.3, noise_std=0.05), image, number) - views(settings, image, number)
  noisy = np.abs(difference).max(axis=(1, 2, 3)) > 1e-6
  assert within_binomial(noisy.sum(), number, 0.3)
  assert scipy.stats.kstest(difference[noisy][:60].ravel() / 0.05, 'norm').pvalue > 1e-3


# `make`.


@pytest.fixture(scope='module')
def everything():
  return jax.jit(jax.vmap(augment.make(EVERYTHING)))


@hypothesis.given(
  image=hypothesis.extra.numpy.arrays(np.uint8, (9, 7, 3)), seed=st.integers(0, 2**32 - 1), shift=st.integers(1, 15)
)
@hypothesis.settings(
  deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_views_are_images_and_depend_on_their_own_key_and_image_alone(everything, image, seed, shift):
  batch = np.stack([picture(9, 7)] * 16)
  batch[2] = image
  result = np.asarray(everything(keys(16, seed), jnp.asarray(batch)))
  assert result.shape == (16, 8, 8, 3) and result.dtype == np.float32
  assert np.all(np.isfinite(result)) and result.min() >= 0 and result.max() <= 1
  order = np.roll(np.arange(16), shift)
  moved = everything(keys(16, seed)[order], jnp.asarray(batch[order]))
  np.testing.assert_array_equal(moved, result[order])


def test_another_key_is_another_view(everything):
  result = np.asarray(everything(keys(16), jnp.asarray(np.stack([picture(9, 7)] * 16))))
  assert len(np.unique(result.reshape(16, -1), axis=0)) == 16


def test_a_batch_is_its_examples_on_any_number_of_devices(everything):
  batch, key = jnp.asarray(np.stack([picture(9, 7, seed=k) for k in range(16)])), keys(16)
  expected = everything(key, batch)
  single = jax.jit(augment.make(EVERYTHING))
  for k in range(16):
    np.testing.assert_allclose(single(key[k], batch[k]), expected[k], atol=2e-6)
  mesh = jax.make_mesh((4,), ('batch',), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('batch'))
  sharded = everything(jax.device_put(key, sharding), jax.device_put(batch, sharding))
  assert len(sharded.sharding.device_set) == 4
  np.testing.assert_allclose(sharded, expected, atol=2e-6)


@pytest.mark.parametrize('settings', [{}, augment.OFF, dict(jitter=1.0, brightness=0, contrast=0, saturation=0, hue=0)])
def test_nothing_on_is_the_image(settings):
  image = picture(9, 7)
  np.testing.assert_allclose(views(settings, image, 2), np.stack([image, image]) / 255, atol=1e-6)


def test_make_is_the_kernels_in_order():
  image, key = picture(9, 9), jax.random.key(5)
  settings = dict(flip=1.0, grey=1.0, solarize=1.0, solarize_threshold=0.3, blur=1.0, blur_sigma=(1.1, 1.1))
  settings.update(mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.2))
  expected = augment.solarize(kernel('blur')(augment.greyscale(to_float(image)[:, ::-1]), 1.1), 0.3)
  expected = augment.normalize(expected, settings['mean'], settings['std'])
  np.testing.assert_allclose(jax.jit(augment.make(settings))(key, jnp.asarray(image)), expected, atol=2e-6)


def test_the_graph_holds_what_is_on():
  image = jax.ShapeDtypeStruct((8, 8, 3), jnp.uint8)

  def graph(**settings):
    return str(jax.make_jaxpr(augment.make(settings))(jax.random.key(0), image))

  assert 'dot_general' not in graph(flip=0.5, jitter=0.8)
  assert 'scan' in graph(jitter=0.8)
  assert 'scan' not in graph(crop=True, blur=0.5)
  products = graph(crop=True, blur=0.5, interpolation='bicubic')
  # On an accelerator the default would be TF32.
  assert products.count('dot_general[') == 4
  assert products.count('precision=(Precision.HIGHEST, Precision.HIGHEST)') == 4
  assert 'gather' not in products


# Settings.


@pytest.mark.parametrize('name', augment.PRESETS)
def test_presets_are_complete_and_run(name):
  settings = augment.PRESETS[name]
  assert settings.keys() == augment.OFF.keys()
  image = jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8)
  view = jax.eval_shape(augment.make(settings), jax.random.key(0), image)
  assert view.shape == (32, 32, 3) and view.dtype == jnp.float32


def differences(name, base):
  return {key: value for key, value in augment.PRESETS[name].items() if value != augment.PRESETS[base][key]}


def test_presets_are_the_papers():
  cifar10, imagenet = augment.MEAN_STD['cifar10'], augment.MEAN_STD['imagenet']
  jitter = dict(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, jitter=0.8)
  simclr = dict(crop=True, crop_scale=(0.08, 1.0), crop_ratio=(3 / 4, 4 / 3), flip=0.5, grey=0.2, **jitter)
  assert augment.PRESETS['simclr'].items() >= dict(simclr, blur=0.5, blur_sigma=(0.1, 2.0)).items()
  assert differences('dystress_cifar', 'simclr') == dict(blur=0.0, **cifar10)
  full = dict(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2)
  assert differences('simclr_imagenet', 'simclr') == full | imagenet
  assert differences('moco_v2', 'simclr') == dict(crop_scale=(0.2, 1.0), **imagenet)
  assert differences('cacr_large', 'moco_v2') == differences('supervised_imagenet', 'moco_v2') == {}
  assert differences('cacr_small', 'simclr') == dict(crop_scale=(0.2, 1.0), jitter=1.0, hue=0.4, blur=0.0, **cifar10)
  assert differences('cacr_stl10', 'cacr_small') == dict(crop_scale=(0.08, 1.0), **augment.MEAN_STD['stl10'])
  assert differences('supervised_cifar', 'dystress_cifar') == imagenet
  assert differences('supervised_imagenet_no_blur', 'supervised_imagenet') == dict(blur=0.0)
  assert differences('supervised_imagenet_no_color', 'supervised_imagenet') == dict(jitter=0.0, grey=0.0)
  for added in ('cutout', 'rotation', 'noise'):
    assert differences(f'supervised_imagenet_{added}', 'supervised_imagenet').keys() == {added}
    assert differences(f'supervised_cifar_{added}', 'supervised_cifar').keys() == {added}
  assert differences('byol_2', 'byol_1') == dict(blur=0.1, solarize=0.2)
  byol = dict(saturation=0.2, interpolation='bicubic', blur=1.0, **imagenet)
  assert differences('byol_1', 'simclr') == byol


@pytest.mark.parametrize(
  'key, value',
  [
    ('size', 0),
    ('size', 3.5),
    ('crop', 0.5),
    ('crop_scale', (1.2, 1)),
    ('crop_scale', (0.0, 1)),
    ('crop_scale', (0.5, 0.2)),
    ('crop_scale', (0.2, 0.5, 1.0)),
    ('crop_scale', 0.2),
    ('crop_ratio', (2.0, 0.5)),
    ('crop_ratio', (0.0, 1.0)),
    ('interpolation', 'nearest'),
    ('flip', 1.5),
    ('jitter', -0.1),
    ('brightness', -0.4),
    ('contrast', math.inf),
    ('saturation', 'strong'),
    ('hue', 0.6),
    ('grey', math.nan),
    ('blur', 2),
    ('blur_sigma', (0.0, 2.0)),
    ('blur_sigma', (2.0, 0.1)),
    ('solarize', None),
    ('solarize_threshold', 128),
    ('cutout', -1),
    ('cutout_size', 16),
    ('rotation', 30),
    ('rotation_degrees', 270),
    ('noise', 1.1),
    ('noise_std', -0.1),
    ('mean', (0.5, 0.5)),
    ('mean', 0.5),
    ('std', (0.2, 0.0, 0.2)),
  ],
)
def test_a_bad_value_is_named_in_one_line(key, value):
  with pytest.raises(ValueError) as error:
    augment.make({key: value})
  message = str(error.value)
  assert message.startswith(f'augment.{key} = {value!r}: give ')
  assert '\n' not in message


def test_a_misspelt_setting_is_an_error_with_the_nearest_name():
  with pytest.raises(ValueError, match=r"^augment\.gray = 0\.2 does not exist: did you mean 'grey'\?$"):
    augment.make(dict(gray=0.2))


def test_images_of_another_size_without_a_crop_are_an_error():
  with pytest.raises(ValueError, match=r'^augment\.size = 32: the images are 9x7; set augment\.crop = True\.$'):
    augment.make(dict(size=32))(jax.random.key(0), jnp.asarray(picture(9, 7)))


# Evaluation.


def test_an_evaluation_view_of_the_right_size_is_the_image():
  image, mean, std = picture(32, 32), (0.1, 0.2, 0.3), (0.5, 0.4, 0.2)
  expected = (image / 255 - np.array(mean)) / np.array(std)
  np.testing.assert_allclose(augment.make_eval(32, mean, std)(jnp.asarray(image)), expected, atol=1e-5)
  np.testing.assert_array_equal(augment.make_eval()(jnp.asarray(image)), to_float(image))


def test_an_evaluation_view_is_the_centre():
  image = picture(40, 49)
  actual = jax.jit(augment.make_eval(24, crop=0.875))(jnp.asarray(image))
  expected = Image.fromarray(image).crop((7, 2, 42, 37)).resize((24, 24), Image.Resampling.BILINEAR)
  assert np.abs(levels(actual) - np.asarray(expected, np.float64)).max() < 1.5
  with pytest.raises(ValueError, match=r'^crop = 1\.5: give '):
    augment.make_eval(24, crop=1.5)


@needs_real_data
def test_an_evaluation_view_of_a_photograph_is_resize_256_and_centre_224():
  photograph = photographs()[0].crop((0, 0, 400, 320))
  expected = photograph.resize((320, 256), Image.Resampling.BILINEAR).crop((48, 16, 48 + 224, 16 + 224))
  actual = jax.jit(augment.make_eval(224, crop=0.875))(jnp.asarray(np.asarray(photograph)))
  difference = np.abs(levels(actual) - np.asarray(expected, np.float64))
  assert difference[1:-1, 1:-1].max() < 1.5  # at the border it sees beyond the centre
  assert difference.mean() < 0.5
