"""Image operations match Pillow, colorsys, scipy and torch; random crops match torchvision."""

import colorsys
import itertools
import math

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

from ssl_jax.data import augment, image_ops
from tests.data.pictures import images, kernel, levels, load, photographs, picture, to_float
from tests.helpers import needs_real_data

BOXES = [(0, 0, 40, 48), (3, 5, 7, 9), (10, 2, 30, 45), (39, 47, 1, 1), (0, 40, 40, 3)]


@images()
@pytest.mark.parametrize('size', [16, 56])
def test_bilinear_crop_matches_pillow_in_floats(source, size):
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
def test_crop_matches_pillow_in_8_bits(source, interpolation):
  array = load(source)
  resampling = dict(bilinear=Image.Resampling.BILINEAR, bicubic=Image.Resampling.BICUBIC)[interpolation]
  for size in (16, 56):
    # Not the last box: if the height shrinks much more than the width, Pillow 13 resizes rows before columns, and
    # clips bicubic values in between.
    for top, left, height, width in BOXES[:-1]:
      actual = kernel('crop_and_resize')(
        to_float(array), top, left, height, width, size=size, interpolation=interpolation
      )
      box = (left, top, left + width, top + height)
      expected = np.asarray(Image.fromarray(array).crop(box).resize((size, size), resampling), np.float64)
      assert np.abs(levels(actual) - expected).max() < 1.5  # Pillow rounds twice
      assert np.abs(levels(actual) - expected).mean() < 0.5


@needs_real_data
def test_crop_of_a_whole_photograph_to_224_matches_pillow():
  for seed, photograph in enumerate(photographs()):
    array = np.asarray(photograph)
    uniforms = np.random.default_rng(seed).random(image_ops.CROP_DRAWS)
    top, left, height, width = (int(x) for x in image_ops.sample_crop(uniforms, *array.shape[:2]))
    actual = kernel('crop_and_resize')(to_float(array), top, left, height, width, size=224)
    expected = photograph.crop((left, top, left + width, top + height)).resize((224, 224), Image.Resampling.BILINEAR)
    assert np.abs(levels(actual) - np.asarray(expected, np.float64)).max() < 1.5


ADJUSTMENTS = dict(brightness=1.0, contrast=1.0, saturation=1.0, hue=0.0)  # the factors that change nothing


def adjusted(name, image, factor):
  return kernel('color_jitter')(image, **ADJUSTMENTS | {name: factor}, order=jnp.arange(4))


@images()
@pytest.mark.parametrize('factor', [0.0, 0.35, 1.0, 1.8])
@pytest.mark.parametrize('name', ['brightness', 'contrast', 'saturation'])
def test_adjustments_match_pillow(source, name, factor):
  array = load(source)
  enhance = dict(brightness=ImageEnhance.Brightness, contrast=ImageEnhance.Contrast, saturation=ImageEnhance.Color)
  actual = adjusted(name, to_float(array), factor)
  expected = enhance[name](Image.fromarray(array)).enhance(factor)
  assert np.abs(levels(actual) - np.asarray(expected, np.float64)).max() < 2  # Pillow rounds


@pytest.mark.parametrize('factor', [0.0, 0.35, 1.0, 1.8])
def test_adjustments_match_the_formula(factor):
  x = picture().astype(np.float64) / 255
  luma = x @ np.array([0.299, 0.587, 0.114])
  bases = dict(brightness=0.0, contrast=luma.mean(), saturation=luma[..., None])
  for name, base in bases.items():
    actual = adjusted(name, to_float(picture()), factor)
    np.testing.assert_allclose(actual, np.clip(factor * x + (1 - factor) * base, 0, 1), atol=1e-6)


@pytest.mark.parametrize('shift', [-0.5, -0.13, 0.0, 0.1, 0.4, 1.0])
def test_hue_matches_colorsys(shift):
  array = picture(12, 15)
  array[0, :6] = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (7, 7, 7), (0, 0, 0), (255, 255, 255)]

  def turned(pixel):
    hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
    return colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)

  expected = np.apply_along_axis(turned, -1, array)
  np.testing.assert_allclose(kernel('adjust_hue')(to_float(array), shift), expected, atol=2e-6)


