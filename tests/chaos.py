"""Kills a real run again and again, at random moments, and compares everything that it computes with a quiet run.

python -m tests.chaos --kills=20 --seed=0

Each launch of `main.py` is killed at one moment: at a random time of its start, at a random step, in the last save, in
the last evaluation, or by a second SIGTERM in a step. A run that finishes is compared, bit by bit, and the next kills
are those of a new run.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import tests.conftest  # noqa: F401  # sets up jax, before it is imported
from tests.helpers import bits, config_file, results

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 40
CHOICES = {
  'steps': STEPS,
  'checkpoint.every_steps': 4,
  'checkpoint.keep': 3,
  'eval.every_epochs': 5,
  'eval.at_end': True,
  'eval.linear': 'ridge',
  'log.every_steps': 3,  # so that checkpoints are within a row
  'log.tensorboard': True,
}
SECONDS = 300  # after which a launch counts as hanging

# The moments at which a launch is killed, and how often each is drawn.
MOMENTS = {'start': 2, 'step': 8, 'last save': 3, 'last evaluation': 3, 'second SIGTERM': 4}


@contextlib.contextmanager
def launch(config: pathlib.Path, workdir: pathlib.Path) -> Iterator[subprocess.Popen]:
  """main.py in a process of its own, with its output in files beside the workdir."""
  command = [sys.executable, 'main.py', f'--config={config}', f'--workdir={workdir}']
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT)}
  with (workdir.parent / 'out').open('w') as out, (workdir.parent / 'err').open('w') as err:
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)
    try:
      yield process
    finally:
      process.kill()
      process.wait()


def reached(process: subprocess.Popen, condition: Callable[[], bool]) -> bool:
  """Waits for a condition; False if the process ends before."""
  until = time.monotonic() + SECONDS
  while not condition():
    if process.poll() is not None:
      return False
    assert time.monotonic() < until, f'no end after {SECONDS} s'
    time.sleep(0.002)
  return True


def kill(process: subprocess.Popen, moment: str, workdir: pathlib.Path, rng: random.Random) -> bool:
  """Kills the process at the moment; False if it finished before."""
  checkpoints, begun = workdir / 'checkpoints', time.time()
  lines = lambda: (workdir.parent / 'out').read_text().splitlines()
  if moment == 'start':
    due = time.monotonic() + rng.uniform(0, 6)
    happened = reached(process, lambda: time.monotonic() > due)
  elif moment in ('step', 'second SIGTERM'):
    count = rng.randrange(1, 8)  # rows of this launch
    happened = reached(process, lambda: sum(line.startswith('step ') for line in lines()) >= count)
    time.sleep(rng.uniform(0, 0.1))
  elif moment == 'last save':
    happened = reached(process, lambda: any(_since(path, begun) for path in checkpoints.glob(f'{STEPS}*')))
    time.sleep(rng.uniform(0, 0.05))
  else:
    happened = reached(process, lambda: any(line.startswith('evaluation, ') for line in lines()))
    time.sleep(rng.uniform(0, 1))
  if not happened or process.poll() is not None:
    return False
  if moment == 'second SIGTERM':
    process.terminate()
    time.sleep(rng.uniform(0, 0.05))
    process.terminate()
    ended = process.wait(SECONDS)
    return ended != 0
  process.kill()
  return process.wait() == -signal.SIGKILL


def _since(path: pathlib.Path, when: float) -> bool:
  """Whether a path is there and was written since then: a killed launch may have left a part of the last save."""
  try:
    return path.stat().st_mtime >= when
  except FileNotFoundError:
    return False


def check_end(process: subprocess.Popen, workdir: pathlib.Path) -> None:
  """A launch that finished says nothing on stderr."""
  said = (workdir.parent / 'err').read_text()
  assert process.wait(SECONDS) == 0 and not said, said


def chaos(kills: int, seed: int, say: Callable[[str], None] = lambda text: None) -> collections.Counter[str]:
  """Kills runs. -> how often at each moment, and how many runs finished, all with the bits of the quiet one."""
  rng, counts = random.Random(seed), collections.Counter[str]()
  moments = rng.sample(list(MOMENTS), len(MOMENTS))  # each moment once, then random ones
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    config = config_file(folder, CHOICES)
    (folder / 'quiet').mkdir()
    with launch(config, folder / 'quiet' / 'run') as process:
      check_end(process, folder / 'quiet' / 'run')
    expected = everything(folder / 'quiet' / 'run')
    while sum(counts[moment] for moment in MOMENTS) < kills:
      workdir = folder / f'round{counts["runs"]}' / 'run'
      workdir.parent.mkdir()
      while True:
        left = kills - sum(counts[moment] for moment in MOMENTS)
        moments = moments or rng.choices(list(MOMENTS), list(MOMENTS.values()))
        with launch(config, workdir) as process:
          if left and kill(process, moments[0], workdir, rng):
            moment = moments.pop(0)
            counts[moment] += 1
            said = (workdir.parent / 'err').read_text()
            assert 'Traceback' not in said, said
            say(f'{kills - left + 1} of {kills}: {moment}, {place(workdir)}')
            continue
          check_end(process, workdir)
        break
      compare(everything(workdir), expected)
      counts['runs'] += 1
      say(f'run {counts["runs"]} is finished: the same bits')
  return counts


def place(workdir: pathlib.Path) -> str:
  """Where a killed run was, in words."""
  lines = (workdir.parent / 'out').read_text().splitlines()
  saved = sorted(path.name for path in (workdir / 'checkpoints').glob('*'))
  return f'last line {lines[-1][:60]!r}, checkpoints {saved}' if lines else 'before it said anything'


def everything(workdir: pathlib.Path) -> dict[str, Any]:
  """All that a finished run computes, without times and speeds."""
  assert not list(workdir.rglob('*.part')) + list(workdir.rglob('*tmp*')), 'parts are left'
  return {
    **bits(workdir),
    'summary': results(workdir),
    'evaluation': (workdir / 'evaluation.json').read_text(),
    'arrays': (workdir / 'evaluation.npz').read_bytes(),
    'picture': (workdir / 'neighbors.png').read_bytes(),
    'config': (workdir / 'config.json').read_text(),
  }


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
  """An AssertionError that names what differs. A SIGTERM may have left a checkpoint of another step."""
  free = {name for name in found.keys() ^ expected.keys() if name.startswith('checkpoint ')} - {f'checkpoint {STEPS}'}
  for name in sorted((expected.keys() | found.keys()) - free):
    assert found.get(name) == expected.get(name), f'{name} differs'


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  for name, default in (('kills', 20), ('seed', 0)):
    parser.add_argument(f'--{name}', type=int, default=default)
  given = parser.parse_args()
  counts = chaos(given.kills, given.seed, lambda text: print(text, flush=True))
  print(f'{given.kills} kills, seed {given.seed}: ' + ', '.join(f'{n} {name}' for name, n in sorted(counts.items())))


if __name__ == '__main__':
  main()
