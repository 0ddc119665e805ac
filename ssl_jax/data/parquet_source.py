"""Images, with or without text, in Parquet files, in the layout of Hugging Face datasets.

The unit of reading is a row group of some 100 to 1,000 rows. Each process caches the most recent ones, and an epoch
visits the images of a few random row groups at a time (`Source.window`). Images must be stored in the files: paths to
other files are ignored.
"""

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ssl_jax.data import shards
from ssl_jax.data.decoding import open_image
from ssl_jax.data.folder_source import shown
from ssl_jax.data.shards import Shard
from ssl_jax.data.sources import THREADS, Source, digest_of, one_line, reject_gaps, without_labels
from ssl_jax.registry import nearest

WINDOW = 4096  # default of data.shuffle_window: images that are shuffled together
OPEN = 64  # files that a process keeps open
ITEM = np.dtype([('file', '<i4'), ('group', '<i4'), ('row', '<i4')])  # the row within its row group

# Usual column names. The first one that exists is used.
IMAGE = ('image', 'img', 'jpg', 'png', 'webp', 'image_bytes')
TEXT = ('caption', 'captions', 'text', 'txt', 'sentences', 'sentence')
LABEL = ('label', 'labels', 'cls', 'class')


class Columns(NamedTuple):
  """Column names; '' for a column that the file does not have."""

  image: str
  text: str
  label: str


class Parquet(Source):
  """An item is a row of a row group (`ITEM`)."""

  def __init__(
    self,
    items: np.ndarray,
    *more: Any,
    files: Sequence[Shard],
    rows: Sequence[np.ndarray],
    columns: Columns,
    window: int,
    **named: Any,
  ):
    super().__init__(items, *more, **named)
    self.files, self.rows, self.columns, self.window = tuple(files), tuple(rows), columns, window
    groups = sum(map(len, rows))
    self.kept = window * groups // max(len(items), 1) + 2  # row groups in the cache: about those of one window

  def open(self, positions: Sequence[int] | np.ndarray) -> list[Callable[[], Image.Image]]:
    return [functools.partial(self._open, k) for k in positions]

  def where(self, position: int) -> str:
    file, group, row = self.items[position].tolist()
    return f'{shown(self.files[file].path)}: row {self.rows[file][:group].sum() + row}'

  def name(self, position: int) -> str:
    file, group, row = self.items[position].tolist()
    return f'{self.files[file].name}:{self.rows[file][:group].sum() + row}'

  def fingerprint(self) -> str:
    return digest_of([*map(str, self.files), str(self.columns), self.items.tobytes().hex()])

  def identities(self) -> list[Hashable]:
    real = [os.path.realpath(file.path) for file in self.files]
    return [(real[file], group, row) for file, group, row in self.items.tolist()]

  def blocks(self) -> np.ndarray:
    new = np.diff(self.items['file'], prepend=-1).astype(bool) | np.diff(self.items['group'], prepend=-1).astype(bool)
    return np.flatnonzero(new)

  def subset(self, positions: np.ndarray) -> 'Source':
    part = super().subset(positions)
    part.window = -(-self.window * len(part) // max(len(self), 1))  # a window spans as many row groups as before
    return part

  def has_text(self) -> bool:
    return bool(self.columns.text)

  def read_captions(self, position: int) -> tuple[str, ...]:
    value = self._value(position, self.columns.text)
    texts = [value] if isinstance(value, str) else value or []
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())

  def _open(self, position: int) -> Image.Image:
    value = self._value(position, self.columns.image)
    content = value.get('bytes') if isinstance(value, dict) else value
    if not content:
      raise OSError('it has no bytes')
    return open_image(content)

  def _value(self, position: int, column: str) -> Any:
    file, group, row = self.items[position].tolist()
    kept = 2 * self.kept if self.paired else self.kept  # images and captions are cached separately
    return _row_group(self.files[file], group, column, kept)[row].as_py()


_GROUPS: dict[tuple[Shard, int, str], Any] = {}  # cached columns, oldest first
_READING = threading.Lock()


