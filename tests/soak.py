"""Trains for many steps and checks that memory, open files and threads do not grow.

python -m tests.soak --steps=3000

Two runs, with the images on the device and from two worker processes. Both evaluate every 20 steps, save every 10, and
write for TensorBoard.
"""

import argparse
import os
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import tests.conftest  # noqa: F401  # sets up jax, before it is imported
from ssl_jax import train
from ssl_jax.workdir import metric_log
from tests.helpers import tiny

MEMORY = 8  # MiB by which the median of the last third may exceed that of the second: the allocator's noise
COUNT = 2  # files and threads by which it may
CHOICES: dict[str, Any] = {
  'eval.every_epochs': 10,
  'checkpoint.every_steps': 10,
  'log.every_steps': 1,
  'log.tensorboard': True,
}


class Usage(NamedTuple):
  """What a process holds."""

  memory: float  # MiB, with its children
  files: int
  threads: int
  python_threads: int
  children: int


def usage() -> Usage:
  """The present usage, from /proc."""
  own = os.getpid()
  tasks = pathlib.Path(f'/proc/{own}/task').glob('*/children')  # a process belongs to the thread that started it
  children = [int(x) for task in tasks for x in _text(task).split()]
  pages = sum(int((_text(pathlib.Path(f'/proc/{pid}/statm')) or '0 0').split()[1]) for pid in (own, *children))
  return Usage(
    memory=pages * os.sysconf('SC_PAGE_SIZE') / 2**20,
    files=len(os.listdir(f'/proc/{own}/fd')),
    threads=len(os.listdir(f'/proc/{own}/task')),
    python_threads=threading.active_count(),
    children=len(children),
  )


def _text(file: pathlib.Path) -> str:
  try:
    return file.read_text()
  except OSError:  # the thread or process has ended
    return ''


def soak(steps: int, folder: pathlib.Path, **choices: Any) -> list[Usage]:
  """Trains for so many steps. -> the usage at each row of metrics"""
  found: list[Usage] = []
  write = metric_log.MetricLog.write

  def watched(log: metric_log.MetricLog, step: int, row: Any) -> None:
    write(log, step, row)
    found.append(usage())

  with mock.patch.object(metric_log.MetricLog, 'write', watched):
    train.train(tiny(folder, **CHOICES | {'steps': steps} | choices), str(folder / 'run'))
  return found


def growth(found: Sequence[Usage]) -> Usage:
  """How far the median usage of the last third exceeds that of the second third; the first third warms up.

  Medians, since a save or an evaluation holds more for a moment; what leaks is held at every row after it.
  """
  third = len(found) // 3
  before, after = (_medians(part) for part in (found[third : 2 * third], found[2 * third :]))
  return Usage(*(y - x for x, y in zip(before, after, strict=True)))


def _medians(found: Sequence[Usage]) -> Usage:
  return Usage(*map(statistics.median_high, zip(*found, strict=True)))


def check(steps: int, say: Callable[[str], None] = lambda text: None) -> None:
  """An AssertionError if anything grows."""
  for name, choices in (('on the device', {}), ('two workers', {'data.on_device': 'no', 'data.workers': 2})):
    with tempfile.TemporaryDirectory() as folder:
      begun, before = time.monotonic(), usage()
      found = soak(steps, pathlib.Path(folder), **choices)
      grown, after = growth(found), usage()
    say(f'{name}, {steps} steps, {time.monotonic() - begun:.0f} s: at the end {found[-1]}')
    say(f'  median of the last third minus that of the second: {grown}; after the run {after}, before it {before}')
    for i in range(0, len(found), max(1, len(found) // 6)):
      say(f'  from row {i}: median {_medians(found[i : i + max(1, len(found) // 6)])}')
    assert grown.memory <= MEMORY, f'{name}: memory grows by {grown.memory:.1f} MiB'
    assert max(grown[1:]) <= COUNT, f'{name}: {grown}'


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--steps', type=int, default=3000)
  check(parser.parse_args().steps, lambda text: print(text, flush=True))


if __name__ == '__main__':
  main()
