"""Runs the missing rows of a paper's table and records the results.

  python -m experiments.dystress.sweep --budget-minutes=25   # missing runs, most important first, for 25 minutes
  python -m experiments.dystress.sweep --of='Table 9'         # the runs of one table or figure
  python -m experiments.dystress.sweep --list                # what is done, what is missing, and each run's command
  python -m experiments.dystress.sweep --table               # results.jsonl -> the table and figures in README.md
  python -m experiments.dystress.sweep --difference=cosine,simclr_0.2    # difference of two rows

A run is one process of main.py and one line of results.jsonl: config, commit, seed, device, wall time, protocol and
every metric at the last epoch. An interrupted sweep stops its runs, which save a checkpoint first. The same command
resumes them. The same sweep may be started several times, for example once per GPU: each skips what another is running.
"""

import argparse
import dataclasses
import datetime
import fcntl
import importlib.metadata
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
from ssl_jax.reporting import figures
from ssl_jax.workdir import metric_log, progress

GRACE = 2.0  # minutes that runs may exceed the budget before they are stopped
FAILURES = 3  # after so many runs in a row that fail with the same error, no more are started


def missing(sweep: Sweep, finished: Mapping, only: Sequence[str] = (), seeds: int = 0) -> list[tuple[Row, int]]:
  """(row, seed) of every missing run: first seeds first, `further` rows last. `only`: these rows, in this order."""
  rows = {row.name: row for row in sweep.rows}
  if seeds < 0:
    raise ValueError(f'--seeds={seeds} must be at least 0')
  for name in only:
    if name not in rows:
      raise ValueError(f'--only={name!r} is not a row of the sweep: {nearest(name, list(rows))}')
  jobs = []
  for place, row in enumerate([rows[name] for name in dict.fromkeys(only)] or sweep.rows):
    wanted = [*row.seeds, *(seed for seed in range(seeds) if seed not in row.seeds)]
    for turn, seed in enumerate(wanted):
      if (row.name, seed) not in finished:
        jobs.append(((row.further and not only, turn, place), row, seed))
  return [(row, seed) for _, row, seed in sorted(jobs, key=lambda job: job[0])]


def estimate(sweep: Sweep, row: Row, seed: int, finished: Mapping, device: str, runs: pathlib.Path) -> float:
  """Estimated minutes of a run on its own, from finished runs of the same config file and options or `row.minutes`."""
  epochs = sweep.resolve(row, seed)['epochs']
  names = {other.name for other in sweep.rows if other.config == row.config}
  alike = [r for (name, _), r in finished.items() if name in names and r['device'] == device]
  share = lambda r: epochs / r['epochs'] if r['epochs'] else 1.0  # without training, epochs do not matter
  times = [r['wall_seconds'] / 60 / slowdown(r['side_by_side']) * share(r) for r in alike]
  done = max((r.get('epoch', 0.0) for r in metric_log.read(runs / f'{row.name}_seed{seed}')), default=0.0)
  # The rest of an interrupted run, and at least a fifth, since it has to start and evaluate in any case.
  return (statistics.mean(times) if times else row.minutes) * max(1 - done / epochs, 0.2)


def slowdown(side_by_side: int) -> float:
  """How many times longer concurrent runs take: about 1.6 for two, 2.2 for three (ResNet-18, one H200, MPS)."""
  return 1 + 0.6 * (side_by_side - 1)


def needed_minutes(alone: Sequence[float], running: Sequence[float], side_by_side: int, others: int = 0) -> list[float]:
  """Minutes until each job would end if it started now, concurrently with the active runs and those of other sweeps."""
  slower = slowdown(side_by_side + others)
  return [max(own * slower, (sum(running) + own) * slower / side_by_side) for own in alone]


