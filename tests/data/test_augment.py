"""Random augmentations have their distributions; settings, presets and the view of evaluations."""

import itertools
import math
from unittest import mock

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from PIL import Image

from ssl_jax.data import augment, image_ops
from tests.data.pictures import kernel, levels, photographs, picture, to_float
from tests.helpers import needs_real_data

EVERYTHING = dict(
  crop=True, flip=0.5, jitter=0.5, grey=0.5, blur=0.5, solarize=0.5, cutout=0.5, rotation=0.5, noise=0.5, size=8
)


def keys(number, seed=0):
  return jax.random.split(jax.random.key(seed), number)


def views(settings, image, number, seed=0):
  """`number` views of one image."""
  return np.asarray(jax.jit(jax.vmap(augment.make(settings), (0, None)))(keys(number, seed), jnp.asarray(image)))


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


def parameters(name, settings, number=2400):
  """What `make` passes to an operation, `[number, parameters]`: the operation is replaced by one that returns it."""

  def recorder(image, *arguments, **_):
    flat = jnp.concatenate([jnp.ravel(jnp.asarray(a, jnp.float32)) for a in arguments])
    return jnp.zeros(image.size).at[: flat.size].set(flat).reshape(image.shape)

  with mock.patch.object(image_ops, name, recorder):
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


def test_cutout_is_centered_on_a_uniform_pixel_and_becomes_zero():
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


def test_noise_uses_separate_random_bits():
  """Uniform numbers come from the key itself, and noise from a key derived from it."""
  key, image = jax.random.key(3), np.full((8, 8, 3), 128, np.uint8)
  noisy = augment.make(dict(augment.OFF, noise=1.0, noise_std=0.05, size=8))(key, image)
  drawn = jax.random.normal(jax.random.fold_in(key, augment._ENDS[-1]), (8, 8, 3))
  np.testing.assert_allclose(noisy, 128 / 255 + 0.05 * drawn, atol=1e-6)


def test_noise_is_gaussian_with_its_probability_and_changes_nothing_else():
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
def test_views_are_images_that_depend_only_on_their_key_and_image(everything, image, seed, shift):
  batch = np.stack([picture(9, 7)] * 16)
  batch[2] = image
  result = np.asarray(everything(keys(16, seed), jnp.asarray(batch)))
  assert result.shape == (16, 8, 8, 3) and result.dtype == np.float32
  assert np.all(np.isfinite(result)) and result.min() >= 0 and result.max() <= 1
  order = np.roll(np.arange(16), shift)
  moved = everything(keys(16, seed)[order], jnp.asarray(batch[order]))
  np.testing.assert_array_equal(moved, result[order])


def test_different_keys_give_different_views(everything):
  result = np.asarray(everything(keys(16), jnp.asarray(np.stack([picture(9, 7)] * 16))))
  assert len(np.unique(result.reshape(16, -1), axis=0)) == 16


def test_a_batch_equals_its_examples_on_any_number_of_devices(everything):
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
def test_without_operations_the_view_is_the_image(settings):
  image = picture(9, 7)
  np.testing.assert_allclose(views(settings, image, 2), np.stack([image, image]) / 255, atol=1e-6)


def test_make_applies_the_operations_in_order():
  image, key = picture(9, 9), jax.random.key(5)
  settings = dict(flip=1.0, grey=1.0, solarize=1.0, solarize_threshold=0.3, blur=1.0, blur_sigma=(1.1, 1.1))
  settings.update(mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.2))
  expected = image_ops.solarize(kernel('blur')(image_ops.greyscale(to_float(image)[:, ::-1]), 1.1), 0.3)
  expected = image_ops.normalize(expected, settings['mean'], settings['std'])
  np.testing.assert_allclose(jax.jit(augment.make(settings))(key, jnp.asarray(image)), expected, atol=2e-6)


def test_only_enabled_operations_are_compiled():
  image = jax.ShapeDtypeStruct((8, 8, 3), jnp.uint8)

  def graph(**settings):
    return str(jax.make_jaxpr(augment.make(settings))(jax.random.key(0), image))

  assert 'dot_general' not in graph(flip=0.5, jitter=0.8)
  assert 'scan' in graph(jitter=0.8)
  assert 'scan' not in graph(crop=True, blur=0.5)
  products = graph(crop=True, blur=0.5, interpolation='bicubic')
  # The default on an accelerator would be TF32.
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


