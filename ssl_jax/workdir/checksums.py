"""Checksums of the files in a folder, stored in the folder and verified when it is read."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator

NAME = 'checksums.json'
LATER = (NAME, '_CHECKPOINT_METADATA', 'commit_success.txt')  # not covered: written last, without state


def write(folder: pathlib.Path) -> None:
  """Writes the digests of all files in a folder to its checksums.json."""
  found = {str(path.relative_to(folder)): digest(path) for path in _files(folder)}
  (folder / NAME).write_text(json.dumps(found, indent=2) + '\n')


def damage(folder: pathlib.Path, part: str = '') -> str:
  """What is wrong with the files of a folder, or of its subfolder `part`; '' if they match their checksums.

  A folder without checksums.json is from an older version and is accepted.
  """
  if not os.path.lexists(folder / NAME):
    return ''
  if not (folder / NAME).is_file():
    return f'{NAME} is not a file'
  try:
    expected = dict(json.loads((folder / NAME).read_bytes()))
  except OSError as error:
    return f'{NAME} cannot be read ({error.strerror})'
  except (ValueError, TypeError, RecursionError):
    return f'{NAME} cannot be read'
  for name in LATER:
    if os.path.lexists(folder / name) and not (folder / name).is_file():  # Orbax would open it
      return f'{name} is not a file'
  for name, value in expected.items():
    if name.startswith(part):
      if not os.path.lexists(folder / name):
        return f'{name} is missing'
      if not (folder / name).is_file():
        return f'{name} is not a file'
      try:
        if digest(folder / name) != value:
          return f'{name} does not match its checksum'
      except OSError as error:
        return f'{name} cannot be read ({error.strerror})'
  return ''


def digest(path: pathlib.Path) -> str:
  """The BLAKE2b digest of a file."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  return (path for path in sorted(folder.rglob('*')) if path.is_file() and path.name not in LATER)
