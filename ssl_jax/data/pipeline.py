"""Batches from the host, for images that do not fit on the device.

Each image is decoded once and cropped for all views. grain prefetches the batches. Batch t is a pure function of
(seed, t): the order of an epoch depends on (seed, epoch), and the crops of an image on (seed, step, slot), where the
slot is its position in the global batch. A run can therefore resume at any step, and batches do not depend on the
number of workers or processes.
"""

import atexit
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from absl import flags
from PIL import Image

from ssl_jax.data import decoding, image_ops, sources
from ssl_jax.registry import require

if TYPE_CHECKING:
  import grain

Batch = dict[str, Any]
Batches: TypeAlias = Generator[Batch, None, None]
T = TypeVar('T')
# (source, positions [b], uniform random numbers [b]) -> tokens of one caption per image, [b, 1, T].
Captions = Callable[[sources.Source, np.ndarray, np.ndarray], np.ndarray]


@functools.lru_cache(maxsize=2)
def order(seed: int, epoch: int, n: int, window: int = 0, blocks: tuple[int, ...] = (0,)) -> np.ndarray:
  """The order in which an epoch visits n images: a permutation, int64 `[n]`, read-only.

  With a `window`, an epoch reads a few blocks at a time: the blocks are shuffled and grouped so that each group has at
  least `window` images (the last one may have fewer), and each group is shuffled. `blocks` are their first positions.
  """
  rng = np.random.default_rng((seed, epoch))
  permutation = _block_order(rng, n, window, blocks) if window else rng.permutation(n)
  permutation.setflags(write=False)
  return permutation


def _block_order(rng: np.random.Generator, n: int, window: int, blocks: tuple[int, ...]) -> np.ndarray:
  """The permutation of `order` if there is a window."""
  starts = np.array(blocks)
  shuffled = rng.permutation(len(blocks))
  sizes = np.diff(starts, append=n)[shuffled]
  visited = np.concatenate([np.arange(a, a + size) for a, size in zip(starts[shuffled], sizes, strict=True)])
  start = end = 0
  for size in sizes:
    end += size
    if end - start >= window:
      rng.shuffle(visited[start:end])
      start = end
  rng.shuffle(visited[start:])
  return visited


class Crop(NamedTuple):
  """A random crop, resized to `size` × `size` pixels."""

  size: int
  scale: tuple[float, float] | None = (0.08, 1.0)  # area as a fraction of the image area; None: the center square
  ratio: tuple[float, float] = (3 / 4, 4 / 3)
  interpolation: str = 'bilinear'


