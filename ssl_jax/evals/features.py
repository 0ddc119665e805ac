"""Extraction of the features of a whole data source, on all devices, once for all evaluations."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from ssl_jax.arrays import normalize
from ssl_jax.data import decoding, image_ops, npz, sources
from ssl_jax.data.views import View
from ssl_jax.evals import check
from ssl_jax.methods import Method
from ssl_jax.models import Encoder
from ssl_jax.run.devices import Devices
from ssl_jax.run.update import example_keys, make_views
from ssl_jax.workdir import files

# The layers whose outputs are evaluated, in the order of the report.
LAYERS = ('backbone', 'projector')
ABANDONED = 3600  # seconds


def image_size(config: ConfigDict) -> int:
  """Side length, in pixels, of the images that evaluations read, before the center crop (`eval.crop`)."""
  return round(config.data.image_size / config.eval.crop)


def extractor(
  features: Callable,
  shown: Callable,
  devices: Devices,
  layers: Sequence[str] = LAYERS,
  *,
  around: Callable[[jax.Array], list[jax.Array]] | None = None,
) -> Callable:
  """Returns (params, batch_stats, examples [b, ...], positions [b]) -> features of `layers`, on all devices.

  `features` is the method's feature function. `shown` maps one stored example to an encoder input. If given, `around`
  maps inputs [b, ...] to a list of variants, each [b, ...]; the features are then the mean of their unit vectors.
  """

  def apply(params, stats, examples, positions):
    del positions  # only augmentation uses them
    inputs = jax.vmap(shown)(examples)
    if around is None:
      found = features(params, stats, inputs)
      return {layer: found[layer] for layer in layers}
    variants = around(inputs)
    found = features(params, stats, jnp.concatenate(variants))
    mean = lambda x: jnp.mean(normalize(x).reshape(len(variants), -1, x.shape[1]), axis=0)
    return {layer: mean(found[layer]) for layer in layers}

  return devices.map(apply, replicated=2, sharded=2, out='sharded')


def around_image(choice: Mapping, pixels: int) -> Callable[[jax.Array], list[jax.Array]] | None:
  """The argument `around` of `extractor`, from the config section `eval`: a grid of crops, mirror images, or None.

  Crops are resized to `pixels` per side.
  """
  if not choice['patches'] and not choice['flip']:
    return None

  def around(images: jax.Array) -> list[jax.Array]:
    size, count = images.shape[1], choice['patches']
    side = max(1, round(choice['patch'] * size))
    places = [round(place) for place in np.linspace(0, size - side, count)] if count > 1 else [(size - side) // 2]
    resize = functools.partial(image_ops.crop_and_resize, size=pixels, clip=False)  # the images are normalized
    crop = lambda top, left: jax.vmap(lambda x: resize(x, top, left, side, side))(images)
    found = [crop(*place) for place in itertools.product(places, places)] if count else [images]
    return found + ([x[:, :, ::-1] for x in found] if choice['flip'] else [])

  return around


def view_extractor(method: Method, augments: list[View], devices: Devices, *, seed: int) -> Callable:
  """Like `extractor`, with one view per augmentation: features [b, views, d]. Random keys depend on the positions."""

  def apply(params, stats, images, positions):
    views = make_views(augments, example_keys(seed, jnp.int32(0), positions), images)
    found = method.features(params, stats, jnp.concatenate(views))
    return jax.tree.map(lambda x: jnp.stack(jnp.split(x, len(views)), axis=1), found)

  return devices.map(apply, replicated=2, sharded=2, out='sharded')


def width(encoder: Encoder, variables: Mapping[str, Any], size: int) -> int:
  """The number of features of an encoder, for inputs of `size` pixels."""
  return jax.eval_shape(lambda: encoder.apply(variables, encoder.example(size), train=False)).shape[1]


def extract(
  apply: Callable,
  devices: Devices,
  params: Any,
  batch_stats: Any,
  source: sources.Source,
  *,
  size: int,
  batch_size: int,
  what: str = '',
  fix: str = 'the weights have diverged, so use an earlier checkpoint',
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
  """Features {'backbone': [N, D], 'projector': [N, P]} and labels [N] of a source, without skipped (broken) images.

  `apply` comes from `extractor` or `view_extractor`. Each process computes its share; all processes return everything.
  If the results are not finite, the error names them as `what`, by default features, and ends with `fix`.
  """
  processes, local = jax.process_count(), len(devices.local)
  share = -(-len(source) // processes)
  positions = np.minimum(np.arange(share) + jax.process_index() * share, len(source) - 1)
  batch_size = -(-min(max(batch_size // processes, 1), share) // local) * local
  parts, waiting = [], None
  for start in range(0, len(positions), batch_size):
    images, found = squares(source, positions[start : start + batch_size], size)
    if (count := len(images)) < batch_size:  # one shape, one compilation
      images = np.concatenate([images, np.zeros((batch_size - count, *images.shape[1:]), images.dtype)])
    places = np.resize(found, batch_size).astype(np.int32)
    ready, waiting = waiting, (apply(params, batch_stats, *devices.shard((images, places))), count, found)
    if ready:  # copy the previous batch back while the device computes this one
      parts.append(_fetch(devices, *ready))
  assert waiting is not None  # a source is not empty
  parts.append(_fetch(devices, *waiting))
  features, found = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  if processes > 1:
    features, found = multihost_utils.process_allgather((features, found), tiled=True)
  read = found[: len(source)] == np.arange(len(source))  # False if another image replaced a broken one
  source.skipped.update(np.flatnonzero(~read).tolist())  # including those that other processes skipped
  for layer, x in features.items():
    check.finite(what or f'features of the {layer}', x, fix)
  chosen = slice(len(source)) if read.all() else np.flatnonzero(read)  # a slice makes no copy
  labels = None if source.labels is None else source.labels[chosen]
  return jax.tree.map(lambda x: x[chosen], features), labels


def squares(source: sources.Source, positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Images uint8 [b, size, size, 3] and the positions that were read: a broken image is replaced by a later one."""
  if source.ready(size):
    return source.items[positions], positions
  read = lambda k: source.first_readable(int(k), lambda image: decoding.square(image, size))
  with ThreadPoolExecutor(sources.CORES) as pool:
    images, found = zip(*pool.map(read, positions), strict=True)
  return np.stack(images), np.array(found)


