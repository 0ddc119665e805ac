"""What several test files share: a tiny run, devices, the command line, and marks for what a machine may lack."""

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags
from ml_collections import ConfigDict

import main
from configs import base
from ssl_jax import config, train
from ssl_jax.run import builder
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints

STEPS = 20  # of a tiny run
REAL = os.environ.get('SSL_JAX_TEST_DATA', '')


needs_real_data = pytest.mark.real_data  # reads the folder SSL_JAX_TEST_DATA; conftest.py skips it without one
needs_browser = pytest.mark.browser  # opens a page in Chromium; conftest.py skips it without one


def changed(chosen: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
  """The config with these keys changed, and validated."""
  for key, value in changes.items():
    config.override(chosen, key, value)
  config.validate(chosen, base.get_config())
  return chosen


def tiny(tmp_path, **changes):
  """A config that trains in seconds: 64 images of 12 pixels, a narrow ResNet, 20 steps over ten epochs."""
  data = tmp_path / 'data.npz'
  if not data.exists():
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 4
    # A color and a gradient per class, and a little noise: smooth, as images are.
    colors, slopes = rng.uniform(60, 200, (4, 1, 1, 3)), rng.normal(0, 6, (4, 1, 12, 1)) + np.zeros((1, 12, 1, 3))
    images = colors[labels] + slopes[labels] + rng.normal(0, 12, (80, 12, 12, 3))
    images = np.clip(images, 0, 255).astype(np.uint8)
    np.savez(data, train_images=images[:64], train_labels=labels[:64], test_images=images[64:], test_labels=labels[64:])
  chosen = base.get_config()
  settings = {
    'data': dict(source='arrays', name='tiny', path=str(data), image_size=12),
    'augment': dict(name='dystress_cifar', jitter=0.0, grey=0.0),  # colors take long to compile
    'model': dict(name='resnet_tiny', width=8, stage_sizes=(1,)),
    'projector': dict(name='simclr', features=(8, 8)),
    'dtype': 'float32',
    'batch_size': 32,
    'steps': STEPS,
    'optimizer.learning_rate': 0.005,
    'temperature.tau': 0.5,
    'parallel.devices': 1,
    'eval': dict(k=(5,), every_epochs=0, batch_size=40),
    'log': dict(every_steps=1, tensorboard=False),
  }
  return changed(chosen, settings | changes)


def final(workdir, chosen):
  """(losses of every step, the last state) of a finished run."""
  losses = [row['loss'] for row in metric_log.read(workdir) if 'loss' in row]
  run = builder.build(chosen)
  checkpoints = Checkpoints(files.check(workdir, run.identity))
  state = checkpoints.restore(run.initial_state())
  checkpoints.close()
  return losses, state


def config_file(folder: pathlib.Path, choices: dict[str, Any]) -> pathlib.Path:
  """A config file for main.py: `tiny` with these choices."""
  file = folder / 'config.py'
  file.write_text(
    'from configs import base\nfrom ssl_jax import config\n\n\n'
    f'def get_config(options):\n  return config.restore({tiny(folder, **choices).to_dict()!r}, base.get_config())\n'
  )
  return file


def results(workdir: pathlib.Path) -> dict[str, Any]:
  """What summary.json says of a run, without what differs between two of them: times, commit and command."""
  others = ('seconds', 'compile_seconds', 'date', 'commit', 'command')
  return {key: x for key, x in json.loads((workdir / 'summary.json').read_text()).items() if key not in others}


def bits(workdir: pathlib.Path, newest: int | None = None) -> dict[str, Any]:
  """What a run computes: the rows of metrics.jsonl without speeds, and all arrays of the `newest` checkpoints."""
  found: dict[str, Any] = {
    'rows': [
      {key: value for key, value in row.items() if not key.endswith('_per_second')} for row in metric_log.read(workdir)
    ]
  }
  checkpoints = Checkpoints(workdir)
  for step in files.steps(workdir)[:newest]:
    state = checkpoints._read(step, state=ocp.args.StandardRestore())
    found[f'checkpoint {step}'] = [
      (x.shape, str(x.dtype), x.tobytes()) for x in map(np.asarray, jax.tree.leaves(state))
    ]
    found[f'checkpoint {step}'] += checkpoints._read(step, unlogged=ocp.args.JsonRestore())
  checkpoints.close()
  return found


@contextlib.contextmanager
def asked_to_stop_at(step):
  """Simulates a SIGTERM that arrives during the given step."""

  class Stop:
    asked = 0

    def is_set(self):
      self.asked += 1
      return self.asked == step

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(train, '_stop_requests', lambda: contextlib.nullcontext(Stop()))
    yield


def mapped(function, devices, how):
  """`function(params, shard)` on the devices, each with its part of the batch; the results of the devices, stacked."""
  split = lambda x: x.reshape(devices, x.shape[0] // devices, *x.shape[1:])
  if how == 'pmap':
    run = jax.pmap(function, axis_name='batch', in_axes=(None, 0), devices=jax.devices()[:devices])
  else:
    mesh = jax.make_mesh((devices,), ('batch',), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    spec = jax.sharding.PartitionSpec
    run = jax.jit(
      jax.shard_map(
        lambda params, shards: jax.tree.map(lambda x: x[None], function(params, shards[0])),
        mesh=mesh,
        in_specs=(spec(), spec('batch')),
        out_specs=spec('batch'),
        check_vma=False,
      )
    )
  return lambda params, batch: run(params, split(batch))


def call(*arguments):
  """Runs main.py with these arguments in this process, and returns its exit message."""
  flags.FLAGS.unparse_flags()
  rest = flags.FLAGS(['main.py', *arguments], known_only=True)
  with pytest.raises(SystemExit) as stopped:
    main.main(rest)
  return str(stopped.value)


def of_pairs(loss, found, tau=None, **more):
  """A `Loss` of what a function of `ssl_jax.pairs` gives."""
  return loss(found.pos, found.neg, tau, where=found.where, **more)
