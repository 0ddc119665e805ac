"""Images, with or without text, in tar shards in the WebDataset layout: KEY.jpg, KEY.txt, KEY.cls, KEY.json.

Tar files are not compressed: after one scan of the headers, images can be read in any order. Shuffling, resuming and
multiple processes therefore work as for any other source. Nothing is extracted, and links are not followed.
"""

import functools
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image

from ssl_jax.data import shards, tar_index
from ssl_jax.data.decoding import check_size, open_image
from ssl_jax.data.folder_source import say_once, shown
from ssl_jax.data.shards import Shard
from ssl_jax.data.sources import THREADS, Source, digest_of, reject_gaps, without_labels
from ssl_jax.data.tar_index import JSON, Index

OPEN = 64  # shards that a process keeps open
NAMES = ', '.join(f'KEY{suffix}' for suffix in tar_index.IMAGES)


class Tar(Source):
  """An item is the location of an image in a shard (`tar_index.ITEM`)."""

  def __init__(self, items: np.ndarray, *more: Any, files: Sequence[Shard], **named: Any):
    super().__init__(items, *more, **named)
    self.files = tuple(files)
    self._has_text = bool(items['kind'].any())  # of the whole source: `subset` keeps this value

  def open(self, positions: Sequence[int] | np.ndarray) -> list[Callable[[], Image.Image]]:
    return [functools.partial(self._open, k) for k in positions]

  def where(self, position: int) -> str:
    item = self.items[position]
    try:
      name = _opened(self.files[item['shard']]).name_at(int(item['offset']) - int(item['head']))
    except (OSError, ValueError):
      name = f'byte {item["offset"]:,}'
    return f'{shown(self.files[item["shard"]].path)}: {shown(name)}'

  def name(self, position: int) -> str:
    item = self.items[position]
    return f'{self.files[item["shard"]].name}:{item["offset"]}'

  def fingerprint(self) -> str:
    return digest_of([*map(str, self.files), self.items.tobytes().hex()])

  def identities(self) -> list[Hashable]:
    real = [os.path.realpath(file.path) for file in self.files]
    return [(real[shard], int(offset)) for shard, offset in zip(self.items['shard'], self.items['offset'], strict=True)]

  def blocks(self) -> np.ndarray:
    return np.flatnonzero(np.diff(self.items['shard'], prepend=-1))

  def has_text(self) -> bool:
    return self._has_text

  def read_captions(self, position: int) -> tuple[str, ...]:
    item = self.items[position]
    if not item['kind']:
      return ()
    text = self._read(int(item['shard']), int(item['text']), int(item['text_size']))
    if item['kind'] == JSON:
      return tar_index.captions(tar_index.parse(text))
    return tuple(line.strip() for line in text.decode('utf-8-sig').splitlines() if line.strip())

  def _open(self, position: int) -> Image.Image:
    item = self.items[position]
    check_size(size := int(item['size']))
    return open_image(self._read(int(item['shard']), int(item['offset']), size))

  def _read(self, shard: int, offset: int, size: int) -> bytes:
    return _opened(self.files[shard]).read(offset, size)


class _Opened:
  """An open shard. It is closed with its last reference, and so never while another thread reads it."""

  def __init__(self, shard: Shard):
    self.number = os.open(shard.path, os.O_RDONLY)
    if not shard.unchanged(self.number):
      raise OSError('the shard has changed since the run began')

  def read(self, offset: int, size: int) -> bytes:
    content = os.pread(self.number, size, offset)
    if len(content) < size:
      raise OSError('the shard ends within it')
    return content

  def name_at(self, head: int) -> str:
    return tar_index.name_at(self.number, head)

  def __del__(self) -> None:
    if hasattr(self, 'number'):
      os.close(self.number)


_opened = functools.lru_cache(maxsize=OPEN)(_Opened)


