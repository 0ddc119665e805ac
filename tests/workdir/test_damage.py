"""Damaged files of a workdir: every command ends in the right result or in one line."""

import collections
import errno
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from absl import flags
from tensorboardX.proto import event_pb2

import main
from ssl_jax import train
from ssl_jax.workdir import checksums, files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints
from tests.helpers import tiny
from tests.test_main import QUICK, ROOT

SECONDS = 120  # after which a command counts as hanging


def finish(tmp_path, name='run', **changes):
  """A finished run with checkpoints at steps 2 and 4."""
  chosen = tiny(tmp_path, steps=4, **{'checkpoint.every_steps': 2, 'eval.k': (), **changes})
  train.train(chosen, tmp_path / name)
  return chosen


def flip(file):
  """Inverts 8 bytes in the middle of a file."""
  data = bytearray(file.read_bytes())
  middle = max(0, len(data) // 2 - 4)
  data[middle : middle + 8] = bytes(255 - x for x in data[middle : middle + 8])
  file.write_bytes(data)


def leaves(workdir):
  """The newest state, as a list of arrays."""
  checkpoints = Checkpoints(workdir)
  state = checkpoints.newest()
  checkpoints.close()
  return jax.tree.leaves(state)


def same(a, b):
  return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def data_files(workdir, step):
  return sorted((workdir / 'checkpoints' / str(step) / 'state' / 'ocdbt.process_0' / 'd').iterdir())


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, capsys):
  chosen = finish(tmp_path)
  expected = leaves(tmp_path / 'run')
  file = data_files(tmp_path / 'run', 4)[0]
  flip(file)
  capsys.readouterr()
  assert not same(leaves(tmp_path / 'run'), expected)  # step 2
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and said.startswith('ssl_jax: warning: checkpoint 4 (state/ocdbt.process_0/d/')
  assert 'does not match its checksum' in said and said.endswith('is damaged: step 2 is used\n')
  train.train(chosen, tmp_path / 'run')
  said = capsys.readouterr()
  assert f'is damaged and moved to {tmp_path / "run" / "damaged"}: step 2 is used\n' in said.err
  assert 'resumes at step 2' in said.out
  assert same(leaves(tmp_path / 'run'), expected)
  assert (tmp_path / 'run' / 'damaged' / '4').is_dir()
  assert not capsys.readouterr().err


def test_without_an_intact_checkpoint_the_run_ends_in_one_line(tmp_path):
  chosen = finish(tmp_path)
  for step in (2, 4):
    flip(data_files(tmp_path / 'run', step)[0])
  with pytest.raises(ValueError, match=r'checkpoints 4 .*, 2 .* are damaged: remove .*, and the run starts again'):
    train.train(chosen, tmp_path / 'run')


def test_an_older_checkpoint_has_no_checksums_and_is_read(tmp_path, capsys):
  chosen = finish(tmp_path)
  for file in (tmp_path / 'run' / 'checkpoints').glob(f'*/{checksums.NAME}'):
    file.unlink()
  capsys.readouterr()
  train.train(chosen, tmp_path / 'run')
  said = capsys.readouterr()
  assert 'resumes at step 4' in said.out and not said.err


def test_every_file_of_a_checkpoint_has_a_checksum(tmp_path):
  finish(tmp_path)
  folder = tmp_path / 'run' / 'checkpoints' / '4'
  named = json.loads((folder / checksums.NAME).read_text())
  found = {str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file()}
  assert {name for name in found if pathlib.Path(name).name not in checksums.LATER} == set(named)
  assert not checksums.damage(folder)


def test_a_fifo_that_orbax_would_open_is_damage(tmp_path):
  checksums.write(tmp_path)
  os.mkfifo(tmp_path / '_CHECKPOINT_METADATA')
  assert checksums.damage(tmp_path) == '_CHECKPOINT_METADATA is not a file'


@pytest.mark.parametrize('kind', ['flip', 'truncate', 'remove', 'directory', 'fifo'])
def test_damage_names_the_file(tmp_path, kind):
  (tmp_path / 'part').mkdir()
  for name in ('a', 'part/b'):
    (tmp_path / name).write_text('some content')
  checksums.write(tmp_path)
  assert not checksums.damage(tmp_path)
  harm(tmp_path / 'part' / 'b', kind)
  assert checksums.damage(tmp_path).startswith('part/b ')
  assert not checksums.damage(tmp_path, 'a')


@pytest.mark.parametrize(
  'line', [b'{"step": "x"}', b'{"step": null}', b'null', b'\0\0\0\0', b'{"step": 2, "lo\xffs": 1}', b'[' * 100_000]
)
def test_a_line_without_metrics_is_named(tmp_path, line):
  (tmp_path / 'metrics.jsonl').write_bytes(b'{"step": 1}\n' + line + b'\n')
  with pytest.raises(ValueError, match=r'line 2 of .*metrics.jsonl has no metrics of a step: fix it'):
    metric_log.read(tmp_path)
  (tmp_path / 'metrics.jsonl').write_bytes(b'{"step": 1}\n' + line)
  assert metric_log.read(tmp_path) == [{'step': 1}]