def device_here() -> str:
  """The device, as a result names it. Does not ask jax, which would allocate GPU memory."""
  command = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader']
  if visible := os.environ.get('CUDA_VISIBLE_DEVICES'):
    command.append(f'--id={visible}')
  try:
    answer = subprocess.run(command, capture_output=True, text=True)
  except OSError:
    return '1 x cpu'
  names = answer.stdout.splitlines()
  return f'{len(names)} x {names[0]}' if names else '1 x cpu'


def untrained() -> dict:
  """The summary of a run that only evaluates."""
  return {'steps': 0, 'device': device_here(), 'jax': importlib.metadata.version('jax'), 'peak_memory_gib': None}


def last_scores(summary: Mapping, logged: Sequence[Mapping]) -> dict:
  """The last scores during training, in the format of evaluation.json."""
  found = {'step': logged[-1]['step'], 'epoch': max(row.get('epoch', 0.0) for row in logged), 'measures': {}}
  return found | {'images': {'train': metric_log.examples(summary)}} | progress.accuracies(summary)


def clock(summary: Mapping, wall_seconds: float, side_by_side: int) -> dict[str, float]:
  """Wall seconds of a training process that ran alone, and (`compiled_seconds`) without compilation; otherwise {}."""
  if side_by_side > 1 or 'compile_seconds' not in summary:
    return {}
  return {'alone_seconds': wall_seconds, 'compiled_seconds': round(wall_seconds - summary['compile_seconds'], 1)}


def commit_here() -> str:
  """The commit of the code, with '-dirty' if any file other than results differs from it."""

  def git(*arguments):
    return subprocess.run(['git', *arguments], capture_output=True, text=True, check=True).stdout.strip()

  results = [f':!experiments/*/{name}' for name in ('results.jsonl', 'README.md', '*.svg')]
  try:
    return git('rev-parse', 'HEAD') + ('-dirty' if git('status', '--porcelain', '--', '.', *results) else '')
  except (OSError, subprocess.CalledProcessError):
    raise ValueError('git does not know the commit here: give --commit=HASH') from None


