"""A file cache of decoded images: the first run decodes them in parallel, and later runs memory-map the file.

NAME.npy holds uint8 [N, size, size, 3]: the shorter side of each image is resized to `size`, and the center is cropped.
NAME.json holds the fingerprint of the source, and a checksum for each block of images. A block is valid if its checksum
matches, and all other blocks are decoded. This rule creates a new file, completes one whose process was killed, and
repairs a damaged one. If the fingerprint differs, because the data has changed, a new file is started.
"""

import contextlib
import errno
import json
import math
import os
import pathlib
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ssl_jax.data import locks, sources

BLOCK = 2**24  # maximum bytes of a block, unless a single image is larger
COMPARED = 8  # images that are decoded again at each start, to compare them with the file
SAY_SECONDS, SAVE_SECONDS = 10.0, 5.0  # seconds between progress messages, and between writes of NAME.json
THREADS = sources.CORES  # Pillow releases the GIL


def load(source: sources.Source, image_size: int, folder: str) -> sources.Arrays:
  """`source.in_memory(image_size)`, memory-mapped from a cache file in `folder`.

  Sources that are already in memory are not cached.
  """
  if not (fingerprint := source.fingerprint()):
    return source.in_memory(image_size)
  file = _writable(folder) / f'{source.cache_name}_{image_size}px.npy'
  with _locked(file) as alone:
    cache = _Cache(file, source, image_size, fingerprint)
    cache.complete(alone)
    return cache.images()  # mapped before another process may replace the file