def test_lost_rows_are_noticed(tmp_path, capsys):
  chosen = finish(tmp_path)
  file = tmp_path / 'run' / 'metrics.jsonl'
  file.write_text(''.join(file.read_text().splitlines(keepends=True)[:3]))
  capsys.readouterr()
  train.train(chosen, tmp_path / 'run')
  assert f'{file} ends at step 3, and the run had logged step 4: rows are lost' in capsys.readouterr().err


@pytest.mark.parametrize('content', ['[' * 100_000, '{"a":' * 60 + '1' + '}' * 60, 'null', '\0', ''])
def test_a_config_that_is_no_mapping_is_named(tmp_path, content):
  (tmp_path / 'config.json').write_text(content)
  with pytest.raises(ValueError, match=r'config.json cannot be read \(.*\): fix it, or remove it'):
    files.read_config(tmp_path)


def test_checkpoints_must_be_a_directory(tmp_path):
  (tmp_path / 'checkpoints').write_text('')
  with pytest.raises(ValueError, match='checkpoints is not a directory: remove it, or give another --workdir'):
    files.check(tmp_path, tiny(tmp_path).to_dict())


# Every file, harmed in every way


KINDS = ('flip', 'truncate', 'remove', 'directory', 'fifo')


def harm(file, kind):
  """Damages one file."""
  if kind == 'flip':
    flip(file)
  elif kind == 'truncate':
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  else:
    file.unlink()
    if kind == 'directory':
      file.mkdir()
    elif kind == 'fifo':
      os.mkfifo(file)


def command(*arguments):
  """Runs main.py in this process. Returns its message, or '' if it ends well; anything else is a traceback."""
  flags.FLAGS.unparse_flags()
  rest = flags.FLAGS(['main.py', '--config=', '--mode=train', *arguments], known_only=True)

  def hangs(*_):
    raise AssertionError(f'{arguments} hangs')

  previous = signal.signal(signal.SIGALRM, hangs)
  signal.alarm(SECONDS)
  try:
    main.main(rest)
    return ''
  except SystemExit as stopped:
    return str(stopped.code)
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def outcome(mode, workdir):
  """What a command computed, to compare with the same of an intact workdir."""
  if mode == 'train':
    return leaves(workdir)
  if mode == 'evaluate':
    return json.loads((workdir / 'evaluation.json').read_text())
  if mode == 'export':
    tensors = safetensors.numpy.load_file(workdir / 'export' / 'encoder.safetensors')
    return [tensors[name] for name in sorted(tensors)]
  return (workdir / 'report.md').read_text().replace(str(workdir), '')


def equal(a, b):
  return same(a, b) if isinstance(a, list) else a == b


# The files that each command reads; the others are written, or belong to orbax or TensorBoard.
READ = {
  'train': ('checkpoints/', 'config.json', 'metrics.jsonl', 'summary.json', 'tensorboard/', 'neighbours.png'),
  'evaluate': ('checkpoints/', 'config.json', 'evaluation.'),
  'export': ('checkpoints/', 'config.json'),
  'report': ('config.json', 'summary.json', 'evaluation.', 'metrics.jsonl'),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('mode', 'kind'), [*(('report', kind) for kind in KINDS), ('export', 'flip'), ('train', 'fifo')]
)
def test_every_damaged_file_ends_in_the_right_result_or_in_one_line(mode, kind, tmp_path, monkeypatch, capsys):
  """One file at a time, of those that a command reads."""
  monkeypatch.setattr('ssl_jax.run.devices.start', lambda *_: None)
  monkeypatch.setattr('ssl_jax.run.devices.compile_faster', lambda *_: None)
  evaluated = {'eval.k': (5,), 'eval.at_end': True, 'eval.linear': ''}
  choices = {'log.tensorboard': True, **(evaluated if mode in ('evaluate', 'report') else {'eval.k': ()})}
  finish(tmp_path, 'intact', **choices)
  file = tmp_path / 'config.py'
  file.write_text(
    'import pathlib\n\nfrom tests.helpers import tiny\n\n\n'
    'def get_config(options):\n'
    f"  choices = {choices!r} | {{'checkpoint.every_steps': 2}}\n"
    f'  return tiny(pathlib.Path({str(tmp_path)!r}), steps=4, **choices)\n'
  )
  given = [f'--config={file}'] if mode == 'train' else []
  assert not command(*given, f'--mode={mode}', f'--workdir={tmp_path / "intact"}')
  expected = outcome(mode, tmp_path / 'intact')
  names = [
    str(path.relative_to(tmp_path / 'intact')) for path in sorted((tmp_path / 'intact').rglob('*')) if path.is_file()
  ]
  names = [name for name in names if name.startswith(READ[mode]) and not name.startswith('checkpoints/2/')]
  failures, said = [], collections.Counter()
  for name in names:
    shutil.rmtree(tmp_path / 'run', ignore_errors=True)
    shutil.copytree(tmp_path / 'intact', tmp_path / 'run')
    harm(tmp_path / 'run' / name, kind)
    capsys.readouterr()
    try:
      message = command(*given, f'--mode={mode}', f'--workdir={tmp_path / "run"}')
      warned = capsys.readouterr().err
      if message:
        right = message.startswith('ssl_jax: ') and '\n' not in message
      else:
        # A missing file is left out of a report, and another checkpoint or lost rows are named.
        right = ('warning' in warned and mode != 'train') or (mode == 'report' and kind == 'remove')
        right = right or equal(outcome(mode, tmp_path / 'run'), expected)
      said['one line' if message else 'warned' if warned else 'as if intact'] += 1
    except Exception as error:
      right, message = False, f'{type(error).__name__}: {error}'
    if not right:
      failures.append(f'{name}, {kind}: {message or "another result"}')
  print(mode, kind, dict(said))
  assert not failures, '\n'.join(failures)


