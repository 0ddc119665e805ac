"""ImageNet-100 without a host pipeline: the cache of decoded images, and an epoch on images in device memory.

  python -m benchmarks.image_cache --images=126689 --size=256 --fast-fill
  python -m benchmarks.image_cache --quick    # on a CPU: few small images, a narrow network

Images are generated. With --fast-fill, the cache is filled with generated pixels instead of decoded JPEGs, and decoding
is timed on --sample JPEGs of 500 × 375 pixels. The other steps are those of a run of configs/imagenet100.py:on_device:
check and map the cache, copy it to the device, and train for an epoch in one call. --folder needs space for the cache.
"""

import argparse
import os
import pathlib
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from PIL import Image

from benchmarks import simclr, timing
from configs import imagenet100
from ssl_jax.data import cache, folder_source, pipeline, sources
from ssl_jax.run.devices import AXIS, Devices
from ssl_jax.run.update import scan_update

SIZES = dict(images=126_689, size=256, sample=16_384, batch=256)
QUICK = dict(images=256, size=40, sample=64, batch=32)
QUICK_OPTIONS = (
  'dtype=float32',
  'data.image_size=32',
  'model.name=resnet_tiny',
  'model.width=8',
  'projector.features=(16,16)',
)


class Generated(sources.Source):
  """Images that take no time to decode: windows of random bytes."""

  def __init__(self, number: int, size: int):
    super().__init__(np.arange(number), (np.arange(number) % 100).astype(np.int32))
    self.bytes = np.random.default_rng(0).integers(0, 256, 4 * 3 * size**2, np.uint8)
    self.cache_name = 'generated'

  def fingerprint(self) -> str:
    return f'generated {len(self)}'

  def decode(self, positions: range, out: np.ndarray) -> list[int]:
    for k, place in zip(positions, out, strict=True):
      start = k * 977 % (3 * place.size)
      place[:] = self.bytes[start : start + place.size].reshape(place.shape)
    return []


def jpegs(folder: pathlib.Path, number: int) -> sources.Source:
  """A folder of JPEGs of 500 × 375 pixels, about 60 kB each: 16 smooth pictures with some noise, repeated."""
  rng, encoded = np.random.default_rng(0), []
  for k in range(16):
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(coarse) + rng.normal(0, 12, (375, 500, 3)), 0, 255).astype(np.uint8)
    path = folder / f'{k}.part'
    Image.fromarray(noisy).save(path, 'JPEG', quality=85)
    encoded.append(path.read_bytes())
    path.unlink()
  paths = [folder / f'{k:07}.jpg' for k in range(number)]
  for k, path in enumerate(paths):
    path.write_bytes(encoded[k % len(encoded)])
  found = folder_source.Folder(np.array([str(path) for path in paths], object), root=folder)
  found.cache_name = f'jpegs{number}'
  return found


def timed(call: Callable) -> tuple[float, object]:
  start = time.perf_counter()
  result = call()
  timing.wait(result)
  return time.perf_counter() - start, result


def row(what: str, seconds: float, number: int = 0) -> None:
  rate = f'{number / seconds:,.0f}' if number else ''
  print(f'| {what:<58} | {seconds:>8.1f} | {rate:>11} |', flush=True)


def epoch(images: np.ndarray, batch: int, options: tuple[str, ...]) -> None:
  """Copies the images to the device, and trains on them for an epoch in one call."""
  config = imagenet100.get_config(','.join(['on_device', f'batch_size={batch}', *options]))
  devices = Devices.choose(config.parallel.map, 1)
  seconds, dataset = timed(lambda: devices.replicate(images))
  row('start: copy to the device', seconds, len(images))
  _, init, update = simclr.parts(config, AXIS)
  many = devices.map(scan_update(update(config.seed)), replicated=2, sharded=1, donate=(0,))
  steps = len(images) // batch
  order = pipeline.order(config.seed, 0, len(images))[: steps * batch].reshape(steps, batch).T.astype(np.int32)
  state, index = devices.replicate(jax.device_get(init(config.seed))), devices.shard(order)
  seconds, compiled = timed(lambda: many.lower(state, dataset, index).compile())
  row(f'compile {steps} steps', seconds)
  seconds, _ = timed(lambda: compiled(state, dataset, index))
  row(f'epoch: {config.model.name}, {config.dtype}, {config.data.image_size} px, batch {batch}', seconds, steps * batch)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='small sizes, for a CPU')
  for name, default in SIZES.items():
    parser.add_argument(f'--{name}', type=int, help=f'default: {default}, or {QUICK[name]} with --quick')
  parser.add_argument('--fast-fill', action='store_true', help='fill the cache with generated pixels')
  parser.add_argument('--folder', default=None, help='for the cache (default: a temporary one)')
  args = parser.parse_args()
  defaults = QUICK if args.quick else SIZES
  images, size, sample, batch = (getattr(args, name) or defaults[name] for name in SIZES)
  print(f'{__doc__.splitlines()[0]}\n{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores, jax {jax.__version__}')
  print(f'{images:,} images of {size} pixels: {images * size**2 * 3 / 1e9:.1f} GB\n')
  print(f'| {"":<58} | {"seconds":>8} | {"images/s":>11} |\n|{"-" * 60}|{"-" * 10}|{"-" * 13}|')
  with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
    folder = pathlib.Path(scratch)
    (folder / 'jpegs').mkdir()
    pictures = jpegs(folder / 'jpegs', sample if args.fast_fill else images)
    seconds, _ = timed(lambda: cache.load(pictures, size, str(folder)).items)
    row(f'build: decode {len(pictures):,} JPEGs of 500 × 375 pixels', seconds, len(pictures))
    source = pictures
    if args.fast_fill:
      print(f'at this rate, {images:,} images take {images / len(pictures) * seconds:,.0f} s')
      source = Generated(images, size)
      row('build: generated pixels', timed(lambda: cache.load(source, size, str(folder)).items)[0], images)
    seconds, mapped = timed(lambda: cache.load(source, size, str(folder)).items)
    row('start: check and map the cache', seconds, images)
    epoch(mapped, batch, QUICK_OPTIONS if args.quick else ())


if __name__ == '__main__':
  main()
