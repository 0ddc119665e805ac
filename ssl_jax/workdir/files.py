"""Files of a workdir, which belongs to one run: ownership, a lock for training, and atomic writes."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import jax

from ssl_jax.config import HARMLESS, difference, split_options
from ssl_jax.workdir import checksums

DEEPEST = 50  # maximum nesting of a JSON file
LONGEST_NAME = 80  # maximum characters in the name of a default workdir
FOUND = ('images', 'contents', 'sizes', 'words')  # keys that `Run.identity` adds to `data` once the data is loaded


def default(config_file: str, overrides: Sequence[str] = (), name_of_set: str = '') -> pathlib.Path:
  """The workdir of a command without --workdir: runs/NAME, with the config file, its options and the flags in NAME.

  Keys that do not affect the results are left out, so that every mode finds the same workdir. `name_of_set` is the name
  of a dataset that is named after its folder.

  >>> str(default('configs/cifar10.py:dystress,seed=1', ['log.every_steps=5', 'ema=0.9']))
  'runs/cifar10_dystress_seed=1_ema=0.9'
  """
  file, _, options = config_file.partition(':')
  harmless = lambda text: any(re.match(rf'{re.escape(key)}[.=]', text) for key in HARMLESS)
  parts = [part for part in (name_of_set, *split_options(options), *sorted(overrides)) if part and not harmless(part)]
  full = '_'.join([pathlib.Path(file).stem, *parts])
  name = re.sub(r'[^\w.=+-]+', '-', full, flags=re.ASCII)
  if len(name) > LONGEST_NAME:
    name = f'{name[: LONGEST_NAME - 9]}-{hashlib.sha256(full.encode(errors="surrogateescape")).hexdigest()[:8]}'
  return pathlib.Path('runs', name)


def writable(workdir: str | os.PathLike, *, create: bool = True) -> pathlib.Path:
  """The absolute path of a directory, created if needed. Raises a ValueError if it is not writable.

  If not `create`, a missing directory is not created, and its nearest parent must be writable instead.
  """
  workdir = pathlib.Path(workdir).expanduser().absolute()
  try:
    str(workdir).encode()
  except UnicodeEncodeError:  # Orbax would fail at the first checkpoint
    raise ValueError(f'--workdir={str(workdir)!r} has letters that this locale lacks: set PYTHONUTF8=1') from None
  try:
    if create:
      workdir.mkdir(parents=True, exist_ok=True)
    place = next(path for path in (workdir, *workdir.parents) if os.path.lexists(path))
    with tempfile.TemporaryFile(dir=place) as file:
      file.write(b'\0')  # a full disk has room for an empty file
      file.flush()
    return workdir
  except OSError as error:
    if is_full(error):
      raise OSError(error.errno, error.strerror, str(workdir)) from None
    raise ValueError(
      f'--workdir={str(workdir)!r} cannot be written ({error.strerror}): give another directory'
    ) from None


def steps(workdir: str | os.PathLike) -> list[int]:
  """The steps of the complete checkpoints in a workdir, newest first."""
  folder = pathlib.Path(workdir).expanduser() / 'checkpoints'
  if os.path.lexists(folder) and not folder.is_dir():
    raise ValueError(f'{folder} is not a directory: remove it, or give another --workdir')
  names = [path.name for path in folder.glob('*')]
  return sorted((int(name) for name in names if name.isdecimal()), reverse=True)  # incomplete ones have other names


def saved(workdir: str | os.PathLike) -> bool:
  """Whether a workdir has a checkpoint."""
  return bool(steps(workdir))


def owner(workdir: pathlib.Path) -> dict | None:
  """The identity in the newest checkpoint whose config file is undamaged; None if there is none."""
  for step in steps(workdir):
    if not checksums.damage(workdir / 'checkpoints' / str(step), 'config/'):
      return identity_at(workdir, step)
  return None


def identity_at(workdir: pathlib.Path, step: int) -> dict:
  """`Run.identity` of the run that saved a checkpoint."""
  return read_json(workdir / 'checkpoints' / str(step) / 'config' / 'metadata')  # Orbax's layout


def difference_of(owner: Mapping, found: Mapping, among: Sequence[str] = ()) -> str | None:
  """`config.difference` of two identities. The keys `FOUND` are compared only if both have them.

  `contents` is compared only if `images` and `words` agree, and `sizes` only if `contents` agrees, too: a difference in
  those explains more.
  """
  old, new = owner['data'], found['data']
  hidden = {key for key in FOUND if key not in old or key not in new}
  differ = lambda *keys: any(old.get(key) != new.get(key) for key in keys)
  hidden |= {'contents', 'sizes'} if differ('images', 'words') else {'sizes'} if differ('contents') else set()
  shared = lambda data: {key: x for key, x in data.items() if key not in hidden}
  return difference({**owner, 'data': shared(old)}, {**found, 'data': shared(new)}, among)


def check(workdir: str | os.PathLike, identity: Mapping, *, trains: bool = False) -> pathlib.Path:
  """The absolute path of the workdir, created if needed. Raises a ValueError if this run must not use it.

  A workdir belongs to the run that saved its newest checkpoint. Without a checkpoint, any run may use it, except that
  training is refused next to the summary of a run of another config, and next to an evaluation of other weights or
  features. `identity` is `Run.identity`, or the config as a dict if the data is not loaded.
  """
  folder = pathlib.Path(workdir).expanduser()
  refuse = lambda why: ValueError(f'--workdir={str(workdir)!r} holds {why}: give another directory')
  if (owned := owner(folder)) is not None:
    if differs := difference_of(owned, identity):
      raise refuse(f'a run of another config ({differs})')
  elif trains and (folder / 'summary.json').exists() and (folder / 'config.json').exists():
    if differs := difference_of(read_json(folder / 'config.json'), identity):
      raise refuse(f'the results of another config ({differs})')
  elif trains and (folder / 'evaluation.json').exists():
    raise refuse('an evaluation of other weights (evaluation.json)')
  return writable(workdir)


@contextlib.contextmanager
def locked(workdir: str | os.PathLike) -> Iterator[None]:
  """Raises a ValueError if another process trains in the workdir. The lock is released when the process ends."""
  if jax.process_index() > 0:
    yield
    return
  folder = os.open(writable(workdir), os.O_RDONLY)
  try:
    try:
      fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f'--workdir={str(workdir)!r} is in use by another training process: wait for it, or give another directory'
      ) from None
    except OSError:  # a file system without locks
      pass
    yield
  finally:
    os.close(folder)


def claim(workdir: str | os.PathLike, config: Mapping) -> pathlib.Path:
  """Writes config.json, for later commands in this workdir, and returns the absolute path of the workdir."""
  workdir = writable(workdir)
  if jax.process_index() == 0:
    write_text(workdir / 'config.json', json.dumps(config, indent=2) + '\n')
  return workdir


def read_config(workdir: str | os.PathLike) -> dict:
  """The config of the run in a workdir."""
  file = pathlib.Path(workdir).expanduser() / 'config.json'
  if not file.exists():
    raise ValueError(f'--workdir={str(workdir)!r} does not hold a run (no config.json): train there first')
  return read_json(file)


def read_json(file: pathlib.Path) -> dict:
  """The content of a JSON file written by this project. Raises a ValueError that names the file if it is damaged."""
  try:
    content = json.loads(read_bytes(file))
    if not isinstance(content, dict):
      raise ValueError('not a mapping')
    if not _shallow(content, DEEPEST):
      raise ValueError(f'nested more than {DEEPEST} deep')
    return content
  except (ValueError, OSError, RecursionError) as error:
    raise ValueError(f'{file} cannot be read ({reason(error)}): fix it, or remove it') from error


def check_types(file: pathlib.Path, content: Mapping, types: Mapping[str, Any], needed: Sequence[str] = ()) -> None:
  """Raises a ValueError that names the file and the key if a value is missing or has the wrong type."""
  for key in needed:
    if key not in content:
      raise ValueError(f'{file} has no {key}, so it is not what this program wrote: fix it, or remove it')
  for key, kind in types.items():
    if key in content and not isinstance(content[key], kind):
      found = type(content[key]).__name__
      raise ValueError(f'{file} has a {found} as {key}, so it is not what this program wrote: fix it, or remove it')


def _shallow(content: Any, levels: int) -> bool:
  """Whether a tree of dicts and lists has at most `levels` levels."""
  children = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
  return levels > 0 and all(_shallow(child, levels - 1) for child in children)


def read_bytes(file: pathlib.Path) -> bytes:
  """The content of a file. Raises a ValueError for a FIFO or a device: reading it could block forever."""
  if file.exists() and not file.is_file():
    raise ValueError('not a file')
  return file.read_bytes()


def warn(text: str) -> None:
  """Prints a one-line warning. Only the first process prints."""
  if jax.process_index() == 0:
    print(f'ssl_jax: warning: {text}', file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
  """The first line of an error message."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def write_text(file: pathlib.Path, text: str) -> None:
  """Writes a text file completely or not at all."""
  write_bytes(file, text.encode())