@images()
@pytest.mark.parametrize('steps', [-100, -26, 13, 127])
def test_hue_matches_pillow(source, steps):
  # As torchvision on PIL images. Pillow truncates the hue to 1/255 of a turn, which is 6 levels of a saturated color,
  # and the addition modulo 256 of a value with period 255 is another such step.
  array = load(source)
  hue, saturation, value = Image.fromarray(array).convert('HSV').split()
  hue = Image.fromarray(((np.asarray(hue, np.int64) + steps) % 256).astype(np.uint8))
  expected = np.asarray(Image.merge('HSV', (hue, saturation, value)).convert('RGB'), np.float64)
  difference = np.abs(levels(kernel('adjust_hue')(to_float(array), steps / 255)) - expected)
  assert difference.max() < 14
  assert difference.mean() < 2.5


@images()
def test_greyscale_matches_pillow(source):
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
  # torchvision: a depthwise convolution with reflected borders; 23 taps, as in SimCLR at 224 pixels.
  taps = torch.exp(-0.5 * (torch.arange(-11.0, 12.0) / sigma) ** 2)
  square = torch.outer(taps, taps) / taps.sum() ** 2
  planes = torch.nn.functional.pad(torch.tensor(np.asarray(image)).permute(2, 0, 1)[None], (11,) * 4, mode='reflect')
  convolved = torch.nn.functional.conv2d(planes, square.expand(3, 1, 23, 23), groups=3)
  np.testing.assert_allclose(actual, convolved[0].permute(1, 2, 0).numpy(), atol=2e-6)


def test_blur_is_close_to_pillow_s_box_approximation():
  array = picture()
  expected = np.asarray(Image.fromarray(array).filter(ImageFilter.GaussianBlur(1.5)), np.float64)
  difference = np.abs(levels(kernel('blur')(to_float(array), 1.5)) - expected)[8:-8, 8:-8]  # Pillow extends the border
  assert difference.max() < 6
  assert difference.mean() < 1


@images()
@pytest.mark.parametrize('threshold', [0, 1, 64, 128, 255, 256])
def test_solarize_matches_pillow(source, threshold):
  array = load(source)
  expected = np.asarray(ImageOps.solarize(Image.fromarray(array), threshold), np.float64)
  actual = image_ops.solarize(to_float(array), (threshold - 0.5) / 255)
  np.testing.assert_allclose(levels(actual), expected, atol=1e-4)


def test_the_default_solarize_threshold_matches_pillow_s_128():
  array = np.arange(255, dtype=np.uint8).reshape(5, 17, 3)
  actual = image_ops.solarize(to_float(array), augment.OFF['solarize_threshold'])
  np.testing.assert_allclose(levels(actual), np.asarray(ImageOps.solarize(Image.fromarray(array), 128)), atol=1e-4)


@images()
@pytest.mark.parametrize('degrees', [0, 90, 180, -90, 10, -37.3, 123.4])
def test_rotate_matches_pillow(source, degrees):
  array = load(source)
  for region in (array, array[:31, :31]):
    expected = Image.fromarray(region).rotate(degrees, Image.Resampling.BILINEAR)
    difference = np.abs(levels(kernel('rotate')(to_float(region), degrees)) - np.asarray(expected, np.float64)).max(-1)
    if degrees == -90 or (degrees == 90 and len(set(region.shape[:2])) > 1):
      # The border of the source falls on pixel centers of the result, where rounding decides the side.
      assert np.mean(difference > 1.01) < 0.06
    else:
      assert difference.max() < 1.01


def test_rotated_white_is_white_or_black():
  angles = np.linspace(-180, 180, 64, dtype=np.float32)
  rotated = jax.jit(jax.vmap(lambda degrees: image_ops.rotate(jnp.ones((32, 32, 3)), degrees)))(angles)
  assert rotated.min() == 0 and rotated.max() == 1


