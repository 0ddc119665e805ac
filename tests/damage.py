"""Damages a file of a run, and runs a command on it: it gives the right result, or says in one line what is wrong.

    python -m tests.damage --cases=200 --seed=0

A case is a command, a file (or folder) of its workdir, and a kind of damage, chosen at random from all of them. A case
that fails is printed, and is made again by its number:

    python -m tests.damage --cases=1 --seed=0 --first=47

`silent`: the command ended well, with another result and without a warning.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy
from absl import flags

import main as program
import tests.conftest  # noqa: F401  # sets up jax, before it is imported
from tests.helpers import bits, config_file, results

SECONDS = 300  # after which a command counts as hanging
# The files that each command reads, or replaces. `early` is the report of a run without an evaluation.
READ = {
  'train': (
    'config.json',
    'metrics.jsonl',
    'summary.json',
    'tensorboard',
    'neighbors.png',
    'evaluation',
    'checkpoints',
  ),
  'evaluate': ('config.json', 'evaluation', 'checkpoints'),
  'export': ('config.json', 'summary.json', 'evaluation', 'checkpoints'),
  'report': ('config.json', 'summary.json', 'evaluation', 'metrics.jsonl'),
  'early': ('config.json', 'summary.json', 'metrics.jsonl', 'neighbors.png'),
  'compare': ('config.json', 'summary.json', 'evaluation', 'metrics.jsonl'),
}
CHOICES: dict[str, Any] = {
  'steps': 4,
  'checkpoint.every_steps': 2,
  'eval.every_epochs': 1,
  'eval.at_end': True,
  'eval.linear': 'ridge',
  'log.tensorboard': True,
}


def flip(file: pathlib.Path, rng: random.Random | None = None) -> None:
  """Inverts 8 bytes, in the middle of a file or at a random place."""
  data = bytearray(file.read_bytes())
  start = max(0, len(data) // 2 - 4) if rng is None else rng.randrange(max(1, len(data) - 8))
  data[start : start + 8] = bytes(255 - x for x in data[start : start + 8])
  file.write_bytes(data)


def harm(path: pathlib.Path, kind: str, rng: random.Random | None = None) -> None:
  """Damages a file, or replaces a folder."""
  if kind == 'flip':
    flip(path, rng)
  elif kind == 'truncate':
    size = path.stat().st_size
    os.truncate(path, size // 2 if rng is None else rng.randrange(max(1, size)))
  elif kind == 'extend':
    path.write_bytes(path.read_bytes() + b'\0more\n')
  else:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    REPLACE[kind](path)


REPLACE: dict[str, Callable[[pathlib.Path], Any]] = {
  'remove': lambda path: None,
  'directory': pathlib.Path.mkdir,
  'fifo': os.mkfifo,
  'empty': pathlib.Path.touch,
  'zeros': lambda path: path.write_bytes(bytes(1000)),
  'null': lambda path: path.write_text('null\n'),
  'list': lambda path: path.write_text('[1, 2]\n'),
  'mapping': lambda path: path.write_text('{"step": {}, "knn5": "x", "steps": null, "config": []}\n'),
  'dangling link': lambda path: path.symlink_to('nowhere'),
  'link to itself': lambda path: path.symlink_to(path.name),
}
KINDS = ('flip', 'truncate', 'extend', *REPLACE)
OF_FOLDERS = ('remove', 'empty', 'fifo', 'dangling link', 'link to itself', 'directory')


def command(*arguments: str) -> tuple[str, str]:
  """Runs main.py in this process. -> (its message, '' if it ends well; its warnings); other errors are raised"""
  flags.FLAGS.unparse_flags()
  rest = flags.FLAGS(['main.py', '--config=', '--workdir=', '--mode=train', *arguments], known_only=True)

  def hangs(*_: Any) -> None:
    raise AssertionError(f'no end after {SECONDS} s')

  previous = signal.signal(signal.SIGALRM, hangs)
  signal.alarm(SECONDS)
  said, warned = io.StringIO(), io.StringIO()
  try:
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(warned):
      program.main(rest)
    return '', warned.getvalue()
  except SystemExit as stopped:
    return str(stopped.code), warned.getvalue()
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def outcome(mode: str, folder: pathlib.Path) -> Any:
  """What a command computed, to compare with the same of an intact workdir."""
  run = folder / 'run'
  if mode == 'train':
    return {**bits(run, newest=1), 'config': json.loads((run / 'config.json').read_text()), 'summary': results(run)}
  if mode == 'evaluate':
    return json.loads((run / 'evaluation.json').read_text())
  if mode == 'export':
    tensors = safetensors.numpy.load_file(run / 'export' / 'model.safetensors')
    return {name: np.asarray(tensor).tobytes() for name, tensor in tensors.items()}
  return (folder / 'compared' / 'compare.md' if mode == 'compare' else run / 'report.md').read_text()


class Bench:
  """An intact run, the result of each command on it, and the cases."""

  def __init__(self, folder: pathlib.Path):
    self.folder, self.intact = folder, folder / 'intact'
    self.config = config_file(folder, CHOICES)
    for name, more in (('intact', ()), ('other', ('--config.seed=1',))):
      message, _ = command(f'--config={self.config}', f'--workdir={folder / name}', *more)
      assert not message, message
    self.expected: dict[str, Any] = {}
    paths = sorted(path for path in self.intact.rglob('*') if path.is_file() or 'checkpoints' in path.parts)
    self.names = ['checkpoints', *(str(path.relative_to(self.intact)) for path in paths)]

  def case(self, rng: random.Random) -> tuple[str, str, str]:
    """(mode, file, kind)"""
    mode = rng.choice(list(READ))
    read = rng.choice(READ[mode]) if rng.random() < 0.95 else ''  # a kind of files first: most belong to checkpoints
    name = rng.choice([name for name in self.names if name.startswith(read)])
    return mode, name, rng.choice(OF_FOLDERS if (self.intact / name).is_dir() else KINDS)

  def run(self, mode: str, name: str = '', kind: str = '', rng: random.Random | None = None) -> tuple[str, str]:
    """Runs a command on a damaged copy. -> (intact, warned, one line, silent or failed; what it said)"""
    run = self.folder / 'run'
    for old in (run, self.folder / 'compared'):
      shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(self.intact, run)
    if mode == 'early':
      for file in run.glob('evaluation.*'):
        file.unlink()
    if mode not in self.expected and name:
      self.run(mode)
      return self.run(mode, name, kind, rng)
    if name and os.path.lexists(run / name):
      harm(run / name, kind, rng)
    given = [f'--config={self.config}'] if mode == 'train' else []
    given += [
      f'--mode={"report" if mode == "early" else mode}',
      f'--workdir={self.folder / "compared" if mode == "compare" else run}',
    ]
    given += [str(run), str(self.folder / 'other')] if mode == 'compare' else []
    try:
      message, warned = command(*given)
      if message:
        one_line = message.startswith('ssl_jax: ') and '\n' not in message
        return 'one line' if one_line else 'failed', message
      found = outcome(mode, self.folder)
    except Exception as error:
      return 'failed', ''.join(traceback.format_exception(error)[-4:])
    if not name:
      assert not warned, warned
      self.expected[mode] = found
    if found == self.expected[mode]:
      return 'intact', warned
    # Training must end with the same bits, except for rows of earlier steps, which it cannot compute again.
    others = lambda result: {key: value for key, value in result.items() if key != 'rows'}
    if warned and (mode != 'train' or ('rows are lost' in warned and others(found) == others(self.expected[mode]))):
      return 'warned', warned
    if mode in ('report', 'early', 'compare') and not os.path.lexists(run / name):
      return 'left out', ''  # a missing file is a part of the report that is missing
    return 'silent', f'another result than that of the intact workdir {warned}'


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
  with (
    tempfile.TemporaryDirectory() as folder,
    mock.patch('ssl_jax.run.devices.start', lambda *_: None),
    mock.patch('ssl_jax.run.devices.compile_faster', lambda *_: None),
    # Most of the time of a report, on arrays that have been checked.
    mock.patch('ssl_jax.reporting.figures.save', lambda *_: None),
    mock.patch('ssl_jax.reporting.figures.svg', lambda *_: '<svg viewBox="0 0 1 1"></svg>'),
    mock.patch('ssl_jax.reporting.charts.embed', lambda *_: ''),
  ):
    yield Bench(pathlib.Path(folder))


def damage(cases: int, seed: int, first: int = 0, progress: bool = False) -> tuple[dict[str, int], list[str]]:
  """Runs cases. -> (how many ended how, a description of each failure)"""
  counts, failures, begun = collections.Counter[str](), [], time.monotonic()
  with bench() as made:
    for number in range(first, first + cases):
      rng = random.Random(f'{seed}/{number}')
      case = made.case(rng)
      end, said = made.run(*case, rng)
      counts[end] += 1
      if end in ('failed', 'silent'):
        failures.append(f'case {number}, {end}: {case}\n  {said}')
      if progress:
        print(f'{number}, {time.monotonic() - begun:.0f} s, {end}: {", ".join(case)}: {said}'.rstrip(), flush=True)
  return dict(counts), failures


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  for name, default in (('cases', 200), ('seed', 0), ('first', 0)):
    parser.add_argument(f'--{name}', type=int, default=default)
  given = parser.parse_args()
  counts, failures = damage(given.cases, given.seed, given.first, progress=True)
  print('\n'.join(failures))
  print(f'{given.cases} cases, seed {given.seed}: ' + ', '.join(f'{n} {name}' for name, n in counts.items()))
  sys.exit(1 if failures else 0)


if __name__ == '__main__':
  main()
