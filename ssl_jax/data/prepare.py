"""Prepares small image datasets from their official archives, without TensorFlow (--mode=prepare).

CIFAR-10, CIFAR-100, SVHN and STL-10 become prepared tfds datasets, with the same features and record order as if tfds
had written them. `tfds.data_source` can therefore read them, and a seed gives the same batches. Tiny-ImageNet becomes
class folders.
"""

import contextlib
import gzip
import hashlib
import io
import os
import pathlib
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from rich.progress import track

from ssl_jax.data import archives, locks, sources, tfds_source

# Exceptions that the readers raise for a file with an unexpected layout.
BROKEN = (LookupError, ValueError, EOFError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile, zlib.error)

Columns = dict[str, Sequence | np.ndarray]  # features of a split by name: image uint8 [N, H, W, 3], labels [N], id


class Content(NamedTuple):
  """The content of the archives of a dataset."""

  splits: dict[str, Columns]
  class_names: dict[str, Sequence[str]]  # by label feature


def prepare(data: Mapping[str, Any], given: Sequence[str] = (), any_md5: bool = False) -> pathlib.Path:
  """Prepares the dataset `data.name` in `data.path` and returns its folder.

  Args:
    data: the config section `data`.
    given: paths of the archives; if empty, the archives are downloaded.
    any_md5: skips the MD5 check of given archives.
  """
  name = data['name'].partition(':')[0]
  known = TFDS if data['source'] == 'tfds' else ('tiny_imagenet',) if data['source'] == 'folder' else ()
  if name not in known:
    raise ValueError(
      f'data.name = {data["name"]!r} of data.source = {data["source"]!r} is not a set that --mode=prepare knows: '
      f'use the config of one of {", ".join(archives.PUBLISHED)}'
    )
  if data['source'] == 'folder':
    return _prepare_folder(name, data['path'], given, any_md5)
  return _prepare_tfds(name, tfds_source.data_dir(data['path']), given, any_md5)


# Prepared tfds datasets


def _prepare_tfds(name: str, root: pathlib.Path, given: Sequence[str], any_md5: bool) -> pathlib.Path:
  tfds_source.import_tfds()  # fail before the download
  version, read = TFDS[name]
  folder = root / name / version
  if _has_records(folder, name):
    return folder
  with _alone(root):
    if _has_records(folder, name):  # from another process
      return folder
    files = archives.fetch(name, given, root / 'downloads', any_md5)
    part = _empty(folder.with_name(f'{version}.incomplete'))
    with tempfile.TemporaryDirectory(dir=part) as scratch:
      content = _checked(read, files, pathlib.Path(scratch))
      sizes = {split: _write_records(part, name, split, columns) for split, columns in content.splits.items()}
      _write_metadata(part, name, version, content, sizes)
    part.replace(folder)
  print(f'{name} is prepared in {folder}')
  return folder


def _has_records(folder: pathlib.Path, name: str) -> bool:
  """Whether the folder holds the prepared dataset. Raises a ValueError if it holds something else."""
  if (info := folder / 'dataset_info.json').exists():
    if '"array_record"' not in info.read_text(encoding='utf-8'):
      raise ValueError(
        f'{folder} holds the set in a format other than array_record: give another folder, --config.data.path=DIR'
      )
    print(f'{name} is already prepared in {folder}')
    return True
  if folder.exists() and (not folder.is_dir() or os.listdir(folder)):  # else the last step would fail
    raise ValueError(f'{folder} holds something else: remove it, or give another folder, --config.data.path=DIR')
  return False


def _checked(
  read: Callable[[Sequence[pathlib.Path], pathlib.Path], Content], files: Sequence[pathlib.Path], scratch: pathlib.Path
) -> Content:
  """The content of the files. Raises a ValueError that names them if they do not have the official layout."""
  try:
    content = read(files, scratch)
    for columns in content.splits.values():
      if len({len(column) for column in columns.values()}) != 1:
        raise ValueError('the numbers of images and labels differ')
      for key, names in content.class_names.items():
        labels = np.asarray(columns[key])
        if labels.min() < -1 or labels.max() >= len(names):
          raise ValueError(f'{key} {labels.max()} is not one of {len(names)} classes')
  except BROKEN as error:
    raise ValueError(
      f'{" ".join(map(str, files))} cannot be read ({sources.one_line(error)}): give the official file'
    ) from error
  return content


def _write_records(folder: pathlib.Path, name: str, split: str, columns: Columns) -> int:
  """Writes a split as one array_record file and returns the total size of its records in bytes."""
  from array_record.python.array_record_module import ArrayRecordWriter
  from tensorflow_datasets.proto import tf_example_pb2

  def record(position: int) -> bytes:
    example = tf_example_pb2.Example()
    for key, column in columns.items():
      feature, value = example.features.feature[key], column[position]
      if key == 'image':
        feature.bytes_list.value.append(_png(np.asarray(value)))
      elif isinstance(value, str):
        feature.bytes_list.value.append(value.encode())
      else:
        feature.int64_list.value.append(int(value))
    return example.SerializeToString(deterministic=True)

  # tfds sorts by the MD5 of the split name and the record number.
  place = lambda k: hashlib.md5(f'{split}{k}'.encode(), usedforsecurity=False).digest()
  order = sorted(range(len(columns['image'])), key=place)
  starts, size = range(0, len(order), sources.BULK), 0
  writer = ArrayRecordWriter(str(folder / f'{name}-{split}.array_record-00000-of-00001'), 'group_size:1')
  with ThreadPoolExecutor(sources.THREADS) as pool:  # Pillow releases the GIL
    for start in track(starts, f'{name} {split}: {len(order):,} images'):
      for serialized in pool.map(record, order[start : start + sources.BULK]):
        writer.write(serialized)
        size += len(serialized)
  writer.close()
  return size


