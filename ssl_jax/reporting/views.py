"""A contact sheet of augmented views (--mode=views): what the encoder sees in training."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ssl_jax.data import sources
from ssl_jax.data.modality import modality_of
from ssl_jax.data.resolve import stored_size
from ssl_jax.data.views import image_views
from ssl_jax.evals import features
from ssl_jax.reporting import contact_sheet
from ssl_jax.run import builder
from ssl_jax.run.update import example_keys, make_views
from ssl_jax.workdir import files


def draw_views(config: ConfigDict, workdir: str, images: int = 8, draws: int = 4) -> pathlib.Path:
  """Writes views.png: one row per training image, with its label, the image, and `draws` random draws of all views.

  The label is its position and class. Small crops are enlarged to the size of the others.
  """
  if modality_of(config).encoded != 'images':
    raise ValueError(f'data.source = {config.data.source!r} has no images: give --mode=views a config of images')
  run = builder.build(config, trains=False)
  augments = image_views(config, on_device=True).training  # crops on the host follow the same distribution
  folder = files.writable(workdir)
  images = min(images, len(run.train))
  chosen = np.linspace(0, len(run.train) - 1, images).astype(int)
  originals, found = features.squares(run.train, chosen, config.data.image_size)
  stored, _ = features.squares(run.train, chosen, stored_size(config))
  columns, to_pixels = [originals], run.views.to_pixels
  assert to_pixels is not None
  for draw in range(draws):
    keys = example_keys(config.seed, jnp.int32(draw), jnp.arange(images))
    views = jax.jit(lambda keys: make_views(augments, keys, jnp.asarray(stored)))(keys)
    columns += [contact_sheet.enlarge(to_pixels(view), config.data.image_size) for view in views]
  path = contact_sheet.draw(np.stack(columns, axis=1), folder / 'views.png', labels=_labels(run.train, found))
  print(f'{images} images and {draws} draws of {len(augments)} views each: {path}')
  return path


def _labels(source: sources.Source, positions: np.ndarray) -> list[str]:
  """The position and, if known, the class of each image, in two lines."""
  classes = source.labels_of(positions)
  names = [''] * len(positions) if classes is None else [source.class_name(label) for label in classes]
  return [f'image {position}\n{name}' for position, name in zip(positions, names, strict=True)]
