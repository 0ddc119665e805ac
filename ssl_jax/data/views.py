"""The views that a config asks for: augmentation settings, crops on the host, and the view that evaluations see."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from ssl_jax.data import augment, pipeline, resolve, sources
from ssl_jax.registry import require_choice, show

View = Callable[[jax.Array, Any], jax.Array]


class Views(NamedTuple):
  """How an example becomes what the encoder sees."""

  training: list[View]  # one (key, example) -> view per view, small crops last
  shown: Callable[[jax.Array], jax.Array]  # example -> what evaluations show the encoder
  to_pixels: Callable[[Any], np.ndarray] | None  # a view -> uint8 image, for pictures; sentences have none


def augment_settings(config: ConfigDict) -> tuple[dict[str, Any], dict[str, Any]]:
  """The preset that `augment` names with the config's changes: for the first view, and for every second one."""
  changes = dict(config.augment)
  name = changes.pop('name')
  require_choice('augment.name', name, augment.PRESETS)
  for section in ('augment', 'augment_other'):
    if 'size' in config[section]:
      raise ValueError(f'{section}.size = {show(config[section]["size"])} is not set here: set data.image_size')
  settings = augment.validate(augment.PRESETS[name] | changes)
  augment.validate(dict(config.augment_other), 'augment_other')
  return settings, settings | dict(config.augment_other)


def image_views(config: ConfigDict, on_device: bool) -> Views:
  """The views of images; `on_device` is False where the host crops."""
  common = dict(size=config.data.image_size) | ({} if on_device else dict(crop=False))
  settings, other = (s | common for s in augment_settings(config))
  if on_device and not (settings['crop'] and other['crop']):
    larger = config.data.stored_size if resolve.stored_size(config) != config.data.image_size else 0
    for key, value in {'data.stored_size': larger, 'small_crops.number': config.small_crops.number}.items():
      if value:
        raise ValueError(f'{key} = {value} needs random crops: set augment.crop=True, or {key}=0')
  small = dict(size=config.small_crops.size, crop_scale=config.small_crops.scale)
  training: list[View] = [augment.make(other if v % 2 else settings) for v in range(config.views)]
  training += [augment.make(settings | small) for _ in range(config.small_crops.number)]
  mean, std = np.float32(settings['mean']), np.float32(settings['std'])
  to_pixels = lambda x: np.clip(np.rint((np.asarray(x) * std + mean) * 255), 0, 255).astype(np.uint8)
  shown = augment.make_eval(config.data.image_size, settings['mean'], settings['std'], crop=config.eval.crop)
  return Views(training, shown, to_pixels)


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

  With `captions`, the tokens of one caption of each image come last.
  """
  first, other = (
    pipeline.Crop(config.data.image_size, s['crop_scale'] if s['crop'] else None, s['crop_ratio'], s['interpolation'])
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