def _png(image: np.ndarray) -> bytes:
  encoded = io.BytesIO()
  Image.fromarray(np.ascontiguousarray(image)).save(encoded, 'PNG')
  return encoded.getvalue()


def _write_metadata(folder: pathlib.Path, name: str, version: str, content: Content, sizes: Mapping[str, int]) -> None:
  """Writes dataset_info.json, features.json and the class names."""
  tfds = tfds_source.import_tfds()

  def feature(key: str, column: Any) -> Any:
    if key == 'image':
      return tfds.features.Image(shape=column.shape[1:])
    return (
      tfds.features.ClassLabel(names=content.class_names[key]) if key in content.class_names else tfds.features.Text()
    )

  template = tfds.core.ShardedFileTemplate(
    data_dir=folder,
    dataset_name=name,
    filetype_suffix='array_record',
    template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}',
  )
  tfds.folder_dataset.write_metadata(
    data_dir=folder,
    version=version,
    features=tfds.features.FeaturesDict({key: feature(key, column) for key, column in content.splits['train'].items()}),
    split_infos=[
      tfds.core.SplitInfo(split, [len(columns['image'])], sizes[split], template.replace(split=split))
      for split, columns in content.splits.items()
    ],
    filename_template=template,
    check_data=False,  # checking would need TensorFlow
    supervised_keys=('image', 'label'),
    homepage=archives.PUBLISHED[name].archives[0].url.rpartition('/')[0],
  )


# Readers of archives: (files, an empty scratch folder) -> Content


def _read_cifar10(files: Sequence[pathlib.Path], scratch: pathlib.Path) -> Content:
  """cifar-10-binary.tar.gz: a record is one byte for the class and 3,072 bytes for the red, green and blue planes."""
  train, test = [f'data_batch_{k}.bin' for k in range(1, 6)], ['test_batch.bin']
  root = _unpack(files[0], scratch, 'cifar-10-batches-bin', [*train, *test, 'batches.meta.txt'])
  splits = {split: _cifar(root, split, parts, ['label']) for split, parts in (('train', train), ('test', test))}
  return Content(splits, {'label': _lines(root / 'batches.meta.txt')})


def _read_cifar100(files: Sequence[pathlib.Path], scratch: pathlib.Path) -> Content:
  """cifar-100-binary.tar.gz: as CIFAR-10, with a leading byte for the superclass."""
  labels = ['coarse_label', 'label']
  names = {'coarse_label': 'coarse_label_names.txt', 'label': 'fine_label_names.txt'}
  root = _unpack(files[0], scratch, 'cifar-100-binary', ['train.bin', 'test.bin', *names.values()])
  splits = {split: _cifar(root, split, [f'{split}.bin'], labels) for split in ('train', 'test')}
  return Content(splits, {key: _lines(root / file) for key, file in names.items()})


def _cifar(root: pathlib.Path, split: str, parts: Sequence[str], labels: Sequence[str]) -> Columns:
  rows = np.concatenate([np.fromfile(root / part, np.uint8) for part in parts]).reshape(-1, len(labels) + 3072)
  return {
    'id': [f'{split}_{k:05d}' for k in range(len(rows))],
    'image': rows[:, len(labels) :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1),
    **{key: rows[:, k] for k, key in enumerate(labels)},
  }


def _read_svhn(files: Sequence[pathlib.Path], scratch: pathlib.Path) -> Content:
  """train_32x32.mat and test_32x32.mat: X, uint8 [32, 32, 3, N], and y, [N, 1], where 10 stands for the digit 0."""
  import scipy.io

  del scratch
  splits: dict[str, Columns] = {}
  for split, file in zip(('train', 'test'), files, strict=True):
    try:
      held = scipy.io.loadmat(str(file))
    except Exception as error:  # scipy raises many kinds for a damaged file
      raise ValueError(f'{file.name}: {sources.one_line(error)}') from error
    splits[split] = {
      'id': [f'{split}_{k:06d}' for k in range(held['X'].shape[3])],
      'image': np.moveaxis(held['X'], 3, 0),
      'label': held['y'].ravel() % 10,
    }
  return Content(splits, {'label': [str(digit) for digit in range(10)]})


