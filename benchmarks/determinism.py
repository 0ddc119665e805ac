"""Does the same command give the same bits? Two runs with separate compilation caches, and one killed and resumed.

  python -m benchmarks.determinism [--quick] [--networks=2]

Each run is a process of main.py on the embedded images. All pairs of runs start at the same time, with empty caches.
Then, alone on the device, a third run is killed with SIGKILL after its first checkpoint and resumed; images/s is its
speed. The bits are those of every array in the last checkpoint: weights, statistics and optimizer state.
`--networks=2` adds AlexNet. `--quick` is for a CPU: a tiny network, and no `deterministic=False`, which changes nothing
there.
"""

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from benchmarks import timing
from ssl_jax.workdir import metric_log
from ssl_jax.workdir.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).parent.parent
NETWORKS = {'resnet18_cifar': 'simclr', 'alexnet_small': 'alexnet'}  # {encoder: projector}


def start(folder: pathlib.Path, cache: pathlib.Path, overrides: Sequence[str]) -> subprocess.Popen:
  """Starts a training process. Its output goes to a file next to its folder."""
  command = [sys.executable, 'main.py', '--config=configs/quickstart.py', f'--workdir={folder}']
  command += [f'--config.{key}' for key in overrides]
  environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache), 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  with open(f'{folder}.log', 'a') as output:
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def fail(folder: pathlib.Path) -> None:
  sys.exit(f'a run failed:\n{pathlib.Path(f"{folder}.log").read_text()[-2000:]}')


def killed(process: subprocess.Popen, folder: pathlib.Path) -> int:
  """Waits for the first checkpoint and kills the process. Returns the step of the checkpoint."""
  while process.poll() is None:
    if steps := [int(path.name) for path in (folder / 'checkpoints').glob('*') if path.name.isdigit()]:
      process.send_signal(signal.SIGKILL)
      process.wait()
      return max(steps)
    time.sleep(0.01)
  fail(folder)
  return 0


def fingerprint(folder: pathlib.Path) -> str:
  """A hash of every array in the last checkpoint."""
  checkpoints = Checkpoints(folder)
  state = checkpoints.newest()
  checkpoints.close()
  digest = hashlib.sha256()
  for x in jax.tree.leaves(state):
    digest.update(np.ascontiguousarray(x).tobytes())
  return digest.hexdigest()


def losses(folder: pathlib.Path) -> list[float]:
  return [row['loss'] for row in metric_log.read(folder) if 'loss' in row]


def cases(quick: bool, networks: int) -> dict[str, tuple[str, ...]]:
  """{row: its config overrides}"""
  common = ('parallel.cpu_devices=1', 'eval.every_epochs=0', 'eval.at_start=False', 'eval.k=()')
  common += ('log.tensorboard=False', 'log.every_steps=10')
  if quick:
    return {'resnet_tiny': (*common, 'steps=40', 'checkpoint.every_steps=10', 'batch_size=16', 'model.width=8')}
  common += ('steps=936', 'checkpoint.every_steps=300', 'batch_size=128', 'dtype=bfloat16')
  common += ('optimizer.learning_rate=0.03',)
  return {
    f'{name}, deterministic={way}': (
      *common,
      f'model.name={name}',
      f'projector.name={head}',
      f'deterministic={way}',
    )
    for name, head in list(NETWORKS.items())[:networks]
    for way in (True, False)
  }


def main() -> None:
  args = timing.arguments(__doc__, networks=1)
  logging.set_verbosity(logging.ERROR)  # orbax logs every file
  print(f'{__doc__.splitlines()[0]}\n{jax.devices()[0].device_kind}, jax {jax.__version__}\n')
  print('| run | two runs | largest difference of the loss | killed and resumed | images/s |\n|---|---|---|---|---|')
  chosen = cases(args.quick, args.networks)
  with tempfile.TemporaryDirectory() as temporary:
    folders = {name: [pathlib.Path(temporary) / f'{row}_{run}' for run in range(3)] for row, name in enumerate(chosen)}
    pairs = [(f, start(f, pathlib.Path(f'{f}.cache'), chosen[name])) for name in chosen for f in folders[name][:2]]
    for folder, process in pairs:
      if process.wait():
        fail(folder)
    for name, (one, two, three) in folders.items():
      again = (three, pathlib.Path(f'{one}.cache'), chosen[name])
      step = killed(start(*again), three)
      if start(*again).wait():
        fail(three)
      prints = [fingerprint(run) for run in (one, two, three)]
      apart = max(abs(a - b) for a, b in zip(losses(one), losses(two), strict=True))
      same = ['the same bits' if other == prints[0] else 'other bits' for other in prints[1:]]
      speed = [row['images_per_second'] for row in metric_log.read(three) if 'images_per_second' in row][-1]
      print(f'| {name} | {same[0]} | {apart:.2g} | {same[1]} (killed after step {step}) | {speed:,.0f} |', flush=True)


if __name__ == '__main__':
  main()
