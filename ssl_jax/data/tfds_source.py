"""Images from tfds datasets prepared as array_record files. Reading them needs neither TensorFlow nor a network."""

import functools
import gc
import os
import pathlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from ssl_jax.data import archives, decoding, folder_source, sources
from ssl_jax.registry import nearest


class Tfds(sources.Source):
  """Items are record numbers of a prepared tfds dataset. Labels are stored in the records and read on first use."""

  _labels: np.ndarray | None
  label_names: Sequence[str] = ()  # class names of a multi-label dataset

  def __init__(
    self, records: Any, split: str, has_labels: bool, class_names: Sequence[str], broken: str, files: Sequence[Any] = ()
  ):
    self._records, self._split, self._has_labels = records, split, has_labels
    self._files = [(str(part.filename), int(part.skip), int(part.take)) for part in files]
    super().__init__(np.arange(len(records)), None, class_names, broken)

  @property
  def labels(self) -> np.ndarray | None:
    if self._labels is None and self._has_labels:
      values = np.empty(len(self), np.int32)
      for start in range(0, len(self), sources.BULK):
        examples = self._readable(range(start, min(start + sources.BULK, len(self))))
        values[start : start + sources.BULK] = [_label(example) for example in examples]
      if negative := int((values < 0).sum()):  # the labels of an unlabeled split are -1
        sources.without_labels(negative, len(values))
      self._labels, self._has_labels = values, not negative
    return self._labels if self._has_labels else None

  @labels.setter
  def labels(self, values: np.ndarray | None) -> None:
    self._labels = values

  def open(self, positions: Sequence[int] | np.ndarray) -> list[Callable[[], Image.Image]]:
    try:
      return [functools.partial(_image, example) for example in self._examples(positions)]
    except OSError:  # one by one, so that only a damaged record raises an error
      return [functools.partial(self._open, k) for k in positions]

  def where(self, position: int) -> str:
    return f'record {self.items[position]} of {self._split}'

  def labels_of(self, positions: np.ndarray) -> np.ndarray | None:
    if self._labels is not None or not self._has_labels:
      return super().labels_of(positions)
    return np.array([_label(example) for example in self._readable(positions)])

  def fingerprint(self) -> str:
    stored = (f'{file}\0{sources.stamp(file)}\0{skip}\0{take}' for file, skip, take in self._files)
    return sources.digest_of([*stored, self.items.astype(np.int64).tobytes().hex()])

  def multi_labels(self) -> list[list[str]] | None:
    """Labels from the feature `labels`, a sequence of classes, as in VOC."""
    if not self.label_names:
      return None
    found = []
    for start in range(0, len(self), sources.BULK):
      for example in self._readable(range(start, min(start + sources.BULK, len(self)))):
        found.append([self.label_names[k] for k in sorted(set(example['labels'].int64_list.value))])
    return found

  def identities(self) -> list[Hashable]:
    """(file, record number in the file), also for parts of a split that start later, such as train[50%:]."""
    stored = [(file, skip + k) for file, skip, count in self._files for k in range(count)]
    return [stored[k] for k in self.items]

  def _open(self, position: int) -> Image.Image:
    return _image(self._examples([position])[0])

  def _readable(self, positions: Sequence[int] | np.ndarray) -> list[Mapping[str, Any]]:
    """The examples at these positions. With broken='skip', a damaged one is empty."""
    from tensorflow_datasets.proto import tf_example_pb2

    try:
      return self._examples(positions)
    except OSError as error:
      if len(positions) > 1:
        return [example for k in positions for example in self._readable([k])]
      self._note_broken(int(positions[0]), error, 'is not a readable record')
      return [tf_example_pb2.Example().features.feature]

  def _examples(self, positions: Sequence[int] | np.ndarray) -> list[Mapping[str, Any]]:
    """The examples at these positions. Raises an OSError if any is damaged."""
    # Raw records and Pillow take 7 s for the 50,000 images of CIFAR. Decoding by tfds takes 27 s.
    from tensorflow_datasets.proto import tf_example_pb2

    try:
      records = self._records.__getitems__(self.items[positions].tolist())
    except RuntimeError as error:  # from array_record
      raise OSError(f'damaged: {sources.one_line(error)}') from error
    return [tf_example_pb2.Example.FromString(record).features.feature for record in records]


def _image(example: Mapping[str, Any]) -> Image.Image:
  return decoding.open_image(example['image'].bytes_list.value[0])


def _label(example: Mapping[str, Any]) -> int:
  """The label of an example; 0 for an empty one, which is not used."""
  return int(example['label'].int64_list.value[0]) if example else 0


