"""Where images come from: prepared tfds sets, .npz files, folders of images, the embedded set.

    source = load(config.data, 'train')
    len(source), source.labels  # int32 [N]; None where the images have no labels
    source.read(7)  # uint8 [H, W, 3]
    images, labels = source.arrays(32)  # everything: uint8 [N, 32, 32, 3], int32 [N]

Nothing here needs TensorFlow or the network. Images are turned to RGB and otherwise left as stored (EXIF orientation is
ignored, as ImageNet pipelines do).
"""

import copy
import functools
import io
import itertools
import os
import pathlib
import re
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, UnidentifiedImageError

from ssl_jax.data import classes
from ssl_jax.registry import nearest

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.bmp', '.webp')
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)  # Pillow's
BROKEN_ARCHIVE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # what np.load raises of an .npz
THREADS = min(4, os.cpu_count() or 1)  # of small images, more wait for the interpreter lock: 16 take twice as long as 4
BULK = 512  # images a task, where all are read: large enough to hide its overhead, small enough to share the work


class Source:
  """Random access to N images. A subclass says what an item (a path, a record, pixels) is and how to open some."""

  def __init__(self, items, labels=None, class_names=(), broken='error'):
    self.items = items
    self.labels = labels
    self.class_names = tuple(class_names)
    self.broken = broken
    self.skipped = set()  # positions of broken images that were met and left out (broken='skip')

  def __len__(self):
    return len(self.items)

  def open(self, positions):
    """A function for each position that returns its Pillow image, not yet decoded."""
    raise NotImplementedError

  def where(self, position):
    """The image's place, in words."""
    raise NotImplementedError

  def first_readable(self, position, decode):
    """(decode(image), its position): the image at `position` or, where broken images are skipped, the next good one."""
    tries = min(len(self), 100)
    for step in range(tries):
      k = (position + step) % len(self)
      try:
        return decode(self.open([k])[0]()), k
      except UNREADABLE as error:
        self._meet_broken(k, error)
    raise ValueError(f'no readable image from {self.where(position)} on ({tries} tried); is the data still there?')

  def read(self, position):
    """uint8 [H, W, 3]"""
    return self.first_readable(position, lambda image: np.asarray(rgb(image)))[0]

  def arrays(self, image_size):
    """All images uint8 `[N, image_size, image_size, 3]` and labels int32 `[N]` (or None), without skipped images.

    Images of that size keep their pixels; of others the shorter side is resized to it and the centre is cut out.
    """
    images = np.empty((len(self), image_size, image_size, 3), np.uint8)
    good = np.ones(len(self), bool)

    def fill(start):
      positions = range(start, min(start + BULK, len(self)))
      for k, image in zip(positions, self.open(positions), strict=True):
        try:
          images[k] = square(image(), image_size)
        except UNREADABLE as error:
          self._meet_broken(k, error)
          good[k] = False

    with ThreadPoolExecutor(THREADS) as pool:  # Pillow decodes and resizes outside the interpreter lock
      for _ in pool.map(fill, range(0, len(self), BULK)):
        pass
    if good.all():
      return images, self.labels
    return images[good], None if self.labels is None else self.labels[good]

  def readable(self):
    """Positions int64 of the images that were not found broken so far."""
    return np.setdiff1d(np.arange(len(self)), list(self.skipped))

  def in_memory(self, image_size):
    """The same images as `Arrays`, which remembers those that were left out."""
    kept = Arrays(*self.arrays(image_size), self.class_names)
    kept.skipped = self.skipped
    return kept

  def ready(self, image_size):
    """Whether the items are what an encoder's input is made of, squares of this size, and in memory."""
    return False

  def nbytes_decoded(self, image_size):
    """Bytes of `arrays(image_size)`."""
    return len(self) * image_size * image_size * 3

  def subset(self, positions):
    """The source of the images at these positions, in this order."""
    part = copy.copy(self)
    part.items, part.skipped = self.items[positions], set()
    part.labels = None if self.labels is None else self.labels[positions]
    return part

  def _meet_broken(self, position, error):
    if self.broken == 'error':
      reason = 'of no known format' if isinstance(error, UnidentifiedImageError) else error
      raise ValueError(
        f'{self.where(position)} is not a readable image ({reason}); mend or remove it, or set data.broken=skip'
      ) from error
    self.skipped.add(position)


