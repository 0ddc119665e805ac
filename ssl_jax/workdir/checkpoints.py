"""Orbax checkpoints of the training state. Nothing is unpickled."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from ssl_jax.run.state import State
from ssl_jax.workdir.files import reason


class Checkpoints:
  """The newest checkpoints of one workdir, each complete or absent, written in the background."""

  def __init__(self, workdir: pathlib.Path, identity: Mapping | None = None, keep: int | None = None):
    """`identity` is `Run.identity`, saved for `files.check`. `keep` None: only read, even while a run is writing."""
    self.identity = identity
    if keep is None:
      options = ocp.CheckpointManagerOptions(read_only=True)
    else:
      options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    names = ('state', 'config', 'unlogged')
    self.manager = ocp.CheckpointManager(workdir / 'checkpoints', options=options, item_names=names)

  def latest(self) -> int | None:
    """The step of the newest checkpoint."""
    return self.manager.latest_step()

  def save(self, state: State, unlogged: Sequence[Mapping] = (), seconds: float = 0.0) -> None:
    """Saves a state of host arrays, unless its step is saved already.

    `unlogged` has the metrics of the steps since the last row of metrics.jsonl; `seconds` is the training time so far.
    """
    step = int(state.step)
    if step not in self.manager.all_steps():
      parts = {'config': self.identity, 'unlogged': list(unlogged)}
      parts = {name: ocp.args.JsonSave(part) for name, part in parts.items()}
      parts = ocp.args.Composite(state=ocp.args.StandardSave(state), **parts)
      with self._writing():
        self.manager.save(step, args=parts, custom_metadata={'seconds': seconds})

  def restore(self, like: State) -> State:
    """The newest state, with the shapes and types of `like`."""
    step = self.latest()
    assert step is not None
    return self._read(step, state=ocp.args.StandardRestore(like))

  def newest(self) -> State:
    """The newest state as nested dicts, for callers without the data or the optimizer."""
    if (step := self.latest()) is None:
      raise ValueError(f'{self.manager.directory} has no checkpoint yet: train first')
    return State(**self._read(step, state=ocp.args.StandardRestore()))

  def unlogged(self) -> list[dict]:
    """The metrics of the steps before the newest state that are not in metrics.jsonl yet."""
    step = self.latest()
    return [] if step is None else self._read(step, unlogged=ocp.args.JsonRestore())

  def seconds(self) -> float:
    """How long the run had trained at the newest checkpoint; 0 if the checkpoint does not say."""
    step = self.latest()
    return 0.0 if step is None else (self.manager.metadata(step).custom_metadata or {}).get('seconds', 0.0)

  def _read(self, step: int, **part: ocp.args.CheckpointArgs) -> Any:
    """One part of a checkpoint; a ValueError that names the checkpoint if it is damaged."""
    (name,) = part
    try:
      return self.manager.restore(step, args=ocp.args.Composite(**part))[name]
    except (KeyError, ValueError, OSError) as error:
      before = [known for known in self.manager.all_steps() if known < step]
      then = f'resumes at step {max(before)}' if before else 'starts again'
      raise ValueError(
        f'checkpoint {step} in {self.manager.directory} cannot be read ({reason(error)}): remove its folder, and the '
        f'run {then}'
      ) from error

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Explains an error. Orbax writes in the background, so it may concern the checkpoint before."""
    try:
      yield
    except (ValueError, OSError) as error:
      raise ValueError(
        f'a checkpoint in {self.manager.directory} cannot be written ({reason(error)}): free some space, and the same '
        'command resumes from the last complete one'
      ) from error

  def close(self) -> None:
    """Waits until everything is written."""
    with self._writing():
      self.manager.wait_until_finished()
    self.manager.close()
