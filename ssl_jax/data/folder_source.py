"""Images in a folder, with or without class folders. An optional captions.tsv holds captions."""

import collections
import csv
import functools
import itertools
import os
import pathlib
import stat
import sys
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from ssl_jax.data import archives
from ssl_jax.data.decoding import check_size, open_image
from ssl_jax.data.sources import Source, digest_of, one_line, stamps
from ssl_jax.registry import nearest

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.bmp', '.webp')
LABELS = 'labels.csv'  # in the folder of a split without class folders: one line file,label,... per image
CAPTIONS = 'captions.tsv'  # in the folder of a split: one line file<TAB>caption per caption


class Folder(Source):
  """Items are paths."""

  def __init__(self, items: np.ndarray, *more: Any, root: str | os.PathLike[str] = '', **named: Any):
    super().__init__(items, *more, **named)
    self.root = root  # the folder of the split
    self.captions: Mapping[str, tuple[str, ...]] | None = None  # by path

  def open(self, positions: Sequence[int] | np.ndarray) -> list[Callable[[], Image.Image]]:
    return [functools.partial(_open_file, self.items[k]) for k in positions]

  def where(self, position: int) -> str:
    return shown(self.items[position])

  def name(self, position: int) -> str:
    return self.items[position].removeprefix(str(self.root)).lstrip(os.sep)  # pathlib takes 10 s for a million files

  def fingerprint(self) -> str:
    captions = (self.captions or {}) if self.paired else {}
    found = zip(range(len(self)), self.items, stamps(self.items), strict=True)
    return digest_of(f'{self.name(k)}\0{stamp}\0{captions.get(path)}' for k, path, stamp in found)

  def sizes(self) -> str:
    found = [stamp.partition(' ')[0] for stamp in stamps(self.items[self.samples()])]
    return f'{zlib.crc32(" ".join(found).encode()):08x}'

  def has_text(self) -> bool:
    return self.captions is not None

  def read_captions(self, position: int) -> tuple[str, ...]:
    return (self.captions or {}).get(self.items[position], ())

  def identities(self) -> list[Hashable]:
    """Paths with symbolic links resolved. Only links are resolved, because there may be a million files."""
    links: dict[str, set[str]] = {}
    real: dict[str, str] = {}

    def resolve(path: str) -> str:
      folder, name = os.path.split(path)
      if folder not in links:
        links[folder] = {entry.name for entry in os.scandir(folder) if entry.is_symlink()}
        real[folder] = os.path.realpath(folder)
      return os.path.realpath(path) if name in links[folder] else os.path.join(real[folder], name)

    return [resolve(path) for path in self.items]

  def multi_labels(self) -> list[list[str]] | None:
    """Labels from labels.csv in the folder of the split. Each line is a file name and its labels, comma-separated."""
    file = pathlib.Path(self.root) / LABELS
    if self.labels is not None or not file.is_file():
      return None
    with file.open(newline='', encoding='utf-8') as lines:
      found = {row[0]: [name.strip() for name in row[1:] if name.strip()] for row in csv.reader(lines) if row}
    names = [self.name(position) for position in range(len(self))]
    if missing := [name for name in names if name not in found]:
      raise ValueError(f'{file} has no line for {missing[0]} (images without one: {len(missing)}): add it')
    return [found[name] for name in names]


def load(data: Mapping[str, Any], split: str) -> Folder:
  """The images of a split. The class folders, if any, give the labels."""
  key = f'data.{split}_split'
  path, folder = pathlib.Path(data['path']).expanduser(), data[f'{split}_split']
  root = path / folder
  if not data['path'] or not path.is_dir():
    fix = f'set it to a folder DIR with the images in {pathlib.Path("DIR", folder, "<class>", "*.JPEG")}'
    if data['path'] and data['name'] in archives.PUBLISHED:  # Tiny-ImageNet
      fix = f'run {archives.command(data["name"], data["path"])}'
    raise ValueError(f'data.path = {data["path"]!r} is not a folder: {fix}')
  if not root.is_dir():
    known = subfolders(path)
    fix = nearest(root.name, known) if known else f"set {key}='' if the images are in data.path itself"
    raise ValueError(f'{key} = {folder!r} is not a folder in {path}, as in {root}/<class>/*.JPEG: {fix}')
  ignored: collections.Counter[str] = collections.Counter()
  names, flat = subfolders(root), _images_in(root, ignored, nested=False)
  if names and flat:
    raise ValueError(
      f'{root} has both images and folders ({flat[0]}, {names[0]}): keep only class folders or only images'
    )
  if not names and not flat:
    raise ValueError(
      f'{root} has neither class folders, as in {root}/<class>/*.JPEG, nor images: check data.path and {key}'
    )
  paths = [] if flat else [_images_in(root / name, ignored) for name in names]
  if (texts := root / CAPTIONS).is_file():
    ignored['.tsv'] -= 1
  if flat and (root / LABELS).is_file():
    ignored['.csv'] -= 1
  _name_ignored(root, +ignored)
  if flat:
    return _with_captions(Folder(np.array(flat, object), broken=data['broken'], root=root), texts)
  for name, found in zip(names, paths, strict=True):
    if not found:
      raise ValueError(f'class folder {root / name} has no images ({", ".join(EXTENSIONS)}): fill or remove it')
  # A class has the same label in both splits, even if one split lacks some classes.
  other = path / data['test_split' if split == 'train' else 'train_split']
  known = sorted({*names, *(subfolders(other) if other.is_dir() else ())})
  number = {name: k for k, name in enumerate(known)}
  labels = np.repeat([number[name] for name in names], [len(found) for found in paths]).astype(np.int32)
  items = np.array([*itertools.chain(*paths)], object)
  class_names = [shown(name) for name in known]  # in figures, a name that is not UTF-8 is an error
  return _with_captions(Folder(items, labels, class_names, data['broken'], root=root), texts)


