"""A workdir belongs to one run: who owns it, who writes in it, and files that are written whole or not at all."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator

import jax

from ssl_jax.config import difference

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None


def writable(workdir: str | os.PathLike) -> pathlib.Path:
  """The directory, made where it was not, or an error that says why it cannot be written."""
  workdir = pathlib.Path(workdir).expanduser().absolute()
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=workdir):
      return workdir
  except OSError as error:
    raise ValueError(
      f'--workdir={str(workdir)!r} cannot be written ({error.strerror}): give another directory'
    ) from None


def saved(workdir: str | os.PathLike) -> bool:
  """Whether a workdir has a checkpoint."""
  folder = pathlib.Path(workdir).expanduser() / 'checkpoints'
  return any(step.name.isdigit() for step in folder.glob('*'))  # other names are of what is not whole yet


def check(workdir: str | os.PathLike, config: dict) -> pathlib.Path:
  """The workdir, or an error where another run has it; a run that has saved nothing yet has no claim to it."""
  workdir = writable(workdir)
  check_own(workdir, config)
  return workdir


def check_own(workdir: str | os.PathLike, config: dict) -> None:
  """Refuses a workdir that holds the run of another config, and makes nothing."""
  known = saved(workdir) and (pathlib.Path(workdir).expanduser() / 'config.json').exists()
  if known and (differs := difference(read_config(workdir), config)):
    raise ValueError(f'--workdir={str(workdir)!r} holds a run of another config ({differs}): give another directory')


def check_unjudged(workdir: str | os.PathLike) -> None:
  """Refuses to train where features or weights of other origin were judged: their numbers would pass for the run's."""
  if not saved(workdir) and (pathlib.Path(workdir).expanduser() / 'evaluation.json').exists():
    raise ValueError(
      f'--workdir={str(workdir)!r} holds an evaluation of other weights (evaluation.json): give another directory'
    )


@contextlib.contextmanager
def alone(workdir: str | os.PathLike) -> Iterator[None]:
  """Refuses a workdir that another process trains in; whatever ends this one lets go of it."""
  if fcntl is None or jax.process_index() > 0:
    yield
    return
  folder = os.open(writable(workdir), os.O_RDONLY)
  try:
    try:
      fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f'--workdir={str(workdir)!r} is being trained in by another process: wait, or give another'
      ) from None
    except OSError:  # a file system without locks
      pass
    yield
  finally:
    os.close(folder)


def claim(workdir: str | os.PathLike, config: dict) -> pathlib.Path:
  """Makes the workdir this run's own: writes config.json."""
  workdir = check(workdir, config)
  if jax.process_index() == 0:
    write_text(workdir / 'config.json', json.dumps(config, indent=2) + '\n')
  return workdir


def read_config(workdir: str | os.PathLike) -> dict:
  """The config of the run in a workdir."""
  file = pathlib.Path(workdir).expanduser() / 'config.json'
  if not file.exists():
    raise ValueError(f'--workdir={str(workdir)!r} holds no run (no config.json): train there first')
  return read_json(file)


def read_json(file: pathlib.Path) -> dict:
  """What a file of this project's own making holds, or an error that names it."""
  try:
    found = json.loads(file.read_text())
    if not isinstance(found, dict):
      raise ValueError('no mapping')
    return found
  except ValueError as error:  # of the text, or of its characters
    raise ValueError(f'{file} cannot be read ({reason(error)}): mend it, or remove it') from error


def reason(error: Exception) -> str:
  """What an error says, in a line."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def write_text(file: pathlib.Path, text: str) -> None:
  write_bytes(file, text.encode())


def write_bytes(file: pathlib.Path, data: bytes) -> None:
  """Writes a file whole or not at all."""
  part = file.with_name(file.name + '.part')
  try:
    part.write_bytes(data)
    part.replace(file)
  except OSError as error:
    raise OSError(error.errno, error.strerror, str(file)) from error
