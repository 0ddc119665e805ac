"""Metrics and results of a run on disk: metrics.jsonl, TensorBoard, W&B, summary.json and evaluation.json."""

import contextlib
import io
import json
import os
import pathlib
import re
import socket
import subprocess
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ssl_jax.workdir import files, progress, wandb_log
from ssl_jax.workdir.files import read_json, write_text

# {name in older runs: current name} of metrics.
RENAMED = {
  'rate': 'learning_rate',
  'gradient': 'grad_norm',
  'positive': 'positive_similarity',
  'tau': 'temperature',
  'probe': 'online_probe',
  'probe_loss': 'online_probe_loss',
  'probe_train': 'online_probe_train',
}

# The values that evaluation.npz has in common with evaluation.json, as JSON in the array `evaluation`.
SHARED = ('file', 'step', 'features', 'settings', 'data')
FLUSH_SECONDS = 20  # between flushes of the TensorBoard file

# Keys of summary.json that describe the training. A later call that does not train keeps their values.
TRAINING_KEYS = (
  *('seconds', 'compile_seconds', 'deterministic', 'device', 'jax', 'peak_memory_gib', 'commit', 'date', 'command'),
  'broken_images_skipped',
)


# Types of the values in summary.json that other modules read, to detect a damaged file.
SUMMARY = {'steps': int, 'seconds': int | float, 'device': str, 'date': str, 'jax': str, 'commit': str | None}


def rename(row: Mapping) -> dict:
  """A row of metrics.jsonl, or a summary, with old metric names replaced by current ones.

  >>> rename({'step': 1, 'tau': 0.2})
  {'step': 1, 'temperature': 0.2}
  """
  return {RENAMED.get(name, name): value for name, value in row.items()}


def examples(results: Mapping) -> Any:
  """The numbers of images or sentences in evaluation.json or summary.json. Older runs use the key `images` for both.

  >>> examples({'knn200': 71.3, 'images': 5000})
  5000
  """
  return results.get('sentences', results.get('images'))


def read(workdir: pathlib.Path) -> list[dict]:
  """The rows of metrics.jsonl, without an incomplete last line from an interruption."""
  file = workdir / 'metrics.jsonl'
  if not os.path.lexists(file):
    return []
  try:
    *lines, rest = files.read_bytes(file).split(b'\n')
  except ValueError as error:
    raise ValueError(f'{file} cannot be read ({error}): remove it') from None
  rows = [_row(line) for line in lines]
  if None in rows:
    raise ValueError(f'line {rows.index(None) + 1} of {file} has no metrics of a step: fix it, or remove it')
  last = _row(rest)
  return [row for row in (*rows, last) if row is not None]


def check_history(workdir: pathlib.Path, rows: Sequence[Mapping], step: int) -> None:
  """Warns if the rows of metrics.jsonl end before `step`, which the run had logged."""
  if (last := max((row['step'] for row in rows), default=0)) < step:
    files.warn(f'{workdir / "metrics.jsonl"} ends at step {last}, but the run had logged step {step}: rows are lost')