def write_bytes(file: pathlib.Path, data: bytes) -> None:
  """Writes a file completely or not at all."""
  write_together({file: data})


def write_together(contents: Mapping[pathlib.Path, bytes]) -> None:
  """Writes files that belong together: all of them, or none if there is not enough space.

  Another process that writes the same files waits.
  """
  parts = {file: file.with_name(file.name + '.part') for file in contents}
  with contextlib.ExitStack() as stack:
    try:
      for file, part in parts.items():
        with naming(file):
          stack.callback(_lock(part).close)
          part.write_bytes(contents[file])
      for file, part in parts.items():
        with naming(file):
          part.replace(file)
    except OSError:
      for part in parts.values():
        with contextlib.suppress(OSError):
          part.unlink(missing_ok=True)  # it may be filling the disk
      raise


def _lock(file: pathlib.Path) -> BinaryIO:
  """Creates and locks a file, until it is closed."""
  while True:
    lock = file.open('ab')
    with contextlib.suppress(OSError):  # a file system without locks
      fcntl.flock(lock, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.fstat(lock.fileno()), file.stat()):
        return lock
    lock.close()  # the process that had locked it has renamed it


@contextlib.contextmanager
def naming(file: pathlib.Path) -> Iterator[None]:
  """Adds the file name to an OSError: errors on an open file lack it."""
  try:
    yield
  except OSError as error:
    raise OSError(error.errno, error.strerror or str(error), str(file)) from error


def is_full(error: BaseException | None) -> bool:
  """Whether an error, or one of its causes, is due to a full disk."""
  while error is not None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
      return True
    if any(text in str(error) for text in ('No space left on device', 'Disk quota exceeded')):
      return True
    error = error.__cause__ or error.__context__
  return False