class Child:
  """A process of main.py. Its workdir keeps its log and, if it was interrupted, the seconds it has taken so far."""

  def __init__(self, sweep: Sweep, row: Row, seed: int, runs: pathlib.Path):
    self.sweep, self.row, self.seed, self.name = sweep, row, seed, f'{row.name}_seed{seed}'
    self.runs, self.workdir = runs, runs / self.name
    self.workdir.mkdir(parents=True, exist_ok=True)
    self.lock = (self.workdir / 'sweep.lock').open('a')

  def claim(self) -> bool:
    """Reserves the run for this sweep until `lock` is closed. False if another sweep has it."""
    try:
      fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return False
    except OSError:  # a file system without locks
      pass
    return True

  def start(self, program: str, environment: Mapping) -> None:
    self.begin = time.monotonic()
    arguments = [sys.executable, program, *self.sweep.command(self.row, self.seed, self.runs)[2:]]
    # In its own process group: Ctrl-C reaches only the sweep, which then asks each run to stop.
    common = dict(env=environment, stderr=subprocess.STDOUT, process_group=0)
    with (self.workdir / 'log.txt').open('a') as log:
      self.process = subprocess.Popen(arguments, stdout=log, **common)

  def seconds(self) -> float:
    """Wall time, including earlier parts of an interrupted run."""
    file = self.workdir / 'wall_seconds'
    total = time.monotonic() - self.begin + (float(file.read_text()) if file.exists() else 0.0)
    file.write_text(f'{total}\n')
    return round(total, 1)

  def result(self, **facts) -> dict:
    """The line for results.jsonl. Raises with the last line of the log if the run did not finish."""
    if (number := -self.process.returncode) > 0:
      name = next((known.name for known in signal.Signals if known == number), f'signal {number}')
      raise ValueError(f'ended by {name}; its log is {self.workdir / "log.txt"}')
    if self.process.returncode:
      lines = [line for line in (self.workdir / 'log.txt').read_text(errors='replace').splitlines() if line.strip()]
      raise ValueError(lines[-1] if lines else f'exit status {self.process.returncode}')
    load = lambda name: json.loads((self.workdir / f'{name}.json').read_text())
    config, logged = load('config'), metric_log.read(self.workdir)
    name = metric_log.evaluation_name(config['eval']['data']['name'])  # CACR's Table 5 evaluates on another dataset
    summary = load('summary') if self.row.mode == 'train' else untrained()
    evaluation = load(name) if self.sweep.at_end else last_scores(summary, logged)
    if evaluation['step'] != summary['steps']:
      raise ValueError(f'{name}.json is of step {evaluation["step"]}, but the last step is {summary["steps"]}')
    config['data']['path'] = ''
    speeds = [speed for row in logged for name, speed in row.items() if name.endswith('_per_second')]
    seconds = [metric_log.examples(summary) / speed for speed in speeds]
    metrics = {k: v for k, v in evaluation.items() if isinstance(v, int | float) and k not in ('step', 'epoch')}
    metrics |= {f'{layer}/{k}': v for layer, found in evaluation['measures'].items() for k, v in found.items()}
    curves = {}
    if self.sweep.curves:
      with np.load(self.workdir / f'{name}.npz') as stored:
        curves = {name: [round(float(x), 6) for x in stored[name]] for name in self.sweep.curves}
    history = {name: figures.over_epochs(logged, name) for name in self.row.history}
    return {
      'name': self.row.name,
      'seed': self.seed,
      **facts,
      **clock(summary, facts['wall_seconds'], facts['side_by_side']),
      **{key: summary[key] for key in ('device', 'jax', 'peak_memory_gib')},
      # The median, because evaluations and other runs on the device slow some epochs. The first call logs no speed.
      'seconds_per_epoch': round(statistics.median(seconds), 4) if seconds else None,
      'epochs': evaluation['epoch'],
      'protocol': self.sweep.protocol,
      'images': metric_log.examples(evaluation),
      'finished_at': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'metrics': metrics,
      'curves': curves,
      **({'history': history} if history else {}),
      'config': config,
    }