class Arrays(Source):
  """Items are the pixels, uint8 [N, H, W, 3]."""

  def open(self, positions):
    return [functools.partial(Image.fromarray, self.items[k]) for k in positions]

  def where(self, position):
    return f'image {position} of the arrays'

  def ready(self, image_size):
    return self.items.shape[1:3] == (image_size, image_size)

  def readable(self):
    return np.arange(len(self))  # what was skipped stood in another source

  def arrays(self, image_size):
    if self.ready(image_size):
      return self.items, self.labels
    return super().arrays(image_size)


class Folder(Source):
  """Items are paths."""

  def open(self, positions):
    return [functools.partial(_open_file, self.items[k]) for k in positions]

  def where(self, position):
    return self.items[position]


class Tfds(Source):
  """Items are record numbers of a prepared tfds set. Labels lie in the records, and are read when first asked for."""

  def __init__(self, records, split, has_labels, class_names, broken):
    self._records, self._split, self._has_labels = records, split, has_labels
    super().__init__(np.arange(len(records)), None, class_names, broken)

  @property
  def labels(self):
    if self._labels is None and self._has_labels:
      values = np.empty(len(self), np.int32)
      for start in range(0, len(self), BULK):
        examples = self._examples(range(start, min(start + BULK, len(self))))
        values[start : start + BULK] = [example['label'].int64_list.value[0] for example in examples]
      self._labels, self._has_labels = values, bool((values >= 0).all())  # an unlabelled split is labelled -1
    return self._labels if self._has_labels else None

  @labels.setter
  def labels(self, values):
    self._labels = values

  def open(self, positions):
    return [
      functools.partial(Image.open, io.BytesIO(example['image'].bytes_list.value[0]))
      for example in self._examples(positions)
    ]

  def where(self, position):
    return f'record {self.items[position]} of {self._split}'

  def _examples(self, positions):
    # tfds decodes by itself, but takes 27 s for the 50,000 images of CIFAR; its raw records and Pillow take 7.
    from tensorflow_datasets.proto import tf_example_pb2

    records = self._records.__getitems__(self.items[positions].tolist())
    return [tf_example_pb2.Example.FromString(record).features.feature for record in records]


def _open_file(path):
  with open(path, 'rb') as file:  # read whole, so that a broken image leaves no open file behind
    return Image.open(io.BytesIO(file.read()))


def rgb(image):
  """The decoded image in RGB, 8 bits a channel."""
  if image.mode.startswith('I'):  # 16-bit greyscale, of which Pillow would clip all but the darkest 256 levels
    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
  elif image.mode == 'P' and 'transparency' in image.info:  # Pillow warns of the direct way
    image = image.convert('RGBA')
  image.load()
  return image if image.mode == 'RGB' else image.convert('RGB')


def square(image, size):
  """The image as uint8 [size, size, 3]: the shorter side resized to `size`, the centre cut out."""
  if image.size != (size, size):
    image.draft('RGB', (2 * size, 2 * size))  # a JPEG that is more than twice as large is decoded at a fraction
    side, (width, height) = min(image.size), image.size
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(rgb(image).resize((size, size), Image.Resampling.BILINEAR, box))
  return np.asarray(rgb(image))


def load(data, split):
  """The source that the config's section `data` names; `split` is 'train' or 'test'."""
  loaders = {'tfds': _tfds, 'arrays': _arrays, 'folder': _folder, 'embedded': _embedded}
  _one_of('data.source', data['source'], loaders)
  _one_of('data.broken', data['broken'], ('error', 'skip'))
  _one_of('split', split, ('train', 'test'))
  if data['classes']:
    _one_of('data.classes', data['classes'], classes.NAMED)
  source = loaders[data['source']](data, split)
  return _restrict(source, data['classes']) if data['classes'] else source


