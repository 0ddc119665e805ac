"""An epoch of host batches (two 224-pixel crops): the same images in tar shards, in a folder and in Parquet files.

  python -m benchmarks.shards --path=DIR [--quick]

DIR is a folder of class folders with JPEGs. They are copied to a temporary folder as files, as tar shards of 200 images
with captions, and as Parquet files with row groups of 100. Everything is in the page cache, and threads decode. The
`CPU` rows are in CPU seconds, which other processes do not affect: for an epoch, and for reading every image without
decoding it. `opened` is the time until the first image can be read. `--quick` uses 400 images and 96 pixels.
"""

import contextlib
import functools
import io
import os
import pathlib
import tarfile
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import timing
from ssl_jax.data import pipeline, sources, tar_index

SHARD, ROWS, BATCH = 200, 100, 64


def write_tar(path: pathlib.Path, files: Sequence[str], first: int) -> None:
  """Writes the files as samples with a caption, in this order."""
  with tarfile.open(path, 'w') as archive:
    for k, file in enumerate(files, first):
      for suffix, content in (('jpg', pathlib.Path(file).read_bytes()), ('txt', f'image {k}'.encode())):
        member = tarfile.TarInfo(f'{k:08}.{suffix}')
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def write_parquet(path: pathlib.Path, files: Sequence[str], first: int) -> None:
  """Writes the same samples in the format of a Hugging Face dataset."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  images = [{'bytes': pathlib.Path(file).read_bytes(), 'path': os.path.basename(file)} for file in files]
  captions = [f'image {k}' for k in range(first, first + len(files))]
  pq.write_table(pa.table({'image': images, 'caption': captions}), path, row_group_size=ROWS)


def epoch(source: sources.Source, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
  """[(index [b], images [b, 2, S, S, 3]), ...] of one epoch."""
  settings: dict[str, Any] = dict(seed=0, batch_size=BATCH, total_steps=len(source) // BATCH)
  with contextlib.closing(pipeline.batches(source, crops=[pipeline.Crop(size)] * 2, **settings)) as batches:
    return [(batch['index'], batch['images'][0]) for batch in batches]


def read(source: sources.Source) -> None:
  """Reads every image in order, but decodes only its header."""
  for image in source.open(range(len(source))):
    image()


def assert_same(mine: Sequence[tuple[np.ndarray, ...]], theirs: Sequence[tuple[np.ndarray, ...]]) -> None:
  """Checks that equal indices have equal pixels. Parquet has another order, and leaves out other images at the end."""
  for (index, images), (other_index, others) in zip(mine, theirs, strict=True):
    same = index == other_index
    np.testing.assert_array_equal(images[same], others[same])
    assert len(np.unique(other_index)) == len(index)


def load(kind: str, path: pathlib.Path | str) -> sources.Source:
  data = dict(source=kind, name='', path=str(path), train_split='train', test_split='test', classes='', broken='error')
  return sources.load(data, 'train')


def main() -> None:
  chosen = timing.arguments(__doc__, path='')
  listed = load('folder', chosen.path).items[: 400 if chosen.quick else None]
  size = 96 if chosen.quick else 224
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    (root / 'train').mkdir()
    for k, file in enumerate(listed):  # in the order of the list, so that all formats have the same order
      (root / 'train' / f'{k:08}.jpg').write_bytes(pathlib.Path(file).read_bytes())
    parquet = timing.optional('pyarrow.parquet')
    for number, first in enumerate(range(0, len(listed), SHARD)):
      write_tar(root / f'train-{number:04}.tar', listed[first : first + SHARD], first)
      if parquet:
        write_parquet(root / f'train-{number:04}.parquet', listed[first : first + SHARD], first)
    kinds = ('tar', 'folder', *(('parquet',) if parquet else ()))
    found = {kind: load(kind, root) for kind in kinds}
    epochs = {kind: functools.partial(epoch, source, size) for kind, source in found.items()}
    reads = {kind: functools.partial(read, source) for kind, source in found.items()}
    opens = {'tar': functools.partial(load, 'tar', root), 'folder': functools.partial(load, 'folder', root)}
    opens['tar, without a stored index'] = lambda: [tar_index.scan(shard) for shard in found['tar'].files]
    table = timing.Table(__doc__, chosen.quick, 'images')
    table.compare(f'epoch, {len(listed):,} images', epochs, same=assert_same, items=len(listed) // BATCH * BATCH)
    table.compare('CPU, epoch', epochs, items=len(listed) // BATCH * BATCH, clock=time.process_time)
    table.compare('CPU, read', reads, items=len(listed), clock=time.process_time)
    table.compare('opened', opens, items=len(listed))


if __name__ == '__main__':
  main()