def test_cutout_fills_the_part_inside_the_image():
  array = picture(10, 12)
  for top, left, height, width in [(2, 3, 4, 5), (-2, -1, 4, 3), (8, 10, 5, 5), (-9, 0, 4, 4)]:
    expected = array.astype(np.float32) / 255
    expected[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = (0.1, 0.2, 0.3)
    actual = image_ops.cutout(to_float(array), top, left, height, width, (0.1, 0.2, 0.3))
    np.testing.assert_allclose(actual, expected, atol=1e-7)


def test_noise_and_normalize_match_the_formula():
  x, noise = picture(10, 12) / 255, np.random.default_rng(0).standard_normal((10, 12, 3))
  actual = image_ops.add_noise(to_float(picture(10, 12)), jnp.asarray(noise, jnp.float32), 0.2)
  np.testing.assert_allclose(actual, np.clip(x + 0.2 * noise, 0, 1), atol=1e-6)
  mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.2)
  actual = image_ops.normalize(to_float(picture(10, 12)), mean, std)
  np.testing.assert_allclose(actual, (x - np.array(mean)) / np.array(std), atol=1e-6)


def test_color_jitter_applies_the_four_adjustments_in_order():
  image, factors = to_float(picture(14, 10)), (1.3, 0.7, 1.5, 0.2)
  orders = list(itertools.permutations(range(4)))
  actual = jax.jit(jax.vmap(lambda order: image_ops.color_jitter(image, *factors, order)))(jnp.asarray(orders))
  results = []
  for order in orders:
    expected = image
    for operation in order:
      expected = adjusted([*ADJUSTMENTS][operation], expected, factors[operation])
    results.append(np.asarray(expected))
  np.testing.assert_allclose(actual, results, atol=1e-5)
  # The order matters, also because of clipping: all 24 results differ.
  assert min(np.abs(a - b).max() for a, b in itertools.combinations(results, 2)) > 1e-3


# The box of the random resized crop.


def torchvision_loop(uniforms, height, width, scale, ratio):
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
def test_sample_crop_matches_torchvision(height, width, scale):
  uniforms = np.random.default_rng(0).random((300, image_ops.CROP_DRAWS))
  boxes = np.stack(image_ops.sample_crop(uniforms, height, width, scale), axis=-1)
  expected = [torchvision_loop(row, height, width, scale, (3 / 4, 4 / 3)) for row in uniforms]
  np.testing.assert_array_equal(boxes, expected)


@pytest.mark.parametrize('height, width, scale', [(32, 32, (0.08, 1.0)), (20, 300, (0.5, 1.0))])
def test_sample_crop_is_the_same_on_the_device_and_on_the_host(height, width, scale):
  uniforms = np.random.default_rng(0).random((2000, image_ops.CROP_DRAWS), np.float32)
  host = np.stack(image_ops.sample_crop(uniforms, height, width, scale), axis=-1)
  sample = jax.jit(lambda u: jnp.stack(image_ops.sample_crop(u, height, width, scale), axis=-1))
  device = np.asarray(sample(jnp.asarray(uniforms)))
  assert host.dtype == device.dtype == np.int32
  assert np.mean(np.all(host == device, axis=-1)) > 0.998  # a half rounds either way


@hypothesis.given(
  height=st.integers(1, 600),
  width=st.integers(1, 600),
  uniforms=hypothesis.extra.numpy.arrays(
    np.float32, image_ops.CROP_DRAWS, elements=st.floats(0, 1, exclude_max=True, width=32)
  ),
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_a_crop_is_inside_the_image(height, width, uniforms):
  top, left, h, w = (int(x) for x in image_ops.sample_crop(uniforms, height, width))
  assert h >= 1 and w >= 1
  assert 0 <= top <= height - h
  assert 0 <= left <= width - w


def test_crops_are_uniform_in_area_position_and_logarithm_of_ratio():
  uniforms = np.random.default_rng(0).random((4000, image_ops.CROP_DRAWS))
  top, left, h, w = image_ops.sample_crop(uniforms, 1000, 1000, (0.1, 0.5), (0.5, 2.0))  # any such box fits
  log2_ratio = np.log2(w / h)
  assert scipy.stats.kstest(h * w / 1e6, scipy.stats.uniform(0.1, 0.4).cdf).pvalue > 1e-3
  assert scipy.stats.kstest(log2_ratio, scipy.stats.uniform(-1, 2).cdf).pvalue > 1e-3
  for start, length in ((top, h), (left, w)):
    assert scipy.stats.kstest(start / (1000 - length), 'uniform').pvalue > 1e-3
  assert np.abs(np.corrcoef([h * w, log2_ratio, top / (1000 - h), left / (1000 - w)]) - np.eye(4)).max() < 0.08
