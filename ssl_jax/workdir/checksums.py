"""Checksums of a folder's files, written into the folder and compared when it is read."""

import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Iterator

NAME = 'checksums.json'
LATER = (NAME, '_CHECKPOINT_METADATA', 'commit_success.txt')  # orbax writes them last, and no state depends on them


def write(folder: pathlib.Path) -> None:
  """Writes the digest of every file of a folder to checksums.json in it."""
  found = {str(path.relative_to(folder)): digest(path) for path in _files(folder)}
  (folder / NAME).write_text(json.dumps(found, indent=2) + '\n')


def damage(folder: pathlib.Path, part: str = '') -> str:
  """What is wrong with the files of a folder, or of its subfolder `part`: '' if they are as they were written.

  A folder without checksums.json was written before there were checksums, and is accepted.
  """
  if not os.path.lexists(folder / NAME):
    return ''
  if not is_regular(folder / NAME):
    return f'{NAME} is not a file'
  try:
    expected = dict(json.loads((folder / NAME).read_bytes()))
  except (ValueError, TypeError, RecursionError):
    return f'{NAME} cannot be read'
  for name in LATER:
    if os.path.lexists(folder / name) and not is_regular(folder / name):  # orbax would open it
      return f'{name} is not a file'
  for name, value in expected.items():
    if name.startswith(part):
      if not os.path.lexists(folder / name):
        return f'{name} is missing'
      if not is_regular(folder / name):
        return f'{name} is not a file'
      if digest(folder / name) != value:
        return f'{name} does not match its checksum'
  return ''


def digest(path: pathlib.Path) -> str:
  """The BLAKE2b digest of a file."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def is_regular(path: pathlib.Path) -> bool:
  """Whether a path is a file of bytes: opening a FIFO or a device could wait forever."""
  try:
    return stat.S_ISREG(path.stat().st_mode)
  except (OSError, ValueError):
    return False


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  return (path for path in sorted(folder.rglob('*')) if is_regular(path) and path.name not in LATER)
