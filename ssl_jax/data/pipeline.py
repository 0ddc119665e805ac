"""Host batches for images that do not fit on the device: decode once, crop all views, let grain fetch ahead.

Batch t is a pure function of (seed, t): the order of an epoch follows from (seed, epoch), the crops of an image from
(seed, step, slot), where the slot is its place in the global batch. So a resumed run starts at its step, and any number
of workers and processes gives the same batches.
"""

import collections
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grain
import numpy as np
from absl import flags
from PIL import Image

from ssl_jax.data import augment, sources


@functools.lru_cache(maxsize=2)
def order(seed, epoch, n):
  """The permutation int64 `[n]` in which an epoch visits n images (read-only)."""
  permutation = np.random.default_rng((seed, epoch)).permutation(n)
  permutation.setflags(write=False)
  return permutation


class Crop(NamedTuple):
  """A random resized crop, to a square of `size` pixels."""

  size: int
  scale: tuple[float, float] | None = (0.08, 1.0)  # None: the centre square
  ratio: tuple[float, float] = (3 / 4, 4 / 3)
  interpolation: str = 'bilinear'


@dataclasses.dataclass(frozen=True)
class Loader:
  """The process's part of the batch of a step: slots `first`, ..., `first + local - 1` of the global batch."""

  source: sources.Source
  seed: int
  batch_size: int
  first: int
  local: int
  crops: tuple[Crop, ...]  # one a view, those of one size beside each other
  threads: int

  def __call__(self, step):
    """-> images, for each size uint8 [b, V, S, S, 3]; index int32 [b], the position in the data; broken int32 [b].

    `broken` is the position of a broken image whose place another one took, -1 elsewhere; `index` is that of the image
    that was read.
    """
    epoch, batch = divmod(step, len(self.source) // self.batch_size)
    slots = np.arange(self.first, self.first + self.local)
    wanted = order(self.seed, epoch, len(self.source))[batch * self.batch_size + slots]
    groups = [(size, len(list(views))) for size, views in itertools.groupby(crop.size for crop in self.crops)]
    images = tuple(np.empty((self.local, views, size, size, 3), np.uint8) for size, views in groups)
    index = np.empty(self.local, np.int32)

    def fill(k):
      rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(step, int(slots[k]))))
      uniforms = rng.random((len(self.crops), augment.CROP_DRAWS))
      views, index[k] = self.source.first_readable(int(wanted[k]), lambda image: self._crop(image, uniforms))
      for place, view in zip((place for group in images for place in group[k]), views, strict=True):
        place[:] = view

    if self.threads > 1:
      with ThreadPoolExecutor(self.threads) as pool:
        collections.deque(pool.map(fill, range(self.local)), maxlen=0)
    else:
      for k in range(self.local):
        fill(k)
    broken = np.where(index == wanted, -1, wanted).astype(np.int32)
    return dict(images=images, index=index, broken=broken)

  def _crop(self, image, uniforms):
    """A crop of one image for each view, Pillow's crop and resize.  -> V of uint8 [S, S, 3]"""
    width, height = image.size
    boxes = []
    for crop, u in zip(self.crops, uniforms, strict=True):
      random = crop.scale and augment.sample_crop(u, height, width, crop.scale, crop.ratio)
      boxes.append([int(x) for x in random or augment.center_box(height, width)])
    # A JPEG can be decoded at 1/2, 1/4 or 1/8: done where every crop still has twice the pixels that it needs.
    surplus = min(min(h, w) // (2 * crop.size) for crop, (_, _, h, w) in zip(self.crops, boxes, strict=True))
    if surplus >= 2:
      image.draft('RGB', (width // surplus, height // surplus))
    image = sources.rgb(image)
    x, y = image.width / width, image.height / height
    views = []
    for crop, (top, left, h, w) in zip(self.crops, boxes, strict=True):
      part = image.crop((round(left * x), round(top * y), round((left + w) * x), round((top + h) * y)))
      kernel = Image.Resampling[crop.interpolation.upper()]
      views.append(np.asarray(part.resize((crop.size, crop.size), kernel)))
    return views


def batches(
  source,
  *,
  seed,
  batch_size,
  total_steps,
  crops,
  start_step=0,
  num_workers=0,
  process_index=0,
  process_count=1,
):
  """An iterator of the process's part of the batches start_step, ..., total_steps - 1 (`Loader` says what they hold).

  `batch_size` is that of all processes together. Without workers, threads of this process decode (Pillow does so
  outside the interpreter lock); each of `num_workers` processes decodes whole batches. Close the iterator to end them:

      with contextlib.closing(batches(...)) as iterator:
        for batch in prefetch(iterator, jax.device_put): ...
  """
  if not 0 < batch_size <= len(source):
    raise ValueError(f'batch_size is {batch_size}, but the data has {len(source)} images; take 1 to {len(source)}')
  if batch_size % process_count:
    raise ValueError(f'batch_size {batch_size} is not divisible by the {process_count} processes; change one of them')
  local = batch_size // process_count
  threads = 1 if num_workers else os.cpu_count()
  loader = Loader(source, seed, batch_size, process_index * local, local, tuple(crops), threads)
  steps = grain.MapDataset.range(start_step, total_steps).map(loader)
  if not num_workers:
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
  _accept_flags()
  _check_shared_memory(num_workers, 3 * local * sum(3 * crop.size**2 for crop in crops))
  steps = steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
  return iter(steps.mp_prefetch(grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=1), _start_worker))


def prefetch(iterator, put, depth=2):
  """Yields put(batch), `depth` batches ahead: device transfers are asynchronous, so the next ones travel meanwhile."""
  ahead = collections.deque()
  for batch in iterator:
    ahead.append(put(batch))
    if len(ahead) > depth:
      yield ahead.popleft()
  yield from ahead


def _accept_flags():
  """Grain asks its own absl flags, which fails where nobody has parsed any (a notebook, a test): take the defaults."""
  if not flags.FLAGS.is_parsed():
    for name in flags.FLAGS:
      if name.startswith('grain_'):
        flags.FLAGS[name].present = True


def _start_worker(index, count):
  """An interruption is the parent's to handle; and a worker does not outlive it, however it ended."""
  del index, count
  for number in (signal.SIGINT, signal.SIGTERM):  # both may be sent to all processes of a job
    signal.signal(number, signal.SIG_IGN)

  def follow():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=follow, daemon=True).start()


def _check_shared_memory(num_workers, bytes_each):
  """Workers hand batches over in /dev/shm; a worker that finds it full would die of a bus error, without a word."""
  needed = num_workers * bytes_each
  if os.path.isdir('/dev/shm') and shutil.disk_usage('/dev/shm').free < needed:
    raise ValueError(
      f'num_workers is {num_workers}, but /dev/shm has no room for their batches ({math.ceil(needed / 2**20)} MiB);'
      f' enlarge it (docker run --shm-size), or take 0 workers (threads)'
    )