@dataclasses.dataclass(frozen=True)
class Loader:
  """Loads this process's part of a batch: slots `first`, ..., `first + local - 1` of the global batch."""

  source: sources.Source
  seed: int
  batch_size: int
  first: int
  local: int
  crops: tuple[Crop, ...]  # one per view; views of the same size are adjacent
  threads: int
  captions: Captions | None = None

  def __call__(self, step: int) -> Batch:
    """A dict with `images`, a tuple of uint8 [b, V, S, S, 3] for each size S, and int32 [b] `index` and `broken`.

    `index` is the position of the image in the source. `broken` is the position of the broken image that it replaces,
    or -1. With `captions`, the last element of `images` has the tokens of one caption per image, [b, 1, T].
    """
    epoch, batch = divmod(step, len(self.source) // self.batch_size)
    slots = np.arange(self.first, self.first + self.local)
    epoch_order = order(self.seed, epoch, len(self.source), self.source.window, self._blocks)
    wanted = epoch_order[batch * self.batch_size + slots]
    groups = [(size, len(list(views))) for size, views in itertools.groupby(crop.size for crop in self.crops)]
    images = tuple(np.empty((self.local, views, size, size, 3), np.uint8) for size, views in groups)
    index = np.empty(self.local, np.int32)
    drawn = np.empty(self.local)  # uniform random numbers that choose the captions

    def fill(k: int) -> None:
      rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(step, int(slots[k]))))
      uniforms, drawn[k] = rng.random((len(self.crops), image_ops.CROP_DRAWS)), rng.random()
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
    if self.captions:
      images = (*images, self.captions(self.source, index, drawn))
    return dict(images=images, index=index, broken=broken)

  @functools.cached_property
  def _blocks(self) -> tuple[int, ...]:
    return tuple(self.source.blocks().tolist()) if self.source.window else (0,)

  def _crop(self, image: Image.Image, uniforms: np.ndarray) -> list[np.ndarray]:
    """Crops an image with Pillow, once per view.  -> V arrays uint8 [S, S, 3]"""
    width, height = image.size
    boxes = []
    for crop, u in zip(self.crops, uniforms, strict=True):
      random = crop.scale and image_ops.sample_crop(u, height, width, crop.scale, crop.ratio)
      boxes.append([int(x) for x in random or image_ops.center_box(height, width)])
    # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if every crop still has at least twice the resolution it needs.
    surplus = min(min(h, w) // (2 * crop.size) for crop, (_, _, h, w) in zip(self.crops, boxes, strict=True))
    if surplus >= 2:
      image.draft('RGB', (width // surplus, height // surplus))
    image = decoding.rgb(image)
    x, y = image.width / width, image.height / height
    views = []
    for crop, (top, left, h, w) in zip(self.crops, boxes, strict=True):
      part = image.crop((round(left * x), round(top * y), round((left + w) * x), round((top + h) * y)))
      kernel = Image.Resampling[crop.interpolation.upper()]
      views.append(np.asarray(part.resize((crop.size, crop.size), kernel)))
    return views


def batches(
  source: sources.Source,
  *,
  seed: int,
  batch_size: int,
  total_steps: int,
  crops: Sequence[Crop],
  start_step: int = 0,
  num_workers: int = 0,
  process_index: int = 0,
  process_count: int = 1,
  captions: Captions | None = None,
) -> Batches:
  """This process's part of the batches start_step, ..., total_steps - 1; `Loader` describes a batch.

  `batch_size` is the global batch size. If `num_workers` is positive, each worker process decodes whole batches.
  Otherwise, threads of this process decode, because Pillow releases the GIL. Close the iterator to stop the workers:

      with contextlib.closing(batches(...)) as iterator:
        for batch in prefetch(iterator, jax.device_put): ...
  """
  import grain  # slow to import, and not needed for images that fit on the device

  require('batch_size', batch_size, lambda x: 0 < x <= len(source), f'from 1 to the {len(source)} images of the data')
  require('batch_size', batch_size, lambda x: x % process_count == 0, f'divisible by the {process_count} processes')
  local = batch_size // process_count
  threads = 1 if num_workers else sources.CORES
  loader = Loader(source, seed, batch_size, process_index * local, local, tuple(crops), threads, captions)
  steps = grain.MapDataset.range(start_step, total_steps).map(loader)
  if not num_workers:
    return _closing(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
  _accept_flags()
  _check_shared_memory(num_workers, 3 * local * sum(3 * crop.size**2 for crop in crops))
  steps = steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
  atexit.register(gc.collect)  # frees shared memory in reference cycles, about which Python would warn at exit
  return _closing(steps.mp_prefetch(grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=1), _start_worker))


def _closing(dataset: 'grain.IterDataset[Batch]') -> Batches:
  """The batches of a dataset. At the end or after an error, workers are stopped and shared memory is released."""
  iterator = iter(dataset)
  try:
    yield from iterator
  except RuntimeError as error:
    if 'exit code -' not in str(error):  # not a signal
      raise
    raise ValueError(
      'a worker of data.workers was killed, probably because memory ran out: lower data.workers, or set it to 0'
    ) from error
  finally:
    iterator.close()
    _unlink_shared_memory()


def _unlink_shared_memory() -> None:
  """Unlinks shared memory of batches that grain still buffers or that a traceback still references.

  The memory itself is freed with the last reference to a batch. grain would unlink it only then, which may be too late:
  at exit, Python warns about shared memory that is still linked.
  """
  for array in gc.get_objects():
    # Not isinstance: it reads __class__, which raises warnings on some objects.
    if issubclass(type(array), np.ndarray) and getattr(array, '_unlink_on_del', False):
      array._unlink_on_del = False
      with contextlib.suppress(FileNotFoundError):  # already unlinked through another view
        array.shm.unlink()


def prefetch(iterator: Iterable[Batch], put: Callable[[Batch], T], depth: int = 2) -> Iterator[T]:
  """Yields put(batch), called `depth` batches ahead, so that asynchronous transfers overlap with computation."""
  ahead: collections.deque[T] = collections.deque()
  for batch in iterator:
    ahead.append(put(batch))
    if len(ahead) > depth:
      yield ahead.popleft()
  yield from ahead


def _accept_flags() -> None:
  """Lets grain read the defaults of its absl flags if none were parsed, as in a notebook or a test."""
  if not flags.FLAGS.is_parsed():
    for name in flags.FLAGS:
      if name.startswith('grain_'):
        flags.FLAGS[name].present = True


def _start_worker(index: int, count: int) -> None:
  """Ignores interrupts, which the parent process handles, and exits when the parent ends for any reason."""
  del index, count
  for number in (signal.SIGINT, signal.SIGTERM):  # schedulers and Ctrl-C signal all processes
    signal.signal(number, signal.SIG_IGN)

  def follow() -> None:
    if parent := multiprocessing.parent_process():
      parent.join()
    os._exit(1)

  threading.Thread(target=follow, daemon=True).start()


def _check_shared_memory(num_workers: int, bytes_each: int) -> None:
  """Raises a ValueError if /dev/shm is too small for batches: workers would die of a bus error without a message."""
  needed = num_workers * bytes_each
  if os.path.isdir('/dev/shm') and shutil.disk_usage('/dev/shm').free < needed:
    raise ValueError(
      f'data.workers = {num_workers} needs {math.ceil(needed / 2**20)} MiB of /dev/shm, which has less: enlarge it '
      '(docker run --shm-size), or set data.workers=0 to use threads'
    )