def read_arrays(workdir: pathlib.Path, name: str = '') -> dict[str, np.ndarray]:
  """The arrays in evaluation.npz, or evaluation_NAME.npz, under their current names; {} if it does not exist."""
  file = workdir / f'{evaluation_name(name)}.npz'
  if not os.path.lexists(file):
    return {}
  try:
    with np.load(io.BytesIO(files.read_bytes(file)), allow_pickle=False) as stored:
      return {name.replace('neighbours', 'neighbors'): array for name, array in stored.items()}
  except (OSError, ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
    raise ValueError(f'{file} cannot be read ({files.reason(error)}): remove it, and evaluate again') from error


def belong_together(arrays: Mapping[str, np.ndarray], results: Mapping) -> bool:
  """Whether evaluation.npz and evaluation.json are of one evaluation: a kill may have replaced only the first."""
  return 'evaluation' not in arrays or str(arrays['evaluation']) == _shared(results)  # older versions lack it


def _shared(results: Mapping) -> str:
  return json.dumps({key: results[key] for key in SHARED if key in results})


def _row(line: bytes) -> dict | None:
  """The row in a line of metrics.jsonl; None if the line is not valid."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  numbers = isinstance(row, dict) and all(isinstance(value, int | float) for value in row.values())
  return rename(row) if numbers and type(row.get('step')) is int else None


def copy(parent: pathlib.Path, workdir: pathlib.Path, step: int, *, logged: int) -> None:
  """Starts the metrics.jsonl of a fork with the rows of its parent up to a step, and a row `forked_at`.

  A warning is printed if the rows end before step `logged`.
  """
  if jax.process_index() == 0:
    rows = [row for row in read(parent) if row['step'] <= step]
    check_history(parent, rows, logged)
    lines = [json.dumps(row) + '\n' for row in (*rows, {'step': step, 'forked_at': step})]
    write_text(workdir / 'metrics.jsonl', ''.join(lines))


class MetricLog:
  """Writes rows of metrics to metrics.jsonl, TensorBoard and W&B (the project `wandb`). Only the first process writes.

  When opened at step n, it first drops the rows after n, so that a resumed run has one continuous log. A warning is
  printed if the rows end before step `logged`.
  """

  def __init__(self, workdir: pathlib.Path, step: int, tensorboard: bool, logged: int = 0, wandb: str = ''):
    self.workdir, self.board, self.file, self.wandb = workdir, None, None, None
    if jax.process_index() > 0:
      return
    kept = [row for row in read(workdir) if row['step'] <= step] if step else []
    check_history(workdir, kept, logged)
    write_text(workdir / 'metrics.jsonl', ''.join(json.dumps(row) + '\n' for row in kept))
    self.file = (workdir / 'metrics.jsonl').open('a', buffering=1)
    if tensorboard:
      self.board = Board(workdir / 'tensorboard', step + 1)
    if wandb:
      self.wandb = wandb_log.WandbRun(workdir, step, wandb)

  def write(self, step: int, row: Mapping[str, float]) -> None:
    if self.file:
      with files.naming(self.workdir / 'metrics.jsonl'):
        self.file.write(json.dumps({'step': step, **row}) + '\n')
    for other in (self.board, self.wandb):
      if other:
        other.write(step, row)

  def close(self) -> None:
    with contextlib.ExitStack() as stack:
      for other in (self.board, self.wandb):
        if other:
          stack.callback(other.close)
      if self.file:
        stack.enter_context(files.naming(self.workdir / 'metrics.jsonl'))
        stack.callback(self.file.close)


class Board:
  """A TensorBoard file of scalars. TensorBoard hides what older files have at step `first` and later.

  TensorBoard reads files in the order of the times in their names, so the new file has a later time than all others,
  even if the clock was set back.

  It writes in the calling thread. tensorboardX's SummaryWriter uses another thread, and blocks forever if that fails.
  """

  def __init__(self, folder: pathlib.Path, first: int):
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import RecordWriter

    self.event, self.flushed_at = Event, time.monotonic()
    times = [re.match(r'events\.out\.tfevents\.(\d+)\.', file.name) for file in folder.glob('*')]
    begun = max([int(time.time()), *(int(found[1]) + 1 for found in times if found)])
    self.file = folder / f'events.out.tfevents.{begun}.{socket.gethostname()}'
    with files.naming(self.file):
      folder.mkdir(exist_ok=True)
      self.records = RecordWriter(str(self.file))
    self._add(file_version='brain.Event:2')
    self._add(step=first, session_log=SessionLog(status=SessionLog.START))

  def write(self, step: int, row: Mapping[str, float]) -> None:
    from tensorboardX import summary

    for name, value in row.items():
      self._add(step=step, summary=summary.scalar(name, value))
    if time.monotonic() - self.flushed_at > FLUSH_SECONDS:
      self.flushed_at = time.monotonic()
      with files.naming(self.file):
        self.records.flush()

  def _add(self, **content: Any) -> None:
    with files.naming(self.file):
      self.records.write(self.event(wall_time=time.time(), **content).SerializeToString())

  def close(self) -> None:
    with files.naming(self.file):
      self.records.close()


def commit(root: pathlib.Path = pathlib.Path(__file__).parents[2]) -> str | None:
  """The git commit of the code, with '-dirty' if a tracked file was modified; None outside of a git checkout."""
  git = lambda *command: subprocess.run(
    ['git', '-C', str(root), *command], capture_output=True, text=True, check=True, timeout=10
  ).stdout.strip()
  try:
    if pathlib.Path(git('rev-parse', '--show-toplevel')).resolve() != root.resolve():  # inside another repository
      return None
    return git('rev-parse', '--short=12', 'HEAD') + ('-dirty' if git('status', '--porcelain', '-uno') else '')
  except (OSError, subprocess.SubprocessError):
    return None


def write_summary(workdir: pathlib.Path, summary: Mapping, *, trained: bool) -> None:
  """Writes summary.json. If not `trained`, the existing values of `TRAINING_KEYS` are kept."""
  if jax.process_index() == 0:
    file = workdir / 'summary.json'
    if not trained and file.exists():
      old = read_json(file)
      files.check_types(file, old, SUMMARY)
      summary = {**summary, **{key: old[key] for key in TRAINING_KEYS if key in old}}
    write_text(file, json.dumps(summary, indent=2) + '\n')


def evaluation_name(name: str = '') -> str:
  """The file name of an evaluation, without suffix. `name` is the dataset, if it is not the one of the run.

  >>> evaluation_name(), evaluation_name('voc/2007'), evaluation_name('鳥')
  ('evaluation', 'evaluation_voc_2007', 'evaluation_鳥')
  """
  return 'evaluation_' + re.sub(r'[\W_]+', '_', name) if name else 'evaluation'


def write_evaluation(workdir: pathlib.Path, results: Mapping, arrays: Mapping[str, np.ndarray], name: str = '') -> None:
  """Writes evaluation.json, and evaluation.npz for the figures; for another dataset, `evaluation_NAME`.

  Prints the accuracies. `results` has the `step` of the checkpoint, or the `file` of the features.
  """
  if jax.process_index() > 0:
    return
  stem = evaluation_name(name)
  stream = io.BytesIO()
  arrays = {**arrays, 'evaluation': np.array(_shared(results))}
  np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
  text = json.dumps(results, indent=2, allow_nan=False) + '\n'
  files.write_together({workdir / f'{stem}.npz': stream.getvalue(), workdir / f'{stem}.json': text.encode()})
  of = results['file'] if 'file' in results else f'step {results["step"]}'
  when = f'{of}, {name}' if name else of
  print(progress.sentence(when, {k: v for k, v in progress.accuracies(results).items() if isinstance(v, float)}))
