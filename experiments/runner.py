"""Does the runs of a paper's table that are missing, and keeps what they gave.

  python -m experiments.dystress.sweep --budget-minutes=25   # what is missing, most important first, for 25 minutes
  python -m experiments.dystress.sweep --list                # what is done and what is not, with each run's command
  python -m experiments.dystress.sweep --table               # results.jsonl -> the table and its picture in README.md

A run is one process of main.py and one line of results.jsonl: config, commit, seed, device, wall time, protocol and
every metric at the last epoch. An interrupted sweep stops its runs, which save themselves; the same command goes on.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import pictures, tables
from experiments.tables import Row, Sweep
from ssl_jax.registry import nearest

GRACE = 2.0  # minutes that runs may go over the budget before they are stopped


def missing(sweep: Sweep, finished: Mapping, only: Sequence[str] = (), seeds: int = 0) -> list[tuple[Row, int]]:
  """(row, seed) of every run that is not done: first seeds first, further rows last, or `only` some in that order.

  `seeds`: at least so many.
  """
  rows = {row.name: row for row in sweep.rows}
  for name in only:
    if name not in rows:
      raise ValueError(f'--only={name!r} is no row of the sweep: {nearest(name, list(rows))}')
  jobs = []
  for place, row in enumerate([rows[name] for name in dict.fromkeys(only)] or sweep.rows):
    wanted = [*row.seeds, *(seed for seed in range(seeds) if seed not in row.seeds)]
    for turn, seed in enumerate(wanted):
      if (row.name, seed) not in finished:
        jobs.append(((row.further and not only, turn, place), row, seed))
  return [(row, seed) for _, row, seed in sorted(jobs, key=lambda job: job[0])]


def estimate(sweep: Sweep, row: Row, seed: int, finished: Mapping, device: str, runs: pathlib.Path) -> float:
  """Minutes that a run would take alone: from runs of the same config file and options here, or the row's guess."""
  epochs = sweep.resolve(row, seed)['epochs']
  like = {other.name for other in sweep.rows if other.config == row.config}
  like = [r for (name, _), r in finished.items() if name in like and r['device'] == device]
  times = [r['wall_seconds'] / 60 / slowdown(r['side_by_side']) * epochs / r['epochs'] for r in like]
  part = _epochs(runs / f'{row.name}_seed{seed}') / epochs  # of a run that was interrupted
  return (statistics.mean(times) if times else row.minutes) * max(1 - part, 0.2)  # it still starts and evaluates


def slowdown(side_by_side: int) -> float:
  """How much longer a run takes beside others: 1.6 for two, 2.25 for three (measured: ResNet-18, one H200, MPS)."""
  return 1 + 0.6 * (side_by_side - 1)


def needed_minutes(alone: Sequence[float], running: Sequence[float], side_by_side: int) -> list[float]:
  """Until each of the jobs would end if it started now: its own time, and what is left of the runs before it."""
  slower = slowdown(side_by_side)
  return [max(own * slower, (sum(running) + own) * slower / side_by_side) for own in alone]


def device_here() -> str:
  """In the words of a result. Not from jax, which would take the GPU's memory."""
  try:
    told = subprocess.run(['nvidia-smi', '--query-gpu=name', '--format=csv,noheader'], capture_output=True, text=True)
  except OSError:
    return '1 x cpu'
  names = told.stdout.splitlines()
  return f'{len(names)} x {names[0]}' if names else '1 x cpu'


def commit_here() -> str:
  """The commit of the code, '-dirty' where files differ from it that are not results."""

  def git(*arguments):
    return subprocess.run(['git', *arguments], capture_output=True, text=True, check=True).stdout.strip()

  results = [f':!experiments/*/{name}' for name in ('results.jsonl', 'README.md', '*.svg')]
  try:
    return git('rev-parse', 'HEAD') + ('-dirty' if git('status', '--porcelain', '--', '.', *results) else '')
  except (OSError, subprocess.CalledProcessError):
    raise ValueError('git does not tell the commit here: give --commit=HASH') from None


def _metrics(workdir: pathlib.Path) -> list[dict]:
  """The rows of metrics.jsonl; an interruption may have cut the last one short."""
  file = workdir / 'metrics.jsonl'
  return [json.loads(line) for line in (file.read_text().splitlines() if file.exists() else ()) if line.endswith('}')]


def _epochs(workdir: pathlib.Path) -> float:
  """How many a run has trained; rows of evaluations do not say."""
  return max((row.get('epoch', 0.0) for row in _metrics(workdir)), default=0.0)


