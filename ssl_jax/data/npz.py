"""Reads untrusted .npz files: no pickles, no pipes, no headers that claim more data than there is."""

import math
import os
import stat
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from ssl_jax.config import require_memory

BROKEN_ARCHIVE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # by np.load, for an .npz


def is_regular(path: str | os.PathLike[str]) -> bool:
  """Whether a path is a regular file: reading a pipe, a device or a socket may never end."""
  return stat.S_ISREG(os.stat(path).st_mode)


def npz_names(path: str | os.PathLike[str]) -> list[str]:
  """The names of the arrays in an .npz file."""
  with zipfile.ZipFile(path) as archive:
    return [name.removesuffix('.npy') for name in archive.namelist() if name.endswith('.npy')]


def read_npz(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, np.ndarray]:
  """Those of the named arrays that an .npz file has. Nothing is allocated for a header that claims more than there is.

  Raises one of BROKEN_ARCHIVE.
  """
  if not os.path.exists(path) or not is_regular(path) or not zipfile.is_zipfile(path):
    raise ValueError('there is no such archive')
  with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as file:
    found = {}
    for name in (name for name in names if f'{name}.npy' in archive.namelist()):
      _check_header(archive, f'{name}.npy')
      found[name] = file[f'{name}.npy']
  return found


def _check_header(archive: zipfile.ZipFile, name: str) -> None:
  """Raises a ValueError unless a member's size is what its header says, and fits in memory."""
  size = archive.getinfo(name).file_size
  with archive.open(name) as member:
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
      return  # for names in Unicode, which an array of numbers does not have
    shape, _, dtype = read[version](member)
    claimed = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and claimed != size - member.tell():
      raise ValueError(f'{name} claims {claimed:,} bytes and has {size - member.tell():,}')
  require_memory(name, size, 'use a folder of images, or fewer of them')
