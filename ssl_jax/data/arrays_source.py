"""Images in an .npz file: train_images, train_labels, test_images, test_labels, class_names."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ssl_jax.data.npz import BROKEN_ARCHIVE, npz_names, read_npz
from ssl_jax.data.sources import Arrays, one_line, reject_gaps, without_labels


def load(data: Mapping[str, Any], split: str) -> Arrays:
  """PREFIX_images and, if present, PREFIX_labels of the file `data.path`. PREFIX is the name of the split."""
  path, prefix = os.path.expanduser(data['path']), data[f'{split}_split']
  try:
    found = read_npz(path, (f'{prefix}_images', f'{prefix}_labels', 'class_names'))
    if f'{prefix}_images' not in found:
      raise ValueError(f'it contains {", ".join(sorted(npz_names(path))) or "nothing"}, not {prefix}_images')
    images, labels = found[f'{prefix}_images'], found.get(f'{prefix}_labels')
    class_names = found['class_names'].tolist() if 'class_names' in found else ()
  except BROKEN_ARCHIVE as error:
    raise ValueError(
      f'data.path = {data["path"]!r} must be an .npz file with train_images, train_labels, test_images, test_labels '
      f'(labels are optional, pickled objects are rejected): {one_line(error)}'
    ) from error
  if class_names and not (isinstance(class_names, list) and all(isinstance(name, str) for name in class_names)):
    raise ValueError(f'class_names of {path} must be a list of strings, one for each class')
  name = f'{prefix}_images of {path}'
  if images.dtype != np.uint8:
    raise ValueError(f'{name} has dtype {images.dtype}: store uint8 from 0 to 255')
  if images.ndim == 3:
    images = images[..., None]
  if images.ndim != 4 or images.shape[-1] not in (1, 3) or not images.size:
    raise ValueError(f'{name} has shape {images.shape}: store [N, H, W, 3], or [N, H, W] for grayscale')
  if images.shape[-1] == 1:
    images = np.repeat(images, 3, axis=-1)
  if labels is not None:
    if labels.dtype.kind not in 'iu' or labels.shape != images.shape[:1]:
      raise ValueError(
        f'{prefix}_labels of {path} is {labels.dtype} {labels.shape}: store one whole number per image '
        f'({len(images)}), or leave it out'
      )
    reject_gaps(f'{prefix}_labels of {path}', labels)
    if class_names and labels.max() >= len(class_names):
      raise ValueError(
        f'class_names of {path} has {len(class_names)} names, but {prefix}_labels reach {labels.max()}: name each class'
      )
    if negative := int((labels < 0).sum()):  # as in an unlabeled split
      labels, _ = without_labels(negative, len(labels))
    else:
      labels = labels.astype(np.int32)
  return Arrays(images, labels, class_names, data['broken'])