# A full disk


def test_a_disk_that_fills_during_a_save_is_one_line(tmp_path, monkeypatch):
  def full(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(checksums, 'write', full)
  message = (
    r'^checkpoint 2 cannot be written to .*checkpoints \(no space left: a state has .* MB, .* MB are free\): make'
  )
  with pytest.raises(ValueError, match=message):
    finish(tmp_path)
  assert not list((tmp_path / 'run' / 'checkpoints').iterdir())  # the part that was written would fill the disk


def test_a_disk_that_is_full_for_metrics_is_named(tmp_path):
  log = metric_log.MetricLog(tmp_path, 0, tensorboard=True)
  log.file.close()
  log.file = open('/dev/full', 'a', buffering=1)  # noqa: SIM115
  with pytest.raises(OSError, match='No space left') as caught:
    log.write(1, {'loss': 1.0})
  assert caught.value.filename == str(tmp_path / 'metrics.jsonl') and files.is_full(caught.value)
  with pytest.raises(OSError, match='No space left'):
    log.file.close()
  log.board.records.close()
  log.file, log.board.records._writer = None, open('/dev/full', 'wb')  # noqa: SIM115
  with pytest.raises(OSError, match='No space left') as caught:
    for step in range(10_000):  # more than a buffer, and more than a queue
      log.write(step, {'loss': 1.0})
  assert caught.value.filename.startswith(str(tmp_path / 'tensorboard' / 'events.out.tfevents'))
  with pytest.raises(OSError, match='No space left'):
    log.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='only root can mount a small disk')
@pytest.mark.parametrize('size', ['4k', '16k', '330k'])  # for the first file, the metrics, and one checkpoint
def test_the_command_on_a_full_disk_prints_one_line(tmp_path, size):
  disk = tmp_path / 'disk'
  disk.mkdir()
  if subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', disk]).returncode:
    pytest.skip('mount is not allowed here')
  try:
    choices = [*QUICK, '--config.log.tensorboard=True', '--config.checkpoint.every_steps=10', '--config.steps=60']
    choices = choices if size == '330k' else [*choices, '--config.checkpoint.every_steps=0']
    run = subprocess.run(
      [sys.executable, 'main.py', *choices, f'--workdir={disk / "run"}'],
      cwd=ROOT,
      env=os.environ | {'XLA_FLAGS': ''},
      capture_output=True,
      text=True,
    )
  finally:
    subprocess.run(['umount', '-l', disk], check=True)
  assert run.returncode == 1
  assert run.stderr.startswith('ssl_jax: ') and run.stderr.count('\n') == 1, run.stderr
  assert str(disk / 'run') in run.stderr and '(no space left' in run.stderr and 'make room there' in run.stderr


def test_tensorboard_reads_the_scalars(tmp_path):
  log = metric_log.MetricLog(tmp_path, 3, tensorboard=True)
  log.write(4, {'loss': 0.5, 'knn5': 70.0})
  log.close()
  (file,) = (tmp_path / 'tensorboard').iterdir()
  events, data = [], file.read_bytes()
  while data:  # a record: its length, the length's checksum, the event, and the event's checksum
    (length,) = struct.unpack('<Q', data[:8])
    events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  assert events[0].file_version == 'brain.Event:2'
  assert (events[1].step, events[1].session_log.status) == (4, event_pb2.SessionLog.START)
  scalars = [(event.step, value.tag, value.simple_value) for event in events[2:] for value in event.summary.value]
  assert scalars == [(4, 'loss', 0.5), (4, 'knn5', 70.0)]
