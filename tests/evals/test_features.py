"""What features are computed from: images and their mirror images; and the file name under which they are stored."""

import numpy as np
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


def test_images_of_a_folder_are_identified_by_their_paths(tmp_path):
  load = folder(tmp_path, ['cat', 'dog'])
  first, second = (features.digest({}, {'w': np.ones(2)}, load()) for _ in range(2))
  assert first == second
  assert features.digest({}, {'w': np.ones(2)}, folder(tmp_path, ['cat', 'dog', 'elk'])()) != first


def test_features_may_be_those_of_an_image_and_its_mirror_image():
  """The mean of two unit vectors: the same for an image and its mirror image."""
  devices = Devices.choose('pmap', 1)
  weights = np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32)
  images = np.random.default_rng(1).normal(size=(3, 4, 4, 3)).astype(np.float32)
  encode = lambda params, stats, x: {'backbone': x.reshape(len(x), -1) @ params, 'projector': x[:, 0, 0]}
  apply = features.extractor(encode, lambda x: x, devices, ('backbone',), flip=True)
  given = devices.replicate(weights), devices.replicate(np.zeros(1))
  extract = lambda x: devices.unshard(apply(*given, *devices.shard((x, np.arange(3)))))
  unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
  own, mirror = (unit(np.float64(x).reshape(3, -1) @ np.float64(weights)) for x in (images, images[:, :, ::-1]))
  found = extract(images)
  assert found.keys() == {'backbone'}
  np.testing.assert_allclose(found['backbone'], (own + mirror) / 2, atol=1e-5)
  np.testing.assert_allclose(extract(images[:, :, ::-1].copy())['backbone'], found['backbone'], atol=1e-5)
