"""A paper's table as data: its rows, the commands that run them, the results so far, and the Markdown."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import scipy.stats

from configs import base
from ssl_jax import config
from ssl_jax.registry import nearest
from ssl_jax.workdir.files import write_text

Results = Mapping[str, Sequence[Mapping]]  # {row name: its results, one per seed}
MARKS = ('<!-- table -->', '<!-- end of table -->')


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of a table: a config, the seeds it is run with, and the published results."""

  name: str  # also names the runs: letters, digits, '.', '_' and '-'
  title: str  # as the table shows it
  config: str  # FILE.py[:options]
  changes: Mapping = dataclasses.field(default_factory=dict)  # overrides of config keys
  seeds: tuple[int, ...] = (0,)
  published: Mapping[str, float | tuple[float, float]] = dataclasses.field(default_factory=dict)  # (low, high): a range
  minutes: float = 8.0  # estimate for one run alone on an H200, used until a run has finished
  note: str = ''
  further: bool = False  # lower priority: runs after all other rows
  shows: tuple[str, ...] = ()  # the paper's tables and figures that it belongs to, as experiments/papers.py names them
  images: int = 0  # number of training images, if different from the sweep's
  mode: str = 'train'  # of main.py; 'evaluate': the weights of the file `init`, or random ones
  history: tuple[str, ...] = ()  # metrics during training that a result stores, for figures


def on_cifar100(row: Row, published: Mapping, shows: tuple[str, ...] | None = None) -> Row:
  """The same row on CIFAR-100, with one seed and low priority (`further`)."""
  names = dict(name=f'cifar100_{row.name}', title=f'{row.title}, CIFAR-100', note='')
  changes = dict(config=row.config.replace('cifar10.py', 'cifar100.py'), seeds=(0,), published=published, further=True)
  return dataclasses.replace(row, **names, **changes, shows=row.shows if shows is None else shows)


@dataclasses.dataclass(frozen=True)
class Column:
  """A metric of the table: an entry of a result's `metrics`, or a field of the result itself."""

  metric: str
  title: str
  digits: int = 2

  def values(self, results: Sequence[Mapping]) -> list[float]:
    found = [result['metrics'].get(self.metric, result.get(self.metric)) for result in results]
    return [value for value in found if value is not None]

  def show(self, value: float) -> str:
    return f'{value:.{self.digits}f}'


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A table, and how its runs are evaluated."""

  title: str
  protocol: str  # in a sentence or two
  rows: Sequence[Row]  # the most important first
  columns: Sequence[Column]
  common: Mapping = dataclasses.field(default_factory=dict)  # overrides of config keys for all rows
  curves: Sequence[str] = ()  # arrays of evaluation.npz that a result stores, for figures
  images: int = 50_000  # number of training images, so that metrics.jsonl gets one row per epoch
  timed: bool = False  # the table has times, which concurrent runs would distort
  at_end: bool = True  # run every evaluation after training; otherwise a result has the last scores during training
  pictured: Sequence[str] = ()  # names of the rows that results.svg shows, in this order; empty: all rows run
  figures: Mapping[str, Callable] = dataclasses.field(default_factory=dict)  # {name: (sweep, results by row) -> Figure}

  def overrides(self, row: Row, seed: int) -> list[str]:
    """The overrides of a run's config, as key=value."""
    changes = {'seed': seed, **self.common, **row.changes}
    if row.mode == 'train' and self.at_end:
      changes['eval.at_end'] = True
    texts = [f'{key}={value if isinstance(value, str) else repr(value)}' for key, value in changes.items()]
    if row.mode != 'train':
      return texts
    per_epoch = (row.images or self.images) // config.load(row.config, texts).batch_size
    return [*texts, f'log.every_steps={max(1, per_epoch)}']

  def resolve(self, row: Row, seed: int) -> dict:
    """The whole config of a run. Raises if it is not valid."""
    chosen = config.load(row.config, self.overrides(row, seed))
    config.validate(chosen, base.get_config())
    return chosen.to_dict()

  def command(self, row: Row, seed: int, runs: pathlib.Path) -> list[str]:
    """The command line of a run whose workdir is in `runs`."""
    flags = [f'--config.{text}' for text in self.overrides(row, seed)]
    mode = [] if row.mode == 'train' else [f'--mode={row.mode}']
    workdir = runs / f'{row.name}_seed{seed}'
    return ['python', 'main.py', *mode, f'--config={row.config}', f'--workdir={workdir}', *flags]

  @property
  def published(self) -> set[str]:
    """The metrics with a published number in any row."""
    return {metric for row in self.rows for metric in row.published}

  def of(self, item: str) -> list[Row]:
    """The rows of a table or figure of the paper, such as 'Table 3'."""
    if found := [row for row in self.rows if item in row.shows]:
      return found
    known = sorted({name for row in self.rows for name in row.shows})
    raise ValueError(f'--of={item!r} is not a table or figure of this sweep: {nearest(item, known)}')


