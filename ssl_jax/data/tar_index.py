"""An index of the samples in a tar shard, built by scanning its headers and stored until the shard changes."""

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ssl_jax.data.folder_source import EXTENSIONS as IMAGES
from ssl_jax.data.npz import BROKEN_ARCHIVE, read_npz
from ssl_jax.data.shards import Shard

BLOCK = 512  # bytes of a header; all offsets are multiples of it
LONGEST_HEADER = 2**20  # maximum bytes of a long name or an extended header
LONGEST_TEXT = 2**20  # maximum bytes of a .txt, .cls or .json
VERSION = 3  # of the stored index: its format, and what counts as a problem

TEXT, JSON = 1, 2  # kinds of caption file; 0: none
ITEM = np.dtype(
  [
    ('shard', '<i4'),
    ('head', '<i4'),  # bytes from the start of the headers to the start of the image
    ('offset', '<i8'),  # of the image in the shard, in bytes
    ('size', '<i8'),
    ('text', '<i8'),  # offset of the captions
    ('text_size', '<i4'),
    ('kind', '<i4'),  # TEXT, JSON or 0
  ]
)


class Index(NamedTuple):
  """The samples of a shard that have an image."""

  items: np.ndarray  # ITEM [n]
  codes: np.ndarray  # int32 [n]: index into `names` of the label of each sample, or -1
  names: tuple[str, ...]
  misnamed: int  # samples whose only images have other names than KEY.jpg, such as KEY.1.jpg
  problem: str  # what is wrong with the shard after these samples, or ''


class Member(NamedTuple):
  """A regular file in a tar file."""

  name: str
  head: int  # byte at which its headers begin
  offset: int  # byte at which its content begins
  size: int


def members(descriptor: int, length: int, start: int = 0) -> Iterator[Member]:
  """The regular files in a tar file of `length` bytes. Raises a ValueError if the tar file is damaged.

  Reads ustar, GNU and pax headers. Links, folders and devices are skipped.
  """
  place = head = start
  extended: dict[str, str] = {}
  while place < length:
    header = os.pread(descriptor, BLOCK, place)
    if not header.strip(b'\0') and len(header) == BLOCK:  # the end of the archive
      return
    size = _check_header(header, place)
    kind, data = header[156:157], place + BLOCK
    if kind in (b'x', b'L'):
      if size > LONGEST_HEADER or data + size > length:
        raise ValueError(f'has a header of {size:,} bytes at byte {place:,}')
      content = os.pread(descriptor, size, data)
      extended |= _extended(content) if kind == b'x' else {'path': _text(content)}
    elif kind not in (b'g', b'K'):
      if kind == b'S':
        raise ValueError(f'has a sparse file at byte {place:,}')
      name = extended.get('path') or _name(header)
      size = 0 if kind in b'123456' else _decimal(extended.get('size', ''), size)
      if data + size > length:
        raise ValueError(f'ends within {name if name.isprintable() else repr(name)}')
      if kind in (b'0', b'\0') and not any(key.startswith('GNU.sparse') for key in extended):
        yield Member(name, head, data, size)
    place = data + -(-size // BLOCK) * BLOCK
    if kind not in (b'x', b'L', b'g', b'K'):
      head, extended = place, {}
  raise ValueError('has no block of zeros at its end, so it was probably cut off')


def _check_header(header: bytes, place: int) -> int:
  """The file size in a header. Raises a ValueError if the header is not valid."""
  try:
    if len(header) == BLOCK and _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * ord(' '):
      return _number(header[124:136])
  except ValueError:
    pass
  raise ValueError('is not a tar file, or is compressed' if not place else f'has no valid header at byte {place:,}')


def _number(field: bytes) -> int:
  """The number in a header field: octal digits, or big-endian binary if the first byte is 0x80."""
  if field[0] == 0x80:
    return int.from_bytes(field[1:], 'big')
  digits = field.partition(b'\0')[0].strip()
  if not digits.isdigit():  # int() would accept signs and underscores
    raise ValueError('no number')
  return int(digits, 8)


def _decimal(text: str, otherwise: int) -> int:
  return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else otherwise


def _text(field: bytes) -> str:
  return field.partition(b'\0')[0].decode('utf-8', 'surrogateescape')


def _name(header: bytes) -> str:
  prefix = _text(header[345:500]) if header[257:263] == b'ustar\0' else ''  # GNU headers use these bytes otherwise
  return f'{prefix}/{_text(header[:100])}' if prefix else _text(header[:100])


def _extended(content: bytes) -> dict[str, str]:
  """The content of a pax header: records 'LENGTH KEY=VALUE\\n'."""
  found = {}
  while content.strip(b'\0'):
    length, _, _ = content.partition(b' ')
    if not length.isdigit() or not len(length) < int(length) <= len(content):
      raise ValueError('has a damaged extended header')
    key, _, value = content[len(length) + 1 : int(length) - 1].partition(b'=')
    found[_text(key)] = _text(value)
    content = content[int(length) :]
  return found


def name_at(descriptor: int, head: int) -> str:
  """The name of the file whose headers begin at byte `head`."""
  return next(members(descriptor, os.fstat(descriptor).st_size, head)).name


def scan(shard: Shard) -> Index:
  """Finds the samples of a shard: files with the same name up to the first dot. The last of duplicate names is used."""
  samples: dict[str, dict[str, Member]] = {}
  misnamed, problem = 0, ''
  rows, labels = [], []
  descriptor = os.open(shard.path, os.O_RDONLY)
  try:
    try:
      for member in members(descriptor, shard.size):
        folder, _, file = member.name.rpartition('/')
        key, _, suffix = file.partition('.')
        if key:  # not hidden
          samples.setdefault(f'{folder}/{key}', {})[f'.{suffix.lower()}'] = member
    except ValueError as error:
      problem = str(error)
    for sample in samples.values():
      image = next((sample[suffix] for suffix in IMAGES if suffix in sample), None)
      if image:
        text, kind, label = _describe(descriptor, sample)
        place = (text.offset, text.size, kind) if text else (0, 0, 0)
        rows.append((0, image.offset - image.head, image.offset, image.size, *place))
        labels.append(label)
      else:
        misnamed += any(suffix.endswith(IMAGES) for suffix in sample)
  finally:
    os.close(descriptor)
  names = sorted({label for label in labels if label})
  number = {name: k for k, name in enumerate(names)} | {'': -1}
  codes = np.array([number[label] for label in labels], np.int32)
  return Index(np.array(rows, ITEM), codes, tuple(names), misnamed, problem)


def _describe(descriptor: int, sample: Mapping[str, Member]) -> tuple[Member | None, int, str]:
  """(file with the captions, its kind, label) of a sample, from its .txt, .cls and .json."""

  def content(suffix: str) -> bytes | None:
    member = sample.get(suffix)
    return os.pread(descriptor, member.size, member.offset) if member and member.size <= LONGEST_TEXT else None

  text, kind, label = sample.get('.txt'), TEXT, _label(content('.cls'))
  if '.json' in sample and (text is None or not label):
    described = content('.json')
    try:
      known = parse(described or b'')
      label = label or _named(known)
      has_text = bool(captions(known))
    except ValueError:
      has_text = True  # damaged: reading the captions will raise an error
    if text is None and has_text:
      text, kind = sample['.json'], JSON
  if text and text.size > LONGEST_TEXT:
    text = None
  return text, kind, label


def _label(content: bytes | None) -> str:
  """The label in a .cls file, or ''."""
  try:
    return _known((content or b'').decode().strip())
  except UnicodeDecodeError:
    return ''


def _named(known: Mapping[str, Any]) -> str:
  """The label in the content of a .json file, or ''."""
  for key in ('label', 'class_name'):
    value = known.get(key)
    if isinstance(value, int | str) and not isinstance(value, bool) and str(value).strip():
      return _known(str(value).strip())
  return ''


def _known(label: str) -> str:
  """The label, or '' if it is a negative number, which marks an unlabeled image."""
  return '' if label.startswith('-') and label[1:].isdecimal() else label


def parse(text: bytes) -> Mapping[str, Any]:
  """The content of a .json file. Raises a ValueError if it is not a JSON object."""
  try:
    known = json.loads(text.decode('utf-8-sig'))
  except RecursionError:
    raise ValueError('nested too deep') from None
  if not isinstance(known, dict):
    raise ValueError('not a JSON object')
  return known


def captions(known: Mapping[str, Any]) -> tuple[str, ...]:
  """The captions in the content of a .json file: a string or a list of strings. Raises a ValueError if it is not UTF-8.

  >>> captions({'caption': 'a red circle', 'width': 32})
  ('a red circle',)
  """
  value = next((known[key] for key in ('caption', 'captions', 'text') if key in known), ())
  texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
  found = tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())
  ''.join(found).encode()  # an escaped half of a surrogate pair raises a UnicodeEncodeError
  return found


