"""Finds the shards of a split, given as `train-{0000..0331}.tar`, `data/train-*.parquet`, or just `train`."""

import glob
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ssl_jax.registry import nearest

MOST = 10**6  # maximum number of values in a brace range


class Shard(NamedTuple):
  """A file, with its size and modification time when it was found."""

  path: str
  size: int
  mtime: int  # nanoseconds

  @property
  def name(self) -> str:
    return os.path.basename(self.path)

  def unchanged(self, descriptor: int) -> bool:
    """Whether an open file still has the same size and modification time."""
    status = os.fstat(descriptor)
    return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime)


def find(data: Mapping[str, Any], split: str, suffix: str) -> list[Shard]:
  """The shards of 'train' or 'test', in the order of the braces. Matches of other wildcards are sorted.

  `data.train_split` (or `data.test_split`) is a pattern for files in `data.path`. With the suffix '.tar', a plain
  `NAME` stands for `NAME.tar`, `NAME-*.tar` and `NAME/*.tar`, in `data.path` or else in its folder `data`.
  """
  key, pattern = f'data.{split}_split', data[f'{split}_split']
  root = pathlib.Path(data['path']).expanduser()
  if not data['path'] or not root.is_dir():
    raise ValueError(f'data.path = {data["path"]!r} is not a folder: set it to the one with the {suffix} files')
  paths: dict[str, None] = {}
  for name in expand(pattern, key):
    whole = name.endswith(suffix) or glob.has_magic(name)
    found = _matches(root, name) if whole else _named(root, name, suffix) or _named(root / 'data', name, suffix)
    if not found:
      raise ValueError(f'{key} = {pattern!r} has no file {name!r} in {root}: {_fix(root, name, suffix)}')
    paths.update(dict.fromkeys(found))
  return [_shard(path) for path in paths]


def find_other(data: Mapping[str, Any], split: str, suffix: str) -> list[Shard]:
  """The shards of the split other than `split`; [] if it is the same or does not exist."""
  if data['train_split'] == data['test_split']:
    return []
  try:
    return find(data, 'test' if split == 'train' else 'train', suffix)
  except ValueError:
    return []


def expand(pattern: str, key: str = 'pattern') -> Iterator[str]:
  """Expands the braces of a pattern as a shell does: ranges of numbers and lists.

  >>> list(expand('{train,extra}-{08..10}.tar'))[:4]
  ['train-08.tar', 'train-09.tar', 'train-10.tar', 'extra-08.tar']
  """
  parts = re.split(r'(\{[^{}]*\})', pattern)
  choices: list[list[str]] = []
  for part in parts:
    inside = part[1:-1]
    if not (part.startswith('{') and part.endswith('}')):
      choices.append([part])
    elif numbers := re.fullmatch(r'(\d{1,12})\.\.(\d{1,12})', inside):
      low, high = numbers.groups()
      width = max(len(low), len(high)) if low.startswith('0') or high.startswith('0') else 0
      if not 0 <= int(high) - int(low) < MOST:
        raise ValueError(f'{key} = {pattern!r} must have a range that ascends, with at most {MOST:,} numbers: {part}')
      choices.append([f'{k:0{width}}' for k in range(int(low), int(high) + 1)])
    else:
      choices.append(inside.split(','))
  return (''.join(chosen) for chosen in itertools.product(*choices))


def _matches(root: pathlib.Path, name: str) -> list[str]:
  return sorted(path for path in glob.glob(str(pathlib.Path(glob.escape(str(root)), name))) if os.path.isfile(path))


def _named(root: pathlib.Path, name: str, suffix: str) -> list[str]:
  patterns = (f'{name}{suffix}', f'{name}-*{suffix}', str(pathlib.Path(name, f'*{suffix}')))
  return [path for pattern in patterns for path in _matches(root, pattern)]


def _fix(root: pathlib.Path, name: str, suffix: str) -> str:
  known = sorted(str(path.relative_to(root)) for path in itertools.islice(root.rglob(f'*{suffix}'), 1000))
  return nearest(name, known) if known else f'put {suffix} files there'


def _shard(path: str) -> Shard:
  status = os.stat(path)
  return Shard(path, status.st_size, status.st_mtime_ns)
