"""What features are computed from: an image, its mirror image, crops of it; and the name of the file with them."""

import os

import numpy as np
import pytest
from PIL import Image

from ssl_jax.data import sources
from ssl_jax.evals import features
from ssl_jax.run.devices import Devices


def folder(path, names):
  for k, name in enumerate(names):
    (path / 'train' / name).mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (8, 8), (40 * k, 0, 0)).save(path / 'train' / name / f'{name}.png')
  settings = dict(source='folder', path=str(path), train_split='train', test_split='test', classes='', broken='error')
  return lambda: sources.load(settings, 'train')


def test_images_of_a_folder_are_identified_by_their_paths_and_files(tmp_path):
  load = folder(tmp_path, ['cat', 'dog'])
  first, second = (features.digest({}, {'w': np.ones(2)}, load()) for _ in range(2))
  assert first == second
  assert features.digest({}, {'w': np.ones(2)}, folder(tmp_path, ['cat', 'dog', 'elk'])()) != first
  load = folder(tmp_path / 'again', ['cat', 'dog'])
  before = features.digest({}, {}, load())
  Image.new('RGB', (9, 8), (9, 9, 9)).save(tmp_path / 'again' / 'train' / 'cat' / 'cat.png')
  assert features.digest({}, {}, load()) != before
  not_utf8 = folder(tmp_path / 'third', ['cat', os.fsdecode(b'caf\xe9')])
  assert features.digest({}, {}, not_utf8()) == features.digest({}, {}, not_utf8())


def mean_features(images, pixels, **choice):
  """(what `extractor` finds for each image, the encoder in float64)"""
  devices = Devices.choose('pmap', 1)
  weights = np.random.default_rng(0).normal(size=(pixels * pixels * 3, 5)).astype(np.float32)
  encode = lambda params, stats, x: {'backbone': x.reshape(len(x), -1) @ params, 'projector': x[:, 0, 0]}
  around = features.around_image({'flip': False, 'patches': 0, 'patch': 0.5, **choice}, pixels)
  apply = features.extractor(encode, lambda x: x, devices, ('backbone',), around=around)
  found = apply(*devices.replicate((weights, np.zeros(1))), *devices.shard((images, np.arange(len(images)))))
  unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
  assert found.keys() == {'backbone'}
  return devices.unshard(found['backbone']), lambda x: unit(np.float64(x).reshape(len(x), -1) @ np.float64(weights))


def test_features_may_be_those_of_an_image_and_its_mirror_image():
  images = np.random.default_rng(1).normal(size=(3, 4, 4, 3)).astype(np.float32)
  mirror = images[:, :, ::-1].copy()
  found, encode = mean_features(images, 4, flip=True)
  np.testing.assert_allclose(found, (encode(images) + encode(mirror)) / 2, atol=1e-5)
  np.testing.assert_allclose(mean_features(mirror, 4, flip=True)[0], found, atol=1e-5)


@pytest.mark.parametrize(('count', 'places'), [(1, [2]), (2, [0, 4]), (3, [0, 2, 4])])
@pytest.mark.parametrize(('flip', 'pixels'), [(False, 8), (True, 8), (True, 6)])
def test_features_may_be_those_of_crops(count, places, flip, pixels):
  images = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)  # normalised, so not within [0, 1]
  found, encode = mean_features(images, pixels, patches=count, flip=flip)
  resize = lambda channel: np.asarray(Image.fromarray(channel, 'F').resize((pixels, pixels), Image.Resampling.BILINEAR))
  of_image = lambda image: np.stack([resize(image[..., c].copy()) for c in range(3)], axis=-1)
  enlarged = lambda crops: np.stack([of_image(crop) for crop in crops])
  seen = [enlarged(images[:, top : top + 4, left : left + 4]) for top in places for left in places]
  seen += [x[:, :, ::-1] for x in seen] if flip else []
  np.testing.assert_allclose(found, np.mean([encode(x) for x in seen], axis=0), atol=1e-5)