@dataclasses.dataclass
class Session:
  """One call of a sweep: `plan` picks the next run, `start` starts it, `poll` records the runs that have ended."""

  sweep: Sweep
  folder: pathlib.Path
  runs: pathlib.Path
  budget: float  # minutes
  side_by_side: int
  others: int
  commit: str

  def __post_init__(self):
    self.begin, self.device, self.finished = time.monotonic(), device_here(), tables.done(self.sweep, self.folder)
    self.jobs, self.running, self.failed, self.stopping = [], [], [], False
    self.errors = []  # of the runs that failed since the last one that did not

  @property
  def at_once(self) -> int:
    """Runs on the device, including those of other sweeps."""
    return self.side_by_side + self.others

  @property
  def hopeless(self) -> bool:
    """Whether the remaining runs would fail like the last ones, for example because the data is not prepared."""
    return len(self.errors) >= FAILURES and len(set(self.errors)) == 1

  def elapsed(self) -> float:
    return (time.monotonic() - self.begin) / 60

  def say(self, text: str) -> None:
    print(f'[{self.elapsed():5.1f} min] {text}', flush=True)

  def plan(self) -> tuple[Row, int, float] | None:
    """The first missing run that would end within the budget, with its minutes; None if no run can start now."""
    if self.stopping or self.hopeless or len(self.running) >= self.side_by_side:
      return None
    alone = lambda row, seed: estimate(self.sweep, row, seed, self.finished, self.device, self.runs)
    running = [alone(child.row, child.seed) for child in self.running]
    needed = needed_minutes([alone(*job) for job in self.jobs], running, self.side_by_side, self.others)
    left = self.budget - self.elapsed()
    return next(((*job, m) for job, m in zip(self.jobs, needed, strict=True) if m <= left), None)

  def start(self, row: Row, seed: int, minutes: float, program: str) -> None:
    """Starts a run, unless another sweep runs it or has run it."""
    self.jobs.remove((row, seed))
    child = Child(self.sweep, row, seed, self.runs)
    recorded = lambda: {(result['name'], result['seed']) for result in tables.read(self.folder / 'results.jsonl')}
    if not child.claim() or (row.name, seed) in recorded():  # in this order: a run is recorded before its lock is freed
      child.lock.close()
      return self.say(f'leaves out {row.name}, seed {seed}: another sweep has it')
    self.say(f'starts {row.name}, seed {seed}: about {minutes:.1f} min')
    environment = dict(os.environ)
    if self.at_once > 1:  # unless the user has set a fraction
      environment.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{0.9 / self.at_once:.3f}')
    child.start(program, environment)
    self.running.append(child)

  def poll(self, signals: Sequence[int], grace: float) -> bool:
    """Stops the runs after a signal or past the budget, and records those that ended. Returns whether any did."""
    if not self.stopping and (signals or self.elapsed() > self.budget + grace):
      self.stopping = True
      self.say(f'stops {", ".join(child.name for child in self.running)}')
      self.stop(signal.SIGTERM)
    if len(signals) > 1:  # the user asked twice
      self.stop(signal.SIGKILL)
    ended = [child for child in self.running if child.process.poll() is not None]
    for child in ended:
      self.running.remove(child)
      with child.lock:
        self.record(child)
    return bool(ended)

  def stop(self, number: int) -> None:
    for child in self.running:
      child.process.send_signal(number)

  def record(self, child: Child) -> None:
    """Appends the result of a run that has ended, or reports why there is none."""
    command = shlex.join(self.sweep.command(child.row, child.seed, pathlib.Path('runs') / self.folder.name))
    facts = dict(commit=self.commit, wall_seconds=child.seconds(), side_by_side=self.at_once)
    try:
      result = child.result(command=command, **facts)
    except (ValueError, OSError, KeyError) as error:
      if not self.stopping:
        self.failed.append(child.name)
        self.errors.append(str(error))
      self.say(f'{child.name} {"stopped; the same command resumes it" if self.stopping else "failed"}: {error}')
      return
    self.errors.clear()
    tables.append(self.folder / 'results.jsonl', result)
    self.finished[child.row.name, child.seed] = result
    shutil.rmtree(child.workdir / 'features', ignore_errors=True)  # up to 1 GB, and main.py can recompute it
    shown = [(column, column.values([result])) for column in self.sweep.columns]
    self.say(f'{child.name}: ' + ', '.join(f'{column.title} {column.show(v[0])}' for column, v in shown if v))


def run(
  sweep: Sweep,
  folder: pathlib.Path,
  *,
  runs: pathlib.Path,
  budget: float = math.inf,
  side_by_side: int = 1,
  others: int = 0,
  only: Sequence[str] = (),
  seeds: int = 0,
  commit: str = '',
  program: str = 'main.py',
  grace: float = GRACE,
) -> list[str]:
  """Starts the missing runs that fit into the budget (in minutes). Returns the names of those that failed."""
  for flag, count, least in (('side-by-side', side_by_side, 1), ('others', others, 0)):
    if count < least:
      raise ValueError(f'--{flag}={count} must be at least {least}')
    if count > least and sweep.timed:
      raise ValueError(f'--{flag}={count} would distort the times in this table: leave it out')
  session, signals = Session(sweep, folder, runs, budget, side_by_side, others, commit or commit_here()), []
  session.jobs = missing(sweep, session.finished, only, seeds)
  stops = (signal.SIGINT, signal.SIGTERM)
  previous = [signal.signal(number, lambda number, _: signals.append(number)) for number in stops]
  try:
    while True:
      while planned := session.plan():
        session.start(*planned, program)
      if not session.running:
        break
      while not session.poll(signals, grace):
        time.sleep(0.1)
  finally:
    session.stop(signal.SIGTERM)  # after an exception, runs are still active
    for number, handler in zip(stops, previous, strict=True):
      signal.signal(number, handler)
  if session.hopeless:
    session.say(f'gives up after {len(session.errors)} runs with the same error: fix it, and run the same command')
  if session.jobs:
    row, seed = session.jobs[0]
    session.say(f'{len(session.jobs)} runs are still missing; next is {row.name}, seed {seed}')
  return session.failed