def _row_group(file: Shard, group: int, column: str, kept: int) -> Any:
  """One column of a row group. The last `kept` columns are cached. Captions can be read without the images."""
  import pyarrow as pa

  key = (file, group, column)
  if (values := _GROUPS.get(key)) is not None:
    return values
  with _READING:  # threads share one reader per file, and no column is read twice
    if (values := _GROUPS.get(key)) is None:
      try:
        values = _opened(file).read_row_group(group, columns=[column]).column(column)
      except pa.ArrowException as error:
        raise OSError(f'row group {group} cannot be read: {one_line(error)}') from error
      _GROUPS[key] = values
      while len(_GROUPS) > kept:
        del _GROUPS[next(iter(_GROUPS))]
  return values


@functools.lru_cache(maxsize=OPEN)
def _opened(file: Shard) -> Any:
  import pyarrow as pa
  import pyarrow.parquet as pq

  opened = pa.OSFile(file.path)
  if not file.unchanged(opened.fileno()):
    raise OSError('the file has changed since the run began')
  return pq.ParquetFile(opened)


def load(data: Mapping[str, Any], split: str) -> Parquet:
  """The images of a split. Labels (class numbers or names) are used only if every image has one."""
  try:
    import pyarrow.parquet  # noqa: F401
  except ModuleNotFoundError:
    raise ValueError("data.source = 'parquet' needs pyarrow: pip install -e '.[parquet]'") from None
  files = shards.find(data, split, '.parquet')
  columns = _columns(data, files[0], _footer(files[0])[0])

  def read(file: Shard) -> tuple[np.ndarray, Any]:
    schema, rows = _footer(file)
    if missing := [name for name in columns if name and name not in schema.names]:
      raise ValueError(f'{shown(file.path)} has no column {missing[0]!r}: it has {", ".join(schema.names)}')
    _check_types(file, schema, columns)
    return rows, _column(file, columns.label) if columns.label else None

  with ThreadPoolExecutor(THREADS) as pool:
    rows, labels = zip(*pool.map(read, files), strict=True)
  items = np.zeros(sum(int(count.sum()) for count in rows), ITEM)
  if not len(items):
    raise ValueError(f'data.{split}_split = {data[f"{split}_split"]!r} has no rows: check data.path')
  counts = np.concatenate(rows)
  items['file'] = np.repeat(np.arange(len(files)), [count.sum() for count in rows])
  items['group'] = np.repeat(np.concatenate([np.arange(len(count)) for count in rows]), counts)
  items['row'] = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
  found = _labels(data, split, files, columns.label, np.concatenate(labels)) if columns.label else (None, ())
  window = data.get('shuffle_window', 0) or WINDOW
  return Parquet(items, *found, data['broken'], files=files, rows=rows, columns=columns, window=window)


def _footer(file: Shard) -> tuple[Any, np.ndarray]:
  """(schema, number of rows of each row group) of a file."""
  import pyarrow as pa

  try:
    opened = _opened(file)
    metadata = opened.metadata
    return opened.schema_arrow, np.array([metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)], int)
  except (pa.ArrowException, OSError) as error:
    raise ValueError(f'{shown(file.path)} is not a Parquet file ({one_line(error)}): copy it again') from error


def _column(file: Shard, name: str) -> np.ndarray:
  """A whole column, as integers or strings; None for a missing value.  -> object or integer [rows]"""
  import pyarrow as pa

  try:
    with _READING:
      column = _opened(file).read(columns=[name]).column(name)
  except (pa.ArrowException, OSError) as error:
    raise ValueError(
      f'{shown(file.path)}: column {name!r} cannot be read ({one_line(error)}): copy it again'
    ) from error
  if pa.types.is_integer(column.type) and not column.null_count:
    return column.to_numpy()
  return np.array(column.to_pylist(), object)


