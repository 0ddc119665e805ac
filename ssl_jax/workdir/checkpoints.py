"""Orbax checkpoints of the training state. Reading them does not use pickle."""

import contextlib
import itertools
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ssl_jax.run.state import State
from ssl_jax.workdir import checksums, files
from ssl_jax.workdir.files import is_full, reason


class Checkpoints:
  """The checkpoints of a workdir, written atomically and in the background.

  Each checkpoint has checksums of its files. The newest undamaged one is read. Newer, damaged ones are skipped with a
  warning, and a run that trains moves them to WORKDIR/damaged.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    identity: Mapping | None = None,
    keep: int | None = None,
    *,
    keep_every: int = 0,
    step: int | None = None,
  ):
    """Opens the checkpoints of a workdir.

    Args:
      identity: `Run.identity`, saved for `files.check`.
      keep: the number of newest checkpoints to keep. None: read-only, possibly while a run is writing.
      keep_every: if positive, the first checkpoint at or after each multiple of this step is also kept.
      step: the step of the checkpoint to read, instead of the newest.
    """
    self.workdir, self.identity, self.fixed = workdir, identity, step
    self.read_only = keep is None
    self.saving, self.bytes = -1, 0  # step and size of the state that is being saved
    self.intact = _intact(workdir, set_aside=not self.read_only) if step is None else _undamaged(workdir, step)
    if keep is None:
      options = ocp.CheckpointManagerOptions(read_only=True)
    else:
      options = ocp.CheckpointManagerOptions(
        preservation_policy=_Kept(keep, keep_every),
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
      )
    names = ('state', 'config', 'unlogged', 'clock')
    self.manager = ocp.CheckpointManager(workdir / 'checkpoints', options=options, item_names=names)

  def latest(self) -> int | None:
    """The step of the newest undamaged checkpoint, or the `step` that was given; None if there is none."""
    return self.intact if self.read_only else self.manager.latest_step()

  def save(
    self, state: State, unlogged: Sequence[Mapping] = (), seconds: float = 0.0, skipped: Sequence[int] = ()
  ) -> None:
    """Saves a state of host arrays, unless its step is already saved.

    `unlogged` has the metrics of the steps since the last row of metrics.jsonl. `seconds` is the training time so far.
    `skipped` has the positions of the broken images that were skipped so far.
    """
    step = int(state.step)
    if step not in self.manager.all_steps():
      clock = {'seconds': seconds, 'skipped': list(skipped)}
      parts = {'config': self.identity, 'unlogged': list(unlogged), 'clock': clock}
      parts = {name: ocp.args.JsonSave(part) for name, part in parts.items()}
      parts = ocp.args.Composite(state=ocp.args.StandardSave(state), **parts)
      with self._writing():
        self.manager.wait_until_finished()
        self.saving, self.bytes = step, sum(x.nbytes for x in jax.tree.leaves(state))
        self.manager.save(step, args=parts)

  def restore(self, like: State) -> State:
    """The newest state, with the shapes and types of `like`."""
    assert self.latest() is not None
    return self._read_newest(state=ocp.args.StandardRestore(like))

  def newest(self) -> State:
    """The newest state as nested dicts, for callers that cannot build a state to pass to `restore`."""
    if self.latest() is None:
      raise ValueError(f'{self.manager.directory} has no checkpoint yet: train first')
    return State(**self._read_newest(state=ocp.args.StandardRestore()))

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """{path: shape} of the arrays of the newest state."""
    return shapes_of(self.newest())

  def wait(self) -> None:
    """Waits until all checkpoints are written."""
    with self._writing():
      self.manager.wait_until_finished()

  def unlogged(self) -> list[dict]:
    """The metrics of the steps up to the newest state that are not in metrics.jsonl yet."""
    step = self.latest()
    return [] if step is None else self._read(step, unlogged=ocp.args.JsonRestore())

  def seconds(self) -> float:
    """The training time at the newest checkpoint; 0 if it is not recorded."""
    return self._clock().get('seconds', 0.0)

  def skipped(self) -> list[int]:
    """Positions of the broken images that were skipped up to the newest checkpoint; none if they are not recorded."""
    return self._clock().get('skipped', [])

  def _clock(self) -> Mapping[str, Any]:
    if (step := self.latest()) is None:
      return {}
    if not (self.manager.directory / str(step) / 'clock').exists():  # checkpoints of older versions
      return self.manager.metadata(step).custom_metadata or {}
    return self._read(step, clock=ocp.args.JsonRestore())

  def _read_newest(self, **part: ocp.args.CheckpointArgs) -> Any:
    """One part of the newest checkpoint, or of a newer one if a running training removes it while it is read."""
    while True:
      step = self.latest()
      assert step is not None
      try:
        return self._read(step, **part)
      except ValueError:
        if not self.read_only or self.fixed is not None or files.steps(self.workdir)[:1] == [step]:
          raise
      self.intact = _intact(self.workdir, set_aside=False)
      self.manager.reload()

  def _read(self, step: int, **part: ocp.args.CheckpointArgs) -> Any:
    """One part of a checkpoint. Raises a ValueError that names the checkpoint if it cannot be read."""
    (name,) = part
    try:
      return self.manager.restore(step, args=ocp.args.Composite(**part))[name]
    except (KeyError, ValueError, OSError) as error:
      before = [known for known in self.manager.all_steps() if known < step]
      then = f'resumes at step {max(before)}' if before else 'starts again'
      fix = f'remove its folder, and the run {then}' if self.fixed is None else 'give another step'
      raise ValueError(
        f'checkpoint {step} in {self.manager.directory} cannot be read ({reason(error)}): {fix}'
      ) from error

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Turns a write error into a one-line ValueError. It may concern the previous save, which is asynchronous."""
    try:
      yield
    except (ValueError, OSError) as error:
      folder = pathlib.Path(self.manager.directory)
      self._remove_part()
      free = shutil.disk_usage(folder).free
      why = (
        f'no space left: a state has {_size(self.bytes)}, {_size(free)} are free' if is_full(error) else reason(error)
      )
      found = files.steps(folder.parent)
      then = f'resumes at step {found[0]}' if found else 'starts again'
      raise ValueError(
        f'checkpoint {self.saving} cannot be written to {folder} ({why}): make room there, and the same command {then}'
      ) from error

  def _remove_part(self) -> None:
    """Removes an incomplete checkpoint, which may be filling the disk."""
    if jax.process_index() == 0:
      for path in pathlib.Path(self.manager.directory).glob(f'{self.saving}.*'):
        shutil.rmtree(path, ignore_errors=True)

  def _write_checksums(self) -> None:
    """Called before Orbax renames a checkpoint to its final name, so that complete checkpoints have checksums."""
    if jax.process_index() == 0:
      (folder,) = (path for path in self.manager.directory.iterdir() if path.name.split('.')[0] == str(self.saving))
      checksums.write(pathlib.Path(folder))

  def close(self) -> None:
    """Waits until all checkpoints are written, and stops the writer threads."""
    self.wait()
    self.manager.close()


