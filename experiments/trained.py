"""Restores trained runs, for figures that need the encoder."""

import pathlib

from configs import base
from ssl_jax import config
from ssl_jax.run import builder
from ssl_jax.run.state import State
from ssl_jax.workdir import files
from ssl_jax.workdir.checkpoints import Checkpoints


def restore(workdir: pathlib.Path) -> tuple[builder.Run, State]:
  """Rebuilds the run of a workdir. Returns it with the state of its newest checkpoint, on the host."""
  chosen = config.restore(files.read_config(workdir), base.get_config())
  run = builder.build(chosen, resumed=True, trains=False)
  checkpoints = Checkpoints(files.check(workdir, run.identity))
  if checkpoints.latest() is None:
    raise ValueError(f'{workdir} has no checkpoint: train it first, or leave it out')
  state = checkpoints.restore(run.initial_state())
  checkpoints.close()
  return run, state