def _fits(what: str, kind: Any) -> bool:
  """Whether a column of an Arrow type can hold the image, text or label."""
  import pyarrow as pa

  is_text = lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind)
  is_list = lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind)
  is_bytes = lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
  if what == 'image':
    has_bytes = pa.types.is_struct(kind) and kind.get_field_index('bytes') >= 0
    return is_bytes(kind.field('bytes').type if has_bytes else kind)
  if what == 'text':
    return is_text(kind.value_type if is_list(kind) else kind)
  return pa.types.is_integer(kind) or is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _check_types(file: Shard, schema: Any, columns: Columns) -> None:
  """Raises a ValueError for a column that occurs twice or cannot hold what it is used for."""
  for what, name in columns._asdict().items():
    if name and schema.names.count(name) > 1:
      raise ValueError(f'{shown(file.path)} has several columns {name!r}: give each its own name')
    if name and not _fits(what, kind := schema.field(name).type):
      raise ValueError(
        f'{shown(file.path)}: column {name!r} is of type {kind}, which does not fit the {what}: '
        'name another column in data.columns'
      )


def _columns(data: Mapping[str, Any], file: Shard, schema: Any) -> Columns:
  """The columns named in `data.columns`. If it is empty: columns with a usual name and a suitable type."""
  names, types = schema.names, dict(zip(schema.names, schema.types, strict=True))
  given = data.get('columns', '')
  if given:
    chosen = [name.strip() for name in given.split(',')]
    if len(chosen) > 3 or not chosen[0]:
      raise ValueError(f"data.columns = {given!r} must name the image, text and label, such as 'img,caption,label'")
    chosen += [''] * (3 - len(chosen))
    for name in filter(None, chosen):
      if name not in names:
        raise ValueError(f'data.columns = {given!r}: {shown(file.path)} has no column {name!r}: {nearest(name, names)}')
  else:
    usual = dict(zip(Columns._fields, (IMAGE, TEXT, LABEL), strict=True))
    here = {what: [name for name in known if name in types] for what, known in usual.items()}
    chosen = [next((name for name in here[what] if _fits(what, types[name])), '') for what in usual]
    if here['label'] and not chosen[2]:
      name = here['label'][0]
      print(f'column {name!r} is of type {types[name]}: labels are not used', file=sys.stderr, flush=True)
    binary = [name for name in names if _fits('image', types[name])]
    chosen[0] = chosen[0] or (binary[0] if len(binary) == 1 else '')
    if not chosen[0]:
      raise ValueError(
        f'{shown(file.path)} has no column named {IMAGE[0]} with images as bytes, only {", ".join(names)}: '
        'name it with data.columns'
      )
  return Columns(*chosen)


def _labels(
  data: Mapping[str, Any], split: str, files: Sequence[Shard], column: str, values: np.ndarray
) -> tuple[np.ndarray | None, Sequence[str]]:
  """(int32 [N], class names); (None, ()) unless every row has a label. Hugging Face uses -1 for a missing label."""
  if values.dtype == object:
    kinds = {type(value) for value in values}
    if len(kinds - {type(None)}) > 1:
      raise ValueError(f'column {column!r} of data.{split}_split has numbers and strings: use one type in all files')
    if kinds != {str}:
      return without_labels(sum(value is None for value in values), len(values))
    names = sorted(set(values) | _names_of_other(data, split, column))
    number = {name: k for k, name in enumerate(names)}
    return np.array([number[value] for value in values], np.int32), names
  if (values < 0).any():
    return without_labels(int((values < 0).sum()), len(values))
  names = _class_names(_footer(files[0])[0], column)
  reject_gaps(f'column {column!r} of data.{split}_split', values)
  if names and (largest := int(values.max())) >= len(names):
    raise ValueError(
      f'column {column!r} of data.{split}_split has label {largest}, but {len(names)} class names: name all classes'
    )
  return values.astype(np.int32), names


def _names_of_other(data: Mapping[str, Any], split: str, column: str) -> set[str]:
  """The class names of the split other than `split`, if it exists and has this column."""
  try:
    found = [_column(file, column) for file in shards.find_other(data, split, '.parquet')]
  except (ValueError, KeyError):
    return set()
  return {value for values in found for value in values if isinstance(value, str)}


def _class_names(schema: Any, column: str) -> Sequence[str]:
  """The class names that Hugging Face stores for a ClassLabel; () if there are none."""
  try:
    features = json.loads((schema.metadata or {})[b'huggingface'])['info']['features']
    names = features[column]['names']
  except (KeyError, TypeError, ValueError, RecursionError):
    return ()
  return [str(name) for name in names] if isinstance(names, list) else ()