class _Kept(ocp.checkpoint_managers.PreservationPolicy):
  """Keeps the newest checkpoints, and the first one at or after each multiple of `every` steps."""

  def __init__(self, newest: int, every: int):
    self.newest, self.every = newest, every

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    passed = [0, *(info.step // self.every if self.every else 0 for info in checkpoints)]
    old = len(checkpoints) - self.newest
    return [k >= old or passed[k + 1] > passed[k] for k in range(len(checkpoints))]


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
  """{path: shape} of the arrays of a state; the same for a state and for its checkpoint."""
  name = lambda part: str(getattr(part, 'key', getattr(part, 'name', getattr(part, 'idx', part))))
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {'/'.join(map(name, path)): np.shape(leaf) for path, leaf in leaves}


def _undamaged(workdir: pathlib.Path, step: int) -> int:
  """Returns the step, or raises a ValueError if its checkpoint is damaged."""
  if found := checksums.damage(workdir / 'checkpoints' / str(step)):
    raise ValueError(f'{_damage(workdir, {step: found})}: give another step')
  return step


def _intact(workdir: pathlib.Path, *, set_aside: bool) -> int | None:
  """The step of the newest undamaged checkpoint, or None if there are no checkpoints. Every process checks."""
  known, damaged, intact = files.steps(workdir), {}, None
  for step in known:
    if not (found := checksums.damage(workdir / 'checkpoints' / str(step))):
      intact = step
      break
    damaged[step] = found
    if files.steps(workdir)[:1] != known[:1]:  # a running training has removed the checkpoint that was read here
      return _intact(workdir, set_aside=set_aside)
  if not damaged:
    return intact
  if intact is None:
    raise ValueError(f'{_damage(workdir, damaged)}: remove {workdir / "checkpoints"}, and the run starts again')
  moved = f' and moved to {workdir / "damaged"}' if set_aside else ''
  files.warn(f'{_damage(workdir, damaged)}{moved}: using step {intact} instead')
  if set_aside:
    _together('damaged checkpoints are known')
    if jax.process_index() == 0:
      for number in damaged:
        _set_aside(workdir, number)
    _together('damaged checkpoints are set aside')
  return intact


def _damage(workdir: pathlib.Path, damaged: Mapping[int, str]) -> str:
  """A one-line description of damaged checkpoints."""
  named = ', '.join(f'{step} ({found})' for step, found in damaged.items())
  one = len(damaged) == 1
  return f'checkpoint{"" if one else "s"} {named} in {workdir / "checkpoints"} {"is" if one else "are"} damaged'


def _size(count: int) -> str:
  """A number of bytes in megabytes.

  >>> _size(91_234_567)
  '91.23 MB'
  """
  return f'{count / 1e6:.2f} MB'


def _set_aside(workdir: pathlib.Path, step: int) -> None:
  """Moves a damaged checkpoint to WORKDIR/damaged, because the run will write this step again."""
  (workdir / 'damaged').mkdir(exist_ok=True)
  names = itertools.chain([str(step)], (f'{step}_{n}' for n in itertools.count(2)))
  free = next(name for name in names if not (workdir / 'damaged' / name).exists())
  (workdir / 'checkpoints' / str(step)).rename(workdir / 'damaged' / free)


def _together(name: str) -> None:
  """Waits for the other processes."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)
