"""Features of every image of a source, from all devices, extracted once for all evaluations."""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from ssl_jax.data import sources
from ssl_jax.methods import Method
from ssl_jax.run.devices import Devices
from ssl_jax.run.update import Augment, example_keys, make_views


def shown(config: ConfigDict) -> int:
  """The side of the squares whose centre, `eval.crop` of it, evaluations see."""
  return round(config.data.image_size / config.eval.crop)


LAYERS = ('backbone', 'projector')


def extractor(method: Method, normalize: Callable, devices: Devices, layers: Sequence[str] = LAYERS) -> Callable:
  """(params, batch_stats, images uint8 [b, H, W, 3], positions [b]) -> features of `layers`, over the devices."""

  def apply(params, stats, images, positions):
    del positions  # only augmentation depends on them
    found = method.features(params, stats, jax.vmap(normalize)(images))
    return {layer: found[layer] for layer in layers}

  return devices.map(apply, replicated=2, sharded=2, out='sharded')


def view_extractor(method: Method, augments: list[Augment], devices: Devices, *, seed: int) -> Callable:
  """As `extractor`, of a view by each of `augments`: features are [b, views, ...]. Keys follow from the positions."""

  def apply(params, stats, images, positions):
    views = make_views(augments, example_keys(seed, jnp.int32(0), positions), images)
    found = method.features(params, stats, jnp.concatenate(views))
    return jax.tree.map(lambda x: jnp.stack(jnp.split(x, len(views)), axis=1), found)

  return devices.map(apply, replicated=2, sharded=2, out='sharded')


def extract(
  apply: Callable, devices: Devices, params, batch_stats, source: sources.Source, *, size: int, batch_size: int
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
  """{'backbone': [N, D], 'projector': [N, P]} of a source, and its labels, without broken images that are skipped.

  `apply` is of `extractor`. Each process takes its share of the images, and all end with the features of all of them.
  """
  processes, local = jax.process_count(), len(devices.local)
  share = -(-len(source) // processes)
  positions = np.minimum(np.arange(share) + jax.process_index() * share, len(source) - 1)
  batch_size = -(-min(max(batch_size // processes, 1), share) // local) * local
  parts, waiting = [], None
  for images, found in _batches(source, positions, size, batch_size):
    if (count := len(images)) < batch_size:  # one shape, one compilation
      images = np.concatenate([images, np.zeros((batch_size - count, *images.shape[1:]), images.dtype)])
    places = np.resize(found, batch_size).astype(np.int32)
    ready, waiting = waiting, (apply(params, batch_stats, *devices.shard((images, places))), count, found)
    if ready:  # its copy back overlaps the compute of the batch that was just dispatched
      parts.append(_fetch(devices, *ready))
  parts.append(_fetch(devices, *waiting))
  features, found = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  if processes > 1:
    features, found = multihost_utils.process_allgather((features, found), tiled=True)
  read = found[: len(source)] == np.arange(len(source))  # or another stands in the place of a broken one
  source.skipped.update(np.flatnonzero(~read).tolist())  # those that other processes met, too
  chosen = slice(len(source)) if read.all() else np.flatnonzero(read)  # all of them without a copy
  labels = None if source.labels is None else source.labels[chosen]
  return jax.tree.map(lambda x: x[chosen], features), labels


def _batches(source, positions, size, batch_size) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """(images uint8 [b, size, size, 3], where they stand in the source), in order."""
  for start in range(0, len(positions), batch_size):
    yield squares(source, positions[start : start + batch_size], size)


def squares(source: sources.Source, positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
  """(uint8 [b, size, size, 3], the positions that were read, which differ where broken images are skipped)."""
  if source.ready(size):
    return source.items[positions], positions
  read = lambda k: source.first_readable(int(k), lambda image: sources.square(image, size))
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    images, found = zip(*pool.map(read, positions), strict=True)
  return np.stack(images), np.array(found)


def _fetch(devices, features, count, found):
  return jax.tree.map(lambda x: x[:count], devices.unshard(features)), found


def digest(settings: dict, weights, *data: sources.Source) -> str:
  """A name for the features of these weights on these images: the same weights, settings and images, the same name.

  Images in memory count with every pixel; others, which would all have to be read, by what names them.
  """
  found = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=10)
  for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
    found.update(jax.tree_util.keystr(path).encode())
    found.update(np.ascontiguousarray(leaf).tobytes())
  for source in data:
    items = np.asarray(source.items)
    found.update(str((items.shape, items.dtype)).encode())
    # The bytes of objects, such as the paths of a folder, would be their addresses.
    found.update('\0'.join(map(str, items)).encode() if items.dtype == object else np.ascontiguousarray(items))
    if source.labels is not None:
      found.update(np.ascontiguousarray(source.labels).tobytes())
  return found.hexdigest()


def cached(folder: pathlib.Path, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """What `compute` returns, kept in the folder under a name; those of other names are removed.

  Several processes compute every time: they must all do the same, and may not see the same disk.
  """
  file = folder / f'{name}.npz'
  if jax.process_count() > 1:
    return compute()
  if file.exists():
    with np.load(file, allow_pickle=False) as stored:
      return dict(stored)
  arrays = compute()
  folder.mkdir(exist_ok=True)
  part = folder / 'part'
  with part.open('wb') as stream:
    np.savez(stream, **arrays)
  for old in folder.glob('*.npz'):
    old.unlink()
  part.replace(file)
  return arrays