class Child:
  """A run of main.py. Its log and the time of its parts, where it was interrupted, lie in its workdir."""

  def __init__(self, sweep: Sweep, row: Row, seed: int, runs: pathlib.Path, program: str, environment: Mapping):
    self.sweep, self.row, self.seed, self.name = sweep, row, seed, f'{row.name}_seed{seed}'
    self.workdir, self.start, self.epochs = runs / self.name, time.monotonic(), sweep.resolve(row, seed)['epochs']
    self.workdir.mkdir(parents=True, exist_ok=True)
    self.rows, self.paused_at, self.waited = len(_metrics(self.workdir)), None, 0.0
    arguments = [sys.executable, program, *sweep.command(row, seed, runs)[2:]]
    with (self.workdir / 'log.txt').open('a') as log:
      # In a group of its own: Ctrl-C reaches this program alone, which asks each run to stop.
      common = dict(stdout=log, stderr=subprocess.STDOUT, process_group=0)
      self.process = subprocess.Popen(arguments, env=environment, **common)

  def wait(self) -> None:
    """For its turn, as soon as everything is compiled: with its first row of metrics, an epoch."""
    if self.paused_at is None and len(_metrics(self.workdir)) > self.rows:
      self.process.send_signal(signal.SIGSTOP)
      self.paused_at = time.monotonic()

  def go_on(self) -> None:
    if self.paused_at is not None:
      self.process.send_signal(signal.SIGCONT)
      self.paused_at, self.waited = None, self.waited + time.monotonic() - self.paused_at

  def stop(self, number: int) -> None:
    self.process.send_signal(number)
    self.go_on()

  def trained(self) -> bool:
    """All epochs are over; what is left is the evaluation."""
    return _epochs(self.workdir) >= self.epochs

  def seconds(self) -> float:
    """Of this part and of those before it, without the waiting."""
    file = self.workdir / 'wall_seconds'
    total = time.monotonic() - self.start - self.waited + (float(file.read_text()) if file.exists() else 0.0)
    file.write_text(f'{total}\n')
    return round(total, 1)

  def result(self, **facts) -> dict:
    """The row of results.jsonl, or an error with the last line of the log."""
    if (number := -self.process.returncode) > 0:
      name = next((known.name for known in signal.Signals if known == number), f'signal {number}')
      raise ValueError(f'ended by {name}; its log is {self.workdir / "log.txt"}')
    if self.process.returncode:
      lines = [line for line in (self.workdir / 'log.txt').read_text(errors='replace').splitlines() if line.strip()]
      raise ValueError(lines[-1] if lines else f'exit status {self.process.returncode}')
    load = lambda name: json.loads((self.workdir / f'{name}.json').read_text())
    config, summary, evaluation = load('config'), load('summary'), load('evaluation')
    if evaluation['step'] != summary['steps']:
      raise ValueError(f'evaluation.json is of step {evaluation["step"]}; the last is {summary["steps"]}')
    config['data']['path'] = ''
    images = summary['images']
    rates = [rate for r in _metrics(self.workdir) for name, rate in r.items() if name.endswith('_per_second')]
    seconds = [images / rate for rate in rates]
    metrics = {k: v for k, v in evaluation.items() if isinstance(v, int | float) and k not in ('step', 'epoch')}
    metrics |= {f'{layer}/{k}': v for layer, found in evaluation['measures'].items() for k, v in found.items()}
    with np.load(self.workdir / 'evaluation.npz') as stored:
      curves = {name: [round(float(x), 6) for x in stored[name]] for name in self.sweep.curves}
    return {
      'name': self.row.name,
      'seed': self.seed,
      **facts,
      **{key: summary[key] for key in ('device', 'jax', 'peak_memory_gib')},
      # The first row has the time of compiling in it, and so has the first after an interruption: the median.
      'seconds_per_epoch': round(statistics.median(seconds[1:] or seconds), 4),
      'epochs': evaluation['epoch'],
      'protocol': self.sweep.protocol,
      'images': evaluation['images'],
      'finished_at': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'metrics': metrics,
      'curves': curves,
      'config': config,
    }