def data_dir(path: str) -> pathlib.Path:
  """The folder of prepared datasets: `data.path`, or the default of tfds if it is empty."""
  return pathlib.Path(path or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets').expanduser()


def import_tfds() -> Any:
  """The module tensorflow_datasets, which is an optional dependency (extra `tfds`)."""
  # tfds replaces `__import__` while it is imported. Garbage whose finalizer imports, such as a semaphore's, must wait.
  collects = gc.isenabled()
  gc.disable()
  try:
    import tensorflow_datasets
  except ModuleNotFoundError:
    raise ValueError("data.source = 'tfds' needs tensorflow-datasets: pip install -e '.[tfds]'") from None
  finally:
    if collects:
      gc.enable()
  return tensorflow_datasets


def load(data: Mapping[str, Any], split: str) -> Tfds:
  """The split 'train' or 'test' of the prepared dataset `data.name` in `data.path` (default: the tfds data folder)."""
  tfds = import_tfds()
  from tensorflow_datasets.core.decode import DeserializeMethod

  root = data_dir(data['path'])
  builder = tfds.builder_from_directory(_prepared(data, root))
  features, file_format = dict(builder.info.features.items()), builder.info.file_format.value
  if file_format != 'array_record':
    raise ValueError(
      f'data.name = {data["name"]!r} in {root} is prepared as {file_format}, which has no random access: '
      f'prepare it in another data.path: {_prepare(data["name"], "DIR")}'
    )
  if not isinstance(features.get('image'), tfds.features.Image):
    raise ValueError(f'data.name = {data["name"]!r} has no feature image, only {", ".join(features)}: use an image set')
  name = data[f'{split}_split']
  try:
    records = builder.as_data_source(name, deserialize_method=DeserializeMethod.RAW_BYTES).data_source
  except ValueError as error:
    raise ValueError(
      f'data.{split}_split = {name!r} is not a split of {data["name"]!r} or a part of one, such as train[:90%]: '
      f'{nearest(name, builder.info.splits)}'
    ) from error
  label: Any = features.get('label')
  has_labels = isinstance(label, tfds.features.ClassLabel)
  where = f'{builder.data_path} ({name})'
  stored = builder.info.splits[name].file_instructions
  source = Tfds(records, where, has_labels, label.names if has_labels else (), data['broken'], stored)
  labels = getattr(features.get('labels'), 'feature', None)
  source.label_names = labels.names if isinstance(labels, tfds.features.ClassLabel) else ()
  return source


def _prepared(data: Mapping[str, Any], root: pathlib.Path) -> pathlib.Path:
  """The folder of a prepared dataset. Not left to tfds, which would look for a missing dataset online."""
  name, _, version = data['name'].partition(':')

  def versions(folder: pathlib.Path) -> list[pathlib.Path]:
    found = [info.parent for info in folder.glob(f'{version or "*"}/dataset_info.json')]
    found = [folder for folder in found if re.fullmatch(r'\d+\.\d+\.\d+', folder.name)]
    return sorted(found, key=lambda folder: [int(part) for part in folder.name.split('.')])

  if found := versions(root / name):
    return found[-1]
  folders = folder_source.subfolders(root / name) if (root / name).is_dir() else []
  configs = [found[-1] for folder in folders if (found := versions(root / name / folder))]
  if len(configs) == 1:
    return configs[0]
  if configs:
    choices = ', '.join(f'{name}/{folder.parent.name}' for folder in configs)
    raise ValueError(f'data.name = {name!r} is prepared in several configurations: give one of {choices}')
  _raise_unprepared(data, root)


def _raise_unprepared(data: Mapping[str, Any], root: pathlib.Path) -> NoReturn:
  tfds, name = import_tfds(), data['name']
  prepared = sorted({info.parent.parent.name for info in root.glob('*/*/dataset_info.json')})
  stock, plain = tfds.list_builders(with_community_datasets=False), re.split('[/:]', name)[0]
  if plain not in stock:
    raise ValueError(
      f'data.name = {name!r} is neither prepared in {root} nor known to tfds: {nearest(name, prepared + stock)}'
    )
  there = f' (there: {", ".join(prepared)})' if prepared else ''
  manual = ''
  if tfds.builder_cls(plain).MANUAL_DOWNLOAD_INSTRUCTIONS:  # ImageNet, for example, needs an account
    files = 'ILSVRC2012_img_{train,val}.tar' if plain == 'imagenet2012' else 'the archives of the set'
    manual = f'put {files} into {root}/downloads/manual, then '
  raise ValueError(f'data.name = {name!r} is not prepared in {root}{there}: {manual}run {_prepare(name, data["path"])}')


def _prepare(name: str, path: str) -> str:
  """The command that prepares a dataset in `data.path`."""
  if name in archives.PUBLISHED:
    return archives.command(name, path)
  return (
    f"pip install -e '.[tensorflow]' && python -c \"import tensorflow_datasets as tfds; tfds.builder({name!r},"
    f" data_dir={str(data_dir(path))!r}, file_format='array_record').download_and_prepare()\""
  )