def _fetch(devices, features, count, found):
  return jax.tree.map(lambda x: x[:count], devices.unshard(features)), found


def digest(settings: dict, weights: Any, *data: sources.Source) -> str:
  """A file name for features: a hash of the settings, the weights, the images and their labels.

  Images in memory are hashed by their pixels. Others are hashed by their position, and by the path, size and time of
  their files, without reading them.
  """
  found = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=10)
  for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
    found.update(jax.tree_util.keystr(path).encode())
    found.update(np.ascontiguousarray(leaf).tobytes())
  for source in data:
    items = np.asarray(source.items)
    found.update(str((items.shape, items.dtype)).encode())
    # The bytes of an object array, such as the paths of a folder, are memory addresses, so its text is hashed.
    found.update(os.fsencode('\0'.join(items)) if items.dtype == object else np.ascontiguousarray(items).data)
    found.update(source.fingerprint().encode())
    if source.labels is not None:
      found.update(np.ascontiguousarray(source.labels).tobytes())
  return found.hexdigest()


def _abandoned(part: pathlib.Path) -> bool:
  """Whether a killed evaluation left this file: nothing has been written to it for `ABANDONED` seconds."""
  with contextlib.suppress(FileNotFoundError):  # another evaluation has finished it
    return time.time() - part.stat().st_mtime > ABANDONED
  return False


def cached(folder: pathlib.Path, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """Reads `folder`/`name`.npz, or computes and stores the arrays and deletes other .npz files.

  A damaged file is replaced. If there is no space for a file, a warning is printed. A run with several processes never
  uses the cache, because all processes must do the same and they might not share a disk.
  """
  file = folder / f'{name}.npz'
  if jax.process_count() > 1:
    return compute()
  if file.exists():
    try:
      with np.load(file, allow_pickle=False) as stored:
        return dict(stored)
    except npz.BROKEN_ARCHIVE as error:
      files.warn(f'{file} cannot be read ({files.reason(error)}): the features are computed again')
  arrays = compute()
  part = folder / f'{os.getpid()}.part'  # another evaluation may write here, too
  try:
    folder.mkdir(exist_ok=True)
    try:
      with part.open('wb') as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
      for old in (*folder.glob('*.npz'), *filter(_abandoned, folder.glob('*.part'))):
        old.unlink(missing_ok=True)
      part.replace(file)
    finally:
      part.unlink(missing_ok=True)
  except OSError as error:  # the features of a large set took hours to compute, and may need more space than is left
    files.warn(f'{folder} cannot be written ({files.reason(error)}): the next evaluation computes the features again')
  return arrays
