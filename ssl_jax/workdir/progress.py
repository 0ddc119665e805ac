"""Displays the progress of a run: a live bar on a terminal, plain lines elsewhere."""

import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

# Prefixes of the names of accuracies and rank correlations.
ACCURACIES = (
  *('zero_shot', 'image_to_text', 'text_to_image', 'knn', 'online_probe', 'linear', 'finetune', 'spearman'),
  'transfer',
)
# Suffixes of names that begin like an accuracy, but are spreads, parts, baselines or training metrics.
DETAILS = ('_std', '_head', '_middle', '_tail', '_pixels', '_loss', '_train')
NARROW = 110  # terminals with fewer columns show a shorter bar and fewer numbers

# The labels are short, because the line must fit next to the bar.
FORMATS = {
  'epoch': 'epoch {:.2f}',
  'loss': 'loss {:.4f}',
  'online_probe_train': 'probe {:.1f} %',
  'temperature': 'tau {:.3f}',
  'learning_rate': 'lr {:.3g}',
  'images_per_second': '{:,.0f} images/s',
  'sentences_per_second': '{:,.0f} sentences/s',
  'pairs_per_second': '{:,.0f} pairs/s',
}

# Files in the workdir of a finished run.
FILES = {
  'summary.json': 'the results',
  'evaluation.json': 'all evaluations',
  'metrics.jsonl': 'all logged steps',
  'neighbors.png': 'test images and their nearest training images',
  'neighbors.txt': 'examples and their nearest sentences',
  'tensorboard': 'the logged steps for TensorBoard',
  'wandb': 'the logged steps for Weights & Biases',
  'checkpoints': 'the weights',
  'config.json': 'the config',
}


class Plain:
  """Prints one line per row, for logs and pipes."""

  def __init__(self, step: int, total: int):
    del step
    self.total = total

  def say(self, text: str) -> None:
    try:
      print(text, flush=True)
    except BrokenPipeError:  # the reader is gone: training continues without output
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

  def show(self, step: int, row: Mapping[str, float], seconds_left: float | None = None) -> None:
    left = '' if seconds_left is None else f'  ETA {seconds_left:.0f} s'
    self.say(f'step {step}/{self.total}  {_numbers(row)}{left}')

  def close(self) -> None:
    pass


class Silent(Plain):
  """Prints nothing, for all processes but the first."""

  def say(self, text: str) -> None:
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

  def say(self, text: str) -> None:
    self.bar.console.print(text, highlight=False, markup=False)

  def show(self, step: int, row: Mapping[str, float], seconds_left: float | None = None) -> None:
    row = {name: value for name, value in row.items() if not (self.narrow and name in ('epoch', 'learning_rate'))}
    self.bar.update(self.task, completed=step, description=f'step {step}/{self.total}', numbers=_numbers(row))

  def close(self) -> None:
    self.bar.stop()


def create(step: int, total: int) -> Plain:
  """The display of a run of `total` steps that starts at `step`."""
  if jax.process_index() > 0:
    return Silent(step, total)
  return (Live if sys.stdout.isatty() else Plain)(step, total)


def stages(what: str) -> Callable[[str], None]:
  """Returns a function that prints a stage of `what`, such as an evaluation, and the seconds since the start."""
  start = time.monotonic()

  def say(stage: str) -> None:
    if jax.process_index() == 0:
      print(f'{what}, {time.monotonic() - start:.0f} s: {stage}', flush=True)

  return say


def accuracies(results: Mapping[str, Any]) -> dict[str, Any]:
  """The accuracies and rank correlations among the results of an evaluation or a summary.

  >>> accuracies({'knn200': 71.3, 'steps': 1000})
  {'knn200': 71.3}
  """
  return {name: value for name, value in results.items() if name.startswith(ACCURACIES)}


def headline(results: Mapping[str, Any]) -> dict[str, float]:
  """The most important numbers among `accuracies`.

  >>> headline({'linear': 80.5, 'linear_std': 0.5, 'linear_protocol': 'ridge', 'spearman_stsb_train': 70.0})
  {'linear': 80.5, 'spearman_stsb_train': 70.0}
  """
  found = accuracies(results)
  of_set = lambda name: name.startswith(('spearman_', 'transfer_'))  # the rest is the name of a file, of any form
  return {name: x for name, x in found.items() if isinstance(x, float) and (of_set(name) or not name.endswith(DETAILS))}


def sentence(when: str, results: Mapping[str, float]) -> str:
  """Results in one line, except measures of single layers, whose names have a slash.

  >>> sentence('epoch 20', {'knn200': 71.3, 'spearman_mean': 0.75, 'backbone/uniformity': -3.1})
  'epoch 20: knn200 71.30 %, spearman_mean 0.75'
  """
  unit = lambda name: '' if name.startswith('spearman') else ' %'
  shown = (f'{name} {value:.2f}{unit(name)}' for name, value in results.items() if '/' not in name)
  return f'{when}: ' + ', '.join(shown)


def finish(workdir: pathlib.Path, summary: Mapping) -> None:
  """Prints the results of a run, the paths of its files, and the commands that usually come next."""
  if jax.process_index() > 0:
    return
  if found := accuracies(summary):
    print(sentence('finished', found))
  for name, text in FILES.items():
    if (workdir / name).exists():
      print(f'  {text + ":":48}{workdir / name}')
  commands = {'evaluate': 'all evaluations', 'report': 'a page of numbers and figures'}
  if not found or any(workdir.glob('evaluation*.json')):  # the images may have no labels, or are evaluated already
    del commands['evaluate']
  for mode, text in commands.items():
    command = f'python main.py --mode={mode} --workdir={shlex.quote(str(workdir))}'
    if mode == 'evaluate' and jax.process_count() > 1:
      command += ' --config.parallel.processes=1'
    print(f'  {text + ":":48}{command}')


def _numbers(row: Mapping[str, float]) -> str:
  return '  '.join(form.format(row[name]) for name, form in FORMATS.items() if name in row)