def main(sweep: Sweep, folder: pathlib.Path, arguments: Sequence[str] | None = None, program: str = 'main.py') -> None:
  """The command line of a sweep."""
  parser = argparse.ArgumentParser(description=f'{sweep.title}. {sweep.protocol}'.replace('%', '%%'))
  names = lambda text: [name for name in text.split(',') if name]
  parser.add_argument('--list', action='store_true', help='show what is done and what is missing')
  parser.add_argument('--table', action='store_true', help='write the table of the results into README.md')
  parser.add_argument('--difference', type=names, metavar='ROW,ROW', help='print the differences of two rows')
  late = 'time limit in minutes: start no run that would exceed it'
  parser.add_argument('--budget-minutes', dest='budget', type=float, default=math.inf, help=late)
  parser.add_argument('--side-by-side', type=int, default=1, help='number of runs at once (up to 4 with NVIDIA MPS)')
  parser.add_argument('--others', type=int, default=0, help='number of other runs on the same device')
  parser.add_argument('--only', type=names, default=(), help='names of rows, separated by commas, in this order')
  parser.add_argument('--of', default='', help="the rows of a table or figure of the paper, such as 'Table 3'")
  parser.add_argument('--seeds', type=int, default=0, help='smallest number of seeds per row')
  parser.add_argument('--runs', type=pathlib.Path, default=pathlib.Path('runs') / folder.name, help='the workdirs')
  parser.add_argument('--commit', default='', help='commit of the code, for a copy without git')
  chosen = vars(parser.parse_args(arguments))
  listing, writing, item, failed = chosen.pop('list'), chosen.pop('table'), chosen.pop('of'), []
  compared = chosen.pop('difference')
  try:
    if item:
      chosen['only'] = [*chosen['only'], *(row.name for row in sweep.of(item))]
    if listing:
      return describe(sweep, folder, chosen)
    if compared is not None:
      return print(tables.differences(sweep, folder, compared))
    if not writing:
      failed = run(sweep, folder, **chosen, program=program)
    with tables.exclusive(folder):
      tables.write(sweep, folder)
      pictures.draw(sweep, folder)
    print(f'{folder / "README.md"} has the table of {len(tables.done(sweep, folder))} runs')
  except ValueError as error:
    sys.exit(f'{folder.name}: {error}')
  except BrokenPipeError:  # `--list | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  if failed:
    sys.exit(f'{folder.name}: failed: {", ".join(failed)}')


def describe(sweep: Sweep, folder: pathlib.Path, chosen: Mapping) -> None:
  """Prints for each row the seeds done and missing, the minutes per run, and the command for the next seed."""
  finished, device, runs = tables.done(sweep, folder), device_here(), chosen['runs']
  left = missing(sweep, finished, chosen['only'], chosen['seeds'])
  for row in (row for row in sweep.rows if not chosen['only'] or row.name in chosen['only']):
    ready, waiting = [seed for name, seed in finished if name == row.name], [s for other, s in left if other is row]
    seed = (waiting or row.seeds)[0]
    minutes = estimate(sweep, row, seed, finished, device, runs)
    print(f'{row.name}: seeds done {ready}, missing {waiting}, {minutes:.1f} min each{", further" * row.further}')
    print(f'  {shlex.join(sweep.command(row, seed, runs))}', flush=True)