def _restrict(source, name):
  """The images of a named list of classes, labelled 0, 1, ... in the order of the source's classes."""
  wanted = classes.NAMED[name]
  missing = sorted(set(wanted) - set(source.class_names))
  if missing:
    raise ValueError(
      f'data.classes is {name!r}, but {len(missing)} of its {len(wanted)} classes are not in the data'
      f' (first: {", ".join(missing[:3])}); take the set that has them, or data.classes="" for all classes'
    )
  if source.labels is None:
    raise ValueError(f'data.classes is {name!r}, but the images have no labels; set data.classes="" for all of them')
  kept = [k for k, class_name in enumerate(source.class_names) if class_name in set(wanted)]
  relabel = np.full(len(source.class_names), -1, np.int32)
  relabel[kept] = np.arange(len(kept))
  labels = relabel[source.labels]
  part = source.subset(np.flatnonzero(labels >= 0))
  part.labels, part.class_names = labels[labels >= 0], tuple(source.class_names[k] for k in kept)
  return part


def _embedded(data, split):
  from ssl_jax.data import embedded

  return Arrays(*embedded.generate(data[f'{split}_split']), embedded.CLASSES)


def _arrays(data, split):
  path, prefix = os.path.expanduser(data['path']), data[f'{split}_split']
  try:
    if not zipfile.is_zipfile(path):
      raise ValueError('no such archive')
    with np.load(path, allow_pickle=False) as file:
      if f'{prefix}_images' not in file:
        raise ValueError(f'it holds {", ".join(sorted(file)) or "nothing"}, not {prefix}_images')
      images = file[f'{prefix}_images']
      labels = file.get(f'{prefix}_labels')
      class_names = file['class_names'].tolist() if 'class_names' in file else ()
  except BROKEN_ARCHIVE as error:
    raise ValueError(
      f'data.path {data["path"]!r} is not an .npz file with train_images, train_labels, test_images, test_labels'
      f' (labels are optional, pickled objects are refused): {error}'
    ) from error
  name = f'{prefix}_images of {path}'
  if images.dtype != np.uint8:
    raise ValueError(f'{name} is {images.dtype}; store uint8 from 0 to 255')
  if images.ndim == 3:
    images = images[..., None]
  if images.ndim != 4 or images.shape[-1] not in (1, 3) or not images.size:
    raise ValueError(f'{name} has shape {images.shape}; store [N, H, W, 3], or [N, H, W] for greyscale')
  if images.shape[-1] == 1:
    images = np.repeat(images, 3, axis=-1)
  if labels is not None:
    if labels.dtype.kind not in 'iu' or labels.shape != images.shape[:1]:
      raise ValueError(
        f'{prefix}_labels of {path} is {labels.dtype} {labels.shape}; store one whole number an image'
        f' ({len(images)}), or leave it out'
      )
    if max(abs(int(labels.min())), abs(int(labels.max()))) >= 2**31:
      raise ValueError(f'{prefix}_labels of {path} go from {labels.min()} to {labels.max()}; number the classes from 0')
    labels = labels.astype(np.int32)
    if class_names and labels.max() >= len(class_names):
      raise ValueError(
        f'class_names of {path} has {len(class_names)} names, and {prefix}_labels go to {labels.max()}: name each class'
      )
  return Arrays(images, labels, class_names, data['broken'])


def _folder(data, split):
  key = f'data.{split}_split'
  path = pathlib.Path(data['path']).expanduser()
  root = path / data[f'{split}_split']
  if not data['path'] or not path.is_dir():
    raise ValueError(f'data.path {data["path"]!r} is not a folder; set it to the one that holds the images')
  if not root.is_dir():
    known = _subfolders(path)
    mend = nearest(root.name, known) if known else f"set {key}='' for the images in data.path itself"
    raise ValueError(f'{key} {data[f"{split}_split"]!r} is not a folder in {path}: {mend}')
  names, flat = _subfolders(root), _images_in(root, nested=False)
  if names and flat:
    raise ValueError(
      f'{root} holds images beside folders ({flat[0]}, {names[0]}); keep class folders alone, or images alone'
    )
  if not names and not flat:
    raise ValueError(
      f'{root} holds no images ({", ".join(EXTENSIONS)}) and no class folders; check data.path and {key}'
    )
  if flat:
    return Folder(np.array(flat, object), broken=data['broken'])
  paths = [_images_in(root / name) for name in names]
  for name, found in zip(names, paths, strict=True):
    if not found:
      raise ValueError(f'class folder {root / name} holds no images ({", ".join(EXTENSIONS)}); fill it or remove it')
  # A class is the same number in both splits, even where one split lacks some classes.
  other = path / data['test_split' if split == 'train' else 'train_split']
  class_names = sorted({*names, *(_subfolders(other) if other.is_dir() else ())})
  labels = np.repeat([class_names.index(name) for name in names], [len(found) for found in paths]).astype(np.int32)
  return Folder(np.array([*itertools.chain(*paths)], object), labels, class_names, data['broken'])


