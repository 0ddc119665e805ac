"""The numbers of a run on disk: metrics.jsonl and TensorBoard, summary.json and evaluation.json."""

import json
import pathlib
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ssl_jax.workdir import progress
from ssl_jax.workdir.files import read_json, write_text

# Metrics that older runs wrote under another name.
RENAMED = {
  'rate': 'learning_rate',
  'gradient': 'grad_norm',
  'positive': 'positive_similarity',
  'tau': 'temperature',
  'probe': 'online_probe',
  'probe_loss': 'online_probe_loss',
  'probe_train': 'online_probe_train',
}

# Keys of summary.json that describe the training; a later call that trains no further leaves them as they are.
TRAINING_KEYS = (
  *('seconds', 'deterministic', 'device', 'jax', 'peak_memory_gib', 'commit', 'date'),
  'broken_images_skipped',
)


def rename(row: Mapping) -> dict:
  """A row of metrics.jsonl, or a summary, with the metrics of older runs under their present names.

  >>> rename({'step': 1, 'tau': 0.2})
  {'step': 1, 'temperature': 0.2}
  """
  return {RENAMED.get(name, name): value for name, value in row.items()}


def examples(results: Mapping) -> Any:
  """The numbers of images or sentences in evaluation.json or summary.json; older runs counted sentences as images.

  >>> examples({'knn200': 71.3, 'images': 5000})
  5000
  """
  return results.get('sentences', results.get('images'))


def read(workdir: pathlib.Path) -> list[dict]:
  """The rows of metrics.jsonl, without a last line that an interruption cut short."""
  file = workdir / 'metrics.jsonl'
  rows, lines = [], file.read_text(errors='replace').splitlines() if file.exists() else []
  for number, line in enumerate(lines, 1):
    try:
      row = rename(json.loads(line))
      row['step']
    except (ValueError, AttributeError, KeyError) as error:
      if number < len(lines):
        raise ValueError(f'line {number} of {file} has no metrics of a step: fix it, or remove it') from error
      break
    rows.append(row)
  return rows


class MetricLog:
  """Writes rows of metrics to metrics.jsonl and TensorBoard. Only the first process writes.

  Opened at step n, it drops the rows after n first, so that a resumed run reads as one run.
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


def commit(root: pathlib.Path = pathlib.Path(__file__).parents[2]) -> str | None:
  """The commit of the code, with '-dirty' if a file differs from it; None outside of a git checkout."""
  git = lambda *command: subprocess.run(
    ['git', '-C', str(root), *command], capture_output=True, text=True, check=True, timeout=10
  ).stdout.strip()
  try:
    if pathlib.Path(git('rev-parse', '--show-toplevel')).resolve() != root.resolve():  # installed inside another one
      return None
    return git('rev-parse', '--short=12', 'HEAD') + ('-dirty' if git('status', '--porcelain', '-uno') else '')
  except (OSError, subprocess.SubprocessError):
    return None


def write_summary(workdir: pathlib.Path, summary: Mapping, *, trained: bool) -> None:
  """Writes summary.json. If nothing was `trained`, time, machine and memory stay those of the training."""
  if jax.process_index() == 0:
    file = workdir / 'summary.json'
    if not trained and file.exists():
      old = read_json(file)
      summary = {**summary, **{key: old[key] for key in TRAINING_KEYS if key in old}}
    write_text(file, json.dumps(summary, indent=2) + '\n')


def write_evaluation(
  workdir: pathlib.Path, results: Mapping, arrays: Mapping[str, np.ndarray], when: str, name: str = ''
) -> None:
  """Writes evaluation.json, and evaluation.npz for the figures. For another dataset: evaluation_NAME."""
  if jax.process_index() > 0:
    return
  stem = f'evaluation_{re.sub("[^a-zA-Z0-9]+", "_", name)}' if name else 'evaluation'
  part = workdir / f'{stem}.npz.part'
  with part.open('wb') as stream:
    np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
  part.replace(workdir / f'{stem}.npz')
  write_text(workdir / f'{stem}.json', json.dumps(results, indent=2, allow_nan=False) + '\n')
  print(progress.sentence(when, {k: v for k, v in progress.accuracies(results).items() if isinstance(v, float)}))
