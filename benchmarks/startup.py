"""Seconds from the command to the first trained step, with an empty and with a filled compilation cache.

  python -m benchmarks.startup [--quick]

Each row is a process of main.py that trains one epoch of ResNet-18 on the embedded images. `--quick` is for a CPU: a
tiny network and two steps.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax

from benchmarks import timing

ROOT = pathlib.Path(__file__).parent.parent


def measure(folder: str, name: str, overrides: tuple[str, ...]) -> dict[str, float]:
  """Seconds until the data is ready, until the step is compiled, and until the process ends."""
  command = [sys.executable, '-u', 'main.py', '--config=configs/quickstart.py', f'--workdir={folder}/{name}']
  environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': f'{folder}/cache', 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  begun, seen = time.perf_counter(), {}
  with subprocess.Popen(
    [*command, *(f'--config.{key}' for key in overrides)],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  ) as process:
    lines = []
    for line in process.stdout:
      lines.append(line)
      for key in ('compiling', 'compiled'):
        if key in line:
          seen.setdefault(key, time.perf_counter() - begun)
  if process.returncode:
    sys.exit(f'a run failed:\n{"".join(lines)[-2000:]}')
  return {**seen, 'end': time.perf_counter() - begun}


def main() -> None:
  quick = timing.arguments(__doc__).quick
  common = ('eval.every_epochs=0', 'eval.at_start=False', 'eval.k=()', 'log.tensorboard=False')
  large = ('model.name=resnet18_cifar', 'projector.name=simclr', 'dtype=bfloat16', 'batch_size=128', 'steps=78')
  large += ('optimizer.warmup_epochs=0.0',)
  small = ('steps=2', 'optimizer.warmup_epochs=0.0', 'batch_size=16', 'model.width=8')
  print(f'{__doc__.splitlines()[0]}\n{jax.devices()[0].device_kind}, jax {jax.__version__}\n')
  print('| cache | data ready | first dispatch compiled | process ended |\n|---|---|---|---|')
  with tempfile.TemporaryDirectory() as folder:
    for cache in ('empty', 'filled'):
      found = measure(folder, cache, (*common, *(small if quick else large)))
      print(f'| {cache} | {found["compiling"]:.1f} s | {found["compiled"]:.1f} s | {found["end"]:.1f} s |', flush=True)


if __name__ == '__main__':
  main()
