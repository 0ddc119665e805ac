"""Images per second of the host pipeline, by number of workers: 500 × 375 JPEGs to two random crops of 224 pixels.

  python -m benchmarks.host_pipeline [--quick] [--workers=16]

A ResNet-50 at 224 pixels consumes about 3,500 images (pairs of views) per second on one H200. The last column is
relative to this number. After the first pass, the files are in memory (the page cache), so the disk is not measured.
`--quick` uses few images.
"""

import contextlib
import os
import pathlib
import tempfile
import time

import numpy as np
from PIL import Image

from benchmarks import timing
from configs import base
from ssl_jax.data import pipeline, sources

RESNET50_RATE = 3500  # images (pairs of views) per second on one H200


def write(folder: pathlib.Path, count: int) -> None:
  """Writes smooth random pictures with some noise, about 60 kB each, like photographs."""
  rng = np.random.default_rng(0)
  for i in range(count):
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375), Image.BICUBIC)
    noisy = np.asarray(coarse, np.int16) + rng.normal(0, 12, (375, 500, 3)).astype(np.int16)
    (folder / 'train' / str(i % 2)).mkdir(parents=True, exist_ok=True)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / 'train' / str(i % 2) / f'{i}.jpg', quality=85)


def images_per_second(source: sources.Source, workers: int, batch: int, steps: int) -> float:
  """Averaged over `steps` batches after the first two, which start the workers."""
  crops = (pipeline.Crop(224), pipeline.Crop(224))
  given = dict(seed=0, batch_size=batch, total_steps=steps + 2, crops=crops, num_workers=workers)
  with contextlib.closing(pipeline.batches(source, **given)) as batches:
    for _ in range(2):
      next(batches)
    start = time.perf_counter()
    for _ in range(steps):
      next(batches)
    return steps * batch / (time.perf_counter() - start)


def main() -> None:
  args = timing.arguments(__doc__, workers=os.cpu_count())
  count, batch, steps = (64, 32, 4) if args.quick else (2048, 128, 40)
  print(f'{__doc__.splitlines()[0]}\n{os.cpu_count()} CPU cores\n')
  print('| workers | images/s | share of ResNet-50 on an H200 |\n|---|---|---|')
  with tempfile.TemporaryDirectory() as folder:
    write(pathlib.Path(folder), count)
    data = base.get_config().data
    data.source, data.path = 'folder', folder
    source = sources.load(data, 'train')
    for workers in sorted({0, max(1, args.workers // 4), args.workers}):
      speed = images_per_second(source, workers, batch, steps)
      print(f'| {workers or "threads"} | {speed:,.0f} | {speed / RESNET50_RATE:.0%} |', flush=True)


if __name__ == '__main__':
  main()
