"""The same command, the same bits: two runs with separate compilation caches, and one that is killed and resumed.

  python -m benchmarks.determinism [--quick]

Each run is a process of main.py on the embedded images. Runs 1 and 2 start at the same time, each with an empty cache of
compiled programs. Run 3 is killed with SIGKILL after its first checkpoint and started again, which ends in the summary's
images/s (with the cache of run 1, alone on the device). Bits are those of every array of the last checkpoint: weights,
statistics, optimizer. `--quick` is for a CPU: a tiny network, and no `deterministic=False`, which changes nothing there.
"""

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from benchmarks import timing
from ssl_jax.workdir import metric_log
from ssl_jax.workdir.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).parent.parent
STEPS, EVERY = 600, 150  # per run, and between checkpoints


def start(folder: pathlib.Path, cache: pathlib.Path, *overrides: str) -> subprocess.Popen:
  """A training process, whose output goes to a file beside its folder."""
  command = [sys.executable, 'main.py', '--config=configs/quickstart.py', f'--workdir={folder}']
  command += [f'--config.{key}' for key in overrides]
  environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache), 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  output = open(folder.with_suffix('.log'), 'a')
  return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, folder: pathlib.Path) -> None:
  if process.wait():
    sys.exit(f'a run failed:\n{folder.with_suffix(".log").read_text()[-2000:]}')


def killed(process: subprocess.Popen, folder: pathlib.Path) -> int:
  """Waits for the first checkpoint and kills the process. Returns the step of the checkpoint."""
  while process.poll() is None:
    if steps := [int(path.name) for path in (folder / 'checkpoints').glob('*') if path.name.isdigit()]:
      process.send_signal(signal.SIGKILL)
      process.wait()
      return max(steps)
    time.sleep(0.02)
  sys.exit(f'a run ended before it could be killed:\n{folder.with_suffix(".log").read_text()[-2000:]}')


def fingerprint(folder: pathlib.Path) -> str:
  """Of every array of the last checkpoint."""
  checkpoints = Checkpoints(folder)
  state = checkpoints.newest()
  checkpoints.close()
  digest = hashlib.sha256()
  for x in jax.tree.leaves(state):
    digest.update(np.ascontiguousarray(x).tobytes())
  return digest.hexdigest()[:12]


def losses(folder: pathlib.Path) -> list[float]:
  return [row['loss'] for row in metric_log.read(folder) if 'loss' in row]


def compare(folder: pathlib.Path, name: str, *overrides: str) -> None:
  """Makes the three runs and prints their row."""
  one, two, three = (folder / f'{name}_{i}' for i in (1, 2, 3))
  both = [(start(run, folder / f'cache_{run.name}', *overrides), run) for run in (one, two)]
  for process, run in both:
    finish(process, run)
  step = killed(start(three, folder / f'cache_{one.name}', *overrides), three)
  finish(start(three, folder / f'cache_{one.name}', *overrides), three)
  prints = [fingerprint(run) for run in (one, two, three)]
  apart = max(abs(a - b) for a, b in zip(losses(one), losses(two), strict=True))
  same = lambda i: 'the same bits' if prints[i] == prints[0] else 'other bits'
  speed = [row['images_per_second'] for row in metric_log.read(three) if 'images_per_second' in row][-1]
  print(f'| {name} | {same(1)} | {apart:.2g} | {same(2)} (killed after step {step}) | {speed:,.0f} |', flush=True)


def main() -> None:
  quick = timing.arguments(__doc__).quick
  common = ('parallel.cpu_devices=1', 'eval.every_epochs=0', 'eval.at_start=False', 'log.tensorboard=False', 'eval.k=()')
  common += (f'steps={40 if quick else STEPS}', f'checkpoint.every_steps={10 if quick else EVERY}', 'log.every_steps=10')
  sizes = ('batch_size=16', 'model.width=8') if quick else ('batch_size=128', 'dtype=bfloat16')
  networks = ('resnet_tiny',) if quick else ('resnet18_cifar', 'alexnet_small')
  print(f'{__doc__.splitlines()[0]}\n{jax.devices()[0].device_kind}, jax {jax.__version__}\n')
  print('| run | two runs | largest difference of the loss | killed and resumed | images/s |\n|---|---|---|---|---|')
  with tempfile.TemporaryDirectory() as folder:
    for network in networks:
      for deterministic in (True,) if quick else (True, False):
        mine = () if quick else (('projector.name=alexnet',) if 'alexnet' in network else ())
        name = f'{network}, deterministic={deterministic}'
        given = (*common, *sizes, f'model.name={network}', f'deterministic={deterministic}', *mine)
        compare(pathlib.Path(folder), name.replace(', ', '_').replace('=', '_'), *given)


if __name__ == '__main__':
  main()
