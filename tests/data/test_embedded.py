"""The embedded set has the same bytes everywhere, is balanced, and is hard to classify from raw pixels."""

import hashlib

import numpy as np
import pytest

from ssl_jax.data import embedded


@pytest.fixture(scope='module')
def splits():
  return {split: embedded.generate(split) for split in embedded.SIZES}


@pytest.mark.parametrize(
  ('split', 'digest'),
  [
    ('train', '68666991779bab3f'),
    ('test', 'f751202bcdb2d013'),
  ],
)
def test_the_bytes_are_the_same_on_every_machine(split, digest):
  images, _ = embedded.generate(split, seed=0, size=30)
  assert hashlib.sha256(images.tobytes()).hexdigest().startswith(digest)


@pytest.mark.parametrize('split', embedded.SIZES)
def test_types_sizes_and_range(splits, split):
  images, labels = splits[split]
  assert images.shape == (embedded.SIZES[split], 32, 32, 3)
  assert images.dtype == np.uint8
  assert labels.shape == (embedded.SIZES[split],)
  assert labels.dtype == np.int32
  assert (images.min(), images.max()) == (0, 255)
  assert images.std(axis=(1, 2, 3)).min() > 5  # none is blank


@pytest.mark.parametrize('split', embedded.SIZES)
def test_classes_are_balanced(splits, split):
  counts = np.bincount(splits[split][1], minlength=len(embedded.CLASSES))
  np.testing.assert_array_equal(counts, embedded.SIZES[split] // len(embedded.CLASSES))


@pytest.mark.parametrize('size', [0, 1, 37, 501])
def test_a_smaller_set_is_a_prefix(splits, size):
  images, labels = embedded.generate('train', size=size)
  np.testing.assert_array_equal(images, splits['train'][0][:size])
  np.testing.assert_array_equal(labels, splits['train'][1][:size])


def test_no_image_occurs_twice_within_or_across_splits_and_seeds(splits):
  sets = [splits['train'][0], splits['test'][0], embedded.generate('train', seed=1, size=500)[0]]
  assert len({image.tobytes() for images in sets for image in images}) == sum(map(len, sets))


@pytest.mark.parametrize('name', embedded.CLASSES)
def test_a_shape_has_about_unit_radius_and_unit_slope(name):
  """So that `radius` and `slack` determine size and position, and the antialiased edge is about one pixel wide."""
  step = 1 / 64
  y, x = np.meshgrid(*[np.arange(-1.5, 1.5, step, dtype=np.float32)] * 2, indexing='ij')
  distance = embedded._SHAPES[name](x, y)
  inside = distance < 0
  assert 0.2 < inside.sum() * step**2 < np.pi
  assert 0.8 < np.sqrt(x * x + y * y)[inside].max() < 1.2
  slope = np.hypot(*np.gradient(distance, step))
  assert 0.9 < np.median(slope[np.abs(distance) < 2 * step]) < 1.1


@pytest.mark.parametrize('label', range(len(embedded.CLASSES)))
def test_the_background_is_independent_of_the_class(splits, label):
  """The corners show background: their mean color in a class is that of the set, within five standard errors."""
  images, labels = splits['train']
  corners = images[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean(axis=1)
  chosen = corners[labels == label]
  error = corners.std(axis=0) / np.sqrt(len(chosen))
  assert (np.abs(chosen.mean(axis=0) - corners.mean(axis=0)) < 5 * error).all()


@pytest.mark.parametrize('label', range(len(embedded.CLASSES)))
def test_both_signs_of_the_contrast_occur_in_each_class(splits, label):
  """The middle, where most shapes are, is lighter than the corners in about half of the images."""
  images, labels = splits['train']
  light = images[labels == label].astype(np.float32).mean(axis=3)
  middle, corners = light[:, 12:20, 12:20].mean(axis=(1, 2)), light[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean(axis=1)
  assert 0.4 < (middle > corners).mean() < 0.6


def test_raw_pixels_classify_poorly(splits):
  """Cosine-weighted kNN on centred pixels: above chance (12.5 %), far from solved."""
  (train, labels), (test, expected) = splits['train'], (x[:1000] for x in splits['test'])
  mean = train.mean(axis=0, dtype=np.float32)
  unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
  train, test = (unit((x - mean).reshape(len(x), -1)) for x in (train, test))
  similarity = test @ train.T
  nearest = np.argsort(-similarity, axis=1)[:, :200]
  weight = np.exp(np.take_along_axis(similarity, nearest, axis=1) / 0.1)
  for k in (1, 20, 200):
    same = [labels[nearest[:, :k]] == c for c in range(len(embedded.CLASSES))]
    votes = np.stack([(weight[:, :k] * s).sum(axis=1) for s in same], axis=1)
    assert 0.14 < (votes.argmax(axis=1) == expected).mean() < 0.45


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (dict(split='valid'), "split = 'valid' is not a valid choice: give one of train, test"),
    (dict(split='train', size=-1), 'size = -1 must be at least 0'),
    (dict(split='train', seed=-1), 'seed = -1 must be at least 0'),
  ],
)
def test_invalid_arguments_are_rejected(arguments, message):
  with pytest.raises(ValueError, match=message):
    embedded.generate(**arguments)
