"""The file name of stored features depends on what they are computed from."""

import numpy as np
from PIL import Image

from ssl_jax.data import sources
from ssl_jax.evals import features


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
