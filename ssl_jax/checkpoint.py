"""Orbax checkpoints of the train state, tied to the config that made them. Nothing is unpickled."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import jax
import orbax.checkpoint as ocp

from ssl_jax.config import difference
from ssl_jax.state import State

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
    raise ValueError(f'{file} cannot be read ({_reason(error)}): mend it, or remove it') from error


def _reason(error: Exception) -> str:
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


class Checkpoints:
  """The checkpoints of one workdir: the newest few, each whole or absent, written in the background."""

  def __init__(self, workdir: pathlib.Path, config: dict, keep: int | None = None):
    """`config` is the run's `identity`. `keep` None: only to read, beside a run that may be writing."""
    self.config = config
    if keep is None:
      options = ocp.CheckpointManagerOptions(read_only=True)
    else:
      options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    names = ('state', 'config', 'unlogged')
    self.manager = ocp.CheckpointManager(workdir / 'checkpoints', options=options, item_names=names)

  def latest(self) -> int | None:
    return self.manager.latest_step()

  def save(self, state: State, unlogged: Sequence[Mapping] = ()) -> None:
    """Keeps a state of host arrays, and the metrics of the steps since the last row; once for each step."""
    step = int(state.step)
    if step not in self.manager.all_steps():
      parts = {'config': self.config, 'unlogged': list(unlogged)}
      parts = {name: ocp.args.JsonSave(part) for name, part in parts.items()}
      with self._written():
        self.manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), **parts))

  def restore(self, like: State) -> State:
    """The newest state, with the shapes and types of `like`; refuses one that another config made."""
    step = self.latest()
    saved = self._read(step, config=ocp.args.JsonRestore())
    if differs := difference(saved, self.config):
      raise ValueError(f'checkpoint {step} in {self.manager.directory} is of another config ({differs})')
    return self._read(step, state=ocp.args.StandardRestore(like))

  def newest(self) -> State:
    """The newest state as it was saved, of nested dicts: for what has neither the data nor the optimiser."""
    if (step := self.latest()) is None:
      raise ValueError(f'{self.manager.directory} has no checkpoint yet: train first')
    return State(**self._read(step, state=ocp.args.StandardRestore()))

  def unlogged(self) -> list[dict]:
    """The metrics of the steps before the newest state that no row has yet."""
    if (step := self.latest()) is None:
      return []
    return self._read(step, unlogged=ocp.args.JsonRestore())

  def _read(self, step: int, **part):
    """One part of a checkpoint, or an error that names it."""
    (name,) = part
    try:
      return self.manager.restore(step, args=ocp.args.Composite(**part))[name]
    except (KeyError, ValueError, OSError) as error:
      before = [known for known in self.manager.all_steps() if known < step]
      then = f'goes on from {max(before)}' if before else 'begins anew'
      raise ValueError(
        f'checkpoint {step} in {self.manager.directory} cannot be read ({_reason(error)}): remove its folder, and the '
        f'run {then}'
      ) from error

  @contextlib.contextmanager
  def _written(self) -> Iterator[None]:
    """Writing goes on in the background: an error may be of the checkpoint before."""
    try:
      yield
    except (ValueError, OSError) as error:
      raise ValueError(
        f'a checkpoint in {self.manager.directory} cannot be written ({_reason(error)}): make room, and the same '
        'command goes on from the last one that is whole'
      ) from error

  def close(self) -> None:
    with self._written():
      self.manager.wait_until_finished()
    self.manager.close()
