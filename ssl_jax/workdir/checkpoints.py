"""Orbax checkpoints of the train state, tied to the config that made them. Nothing is unpickled."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import orbax.checkpoint as ocp

from ssl_jax.config import difference
from ssl_jax.run.state import State
from ssl_jax.workdir.files import reason


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
        f'checkpoint {step} in {self.manager.directory} cannot be read ({reason(error)}): remove its folder, and the '
        f'run {then}'
      ) from error

  @contextlib.contextmanager
  def _written(self) -> Iterator[None]:
    """Writing goes on in the background: an error may be of the checkpoint before."""
    try:
      yield
    except (ValueError, OSError) as error:
      raise ValueError(
        f'a checkpoint in {self.manager.directory} cannot be written ({reason(error)}): make room, and the same '
        'command goes on from the last one that is whole'
      ) from error

  def close(self) -> None:
    with self._written():
      self.manager.wait_until_finished()
    self.manager.close()