def stored(shard: Shard) -> Index | None:
  """The stored index of a shard; None if there is none or the shard has changed."""
  for file in _places(shard):
    with contextlib.suppress(KeyError, *BROKEN_ARCHIVE):  # a KeyError if it lacks an array
      found = read_npz(file, ('items', 'codes', 'texts', 'stamp'))
      if found['stamp'].tolist() == [VERSION, shard.size, shard.mtime] and found['items'].dtype == ITEM:
        *names, misnamed, problem = json.loads(found['texts'].tobytes())
        return Index(found['items'], found['codes'], tuple(names), misnamed, problem)
  return None


def make(shard: Shard) -> Index:
  """Scans a shard and stores its index next to the shard or, if that is not writable, in the user's cache folder."""
  index = scan(shard)
  texts = np.frombuffer(json.dumps([*index.names, index.misnamed, index.problem]).encode(), np.uint8)
  stamp = np.array([VERSION, shard.size, shard.mtime], np.int64)
  for file in _places(shard):
    part = file.with_name(f'{file.name}.{secrets.token_hex(4)}.part')  # several processes may write the same index
    try:
      file.parent.mkdir(parents=True, exist_ok=True)
      with part.open('wb') as stream:
        np.savez(stream, items=index.items, codes=index.codes, texts=texts, stamp=stamp)
      part.replace(file)
      break
    except OSError:
      with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)
  return index


def _places(shard: Shard) -> tuple[pathlib.Path, pathlib.Path]:
  path = pathlib.Path(os.path.abspath(shard.path))
  cache = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser()
  digest = hashlib.blake2b(str(path).encode('utf-8', 'surrogateescape'), digest_size=12).hexdigest()
  return path.parent / '.index' / f'{path.name}.npz', cache / 'ssl_jax' / f'{digest}.npz'