class _Cache:
  """The cache file of a source, and the content of its NAME.json (`known`)."""

  def __init__(self, file: pathlib.Path, source: sources.Source, image_size: int, fingerprint: str):
    self.file, self.source, self.size = file, source, image_size
    self.shape = (len(source), image_size, image_size, 3)
    self.step = max(BLOCK // (3 * image_size**2), 1)  # images per block
    self.identity = {
      'fingerprint': fingerprint,
      'paired': source.paired,  # if True, an image without text counts as broken
      'shape': list(self.shape),
      'block': self.step,
    }
    self.starts = range(0, len(source), self.step)

  def complete(self, alone: bool) -> None:
    """Writes the file, or only the parts that are missing or damaged; `alone`: no other process writes it."""
    self.known = self._read()
    missing = self._missing() if self._mapped() is not None else None
    if missing is None or not self._as_decoded(missing):
      with _writing(self.file):
        self.file.unlink(missing_ok=True)  # not overwritten, because another run may have mapped it
        np.lib.format.open_memmap(self.file, 'w+', np.uint8, self.shape).flush()
      self.known = {**self.identity, 'checksums': [None] * len(self.starts), 'broken': []}
      missing = list(self.starts)
    if missing:
      self._require_space(len(missing) * self.step * self.size**2 * 3)
      self._decode(missing)
      if not alone:  # another process may have replaced the file meanwhile
        self.complete(alone)

  def images(self) -> sources.Arrays:
    """The images of a complete file, as `Source.in_memory` returns them."""
    source, images = self.source, self._mapped()
    assert images is not None
    labels, broken = source.labels, self.known['broken']
    source.skipped.update(broken)
    if broken:  # rare, so a copy in memory is acceptable
      good = source.readable()
      images, labels = images[good], None if labels is None else labels[good]
    return source.decoded_as(images, labels)

  def _read(self) -> dict[str, Any]:
    """The content of NAME.json if it belongs to this source; otherwise {}."""
    try:
      known = json.loads(self.file.with_suffix('.json').read_bytes())
      same = all(known[key] == value for key, value in self.identity.items())
      return known if same and len(known['checksums']) == len(self.starts) and isinstance(known['broken'], list) else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
      return {}

  def _write(self) -> None:
    part = self.file.with_suffix('.json.part')
    with _writing(part):
      part.write_text(json.dumps(self.known))
      part.replace(self.file.with_suffix('.json'))

  def _mapped(self) -> np.ndarray | None:
    """The memory-mapped images; None if the file is missing or does not belong to this source."""
    try:
      if not (self.known and os.path.isfile(self.file)):
        return None
      images = np.load(self.file, mmap_mode='r', allow_pickle=False)
      return np.asarray(images) if (images.shape, images.dtype) == (self.shape, np.uint8) else None
    except (OSError, ValueError, EOFError):
      return None

  def _missing(self) -> list[int]:
    """First positions of the blocks that must be decoded."""
    images, broken = self._mapped(), self.known['broken']
    assert images is not None

    def valid(start: int) -> bool:
      if self.source.broken == 'error' and any(start <= k < start + self.step for k in broken):
        return False  # decoding raises an error that names the broken image
      expected = self.known['checksums'][start // self.step]
      return expected is not None and zlib.crc32(images[start : start + self.step].data) == expected

    with ThreadPoolExecutor(THREADS) as pool:
      return [start for start, good in zip(self.starts, pool.map(valid, self.starts), strict=True) if not good]

  def _as_decoded(self, missing: Sequence[int]) -> bool:
    """Whether a few images equal a fresh decoding: another version of Pillow may round differently."""
    images = self._mapped()
    assert images is not None
    lost = {*missing, *(k // self.step * self.step for k in self.known['broken'])}
    positions = np.linspace(0, len(images) - 1, COMPARED).astype(int)
    again = np.empty((1, *self.shape[1:]), np.uint8)
    for k in (int(k) for k in positions if k // self.step * self.step not in lost):
      self.source.decode(range(k, k + 1), again)
      if not np.array_equal(again[0], images[k]):
        return False
    return True

  def _require_space(self, needed: int) -> None:
    # An overestimate if damaged blocks of an existing file already occupy disk space.
    if (free := shutil.disk_usage(self.file.parent).free) < needed:
      raise ValueError(
        f'data.cache = {str(self.file.parent)!r} has {free / 1e9:,.1f} GB free, and {len(self.source):,} images of '
        f'{self.size} pixels need {needed / 1e9:,.1f}: make room there, or give another folder'
      )

  def _decode(self, missing: Sequence[int]) -> None:
    """Decodes blocks into the file. Finished blocks are kept if decoding is interrupted."""
    header = self.file.stat().st_size - math.prod(self.shape)  # bytes
    total, done, begun = len(self.source), 0, time.monotonic()
    said = saved = begun
    _say(f'decoding {total:,} images at {self.size} pixels into {self.file} ({THREADS} threads)')
    known = total - sum(len(range(total)[start : start + self.step]) for start in missing)

    def fill(start: int) -> tuple[int, int, list[int]]:
      positions = range(total)[start : start + self.step]
      block = np.zeros((len(positions), *self.shape[1:]), np.uint8)
      broken = self.source.decode(positions, block)
      with _writing(self.file), self.file.open('r+b') as stream:  # writing to a map would crash on a full disk
        stream.seek(header + start * block[0].nbytes)
        stream.write(block.data)
      return start, zlib.crc32(block.data), broken

    pool = ThreadPoolExecutor(THREADS)
    try:
      for start, checksum, broken in pool.map(fill, missing):
        self.known['checksums'][start // self.step] = checksum
        kept = [k for k in self.known['broken'] if not start <= k < start + self.step]
        self.known['broken'] = sorted(kept + broken)
        done += len(range(total)[start : start + self.step])
        now = time.monotonic()
        if now - said > SAY_SECONDS:
          rate, said = done / (now - begun), now
          left = (total - known - done) / rate
          _say(f'{known + done:,} of {total:,} images decoded, {rate:,.0f} images/s, {left:,.0f} s left')
        if now - saved > SAVE_SECONDS:
          self._write()
          saved = now
    finally:
      pool.shutdown(cancel_futures=True)
      self._write()
    _say(f'decoded {done:,} images in {time.monotonic() - begun:,.0f} s')


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _writable(folder: str) -> pathlib.Path:
  path = pathlib.Path(folder).expanduser()
  try:
    path.mkdir(parents=True, exist_ok=True)
    return path
  except OSError as error:
    raise ValueError(f'data.cache = {folder!r} cannot be written ({error.strerror}): give another folder') from None


@contextlib.contextmanager
def _writing(file: pathlib.Path) -> Iterator[None]:
  """Turns an OSError, such as that of a full disk, into a one-line ValueError that names the file."""
  try:
    yield
  except OSError as error:
    room = 'make room there, or ' if error.errno in (errno.ENOSPC, errno.EDQUOT) else ''
    raise ValueError(
      f'{file} cannot be written ({error.strerror or error}): {room}give another folder as data.cache'
    ) from error


@contextlib.contextmanager
def _locked(file: pathlib.Path) -> Iterator[bool]:
  """Locks a cache file: other processes that need it wait.

  Yields False without a lock: on a file system that has none, or if this user may only read an existing file.
  """
  path, held = file.with_suffix('.lock'), False
  with contextlib.ExitStack() as stack:
    try:
      lock = stack.enter_context(path.open('a'))
    except OSError as error:
      if error.errno not in (errno.EACCES, errno.EROFS) or not file.exists():
        with _writing(path):
          raise
    else:
      held = locks.acquire(lock, lambda: _say(f'another process is writing {file}: waiting for it'))
    yield held