def _read_stl10(files: Sequence[pathlib.Path], scratch: pathlib.Path) -> Content:
  """stl10_binary.tar.gz: planes of 96 × 96 pixels in column-major order, and classes from 1 to 10."""
  parts = {'train': 'train', 'test': 'test', 'unlabelled': 'unlabeled'}  # the keys are tfds's spelling
  wanted = [*(f'{part}_X.bin' for part in parts.values()), 'train_y.bin', 'test_y.bin', 'class_names.txt']
  root = _unpack(files[0], scratch, 'stl10_binary', wanted)
  splits: dict[str, Columns] = {}
  for split, part in parts.items():
    planes = np.memmap(root / f'{part}_X.bin', np.uint8, 'r').reshape(-1, 3, 96, 96)  # the unlabeled images take 2.8 GB
    labels = root / f'{part}_y.bin'
    splits[split] = {
      'image': planes.transpose(0, 3, 2, 1),
      'label': np.fromfile(labels, np.uint8).astype(int) - 1 if labels.exists() else np.full(len(planes), -1),
    }
  return Content(splits, {'label': _lines(root / 'class_names.txt')})


def _unpack(archive: pathlib.Path, folder: pathlib.Path, root: str, wanted: Collection[str]) -> pathlib.Path:
  """Extracts the files `wanted` in the folder `root` of a tar archive to `folder`, and returns `folder`."""
  missing = set(wanted)
  with tarfile.open(archive, 'r|*') as tar:  # in one pass: seeking in a compressed file is slow
    for member in tar:
      name = member.name.removeprefix('./').removeprefix(f'{root}/')
      if name in missing and (content := tar.extractfile(member)):
        missing.remove(name)
        with content, (folder / name).open('wb') as file:
          shutil.copyfileobj(content, file, 2**20)
  if missing:
    raise ValueError(f'{root}/{min(missing)} is missing')
  return folder


def _lines(file: pathlib.Path) -> list[str]:
  return file.read_text(encoding='utf-8').split()


# tfds name -> (version of the prepared dataset, reader of its archives).
TFDS = {
  'cifar10': ('3.0.2', _read_cifar10),
  'cifar100': ('3.0.2', _read_cifar100),
  'svhn_cropped': ('3.1.0', _read_svhn),
  'stl10': ('1.0.0', _read_stl10),
}


# Class folders


def _prepare_folder(name: str, path: str, given: Sequence[str], any_md5: bool) -> pathlib.Path:
  """Sorts the images of tiny-imagenet-200.zip into `train/<wnid>/` and `val/<wnid>/`."""
  folder = pathlib.Path(path).expanduser().absolute()
  if _has_images(folder, name):
    return folder
  with _alone(folder.parent):
    if _has_images(folder, name):  # from another process
      return folder
    [file] = archives.fetch(name, given, folder.parent / 'downloads', any_md5)
    part = _empty(folder.with_name(f'{folder.name}.incomplete'))
    try:
      with zipfile.ZipFile(file) as archive:
        places = _tiny_imagenet(archive)
        for member, place in track(places.items(), f'{name}: {len(places):,} images'):
          (part / place).parent.mkdir(parents=True, exist_ok=True)
          (part / place).write_bytes(archive.read(member))
    except BROKEN as error:
      raise ValueError(f'{file} cannot be read ({error}): give the official file') from error
    if folder.is_dir():
      folder.rmdir()  # empty
    part.replace(folder)
  print(f'{name} is prepared in {folder}')
  return folder


def _has_images(folder: pathlib.Path, name: str) -> bool:
  """Whether the folder holds the prepared images. Raises a ValueError if it holds something else."""
  if not (folder.is_dir() and os.listdir(folder)):
    return False
  if not (folder / 'train').is_dir() or (folder / 'val' / 'images').is_dir():
    raise ValueError(f'data.path = {str(folder)!r} holds something else: give another folder, --config.data.path=DIR')
  print(f'{name} is already prepared in {folder}')
  return True


def _tiny_imagenet(archive: zipfile.ZipFile) -> dict[str, str]:
  """{archive member: target path}. The archive has all validation images in one folder, with a list of classes."""
  root = 'tiny-imagenet-200'
  places = {}
  for member in archive.namelist():
    if found := re.fullmatch(rf'{root}/train/(n\d+)/images/(\w+\.JPEG)', member):
      places[member] = f'train/{found[1]}/{found[2]}'
  for line in archive.read(f'{root}/val/val_annotations.txt').decode().splitlines():
    if not (found := re.match(r'(\w+\.JPEG)\t(n\d+)\t', line)):
      raise ValueError(f'{line!r} of val_annotations.txt is not a file and its class')
    places[f'{root}/val/images/{found[1]}'] = f'val/{found[2]}/{found[1]}'
  return places


# Both


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  """Creates and locks a folder: another process that prepares a dataset there waits."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise ValueError(
      f'{folder} cannot be written ({error.strerror}): give another folder, --config.data.path=DIR'
    ) from None
  lock = os.open(folder, os.O_RDONLY)
  try:
    locks.acquire(lock, lambda: print(f'another process prepares a set in {folder}: waiting for it', flush=True))
    yield
  finally:
    os.close(lock)


def _empty(folder: pathlib.Path) -> pathlib.Path:
  """Creates the folder, or empties it."""
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  return folder
