"""The views of a config: augmentation settings, crops on the host, and the view for evaluations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from ssl_jax.data import augment, pipeline, resolve, sources
from ssl_jax.registry import require, require_choice, show

View = Callable[[jax.Array, Any], jax.Array]  # (key, example) -> one view of the example


class Views(NamedTuple):
  """The functions that turn an example into inputs of the encoder."""

  training: list[View]  # one function (key, example) -> view for each view, small crops last
  eval_view: Callable[[jax.Array], jax.Array]  # example -> view for evaluations
  to_pixels: Callable[[Any], np.ndarray] | None  # view -> uint8 image, for figures; None for sentences


def augment_settings(config: ConfigDict) -> tuple[dict[str, Any], dict[str, Any]]:
  """The settings of the 1st, 3rd, ... view (`augment`), and of the 2nd, 4th, ... view (with `augment_other`).

  Views have the size `data.image_size`, like the images of evaluations, unless `augment.size` is smaller.
  """
  changes = dict(config.augment)
  name = changes.pop('name')
  require_choice('augment.name', name, augment.PRESETS)
  if 'size' in config.augment_other:
    raise ValueError(
      f'augment_other.size = {show(config.augment_other["size"])} cannot be set: all views have augment.size'
    )
  settings = augment.validate(augment.PRESETS[name] | changes)
  largest = config.data.image_size
  settings['size'] = settings['size'] or largest
  require('augment.size', settings['size'], lambda size: size <= largest, f'at most data.image_size = {largest}')
  augment.validate(dict(config.augment_other), 'augment_other')
  return settings, settings | dict(config.augment_other)


def image_views(config: ConfigDict, on_device: bool) -> Views:
  """The views of images. `on_device` is False if the host crops."""
  settings, other = (s | ({} if on_device else dict(crop=False)) for s in augment_settings(config))
  if on_device and not (settings['crop'] and other['crop']):
    larger = config.data.stored_size if resolve.stored_size(config) != config.data.image_size else 0
    smaller = settings['size'] if settings['size'] < config.data.image_size else 0
    needs = {'data.stored_size': larger, 'small_crops.number': config.small_crops.number, 'augment.size': smaller}
    for key, value in needs.items():
      if value:
        raise ValueError(f'{key} = {value} needs random crops: set augment.crop=True, or leave it out')
  small = dict(size=config.small_crops.size, crop_scale=config.small_crops.scale)
  training: list[View] = [augment.make(other if v % 2 else settings) for v in range(config.views)]
  training += [augment.make(settings | small) for _ in range(config.small_crops.number)]
  mean, std = np.float32(settings['mean']), np.float32(settings['std'])
  to_pixels = lambda x: np.clip(np.rint((np.asarray(x) * std + mean) * 255), 0, 255).astype(np.uint8)
  eval_view = augment.make_eval(config.data.image_size, settings['mean'], settings['std'], crop=config.eval.crop)
  return Views(training, eval_view, to_pixels)


def host_batches(
  config: ConfigDict,
  source: sources.Source,
  seed: int,
  batch_size: int,
  *,
  views: int,
  small: int = 0,
  total_steps: int,
  start_step: int = 0,
  captions: pipeline.Captions | None = None,
) -> pipeline.Batches:
  """This process's part of each batch, decoded and cropped on the host for `views` views and `small` small crops.

  With `captions`, the tokens of one caption per image come last.
  """
  first, other = (
    pipeline.Crop(s['size'], s['crop_scale'] if s['crop'] else None, s['crop_ratio'], s['interpolation'])
    for s in augment_settings(config)
  )
  crops = [other if v % 2 else first for v in range(views)]
  crops += [first._replace(size=config.small_crops.size, scale=config.small_crops.scale)] * small
  return pipeline.batches(
    source,
    seed=seed,
    batch_size=batch_size,
    start_step=start_step,
    total_steps=total_steps,
    crops=crops,
    num_workers=config.data.workers,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
    captions=captions,
  )