def _with_captions(source: Folder, file: pathlib.Path) -> Folder:
  """The source with the captions in `file`, if it exists. `data.broken` says whether invalid lines raise an error."""
  if not file.is_file():
    return source
  plain = lambda path: path.removeprefix('./')  # with data.path=., only some of the items begin with it
  known, found = {plain(path): path for path in source.items}, collections.defaultdict[str, list[str]](list)
  with file.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      try:
        name, tab, caption = line.decode('utf-8-sig' if number == 1 else 'utf-8').strip('\r\n').partition('\t')
        path = known.get(plain(os.path.join(source.root, name)))
        if not tab or not caption.strip():
          raise ValueError('it must be file<TAB>caption')
        if path is None:
          raise ValueError(f'there is no image {shown(name)}')
        found[path].append(caption.strip())
      except ValueError as error:
        if line.strip() and source.broken == 'error':
          where = f'{file}, line {number} ({one_line(error)})'
          raise ValueError(f'{where}: fix or remove it, or set data.broken=skip') from error
  source.captions = {path: tuple(captions) for path, captions in found.items()}
  return source


def subfolders(root: str | os.PathLike[str]) -> list[str]:
  """Sorted names of the subfolders of a folder, except hidden ones."""
  return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith('.'))


def holds_images(root: str | os.PathLike[str]) -> bool:
  """Whether a folder itself has images."""
  with os.scandir(root) as entries:
    return any(os.path.splitext(entry.name)[1].lower() in EXTENSIONS for entry in entries if entry.is_file())


def _images_in(root: pathlib.Path, ignored: 'collections.Counter[str]', nested: bool = True) -> list[str]:
  """Sorted paths of the images in a folder and, if `nested`, in its subfolders, except hidden files and folders.

  Other files are counted by suffix in `ignored`.
  """
  found: list[str] = []
  seen: set[str] = set()

  def unreadable(error: OSError) -> None:
    raise ValueError(f'{error.filename} cannot be read ({error.strerror}): make it readable, or remove it') from error

  for folder, below, files in os.walk(root, onerror=unreadable, followlinks=True):
    if (place := os.path.realpath(folder)) in seen:  # a link to a folder that was visited, such as a parent
      below[:] = []
      continue
    seen.add(place)
    below[:] = [name for name in below if nested and not name.startswith('.')]
    for name in (name for name in files if not name.startswith('.')):
      if (suffix := os.path.splitext(name)[1].lower()) in EXTENSIONS:
        found.append(os.path.join(folder, name))
      else:
        ignored[suffix] += 1
  return sorted(found)


def _name_ignored(root: pathlib.Path, types: 'collections.Counter[str]') -> None:
  """Prints how many files of a folder are ignored because of their suffix."""
  if types:
    kinds = ', '.join(f'{count:,} {shown(suffix) or "without a suffix"}' for suffix, count in types.most_common(5))
    verb = 'files are' if types.total() > 1 else 'file is'
    say_once(f'{root}: {types.total():,} {verb} not read ({kinds}), only {", ".join(EXTENSIONS)}')


@functools.cache
def say_once(text: str) -> None:
  """Prints a message to stderr. Data is read twice if it has both the training and the test images."""
  print(text, file=sys.stderr, flush=True)


def shown(path: str) -> str:
  """A path as printable text for a one-line message."""
  return path if path.isprintable() else repr(path)


def _open_file(path: str) -> Image.Image:
  with open(path, 'rb', opener=_without_waiting) as file:
    status = os.fstat(file.fileno())  # of the open file: on network storage, a path takes another request
    if not stat.S_ISREG(status.st_mode):
      raise OSError('not a regular file')
    check_size(status.st_size)
    return open_image(file.read())  # read at once, because Pillow keeps the file of a broken image open


def _without_waiting(path: str, flags: int) -> int:
  """Opens a file; opening or reading a pipe would otherwise block, maybe forever."""
  return os.open(path, flags | os.O_NONBLOCK)