# Results


def read(file: pathlib.Path) -> list[dict]:
  """The results in results.jsonl, without a last line that is incomplete."""
  lines = file.read_text().splitlines() if file.exists() else []
  found = []
  for number, line in enumerate(lines, start=1):
    try:
      found.append(json.loads(line))
    except json.JSONDecodeError:
      if number < len(lines):
        raise ValueError(f'{file}: line {number} is not valid JSON: fix it or remove it') from None
  return found


@contextlib.contextmanager
def exclusive(folder: pathlib.Path) -> Iterator[None]:
  """Waits until no other sweep writes the files of a folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # a file system without locks
      fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


def append(file: pathlib.Path, result: Mapping) -> None:
  """Adds a result to results.jsonl atomically. An incomplete last line is dropped."""
  with exclusive(file.parent):
    write_text(file, ''.join(json.dumps(row) + '\n' for row in [*read(file), result]))


def done(sweep: Sweep, folder: pathlib.Path) -> dict[tuple[str, int], dict]:
  """{(name, seed): result}. Raises if the config of a result differs from that of the row with its name."""
  rows, found = {row.name: row for row in sweep.rows}, {}
  for result in read(folder / 'results.jsonl'):
    name, seed = result['name'], result['seed']
    what = f'{folder / "results.jsonl"}: {name!r}, seed {seed},'
    if name not in rows:
      raise ValueError(f'{what} is not a row of the sweep: restore the name of the row, or remove the line')
    here, there = (_relevant(c) for c in (sweep.resolve(rows[name], seed), result['config']))
    for key in sorted(here.keys() | there.keys()):
      if here.get(key) != there.get(key):
        differs = f'{key} = {here.get(key)!r} in the sweep, {there.get(key)!r} in the result'
        raise ValueError(f'{what} has another config ({differs}): rename the row, or remove the line')
    found[name, seed] = result
  return found


def by_row(sweep: Sweep, folder: pathlib.Path) -> dict[str, list[dict]]:
  """The results of each row that was run, in the order of their seeds."""
  return grouped(sweep, done(sweep, folder))


def grouped(sweep: Sweep, finished: Mapping) -> dict[str, list[dict]]:
  """{row: its results}, from {(name, seed): result}."""
  found = {row.name: _results(row, finished) for row in sweep.rows}
  return {name: results for name, results in found.items() if results}


def temperatures(names: Iterable[str], prefix: str) -> dict[float, str]:
  """{τ: name} of the rows that are named after their constant temperature, from the lowest.

  >>> temperatures(['simclr_0.5', 'simclr_0.2', 'simclr_0.2_plain_sgd'], 'simclr_')
  {0.2: 'simclr_0.2', 0.5: 'simclr_0.5'}
  """
  found = {name: re.fullmatch(rf'{prefix}([0-9.]+)', name) for name in names}
  return dict(sorted((float(match[1]), name) for name, match in found.items() if match))


def _relevant(saved: Mapping) -> dict:
  """The keys that define a run. Keys missing in an older config get their defaults."""
  defaults = {k: v for k, v in config.flatten(base.get_config()).items() if k.split('.')[0] not in config.NAMED}
  return config.relevant(defaults | config.flatten(config.upgrade(saved)))


# Differences


def differences(sweep: Sweep, folder: pathlib.Path, names: Sequence[str]) -> str:
  """A line per metric: the mean of the first row minus that of the second, over all seeds of each."""
  if len(names) != 2:
    raise ValueError(f'--difference={",".join(names)!r} must name two rows, separated by a comma')
  found, rows = by_row(sweep, folder), [row.name for row in sweep.rows]
  for name in names:
    if name not in rows:
      raise ValueError(f'--difference: {name!r} is not a row of the sweep: {nearest(name, rows)}')
    if name not in found:
      raise ValueError(f'--difference: {name!r} has not been run: run it with --only={name}')
  here, there = (found[name] for name in names)
  seeds_of = lambda results: ', '.join(str(result['seed']) for result in results)
  known = {column.metric: column for column in sweep.columns}
  # All accuracies, even if they have no column; measures of features have a slash.
  others = [metric for metric in here[0]['metrics'] if not ('/' in metric or metric.endswith('_top5'))]
  lines = [f'{names[0]} (seeds {seeds_of(here)}) minus {names[1]} (seeds {seeds_of(there)})']
  for column in [*sweep.columns, *(Column(metric, metric) for metric in others if metric not in known)]:
    values = column.values(here), column.values(there)
    if all(values):
      fewer = [len(found) for found in values] != [len(here), len(there)]
      seeds = f' ({len(values[0])} and {len(values[1])} seeds)' if fewer else ''
      lines.append(f'  {column.metric}: {_difference(column, *values)}{seeds}')
  return '\n'.join([*lines, '± is the standard error of the difference, brackets are the 95 % interval (Welch).'])


def _difference(column: Column, here: Sequence[float], there: Sequence[float]) -> str:
  """The difference of two means of independent runs. A mean of one seed has no known error."""
  show = lambda value: f'{value:+.{column.digits}f}'
  mean = statistics.mean(here) - statistics.mean(there)
  if min(len(here), len(there)) < 2:
    return f'{show(mean)} (one seed: no standard error)'
  error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (here, there)))
  if not error:
    return show(mean)
  interval = scipy.stats.ttest_ind(here, there, equal_var=False).confidence_interval(0.95)
  return f'{show(mean)} ± {column.show(error)} [{show(interval.low)}, {show(interval.high)}]'


# Markdown


def comparable(sweep: Sweep, finished: Mapping) -> tuple[list[Column], list[tuple[Row, list[dict]]]] | None:
  """The columns and rows of results.svg, with results; None if none of these rows has published numbers."""
  columns = [column for column in sweep.columns if column.metric in sweep.published]
  named = {row.name: row for row in sweep.rows}
  rows = [(row, _results(row, finished)) for row in (named[name] for name in sweep.pictured or named)]
  rows = [(row, results) for row, results in rows if results]
  return (columns, rows) if any(row.published for row, _ in rows) else None


def _results(row: Row, finished: Mapping) -> list[dict]:
  return [result for (name, _), result in sorted(finished.items()) if name == row.name]


def markdown(sweep: Sweep, finished: Mapping, name: str) -> str:
  """The table: mean ± standard deviation over seeds, '—' if not run yet, and the published number in brackets.

  `name` is the folder of the sweep. Further rows that were not run are counted, not shown.
  """
  compared = sweep.published
  titles = [f'{column.title} (published)' if column.metric in compared else column.title for column in sweep.columns]
  lines, waiting = [['row', *titles, 'seeds', 'config'], ['---'] * (len(titles) + 3)], 0
  for row in sweep.rows:
    results = _results(row, finished)
    if row.further and not results:
      waiting += 1
      continue
    cells = [f'{row.title} ({row.note})' if row.note else row.title]
    cells += [_cell(column, row.published.get(column.metric), column.values(results)) for column in sweep.columns]
    mode = [] if row.mode == 'train' else [f'--mode={row.mode}']
    lines.append([*cells, str(len(results)), f'`{" ".join([row.config, *mode, *flags(row.changes)])}`'])
  text = f'{sweep.protocol}\n'
  if shown := len(lines) > 2:
    text += '\n' + ''.join(f'| {" | ".join(line)} |\n' for line in lines)
  if any(int(seeds) > 1 for *_, seeds, _ in lines[2:]):
    text += '\n± is the standard deviation over seeds.\n'
  text += '\n![Published and measured here](results.svg)\n' if comparable(sweep, finished) else ''
  text += f'\nAll rows also use `{" ".join(flags(sweep.common))}`.\n' if sweep.common else ''
  if waiting:
    rows = 'Further rows' if shown else 'Rows'
    text += f'\n{rows} not run yet: {waiting}. `python -m experiments.{name}.sweep --list` lists them.\n'
  return text


def flags(changes: Mapping) -> list[str]:
  """Config overrides as flags of main.py, without spaces."""
  return [f'--config.{key}={value}'.replace(' ', '') for key, value in changes.items()]


def _cell(column: Column, published: float | tuple | None, values: Sequence[float]) -> str:
  text = column.show(statistics.mean(values)) if values else '—'
  text += f' ± {column.show(statistics.stdev(values))}' if len(values) > 1 else ''
  if published is None:
    return text
  low, high = published if isinstance(published, tuple) else (published, published)
  return f'{text} ({column.show(low)})' if low == high else f'{text} ({column.show(low)} to {column.show(high)})'


def write(sweep: Sweep, folder: pathlib.Path) -> None:
  """Writes the table between the marks in README.md."""
  insert(folder / 'README.md', markdown(sweep, done(sweep, folder), folder.name), MARKS)


def insert(file: pathlib.Path, text: str, marks: tuple[str, str]) -> None:
  """Replaces the text between two marks in a file."""
  before, first, rest = file.read_text(encoding='utf-8').partition(marks[0])
  _, last, after = rest.partition(marks[1])
  if not (first and last):
    raise ValueError(f'{file} has no {marks[0]} and {marks[1]}: add them where the table goes')
  file.write_text(f'{before}{first}\n{text}{last}{after}', encoding='utf-8')
