"""Reads untrusted .npz files. Rejects pickles, pipes, and headers that claim more data than the file has."""

import math
import os
import threading
import zipfile
import zlib
from collections.abc import Sequence
from tokenize import TokenError

import numpy as np

from ssl_jax.config import require_memory

# Raised by np.load for a damaged .npz; a RuntimeError if it is encrypted or its compression is unknown.
BROKEN_ARCHIVE = (OSError, ValueError, EOFError, RuntimeError, SyntaxError, TokenError, zipfile.BadZipFile, zlib.error)

# Numpy parses headers with `ast`, which fails at random in several threads at once (CPython issue 106905).
_PARSING = threading.Lock()


def npz_names(path: str | os.PathLike[str]) -> list[str]:
  """The names of the arrays in an .npz file."""
  with zipfile.ZipFile(path) as archive:
    return [name.removesuffix('.npy') for name in archive.namelist() if name.endswith('.npy')]


def read_npz(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, np.ndarray]:
  """The named arrays, as far as an .npz file has them. Headers are checked before arrays are allocated.

  Raises one of BROKEN_ARCHIVE.
  """
  if not os.path.isfile(path):  # a pipe is not opened: reading it may block forever
    raise ValueError('it does not exist, or is not a regular file')
  if not zipfile.is_zipfile(path):
    raise ValueError('it is not an .npz file, or was cut off')
  with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as file:
    found = {}
    for name in (name for name in names if f'{name}.npy' in archive.namelist()):
      with _PARSING:
        _check_header(archive, f'{name}.npy')
        found[name] = file[f'{name}.npy']
  return found


def _check_header(archive: zipfile.ZipFile, name: str) -> None:
  """Raises a ValueError unless an array has the size that its header claims, and fits in memory."""
  size = archive.getinfo(name).file_size
  with archive.open(name) as member:
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:  # 3.0 is for Unicode field names, which arrays of numbers do not have
      raise ValueError(f'{name} has the .npy version {".".join(map(str, version))}, not 1.0 or 2.0')
    shape, _, dtype = read[version](member)
    claimed = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and claimed != size - member.tell():
      raise ValueError(f'{name} claims {claimed:,} bytes and has {size - member.tell():,}')
  require_memory(name, size, 'use a folder of images, or fewer of them')
