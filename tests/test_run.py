"""What a config makes of each view of an image."""

import contextlib

import jax
import numpy as np
import pytest

from ssl_jax import config
from ssl_jax.run import builder
from tests.helpers import tiny


def views(tmp_path, image, examples=1, **changes):
  """The views of each of several examples of the same image, [examples, size, size, 3] each."""
  augments = builder.build(tiny(tmp_path, **changes)).views.training
  keys = jax.random.split(jax.random.key(0), examples)
  return [np.asarray(jax.jit(jax.vmap(augment, in_axes=(0, None)))(keys, image)) for augment in augments]


def test_every_second_view_has_the_other_augmentation(tmp_path):
  image = np.random.default_rng(0).integers(256, size=(12, 12, 3), dtype=np.uint8)
  inverted = dict(solarize=1.0, solarize_threshold=0.0)
  found = views(tmp_path, image, augment=dict(name='none'), augment_other=inverted, views=4)
  plain = image / 255
  np.testing.assert_allclose(found, [[plain], [1 - plain], [plain], [1 - plain]], atol=1e-6)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model.width': 0}, 'model.width = 0 must be at least 1 and at most 1048576'),
    ({'model.width': 'wide'}, "model.width = 'wide' must be at least 1 and at most 1048576"),
    ({'projector.features': 16}, 'projector.features = 16 must be layer widths'),
    ({'model.dtype': 'float64'}, "model.dtype = 'float64' is not a parameter of 'resnet_tiny'"),
    ({'projector.name': 'simcrl'}, "projector.name = 'simcrl' is not a known projector: did you mean 'simclr'"),
    (
      {'method': dict(name='moco_v3')},
      "projector.name = 'simclr' gives 8 features, but the predictor of 'moco_v3' gives 256: set projector.features",
    ),
    ({'method.by_view_pair': 'no'}, "method.by_view_pair = 'no' must be True or False"),
  ],
)
def test_a_network_that_cannot_be_built_is_refused_in_one_line(tmp_path, changes, message):
  with pytest.raises(ValueError, match='^' + message) as error:
    builder.build(tiny(tmp_path, **changes))
  assert '\n' not in str(error.value)


def test_a_mistake_in_the_other_augmentation_is_named(tmp_path):
  with pytest.raises(
    ValueError, match=r'^augment_other\.solarise = 0\.1 is not a known setting: did you mean .solarize'
  ):
    builder.build(tiny(tmp_path, augment_other=dict(solarise=0.1)))


def areas(view):
  """The share of the image's area that each crop shows, by the slope of the ramps in its middle."""
  n, middle = view.shape[1], view.shape[1] // 2
  width = view[:, middle, middle, 0] - view[:, middle, middle - 1, 0]
  height = view[:, middle, middle, 1] - view[:, middle - 1, middle, 1]
  return width * height * (n * 255 / 240) ** 2


def test_small_crops_are_small_in_pixels_and_in_area(tmp_path):
  ramp = np.broadcast_to(4 * np.arange(60), (60, 60))
  image = np.stack([ramp, ramp.T, ramp], axis=2).astype(np.uint8)
  changes = dict(augment=dict(name='none', crop=True, crop_scale=(0.4, 0.9)), small_crops=dict(number=2, size=6))
  found = views(tmp_path, image, 32, **changes, **{'small_crops.scale': (0.05, 0.14)})
  assert [view.shape for view in found] == [(32, 12, 12, 3)] * 2 + [(32, 6, 6, 3)] * 2
  for view, (low, high) in zip(found, [(0.4, 0.9)] * 2 + [(0.05, 0.14)] * 2, strict=True):
    assert (areas(view) > 0.9 * low).all() and (areas(view) < 1.1 * high).all()
    assert np.ptp(areas(view)) > (high - low) / 2


def test_small_crops_of_the_host_are_those_of_the_device(tmp_path):
  """In size and in area; both start from the same ramps."""
  ramp = np.broadcast_to(4 * np.arange(60), (60, 60))
  images = np.repeat(np.stack([ramp, ramp.T, ramp], axis=2).astype(np.uint8)[None], 32, axis=0)
  np.savez(tmp_path / 'ramps.npz', train_images=images, test_images=images)
  crops = dict(augment=dict(name='none', crop=True, crop_scale=(0.4, 0.9)), small_crops=dict(number=2, size=6))
  changes = {'data.path': str(tmp_path / 'ramps.npz'), 'data.on_device': 'no', 'small_crops.scale': (0.05, 0.14)}
  with contextlib.closing(builder.build(tiny(tmp_path, **crops, **changes)).host_batches(0)) as batches:
    large, small = next(batches)['images']
  assert large.shape == (32, 2, 12, 12, 3) and small.shape == (32, 2, 6, 6, 3)
  for group, (low, high) in ((large, (0.4, 0.9)), (small, (0.05, 0.14))):
    group = group.reshape(-1, *group.shape[2:])
    for view in (group[::2], group[1::2]):
      assert (areas(view / 255) > 0.85 * low).all() and (areas(view / 255) < 1.15 * high).all()
      assert np.ptp(areas(view / 255)) > (high - low) / 2


def test_host_batches_are_cropped_as_each_view_asks(tmp_path):
  small = dict(crop=True, crop_scale=(0.05, 0.05))
  prepared = builder.build(tiny(tmp_path, augment=dict(name='none'), augment_other=small, **{'data.on_device': 'no'}))
  with contextlib.closing(prepared.host_batches(0)) as batches:
    batch = next(batches)
  whole, (images,) = prepared.train.items[batch['index']], batch['images']
  np.testing.assert_array_equal(images[:, 0], whole)
  assert (images[:, 1] != whole).any(axis=(1, 2, 3)).all()


def test_small_crops_are_refused_by_an_encoder_of_one_size(tmp_path):
  images = np.zeros((128, 32, 32, 3), np.uint8)
  np.savez(tmp_path / 'data.npz', train_images=images, test_images=images[:8])
  data = ['data.source=arrays', f'data.path={tmp_path / "data.npz"}']
  chosen = config.load('configs/cifar10.py:cacr,multi_crop', data)
  with pytest.raises(ValueError, match=r"^small_crops.size = 16 does not fit model.name = 'alexnet_small'.*number=0"):
    builder.build(chosen)


def test_views_may_be_smaller_than_the_images_of_evaluations(tmp_path):
  for where in ('yes', 'no'):
    prepared = builder.build(tiny(tmp_path, **{'augment.size': 8, 'data.on_device': where}))
    image = prepared.train.items[0] if where == 'yes' else np.zeros((8, 8, 3), np.uint8)  # the host has cropped it
    assert [view(jax.random.key(0), image).shape for view in prepared.views.training] == [(8, 8, 3)] * 2
    assert prepared.views.eval_view(np.zeros((12, 12, 3), np.uint8)).shape == (12, 12, 3)
  with contextlib.closing(prepared.host_batches(0)) as batches:
    assert [group.shape for group in next(batches)['images']] == [(32, 2, 8, 8, 3)]


@pytest.mark.parametrize('steps', [1, 97, 390, 512, 513, 1021, 4062, 5004, 100_000])
def test_parts_of_an_epoch_are_short_and_equal(steps):
  part = builder.equal_part(steps, 512)
  calls = -(-steps // part)
  assert part <= 512 and part * (calls - 1) < steps <= part * calls
  assert calls <= max(1, steps / 256)  # no more calls than parts of half that length
