"""What a run writes down: metrics.jsonl, TensorBoard, and progress for whoever watches."""

import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ssl_jax.workdir.files import read_json, write_text

JUDGED = ('knn', 'probe', 'linear', 'finetune', 'spearman')  # how the names of accuracies begin

# What a summary keeps where nothing was trained any more.
OF_TRAINING = ('seconds', 'deterministic', 'device', 'jax', 'peak_memory_gib', 'broken_images_skipped')


def read(workdir: pathlib.Path) -> list[dict]:
  """The rows of metrics.jsonl; a last line that an interruption cut short does not count."""
  file = workdir / 'metrics.jsonl'
  rows, lines = [], file.read_text(errors='replace').splitlines() if file.exists() else []
  for number, line in enumerate(lines, 1):
    try:
      rows.append(json.loads(line))
      rows[-1]['step']
    except (ValueError, TypeError, KeyError) as error:
      if number < len(lines):
        raise ValueError(f'line {number} of {file} is no row of numbers by step: mend it, or remove it') from error
      return rows[: number - 1]
  return rows


class Records:
  """Rows of numbers by step. Opened at step n, it first drops the rows after n: a resumed run is one run.

  Only the first process writes.
  """

  def __init__(self, workdir: pathlib.Path, step: int, tensorboard: bool):
    self.workdir, self.board, self.file = workdir, None, None
    if jax.process_index() > 0:
      return
    kept = [row for row in read(workdir) if row['step'] <= step] if step else []
    write_text(workdir / 'metrics.jsonl', ''.join(json.dumps(row) + '\n' for row in kept))
    self.file = (workdir / 'metrics.jsonl').open('a', buffering=1)
    if tensorboard:
      from tensorboardX import SummaryWriter

      self.board = SummaryWriter(str(workdir / 'tensorboard'), purge_step=step + 1)

  def write(self, step: int, row: Mapping[str, float]) -> None:
    if self.file:
      self.file.write(json.dumps({'step': step, **row}) + '\n')
    if self.board:
      for name, value in row.items():
        self.board.add_scalar(name, value, step)

  def close(self) -> None:
    if self.file:
      self.file.close()
    if self.board:
      self.board.close()


NARROW = 110  # columns of a terminal, below which the bar shows less


class Plain:
  """One line a row, for logs and pipes."""

  def __init__(self, step: int, total: int):
    del step
    self.total = total

  def say(self, text: str) -> None:
    try:
      print(text, flush=True)
    except BrokenPipeError:  # nobody reads any more, which is no reason to stop
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

  def show(self, step: int, row: Mapping[str, float], left: float) -> None:
    """A row, and the seconds to the end at its pace."""
    self.say(f'step {step}/{self.total}  {_numbers(row)}  ETA {left:.0f} s')

  def close(self) -> None:
    pass


class Silent(Plain):
  """The processes that are not the first say nothing."""

  def say(self, text):
    pass

  def show(self, step, row, left):
    pass


class Live(Plain):
  """A rich progress bar that stays in place, for terminals."""

  def __init__(self, step: int, total: int):
    console = Console(soft_wrap=True)
    self.narrow = console.width < NARROW
    columns = (
      TextColumn('{task.description}'),
      BarColumn(10 if self.narrow else 40),
      TextColumn('{task.fields[numbers]}'),
      TimeRemainingColumn(),
    )
    self.bar = Progress(*columns, console=console)
    self.total = total
    self.task = self.bar.add_task(f'step {step}/{total}', total=total, completed=step, numbers='')
    self.bar.start()

  def say(self, text):
    self.bar.console.print(text, highlight=False, markup=False)

  def show(self, step, row, left):
    row = {name: value for name, value in row.items() if not (self.narrow and name in ('epoch', 'rate'))}
    self.bar.update(self.task, completed=step, description=f'step {step}/{self.total}', numbers=_numbers(row))

  def close(self):
    self.bar.stop()


def progress(step: int, total: int) -> Plain:
  """A live bar on a terminal, plain lines elsewhere, nothing from any process but the first."""
  if jax.process_index() > 0:
    return Silent(step, total)
  return (Live if sys.stdout.isatty() else Plain)(step, total)


def sentence(when: str, results: Mapping[str, float]) -> str:
  """'epoch 20: knn200 71.3 %, ...', of accuracies alone; measures have a layer's name before theirs."""
  unit = lambda name: '' if name.startswith('spearman') else ' %'
  told = (f'{name} {value:.2f}{unit(name)}' for name, value in results.items() if '/' not in name)
  return f'{when}: ' + ', '.join(told)


def write_evaluation(
  workdir: pathlib.Path, results: Mapping, arrays: Mapping[str, np.ndarray], when: str, name: str = ''
) -> None:
  """Writes evaluation.json, and evaluation.npz with what the figures need; of another set, evaluation_NAME."""
  if jax.process_index() > 0:
    return
  stem = f'evaluation_{re.sub("[^a-zA-Z0-9]+", "_", name)}' if name else 'evaluation'
  part = workdir / f'{stem}.npz.part'
  with part.open('wb') as stream:
    np.savez_compressed(stream, **arrays)
  part.replace(workdir / f'{stem}.npz')
  write_text(workdir / f'{stem}.json', json.dumps(results, indent=2, allow_nan=False) + '\n')
  accuracies = {k: v for k, v in results.items() if k.startswith(JUDGED) and isinstance(v, float)}
  print(sentence(when, accuracies))


def keep(workdir: pathlib.Path, summary: Mapping, *, trained: bool) -> None:
  """Writes summary.json. Where nothing was trained any more, time, machine and memory stay those of who did."""
  if jax.process_index() == 0:
    file = workdir / 'summary.json'
    if not trained and file.exists():
      old = read_json(file)
      summary = {**summary, **{key: old[key] for key in OF_TRAINING if key in old}}
    write_text(file, json.dumps(summary, indent=2) + '\n')


def finish(workdir: pathlib.Path, summary: Mapping) -> None:
  """Says what came out and where everything is."""
  if jax.process_index() > 0:
    return
  accuracies = {name: value for name, value in summary.items() if name.startswith(JUDGED)}
  if accuracies:
    print(sentence('finished', accuracies))
  what = {
    'summary.json': 'the results',
    'evaluation.json': 'every evaluation',
    'metrics.jsonl': 'every logged step',
    'neighbours.png': 'test images and their nearest training images',
    'neighbours.txt': 'sentences and those that are nearest',
    'tensorboard': 'the same for TensorBoard',
    'checkpoints': 'the weights',
    'config.json': 'the config',
  }
  for name, text in what.items():
    if (workdir / name).exists():
      print(f'  {text + ":":48}{workdir / name}')


def _numbers(row):
  forms = {
    'epoch': 'epoch {:.2f}',
    'loss': 'loss {:.4f}',
    'probe_train': 'probe {:.1f} %',
    'tau': 'tau {:.3f}',
    'rate': 'rate {:.3g}',
    'images_per_second': '{:,.0f} images/s',
    'sentences_per_second': '{:,.0f} sentences/s',
  }
  return '  '.join(form.format(row[name]) for name, form in forms.items() if name in row)
