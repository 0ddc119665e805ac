"""Features of every image of a source, from all devices, extracted once for all evaluations."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.experimental import multihost_utils

from ssl_jax.data import sources
from ssl_jax.methods import Method
from ssl_jax.parallel import Devices


def extractor(method: Method, normalize: Callable, devices: Devices) -> Callable:
  """(params, batch_stats, images uint8 [b, H, W, 3]) -> features, mapped over the devices."""
  apply = lambda params, stats, images: method.features(params, stats, jax.vmap(normalize)(images))
  return devices.map(apply, replicated=2, out='sharded')


def extract(
  apply: Callable, devices: Devices, params, batch_stats, source: sources.Source, *, size: int, batch_size: int
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
  """{'backbone': [N, D], 'projector': [N, P]} of a source, and its labels; `apply` is of `extractor`.

  Each process takes its share of the images, and all end with the features of all of them.
  """
  processes, local = jax.process_count(), len(devices.local)
  share = -(-len(source) // processes)
  positions = np.minimum(np.arange(share) + jax.process_index() * share, len(source) - 1)
  batch_size = -(-min(batch_size // processes, share) // local) * local
  parts, waiting = [], None
  for images, found in _batches(source, positions, size, batch_size):
    if (count := len(images)) < batch_size:  # one shape, one compilation
      images = np.concatenate([images, np.zeros((batch_size - count, *images.shape[1:]), np.uint8)])
    ready, waiting = waiting, (apply(params, batch_stats, devices.shard(images)), count, found)
    if ready:  # its copy back overlaps the compute of the batch that was just dispatched
      parts.append(_fetch(devices, *ready))
  parts.append(_fetch(devices, *waiting))
  features, found = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  if processes > 1:
    features, found = multihost_utils.process_allgather((features, found), tiled=True)
  features = jax.tree.map(lambda x: x[: len(source)], features)
  return features, None if source.labels is None else source.labels[found[: len(source)]]


def _batches(source, positions, size, batch_size) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """(images uint8 [b, size, size, 3], where they stand in the source), in order."""
  for start in range(0, len(positions), batch_size):
    yield squares(source, positions[start : start + batch_size], size)


def squares(source: sources.Source, positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
  """(uint8 [b, size, size, 3], the positions that were read, which differ where broken images are skipped)."""
  if isinstance(source, sources.Arrays) and source.items.shape[1:3] == (size, size):
    return source.items[positions], positions
  read = lambda k: source.first_readable(int(k), lambda image: sources.square(image, size))
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    images, found = zip(*pool.map(read, positions), strict=True)
  return np.stack(images), np.array(found)


def _fetch(devices, features, count, found):
  return jax.tree.map(lambda x: x[:count], devices.unshard(features)), found
