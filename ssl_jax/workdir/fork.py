"""A fork is a run that starts from a checkpoint of another run, its parent.

Data order and augmentation depend only on the seed and the step. A fork with the config of its parent therefore
continues the parent bit for bit. A fork with another temperature differs only in the temperature, not in its starting
point.
"""

import json
import pathlib
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from ssl_jax.run.builder import Run
from ssl_jax.run.state import State
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints, shapes_of

# Config keys that a fork shares with its parent. They determine which images a step sees, and in which order. The
# network, the method and the optimizer may change if the arrays of the state keep their shapes.
SHARED = ('seed', 'batch_size', 'data', 'imbalance')
PARENT = 'parent.json'  # the config of the parent, and this file of the parent if it is a fork itself
SHOWN = 20  # maximum number of steps listed in a message


def split(fork: str) -> tuple[str, int]:
  """The workdir and the step in `config.fork`.

  >>> split('runs/cifar10@3900')
  ('runs/cifar10', 3900)
  """
  folder, _, step = fork.rpartition('@')
  return folder, int(step)


def parent_of(config: ConfigDict, workdir: str) -> 'Parent | None':
  """The checkpoint from which a run starts; None if it is not a fork, or already has its own checkpoint."""
  return Parent(config) if config.fork and not files.saved(workdir) else None


class Parent:
  """The checkpoint named by `config.fork`. Failed checks raise a one-line ValueError."""

  def __init__(self, config: ConfigDict):
    self.fork = config.fork
    folder, self.step = split(config.fork)
    self.workdir = pathlib.Path(folder).expanduser().absolute()
    known = files.steps(self.workdir)
    if not known:
      raise self._refused(f'{folder!r} has no checkpoint: give the workdir of a trained run')
    if self.step not in known:
      shown = ', '.join(map(str, known[:SHOWN])) + ', ...' * (len(known) > SHOWN)
      raise self._refused(
        f'{folder!r} has no checkpoint of step {self.step}, only of {shown}: give one of them, or train the parent '
        'with checkpoint.keep_every'
      )
    self.checkpoints = Checkpoints(self.workdir, step=self.step)
    try:
      self._require_shared(config.to_dict())
    except ValueError:
      self.close()
      raise

  def _refused(self, why: str) -> ValueError:
    return ValueError(f'fork = {self.fork!r}: {why}')

  def _require_shared(self, identity: Mapping) -> None:
    owner = files.identity_at(self.workdir, self.step)
    if differs := files.difference_of(owner, identity, SHARED):
      raise self._refused(f'{differs}, and a fork must have the {", ".join(SHARED)} of its parent')

  def check(self, run: Run, state: State) -> None:
    """Checks that a built run can start from this checkpoint. `state` is the initial state of the run."""
    self._require_shared(run.identity)
    if self.step >= run.total_steps:
      raise self._refused(f'the run has {run.total_steps} steps in all: fork an earlier step, or raise epochs or steps')
    here, there = shapes_of(state), self.checkpoints.shapes()
    for path in sorted(here.keys() | there.keys()):
      if here.get(path) != there.get(path):
        shown = ' here, '.join(str(list(x[path])) if path in x else 'missing' for x in (here, there))
        raise self._refused(
          f'the state differs ({path}: {shown} there): keep the model, projector, method, optimizer.name, ema and '
          'online_probe of the parent, and whether a temperature or loss parameter is learned'
        )

  def hand_over(self, to: Checkpoints, workdir: pathlib.Path, like: State) -> None:
    """Copies this checkpoint and the parent's metrics up to its step to the fork. Writes parent.json.

    The fork is then like a run that was interrupted at this step, and no longer needs its parent. If its config
    differs, the parent's steps since its last row are left out: a row must not average steps of two configs.
    """
    parent, owner = self.checkpoints, files.identity_at(self.workdir, self.step)
    unlogged = parent.unlogged()
    metric_log.copy(self.workdir, workdir, self.step, logged=self.step - len(unlogged))
    if jax.process_index() == 0:
      before = files.read_json(file) if (file := self.workdir / PARENT).exists() else {}
      files.write_text(workdir / PARENT, json.dumps({'config': owner, 'parent': before}, indent=2) + '\n')
    same = to.identity is not None and not files.difference_of(owner, {**to.identity, 'fork': owner.get('fork', '')})
    to.save(parent.restore(like), unlogged if same else [], parent.seconds(), parent.skipped())
    to.wait()

  def close(self) -> None:
    self.checkpoints.close()
