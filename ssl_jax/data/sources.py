"""Image sources, with or without text: folders, tar shards, Parquet, .npz and tfds files, and the embedded dataset.

    source = load(config.data, 'train')
    len(source), source.labels  # int32 [N]; None if the images have no labels
    source.read(7)  # uint8 [H, W, 3]
    source.captions_of(np.array([7]))  # [('a red circle',)]; None if the images have no text
    images, labels = source.arrays(32)  # everything: uint8 [N, 32, 32, 3], int32 [N]

No source needs TensorFlow or a network. Images are converted to RGB and otherwise left as stored: EXIF orientation is
ignored, as in ImageNet pipelines.
"""

import copy
import errno
import functools
import hashlib
import importlib
import os
import struct
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from ssl_jax.config import require_memory
from ssl_jax.data import classes, embedded, embedded_captions
from ssl_jax.data.decoding import rgb, square
from ssl_jax.registry import require_choice

T = TypeVar('T')

# What reading a broken image or text raises.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
# Errors of the storage, not of an image: a network that does not answer, or too many open files.
STORAGE = (
  *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
  *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
CORES = len(os.sched_getaffinity(0))  # those that this process may use: a Slurm job may not have them all
THREADS = min(4, CORES)  # on small images, 16 threads take twice as long as 4
WAITING = 32  # threads that ask for the status of files: on network storage, each answer takes up to a millisecond
SAMPLES = 10_000  # maximum number of images in the checksum of `contents`
BULK = 512  # images per task when all are read: large enough to hide overhead, small enough to balance the threads


class Source:
  """Random access to N images. A subclass defines what an item is (a path, a record, pixels) and how it is opened."""

  def __init__(
    self, items: np.ndarray, labels: np.ndarray | None = None, class_names: Sequence[str] = (), broken: str = 'error'
  ):
    self.items = items
    self.labels = labels
    self.class_names = tuple(class_names)
    self.broken = broken
    self.skipped: set[int] = set()  # positions of broken images found so far (broken='skip')
    self.origin: Source | None = None  # the source from which these images were decoded, if any
    self.original_contents = ''  # for arrays of another size: the `contents` before they were resized
    self.paired = False  # whether an example is an image with text; if so, an image without readable text is broken
    self.window = 0  # images that are shuffled together, for sources that are faster to read block by block (0: all)
    self.cache_name = ''  # identifies the dataset, the split and the selected images, as part of a file name
    self.vocabulary: Any = None  # for the captions, if `paired`
    self.tokens: Any = None  # the tokenized captions, if `paired` and in memory

  def __len__(self) -> int:
    return len(self.items)

  def open(self, positions: Sequence[int] | np.ndarray) -> list[Callable[[], Image.Image]]:
    """For each position, a function that returns the Pillow image, not yet decoded."""
    raise NotImplementedError

  def where(self, position: int) -> str:
    """Describes where an image is stored, for messages."""
    raise NotImplementedError

  def name(self, position: int) -> str:
    """A name of an image that does not depend on where the data is stored, for `held_out`."""
    return str(position)

  def labels_of(self, positions: np.ndarray) -> np.ndarray | None:
    """The labels of a few images."""
    return None if self.labels is None else self.labels[positions]

  def captions_of(self, positions: np.ndarray) -> list[tuple[str, ...]] | None:
    """The captions of a few images, one or more for each; None if the source has no text.

    Missing or unreadable text raises an error. With broken='skip', it becomes () and the image is added to `skipped`.
    """
    if not self.has_text():
      return None
    found = []
    for k in positions:
      try:
        if not (captions := self.read_captions(int(k))):
          raise ValueError('it is missing or empty')
      except UNREADABLE as error:
        self._note_broken(int(k), error, 'has no readable text')
        captions = ()
      found.append(captions)
    return found

  def has_text(self) -> bool:
    """Whether the source has captions."""
    return False

  def read_captions(self, position: int) -> tuple[str, ...]:
    """The captions of one image, or () if there are none. Raises one of UNREADABLE."""
    raise NotImplementedError

  def multi_labels(self) -> list[list[str]] | None:
    """The label names of each image in a multi-label dataset; otherwise None."""
    return None

  def class_name(self, label: int) -> str:
    """The name of a class, or 'class NUMBER' if it has none."""
    return str(self.class_names[label]) if 0 <= label < len(self.class_names) else f'class {label}'

  def identities(self) -> list[Hashable]:
    """A value for each image. Two sources share an image if they share its value."""
    raise NotImplementedError

  def fingerprint(self) -> str:
    """A hash that changes when the stored images change; '' for images in memory."""
    return ''

  def samples(self) -> np.ndarray:
    """Up to `SAMPLES` positions, evenly spaced."""
    return np.linspace(0, len(self) - 1, min(len(self), SAMPLES)).astype(int)

  def contents(self) -> str:
    """A checksum of the labels and of up to `SAMPLES` image names or, for arrays, of their values.

    It tells apart datasets of the same size, wherever they are stored. Prepared tfds datasets have no image names, so
    only their labels count.
    """
    if self.original_contents:
      return self.original_contents
    source = self.origin or self
    chosen = self.samples()
    parts = [] if self.labels is None else [np.asarray(self.labels, '<i8').tobytes()]
    if type(source).name is not Source.name:
      parts += [source.name(int(k)).encode(errors='surrogateescape') for k in chosen]
    elif source is self and self.items.ndim > 1:
      parts.append(np.ascontiguousarray(self.items[chosen]).tobytes())
    return f'{zlib.crc32(bytes(1).join(parts)):08x}'

  def sizes(self) -> str:
    """A checksum of the sizes of up to `SAMPLES` image files; '' if images have no files of their own."""
    return self.origin.sizes() if self.origin else ''

  def first_readable(self, position: int, decode: Callable[[Image.Image], T]) -> tuple[T, int]:
    """(decode(image), its position). With broken='skip', the next readable image replaces a broken one."""
    tries = min(len(self), 100)
    for step in range(tries):
      k = (position + step) % len(self)
      if not self._complete(k):
        continue
      try:
        return decode(self.open([k])[0]()), k
      except UNREADABLE as error:
        self._note_broken(k, error)
    raise ValueError(
      f'none of the {tries} images starting at {self.where(position)} can be read: check that the data still exists'
    )

  def read(self, position: int) -> np.ndarray:
    """One decoded image. With broken='skip', the next readable one replaces a broken one.  -> uint8 [H, W, 3]"""
    return self.first_readable(position, lambda image: np.asarray(rgb(image)))[0]

  def arrays(self, image_size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """All readable images, uint8 `[N, image_size, image_size, 3]`, and their labels, int32 `[N]` or None.

    Images of that size keep their pixels. In all others, the shorter side is resized to it and the center is cropped.
    """
    needed, fix = self.nbytes_decoded(image_size), 'set data.on_device=no, or lower data.image_size or data.stored_size'
    require_memory(f'decoding {len(self):,} images at {image_size} × {image_size} pixels', needed, fix)
    images = np.empty((len(self), image_size, image_size, 3), np.uint8)
    good = np.ones(len(self), bool)

    def fill(start: int) -> None:
      positions = range(start, min(start + BULK, len(self)))
      good[self.decode(positions, images[start : start + BULK])] = False

    with ThreadPoolExecutor(THREADS) as pool:  # Pillow releases the GIL
      for _ in pool.map(fill, range(0, len(self), BULK)):
        pass
    if good.all():
      return images, self.labels
    return images[good], None if self.labels is None else self.labels[good]

  def decode(self, positions: range, out: np.ndarray) -> list[int]:
    """Decodes images into `out`, uint8 `[b, size, size, 3]`. Returns the positions of the broken ones."""
    broken = []
    for k, place, image in zip(positions, out, self.open(positions), strict=True):
      good = self._complete(k)
      try:
        place[:] = square(image(), out.shape[1])
      except UNREADABLE as error:
        self._note_broken(k, error)
        good = False
      if not good:
        broken.append(k)
    return broken

  def readable(self) -> np.ndarray:
    """Positions, int64, of the images not known to be broken."""
    return np.setdiff1d(np.arange(len(self)), list(self.skipped))

  def in_memory(self, image_size: int) -> 'Arrays':
    """The readable images, decoded, as `Arrays`. `skipped` has the positions of the others in this source."""
    return self.decoded_as(*self.arrays(image_size))

  def decoded_as(self, images: np.ndarray, labels: np.ndarray | None) -> 'Arrays':
    """`Arrays` of images that were decoded from this source."""
    kept = Arrays(images, labels, self.class_names)
    kept.captions, kept.paired = self.captions_of(self.readable()) if self.paired else None, self.paired
    kept.skipped = self.skipped
    if isinstance(self, Arrays):  # `same_images` compares arrays by their pixels
      kept.original_contents = self.contents()
    else:
      kept.origin = self
    return kept

  def ready(self, image_size: int) -> bool:
    """Whether the items are in memory and already have the size of the encoder's input."""
    del image_size
    return False

  def nbytes_decoded(self, image_size: int) -> int:
    """Size of `arrays(image_size)` in bytes."""
    return len(self) * image_size * image_size * 3

  def subset(self, positions: np.ndarray) -> 'Source':
    """The images at these positions, in this order."""
    part = copy.copy(self)
    part.items, part.skipped = self.items[positions], set()
    part.labels = None if self.labels is None else self.labels[positions]
    return part

  def _complete(self, position: int) -> bool:
    """Whether an image has text, if it needs any."""
    return not self.paired or bool((self.captions_of(np.array([position])) or [()])[0])

  def blocks(self) -> np.ndarray:
    """First positions of the blocks that are read together, such as files or row groups.  -> int64 [blocks]"""
    return np.zeros(1, np.int64)

  def _note_broken(self, position: int, error: Exception, what: str = 'is not a readable image') -> None:
    if isinstance(error, OSError) and error.errno in STORAGE:  # skipping would silently change the data of the run
      raise ValueError(
        f'{self.where(position)} cannot be read ({error.strerror}), which is an error of the storage and not of the '
        'image, so it is never skipped: repair the storage and run the same command, or remove the file'
      ) from error
    if self.broken == 'error':
      reason = 'unknown format' if isinstance(error, UnidentifiedImageError) else one_line(error)
      raise ValueError(
        f'{self.where(position)} {what} ({reason}): fix or remove it, or set data.broken=skip'
      ) from error
    self.skipped.add(position)


def without_labels(count: int, total: int, first: str = '') -> tuple[None, Sequence[str]]:
  """The labels and class names of a source in which `count` images have no label. Prints a line if others have one."""
  if count < total:
    print(f'{count:,} of {total:,} images have no label{first}: labels are not used', file=sys.stderr, flush=True)
  return None, ()


def reject_gaps(name: str, labels: np.ndarray) -> None:
  """Raises if far fewer classes occur than the largest label suggests: evaluations hold an entry for every number."""
  largest = int(labels.max())
  if largest >= 100_000 and largest >= 10 * (found := len(np.unique(labels))):  # counted only if it may matter
    raise ValueError(f'{name}: classes up to {largest:,}, but only {found:,} occur; number the classes from 0')


def one_line(error: Exception) -> str:
  """The message of an error on one line."""
  return ' '.join(str(error).split()) or type(error).__name__


class Arrays(Source):
  """Items are pixels, uint8 [N, H, W, 3]. `captions` may be set to one tuple of strings per image."""

  captions: Sequence[tuple[str, ...]] | None = None

  def open(self, positions: Sequence[int] | np.ndarray) -> list[Callable[[], Image.Image]]:
    return [functools.partial(Image.fromarray, self.items[k]) for k in positions]

  def where(self, position: int) -> str:
    return f'image {position} of the arrays'

  def identities(self) -> list[Hashable]:
    return [hash(image.tobytes()) for image in self.items]

  def ready(self, image_size: int) -> bool:
    return self.items.shape[1:3] == (image_size, image_size)

  def has_text(self) -> bool:
    return self.captions is not None

  def read_captions(self, position: int) -> tuple[str, ...]:
    return self.captions[position] if self.captions else ()

  def subset(self, positions: np.ndarray) -> 'Arrays':
    part = super().subset(positions)
    assert isinstance(part, Arrays)
    part.captions = None if self.captions is None else [self.captions[k] for k in np.arange(len(self))[positions]]
    return part

  def readable(self) -> np.ndarray:
    return np.arange(len(self))  # `skipped` refers to positions in the original source

  def arrays(self, image_size: int) -> tuple[np.ndarray, np.ndarray | None]:
    if self.ready(image_size):
      return self.items, self.labels
    return super().arrays(image_size)


def stamp(path: str | os.PathLike[str]) -> str:
  """Size and modification time of a file; '' if it does not exist."""
  try:
    found = os.stat(path)
  except OSError:
    return ''
  return f'{found.st_size} {found.st_mtime_ns}'


def checksums(*found: Source) -> dict[str, str]:
  """Checksums that tell apart datasets of the same name: `contents` and, for files of their own, `sizes`."""
  joined = {'contents': ' '.join(source.contents() for source in found)}
  if sizes := ' '.join(source.sizes() for source in found).strip():
    joined['sizes'] = sizes
  return joined


def stamps(paths: Sequence[str] | np.ndarray) -> Iterator[str]:
  """`stamp` of each file, in order."""
  parts = [paths[start : start + BULK] for start in range(0, len(paths), BULK)]
  with ThreadPoolExecutor(WAITING) as pool:
    for found in pool.map(lambda part: [stamp(path) for path in part], parts):
      yield from found


def digest_of(texts: Iterable[str]) -> str:
  """A hash of a sequence of strings.

  >>> digest_of(['a', 'b']) == digest_of(['ab'])
  False
  """
  found = hashlib.blake2b(digest_size=16)
  for text in texts:
    found.update(text.encode(errors='surrogateescape') + b'\n')
  return found.hexdigest()


def load(data: Mapping[str, Any], split: str) -> Source:
  """The source for the config section `data`; `split` is 'train' or 'test'."""
  require_choice('data.broken', data['broken'], ('error', 'skip'))
  require_choice('split', split, ('train', 'test'))
  require_choice('data.source', data['source'], LOADERS)
  if data['classes']:
    require_choice('data.classes', data['classes'], classes.NAMED)
  source = LOADERS[data['source']](data, split)
  source = _restrict(source, data['classes']) if data['classes'] else source
  share = data.get('held_out', 0.0)
  if not share or data['train_split'] != data['test_split']:
    return source
  test = held_out(source, share)
  if split == 'test' and not test.any():
    raise ValueError(f'data.held_out = {share:g} leaves no test image, because no class has two images: add images')
  return source.subset(np.flatnonzero(test if split == 'test' else ~test))


def held_out(source: Source, share: float) -> np.ndarray:
  """Which images are held out for testing: the fraction `share` of each class, by a hash of image names.  -> bool [N]

  A class of at least two images has at least one on either side. Without labels, all images are one class. The choice
  does not depend on where the data is stored, the order of files, or the seed of the run.
  """
  hashes = [
    hashlib.blake2b(source.name(k).encode(errors='surrogateescape'), digest_size=8).digest() for k in range(len(source))
  ]
  labels = np.zeros(len(source), np.int32) if source.labels is None else source.labels
  chosen = np.zeros(len(source), bool)
  for label in np.unique(labels):
    members = sorted(np.flatnonzero(labels == label), key=lambda k: hashes[k])
    count = min(max(round(share * len(members)), 1), len(members) - 1)
    chosen[members[:count]] = True
  return chosen


def same_images(train: Source, test: Source) -> list[tuple[int, int]]:
  """The test images that are also training images: the same files, the same records or equal pixels.

  Returns (position of the training image, position of the test image), in the sources of decoded images.
  """
  train, test = train.origin or train, test.origin or test
  if type(train) is not type(test):
    return []
  known = {image: k for k, image in enumerate(train.identities())}
  return [(known[image], k) for k, image in enumerate(test.identities()) if image in known]


def _restrict(source: Source, name: str) -> Source:
  """The images of a named list of classes, relabeled 0, 1, ... in the order of the source's classes."""
  wanted = classes.NAMED[name]
  if missing := sorted(set(wanted) - set(source.class_names)):
    raise ValueError(
      f'data.classes = {name!r} has {len(wanted)} classes, of which the data lacks {len(missing)} (first: '
      f"{', '.join(missing[:3])}): use a set that has them, or data.classes='' for all classes"
    )
  if source.labels is None:
    raise ValueError(f"data.classes = {name!r} needs labels, and the images have none: set data.classes=''")
  kept = [k for k, class_name in enumerate(source.class_names) if class_name in set(wanted)]
  relabel = np.full(len(source.class_names), -1, np.int32)
  relabel[kept] = np.arange(len(kept))
  labels = relabel[source.labels]
  part = source.subset(np.flatnonzero(labels >= 0))
  part.labels, part.class_names = labels[labels >= 0], tuple(source.class_names[k] for k in kept)
  return part


def _of(module: str) -> Callable[[Mapping[str, Any], str], Source]:
  """The function `load` of a module of ssl_jax.data, imported on first use to avoid a circular import."""
  return lambda data, split: importlib.import_module(f'ssl_jax.data.{module}').load(data, split)


def _embedded(data: Mapping[str, Any], split: str) -> Arrays:
  require_choice(f'data.{split}_split', data[f'{split}_split'], embedded.SIZES)
  scenes = embedded.scenes(data[f'{split}_split'])
  source = Arrays(scenes.images, scenes.labels, embedded.CLASSES)
  source.captions = embedded_captions.captions(scenes)
  return source


LOADERS = {
  'tfds': _of('tfds_source'),
  'arrays': _of('arrays_source'),
  'folder': _of('folder_source'),
  'tar': _of('tar_source'),
  'parquet': _of('parquet_source'),
  'embedded': _embedded,
}
