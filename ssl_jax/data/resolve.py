"""Resolves the dataset of a config: its source, its splits, and whether it fits in memory."""

import json
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ssl_jax.data import cache, folder_source, imbalance, sources, tfds_source
from ssl_jax.registry import plain, require_choice

ON_DEVICE_LIMIT = 4 * 2**30  # maximum bytes of decoded images that `data.on_device=auto` puts on the device

# Names of the split folders that `auto` looks for.
TRAIN_FOLDERS = ('train', 'training')
TEST_FOLDERS = ('val', 'valid', 'validation', 'test', 'testing')


def eval_data(config: ConfigDict) -> dict[str, Any]:
  """The section `data` for evaluations: `config.data` with the changes in `eval.data`."""
  changes = {key: value for key, value in config.eval.data.items() if value}
  for key in {'source', 'path'} & changes.keys():
    if 'name' not in changes:
      raise ValueError(f'eval.data.{key} = {changes[key]!r} is another set: name it with eval.data.name')
  source = changes.get('source', config.data.source)
  if 'name' in changes and source != 'tfds' and not {'source', 'path'} & changes.keys():
    raise ValueError(
      f'eval.data.name = {changes["name"]!r} alone does not locate a set of data.source = {source!r}: give '
      'eval.data.path, or eval.data.source=tfds'
    )
  another = {'classes': ''} if 'name' in changes else {}
  elsewhere = {'path': ''} if 'source' in changes else {}  # data.path belongs to data.source
  return {**config.data.to_dict(), **another, **elsewhere, **changes}


def open_split(config: ConfigDict, split: str, data: Mapping[str, Any] | None = None) -> sources.Source:
  """The source of 'train' or 'test', not decoded yet, subsampled by `config.imbalance`.

  `data` replaces `config.data` and turns off the subsampling, for evaluations.
  """
  try:
    located = locate(data or config.data)
    source = sources.load(located, split)
  except ValueError as error:
    if data in (None, config.data.to_dict()):
      raise
    raise ValueError(f'eval.data: {error}') from error
  rule = imbalance.create(config.imbalance) if data is None else None
  source.cache_name = _cache_name(located, split, config.imbalance.to_dict() if rule else None)
  if rule is None:
    return source
  if source.labels is None:
    name, held = config.imbalance.name, config.data[f'{split}_split']
    raise ValueError(
      f'imbalance.name = {name!r} needs labels, but data.{split}_split = {held!r} has none: set imbalance.name=none'
    )
  return source.subset(rule(source.labels))


def _cache_name(data: Mapping[str, Any], split: str, rule: Mapping[str, Any] | None) -> str:
  """A file name for the images of a split. It depends on which images are selected, but not on their content."""
  path = str(pathlib.Path(data['path']).expanduser().absolute()) if data['path'] else ''
  chosen = [data.get(key) for key in ('source', 'name', f'{split}_split', 'classes', 'held_out')]
  digest = sources.digest_of([json.dumps([path, *chosen, rule])])[:12]
  return re.sub(r'[^\w.-]+', '-', f'{data["name"][:80]}_{split}_{digest}', flags=re.ASCII)


def placed(config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
  """(source, `fits`): the source decoded into memory, or memory-mapped from `data.cache`, if it fits."""
  if not fits(config, source):
    if config.data.cache:
      print('data.cache is not used, because the images are not kept on the device', file=sys.stderr, flush=True)
    return source, False
  size, folder = stored_size(config), config.data.cache
  return cache.load(source, size, folder) if folder else source.in_memory(size), True


def fits(config: ConfigDict, source: sources.Source) -> bool:
  """Whether the images of a source are kept in host memory and on the device (`data.on_device`)."""
  small = source.nbytes_decoded(stored_size(config)) <= ON_DEVICE_LIMIT
  return {'yes': True, 'no': False, 'auto': small}[config.data.on_device]


def stored_size(config: ConfigDict) -> int:
  """Pixels per side of the images in memory. Views are cropped from them."""
  return config.data.stored_size or config.data.image_size


def split_names(data: Mapping[str, Any]) -> dict[str, str]:
  """{'train_split': ..., 'test_split': ...}, with 'auto' replaced by folder names if `data.source` is 'folder'.

  The names are the first matches of `TRAIN_FOLDERS` and `TEST_FOLDERS`, ignoring case. If one is missing, both splits
  are the same folder, and `data.held_out` divides its images. A folder of images that is named `train` may also be a
  class: a ValueError asks for `data.train_split` if there are other folders of images, but no test folder.
  """
  given = {key: data[key] for key in ('train_split', 'test_split')}
  root = pathlib.Path(data['path']).expanduser()
  if data['source'] != 'folder' or 'auto' not in given.values():
    return given
  found = {name.lower(): name for name in (folder_source.subfolders(root) if data['path'] and root.is_dir() else ())}
  train = given['train_split']
  if train == 'auto':
    train = next((found[name] for name in TRAIN_FOLDERS if name in found), '')
  test = next((found[name] for name in TEST_FOLDERS if name in found), train) if train else ''
  with_images = [name for name in found.values() if folder_source.holds_images(root / name)]
  one_folder = train == test and train in with_images
  if one_folder and given['train_split'] == 'auto' and len(with_images) > 1:
    other = next(name for name in with_images if name != train)
    raise ValueError(
      f"data.train_split = 'auto' is ambiguous, because {root} has {train}/ and {other}/: set it to {train!r} if that "
      "is the training set, or to '' if it is a class"
    )
  auto = {'train_split': train, 'test_split': test}
  return {key: auto[key] if value == 'auto' else value for key, value in given.items()}


def locate(data: Mapping[str, Any]) -> Mapping[str, Any]:
  """`data`, with 'imagenet' resolved to a tfds dataset or class folders in `data.path`, and 'auto' to folder names."""
  require_choice('data.source', data['source'], (*sources.LOADERS, 'imagenet', 'text'))
  if data['source'] != 'imagenet':
    return data if 'auto' not in (data['train_split'], data['test_split']) else {**plain(data), **split_names(data)}
  root = tfds_source.data_dir(data['path'])
  section = plain(data)
  if (root / 'imagenet2012').is_dir():
    splits = {key: {'val': 'validation'}.get(section[key], section[key]) for key in ('train_split', 'test_split')}
    return {**section, **splits, 'source': 'tfds', 'name': 'imagenet2012'}
  if (root / section['train_split']).is_dir():
    return {**section, 'source': 'folder', 'path': section['path'] or str(root)}
  raise ValueError(
    f'data.path = {data["path"]!r} has neither a prepared tfds imagenet2012 nor {section["train_split"]}/<wnid>/*.JPEG '
    f"(looked in {root}): set --config.data.path to ImageNet's folder, or put ILSVRC2012_img_train.tar and _val.tar "
    'into ~/tensorflow_datasets/downloads/manual and run `tfds build imagenet2012 --file_format=array_record`'
  )