def test_presets_match_the_papers():
  cifar10, imagenet = augment.MEAN_STD['cifar10'], augment.MEAN_STD['imagenet']
  jitter = dict(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, jitter=0.8)
  simclr = dict(crop=True, crop_scale=(0.08, 1.0), crop_ratio=(3 / 4, 4 / 3), flip=0.5, grey=0.2, **jitter)
  assert augment.PRESETS['simclr'].items() >= dict(simclr, blur=0.5, blur_sigma=(0.1, 2.0)).items()
  assert differences('dystress_cifar', 'simclr') == dict(blur=0.0, **cifar10)
  full = dict(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2)
  assert differences('simclr_imagenet', 'simclr') == full | imagenet
  assert differences('moco_v2', 'simclr') == dict(crop_scale=(0.2, 1.0), **imagenet)
  assert differences('cacr_large', 'moco_v2') == differences('balanced_imagenet', 'moco_v2') == {}
  assert differences('cacr_small', 'simclr') == dict(crop_scale=(0.2, 1.0), jitter=1.0, hue=0.4, blur=0.0, **cifar10)
  assert differences('cacr_stl10', 'cacr_small') == dict(crop_scale=(0.08, 1.0), **augment.MEAN_STD['stl10'])
  assert differences('balanced_cifar', 'dystress_cifar') == imagenet
  assert differences('balanced_imagenet_no_blur', 'balanced_imagenet') == dict(blur=0.0)
  assert differences('balanced_imagenet_no_color', 'balanced_imagenet') == dict(jitter=0.0, grey=0.0)
  for added in ('cutout', 'rotation', 'noise'):
    assert differences(f'balanced_imagenet_{added}', 'balanced_imagenet').keys() == {added}
    assert differences(f'balanced_cifar_{added}', 'balanced_cifar').keys() == {added}
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
def test_an_invalid_value_is_reported_in_one_line(key, value):
  with pytest.raises(ValueError) as error:
    augment.make({key: value})
  message = str(error.value)
  assert message.startswith(f'augment.{key} = {value!r} must be ')
  assert '\n' not in message


def test_a_misspelled_setting_suggests_the_nearest_name():
  with pytest.raises(ValueError, match=r"^augment\.gray = 0\.2 is not a known setting: did you mean 'grey'\?$"):
    augment.make(dict(gray=0.2))


def test_images_of_another_size_need_a_crop():
  with pytest.raises(ValueError, match=r'^augment\.size = 32 differs from the images, 9 × 7: set augment\.crop=True$'):
    augment.make(dict(size=32))(jax.random.key(0), jnp.asarray(picture(9, 7)))


# Evaluation.


def test_an_evaluation_view_of_the_right_size_is_the_image():
  image, mean, std = picture(32, 32), (0.1, 0.2, 0.3), (0.5, 0.4, 0.2)
  expected = (image / 255 - np.array(mean)) / np.array(std)
  np.testing.assert_allclose(augment.make_eval(32, mean, std)(jnp.asarray(image)), expected, atol=1e-5)
  np.testing.assert_array_equal(augment.make_eval()(jnp.asarray(image)), to_float(image))


def test_an_evaluation_view_is_the_center():
  image = picture(40, 49)
  actual = jax.jit(augment.make_eval(24, crop=0.875))(jnp.asarray(image))
  expected = Image.fromarray(image).crop((7, 2, 42, 37)).resize((24, 24), Image.Resampling.BILINEAR)
  assert np.abs(levels(actual) - np.asarray(expected, np.float64)).max() < 1.5
  with pytest.raises(ValueError, match=r'^eval\.crop = 1\.5 must be '):
    augment.make_eval(24, crop=1.5)


@needs_real_data
def test_an_evaluation_view_of_a_photograph_is_resize_256_and_center_224():
  photograph = photographs()[0].crop((0, 0, 400, 320))
  expected = photograph.resize((320, 256), Image.Resampling.BILINEAR).crop((48, 16, 48 + 224, 16 + 224))
  actual = jax.jit(augment.make_eval(224, crop=0.875))(jnp.asarray(np.asarray(photograph)))
  difference = np.abs(levels(actual) - np.asarray(expected, np.float64))
  assert difference[1:-1, 1:-1].max() < 1.5  # at the border Pillow uses pixels outside of the crop
  assert difference.mean() < 0.5
