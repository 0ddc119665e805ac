"""Logs metrics to Weights & Biases. With WANDB_MODE=offline, this needs neither an account nor a network."""

import pathlib
import re
import sys
from collections.abc import Mapping
from types import ModuleType

from ssl_jax.workdir import files


def require_package(project: str) -> ModuleType:
  """The package wandb. Raises a ValueError if it is not installed."""
  try:
    import wandb
    import wandb.errors  # fails for a mere folder named wandb, such as W&B creates
  except ImportError:
    raise ValueError(f"log.wandb = {project!r} needs wandb: pip install -e '.[wandb]'") from None
  return wandb


class WandbRun:
  """A W&B run, stored in WORKDIR/wandb. If `step` is positive, it continues the W&B run of this workdir, if any.

  W&B ignores rows up to the last step that it already has.
  """

  def __init__(self, workdir: pathlib.Path, step: int, project: str):
    wandb = require_package(project)
    file, same = workdir / 'wandb' / 'run_id', {}
    if step and file.is_file():
      same = {'id': _read_id(file), 'resume': 'allow'}
    try:
      self.run = wandb.init(
        project=project,
        name=workdir.name,
        dir=workdir,
        config=files.read_config(workdir),
        settings=wandb.Settings(console='off'),  # otherwise it wraps stdout, which shows the progress bar
        **same,
      )
    except wandb.errors.Error as error:
      raise ValueError(
        f'log.wandb = {project!r} cannot be used ({files.reason(error)}): run `wandb login`, or set WANDB_MODE=offline'
      ) from error
    file.parent.mkdir(exist_ok=True)  # missing if WANDB_DIR is set
    files.write_text(file, f'{self.run.id}\n')

  def write(self, step: int, row: Mapping[str, float]) -> None:
    self.run.log(dict(row), step=step)

  def close(self) -> None:
    self.run.finish(exit_code=int(sys.exc_info()[0] is not None))  # interrupted runs are not shown as finished


def _read_id(file: pathlib.Path) -> str:
  found = files.read_bytes(file).decode(errors='replace').strip()
  if not re.fullmatch(r'[\w-]{1,128}', found, re.ASCII):
    raise ValueError(f'{file} has no valid W&B run id: remove it to start a new W&B run')
  return found