def run(
  sweep: Sweep,
  folder: pathlib.Path,
  *,
  runs: pathlib.Path,
  budget: float = math.inf,
  side_by_side: int = 1,
  ahead: int = 0,
  only: Sequence[str] = (),
  seeds: int = 0,
  commit: str = '',
  program: str = 'main.py',
  grace: float = GRACE,
) -> list[str]:
  """Does what is missing and fits into the budget, in minutes. Returns the names of the runs that failed.

  `side_by_side` runs train at once. `ahead` more start early and compile, then wait until one of those has trained.
  """
  if side_by_side > 1 and sweep.timed:
    raise ValueError(f'--side-by-side={side_by_side} would spoil the times of this table: leave it out')
  start, device, commit = time.monotonic(), device_here(), commit or commit_here()
  elapsed = lambda: (time.monotonic() - start) / 60
  say = lambda text: print(f'[{elapsed():5.1f} min] {text}', flush=True)
  finished, running, failed, signals = tables.done(sweep, folder), [], [], []
  jobs = missing(sweep, finished, only, seeds)
  most = side_by_side + ahead
  stopping, looking = False, True  # what does not fit now fits no later, until there are new results
  environment = dict(os.environ)
  if most > 1:  # or as the user says
    environment.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{0.9 / most:.3f}')
  stops = (signal.SIGINT, signal.SIGTERM)
  previous = [signal.signal(number, lambda number, _: signals.append(number)) for number in stops]
  try:
    while True:
      while looking and jobs and len(running) < most and not stopping:
        alone = lambda row, seed: estimate(sweep, row, seed, finished, device, runs)
        needed = needed_minutes([alone(*job) for job in jobs], [alone(c.row, c.seed) for c in running], side_by_side)
        first = next((i for i, minutes in enumerate(needed) if elapsed() + minutes <= budget), None)
        if looking := first is not None:
          say(f'starts {jobs[first][0].name}, seed {jobs[first][1]}: about {needed[first]:.1f} min')
          running.append(Child(sweep, *jobs.pop(first), runs, program, environment))
      if not running:
        break
      time.sleep(0.1)
      if ahead and not stopping:
        for place, child in enumerate([child for child in running if not child.trained()]):
          child.go_on() if place < side_by_side else child.wait()
      if not stopping and (signals or elapsed() > budget + grace):
        stopping = True
        say(f'stops {", ".join(child.name for child in running)}')
        for child in running:
          child.stop(signal.SIGTERM)
      if len(signals) > 1:  # asked twice
        for child in running:
          child.stop(signal.SIGKILL)
      for child in [child for child in running if child.process.poll() is not None]:
        running.remove(child)
        looking = True
        typed = shlex.join(sweep.command(child.row, child.seed, pathlib.Path('runs') / folder.name))
        facts = dict(command=typed, commit=commit, wall_seconds=child.seconds(), side_by_side=side_by_side, ahead=ahead)
        try:
          result = child.result(**facts)
        except (ValueError, OSError, KeyError) as error:
          failed += [] if stopping else [child.name]
          say(f'{child.name} {"is stopped, the same command goes on with it" if stopping else "failed"}: {error}')
          continue
        tables.append(folder / 'results.jsonl', result)
        finished[child.row.name, child.seed] = result
        shutil.rmtree(child.workdir / 'features', ignore_errors=True)  # up to a GB, and main.py can make it again
        told = [(column, column.values([result])) for column in sweep.columns]
        say(f'{child.name}: ' + ', '.join(f'{column.title} {column.show(found[0])}' for column, found in told if found))
  finally:
    for child in running:  # after an error of this program
      child.stop(signal.SIGTERM)
    for number, handler in zip(stops, previous, strict=True):
      signal.signal(number, handler)
  if jobs:
    say(f'{len(jobs)} runs are still missing; next is {jobs[0][0].name}, seed {jobs[0][1]}')
  return failed


def main(sweep: Sweep, folder: pathlib.Path, arguments: Sequence[str] | None = None, program: str = 'main.py') -> None:
  parser = argparse.ArgumentParser(description=f'{sweep.title}. {sweep.protocol}')
  names = lambda text: [name for name in text.split(',') if name]
  parser.add_argument('--list', action='store_true', help='say what is done and what is missing')
  parser.add_argument('--table', action='store_true', help='write the table of the results into README.md')
  parser.add_argument(
    '--budget-minutes', dest='budget', type=float, default=math.inf, help='no run starts that would end later'
  )
  parser.add_argument('--side-by-side', type=int, default=1, help='so many runs at once (2 or 3 with NVIDIA MPS)')
  parser.add_argument('--ahead', type=int, default=0, help='so many more compile meanwhile, and wait for their turn')
  parser.add_argument('--only', type=names, default=(), help='names of rows, parted by commas, in this order')
  parser.add_argument('--seeds', type=int, default=0, help='at least so many seeds of each row')
  parser.add_argument('--runs', type=pathlib.Path, default=pathlib.Path('runs') / folder.name, help='the workdirs')
  parser.add_argument('--commit', default='', help='of the code, where git does not tell')
  chosen = vars(parser.parse_args(arguments))
  listing, writing, failed = chosen.pop('list'), chosen.pop('table'), []
  try:
    if listing:
      return describe(sweep, folder, chosen)
    if not writing:
      failed = run(sweep, folder, **chosen, program=program)
    tables.write(sweep, folder)
    pictures.draw(sweep, folder)
    print(f'{folder / "README.md"} has the table of {len(tables.done(sweep, folder))} runs')
  except ValueError as error:
    sys.exit(f'{folder.name}: {error}')
  if failed:
    sys.exit(f'{folder.name}: failed: {", ".join(failed)}')


def describe(sweep: Sweep, folder: pathlib.Path, chosen: Mapping) -> None:
  """Each row: seeds done, seeds missing, minutes, and the command of the next seed."""
  finished, device, runs = tables.done(sweep, folder), device_here(), chosen['runs']
  left = missing(sweep, finished, chosen['only'], chosen['seeds'])
  for row in sweep.rows:
    if chosen['only'] and row.name not in chosen['only']:
      continue
    ready, waiting = [seed for name, seed in finished if name == row.name], [s for other, s in left if other is row]
    seed = (waiting or row.seeds)[0]
    minutes = estimate(sweep, row, seed, finished, device, runs)
    print(f'{row.name}: seeds done {ready}, missing {waiting}, {minutes:.1f} min each{", further" * row.further}')
    print(f'  {shlex.join(sweep.command(row, seed, runs))}')