def load(data: Mapping[str, Any], split: str) -> Tar:
  """The images in the shards of a split. Labels (class numbers or names) are used only if every image has one."""
  files = shards.find(data, split, '.tar')
  found = _indices(files)
  _report(data, files, found)
  items = np.concatenate([index.items for index in found])
  items['shard'] = np.repeat(np.arange(len(files)), [len(index.items) for index in found])
  if not len(items):
    raise ValueError(f'data.{split}_split = {data[f"{split}_split"]!r} has no images ({NAMES}): check data.path')
  labels, names = _labels(data, split, files, found)
  source = Tar(items, labels, names, data['broken'], files=files)
  source.window = data.get('shuffle_window', 0)
  return source


def _indices(files: Sequence[Shard]) -> list[Index]:
  with ThreadPoolExecutor(4 * THREADS) as pool:  # the threads mostly wait for storage
    stored = list(pool.map(tar_index.stored, files))
    if missing := stored.count(None):
      print(f'scanning {missing:,} shards, once: {os.path.dirname(files[0].path)}', file=sys.stderr, flush=True)
    return list(pool.map(lambda file, index: index or tar_index.make(file), files, stored))


def _report(data: Mapping[str, Any], files: Sequence[Shard], found: Sequence[Index]) -> None:
  """Raises an error for the first damaged shard or, with data.broken=skip, prints a line for each.

  Also prints how many samples are not read because of the names of their images.
  """
  for file, index in zip(files, found, strict=True):
    if index.problem and data['broken'] == 'error':
      raise ValueError(
        f'{shown(file.path)} {index.problem}: copy it again, or set data.broken=skip to use what precedes it'
      )
    if index.problem:
      kept = f'the {len(index.items):,} images before that are used'
      print(f'{shown(file.path)} {index.problem}: {kept}', file=sys.stderr, flush=True)
  if misnamed := sum(index.misnamed for index in found):
    first = next(file for file, index in zip(files, found, strict=True) if index.misnamed)
    folder, verb = shown(os.path.dirname(first.path)), 'samples are' if misnamed > 1 else 'sample is'
    why = f'the image has another name than {NAMES}, where KEY has no dot'
    say_once(f'{folder}: {misnamed:,} {verb} not read (first in {first.name}), because {why}')


def _labels(
  data: Mapping[str, Any], split: str, files: Sequence[Shard], found: Sequence[Index]
) -> tuple[np.ndarray | None, Sequence[str]]:
  """(int32 [N], class names); (None, ()) unless every image has a label.

  Numeric labels are kept, with class names from `classnames.txt` if it exists. Otherwise, classes are numbered by the
  sorted class names of both splits.
  """
  codes = [index.codes for index in found]
  without = sum(int((code < 0).sum()) for code in codes)
  if without:
    first = next(k for k, code in enumerate(codes) if (code < 0).any())
    return without_labels(without, sum(map(len, codes)), f' (first in {files[first].name})')
  names = {name for index in found for name in index.names}
  if all(name.isascii() and name.isdecimal() for name in names):
    reject_gaps(f'data.{split}_split', np.array([int(name) for name in names]))
    lookup: Callable[[str], int] = int
    known: Sequence[str] = _class_names(data['path'], max(map(int, names)))
  else:
    other = _indices(shards.find_other(data, split, '.tar'))
    known = sorted(names.union(*(index.names for index in other)))
    lookup = {name: k for k, name in enumerate(known)}.__getitem__
  labels = []
  for index in found:
    numbers = np.array([lookup(name) for name in index.names], np.int32)
    labels.append(numbers[index.codes])
  return np.concatenate(labels), known


def _class_names(path: str, largest: int) -> Sequence[str]:
  file = os.path.join(os.path.expanduser(path), 'classnames.txt')
  if not os.path.isfile(file):
    return ()
  with open(file, encoding='utf-8', errors='replace') as text:
    names = [line.strip() for line in text if line.strip()]
  if len(names) <= largest:
    raise ValueError(f'{file} has {len(names)} names, but labels reach {largest}: name each class, or remove it')
  return names