def _subfolders(root):
  return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith('.'))


def _images_in(root, nested=True):
  """Sorted paths of the images in a folder and the folders below it; hidden files and folders are none."""
  found, seen = [], set()
  for folder, below, files in os.walk(root, followlinks=True):
    if (place := os.path.realpath(folder)) in seen:  # a link back
      below[:] = []
      continue
    seen.add(place)
    below[:] = [name for name in below if nested and not name.startswith('.')]
    found += [
      os.path.join(folder, name) for name in files if name.lower().endswith(EXTENSIONS) and not name.startswith('.')
    ]
  return sorted(found)


def _tfds(data, split):
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.decode import DeserializeMethod

  root = data['path'] or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
  root = pathlib.Path(root).expanduser()
  builder = tfds.builder_from_directory(_prepared(data['name'], root))
  features, file_format = dict(builder.info.features.items()), builder.info.file_format.value
  if file_format != 'array_record':
    raise ValueError(
      f'data.name {data["name"]!r} in {root} is prepared as {file_format}, which has no random access;'
      f' prepare it in another data.path: {_prepare(data["name"], "DIR")}'
    )
  if not isinstance(features.get('image'), tfds.features.Image):
    raise ValueError(
      f'data.name {data["name"]!r} has no feature "image", only {", ".join(features)}; take an image set'
    )
  name = data[f'{split}_split']
  try:
    records = builder.as_data_source(name, deserialize_method=DeserializeMethod.RAW_BYTES).data_source
  except ValueError as error:
    raise ValueError(
      f'data.{split}_split {name!r} is no split of {data["name"]!r}, nor a part such as train[:90%]: '
      f'{nearest(name, builder.info.splits)}'
    ) from error
  label = features.get('label')
  has_labels = isinstance(label, tfds.features.ClassLabel)
  where = f'{builder.data_path} ({name})'
  return Tfds(records, where, has_labels, label.names if has_labels else (), data['broken'])


def _prepared(name, root):
  """The folder of a prepared set, found without tfds, which would ask the network for a set that is not there."""
  asked, (name, _, version) = name, name.partition(':')

  def versions(folder):
    found = [info.parent for info in folder.glob(f'{version or "*"}/dataset_info.json')]
    found = [folder for folder in found if re.fullmatch(r'\d+\.\d+\.\d+', folder.name)]
    return sorted(found, key=lambda folder: [int(part) for part in folder.name.split('.')])

  if found := versions(root / name):
    return found[-1]
  configs = [versions(root / name / config) for config in _subfolders(root / name)] if (root / name).is_dir() else []
  configs = [found[-1] for found in configs if found]
  if len(configs) == 1:
    return configs[0]
  if configs:
    choices = ', '.join(f'{name}/{folder.parent.name}' for folder in configs)
    raise ValueError(f'data.name {name!r} is prepared in several configurations; name one of: {choices}')
  _raise_unprepared(asked, root)


def _raise_unprepared(name, root):
  import tensorflow_datasets as tfds

  prepared = sorted({info.parent.parent.name for info in root.glob('*/*/dataset_info.json')})
  if re.split('[/:]', name)[0] in (stock := tfds.list_builders(with_community_datasets=False)):
    there = f' (there: {", ".join(prepared)})' if prepared else ''
    raise ValueError(f'data.name {name!r} is not prepared in {root}{there}; prepare it: {_prepare(name, root)}')
  raise ValueError(
    f'data.name {name!r} is neither prepared in {root} nor known to tfds: {nearest(name, prepared + stock)}'
  )


def _prepare(name, root):
  return (
    f"pip install 'ssl_jax[tensorflow]' && python -c \"import tensorflow_datasets as tfds; tfds.builder({name!r},"
    f" data_dir={str(root)!r}, file_format='array_record').download_and_prepare()\""
  )


def _one_of(key, value, known):
  if value not in known:
    raise ValueError(f'{key} {value!r} is unknown: {nearest(value, known)}')
