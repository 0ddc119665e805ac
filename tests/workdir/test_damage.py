"""Damaged files of a workdir: every command ends in the right result or in one line."""

import errno
import json
import os
import pathlib
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from ssl_jax import train
from ssl_jax.reporting import report
from ssl_jax.run import builder
from ssl_jax.workdir import checksums, files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints
from tests import damage
from tests.damage import flip, harm
from tests.helpers import tiny
from tests.test_main import QUICK, ROOT


def finish(tmp_path, name='run', **changes):
  """A finished run with checkpoints at steps 2 and 4."""
  chosen = tiny(tmp_path, steps=4, **{'checkpoint.every_steps': 2, 'eval.k': (), **changes})
  train.train(chosen, tmp_path / name)
  return chosen


def leaves(workdir):
  """The newest state, as a list of arrays."""
  checkpoints = Checkpoints(workdir)
  state = checkpoints.newest()
  checkpoints.close()
  return jax.tree.leaves(state)


def test_a_checkpoint_that_a_running_training_removes_is_replaced_by_a_newer_one(tmp_path):
  chosen = tiny(tmp_path, steps=2, **{'eval.k': ()})
  train.train(chosen, tmp_path / 'run')
  checkpoints = Checkpoints(tmp_path / 'run')
  expected = leaves(tmp_path / 'run')
  (tmp_path / 'run' / 'checkpoints' / '2').rename(tmp_path / 'run' / 'checkpoints' / '4')
  assert same(jax.tree.leaves(checkpoints.newest()), expected) and checkpoints.latest() == 4
  (tmp_path / 'run' / 'checkpoints' / '4').rename(tmp_path / 'run' / 'checkpoints' / '6')
  assert same(jax.tree.leaves(checkpoints.restore(builder.build(chosen).initial_state())), expected)
  checkpoints.close()


def test_a_checkpoint_that_a_running_training_is_removing_is_not_damaged(tmp_path, monkeypatch, capsys):
  """Otherwise, an evaluation advises to remove all checkpoints of the running training."""

  def write(step):
    folder = tmp_path / 'checkpoints' / str(step)
    folder.mkdir(parents=True)
    (folder / 'weights').write_text('weights')
    checksums.write(folder)

  def removing(folder, damage=checksums.damage):
    if folder.name == '2':
      write(4)
      (folder / 'weights').unlink()
    return damage(folder)

  write(2)
  monkeypatch.setattr(checksums, 'damage', removing)
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.latest() == 4 and not capsys.readouterr().err
  checkpoints.close()


def test_what_a_killed_save_has_left_is_removed_by_the_next_training(tmp_path):
  (tmp_path / 'run' / 'checkpoints' / '3.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
  finish(tmp_path)
  assert sorted(path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()) == ['2', '4']


def same(a, b):
  return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def data_files(workdir, step):
  return sorted((workdir / 'checkpoints' / str(step) / 'state' / 'ocdbt.process_0' / 'd').iterdir())


def test_a_damaged_checkpoint_whose_config_is_lost_does_not_decide_who_owns_the_workdir(tmp_path):
  chosen = finish(tmp_path)
  for name in ('4', '4_2'):
    harm(tmp_path / 'run' / 'checkpoints' / '4' / 'config' / 'metadata', 'zeros')
    assert files.owner(tmp_path / 'run') == files.identity_at(tmp_path / 'run', 2)
    train.train(chosen, tmp_path / 'run')
    assert (tmp_path / 'run' / 'damaged' / name).is_dir() and files.steps(tmp_path / 'run') == [4, 2]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, capsys):
  chosen = finish(tmp_path)
  expected = leaves(tmp_path / 'run')
  flip(data_files(tmp_path / 'run', 4)[0])
  capsys.readouterr()
  assert not same(leaves(tmp_path / 'run'), expected)  # step 2
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and said.startswith('ssl_jax: warning: checkpoint 4 (state/ocdbt.process_0/d/')
  assert 'does not match its checksum' in said and said.endswith('is damaged: using step 2 instead\n')
  train.train(chosen, tmp_path / 'run')
  said = capsys.readouterr()
  assert f'is damaged and moved to {tmp_path / "run" / "damaged"}: using step 2 instead\n' in said.err
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


@pytest.mark.parametrize('name', ['part/b', checksums.NAME])
def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch, name):
  (tmp_path / 'part').mkdir()
  (tmp_path / 'part/b').write_text('some content')
  checksums.write(tmp_path)
  opened = pathlib.Path.open

  def fail(path, *given, **named):
    if path == tmp_path / name:
      raise OSError(errno.EIO, 'Input/output error')
    return opened(path, *given, **named)

  monkeypatch.setattr(pathlib.Path, 'open', fail)
  assert checksums.damage(tmp_path) == f'{name} cannot be read (Input/output error)'


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
  train.train(chosen, tmp_path / 'run')
  assert 'rows are lost' not in capsys.readouterr().err
  file = tmp_path / 'run' / 'metrics.jsonl'
  file.write_text(''.join(file.read_text().splitlines(keepends=True)[:3]))
  train.train(chosen, tmp_path / 'run')
  assert f'{file} ends at step 3, but the run had logged step 4: rows are lost' in capsys.readouterr().err


@pytest.mark.parametrize('content', ['[' * 100_000, '{"a":' * 60 + '1' + '}' * 60, 'null', '\0', ''])
def test_a_config_that_is_no_mapping_is_named(tmp_path, content):
  (tmp_path / 'config.json').write_text(content)
  with pytest.raises(ValueError, match=r'config.json cannot be read \(.*\): fix it, or remove it'):
    files.read_config(tmp_path)


@pytest.mark.parametrize('kind', ['empty', 'dangling link'])
def test_checkpoints_must_be_a_directory(tmp_path, kind):
  damage.REPLACE[kind](tmp_path / 'checkpoints')
  with pytest.raises(ValueError, match='checkpoints is not a directory: remove it, or give another --workdir'):
    files.check(tmp_path, tiny(tmp_path).to_dict())


NAMED = {section: {'name': 'x'} for section in report.SECTIONS}


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('evaluation.json', {'step': {}, 'features': 'backbone'}, 'has a dict as step'),
    ('evaluation.json', {'knn5': 50.0}, 'has no features'),
    ('evaluation.json', {'features': 'backbone', 'step': 3}, 'has no epoch'),
    ('evaluation.json', {'features': 'backbone', 'measures': {'backbone': 3}}, 'has a int as measures'),
    ('evaluation.json', {'features': 'backbone', 'measures': {'backbone': {'lidar': 'x'}}}, 'has a str as lidar'),
    ('summary.json', {'steps': None}, 'has a NoneType as steps'),
    ('config.json', {'seed': 1}, 'has no method'),
    ('config.json', {'seed': 1, **NAMED, 'loss': {}}, 'has no name'),
    ('config.json', {'seed': 'x', **NAMED}, 'has a str as seed'),
  ],
)
def test_a_report_names_a_file_with_other_content(tmp_path, name, content, message):
  (tmp_path / name).write_text(json.dumps(content))
  with pytest.raises(ValueError, match=f'{name} {message}, so it is not what this program wrote: fix it, or remove it'):
    report.report(tmp_path)


def test_a_report_names_the_evaluation_of_another_set(tmp_path):
  config = {'seed': 1, **NAMED, 'eval': {'data': {'name': 'svhn'}}}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'evaluation_svhn.json').write_text('{"knn5": 50.0}')
  with pytest.raises(ValueError, match=r'evaluation_svhn\.json has no features'):
    report.report(tmp_path)


def test_figures_of_another_evaluation_are_not_shown(tmp_path):
  """A kill between the two renames leaves the new evaluation.npz beside the old evaluation.json."""
  for step in (1, 2):
    results = {'step': step, 'epoch': 1.0, 'features': 'backbone', 'knn5': 50.0 + step}
    metric_log.write_evaluation(tmp_path, results, {'curve': np.arange(3.0)})
    report.report(tmp_path)
  (tmp_path / 'evaluation.json').write_text(json.dumps(results | {'step': 1}))
  with pytest.raises(ValueError, match=r'npz has the figures of another evaluation than evaluation\.json: evaluate'):
    report.report(tmp_path)
  np.savez(tmp_path / 'evaluation.npz', curve=np.arange(3.0))  # by an older version
  report.report(tmp_path)


@pytest.mark.parametrize('name', ['neighbors.png', 'neighbors.txt'])
@pytest.mark.parametrize('kind', ['fifo', 'directory', 'zeros', 'dangling link'])
def test_a_report_names_damaged_neighbors(tmp_path, name, kind):
  (tmp_path / name).touch()
  harm(tmp_path / name, kind)
  if (name, kind) == ('neighbors.txt', 'zeros'):
    (tmp_path / name).write_bytes(b'\xff')
  with pytest.raises(ValueError, match=rf'{name} cannot be read \(.*\): remove it'):
    report._neighbors(report.FinishedRun(tmp_path, {}, {}, {}, {}, []))


@pytest.mark.slow
def test_a_sample_of_damaged_workdirs():
  """Every end is the right result, or one line; python -m tests.damage has more cases."""
  counts, failures = damage.damage(cases=20, seed=1)
  assert not failures, '\n'.join(failures)
  assert counts['one line'] > 3 and counts['intact'] + counts.get('warned', 0) > 3


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


def test_files_that_belong_together_are_all_replaced_or_none(tmp_path, monkeypatch):
  """Otherwise, an export on a full disk has the encoder of one step and the projector of another."""
  encoder, projector = tmp_path / 'model.safetensors', tmp_path / 'projector.safetensors'
  files.write_together({encoder: b'1', projector: b'1'})
  write = pathlib.Path.write_bytes

  def full(path, data):
    if path.name.startswith('projector'):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(path, data)

  with monkeypatch.context() as patched:
    patched.setattr(pathlib.Path, 'write_bytes', full)
    with pytest.raises(OSError, match='No space left') as caught:
      files.write_together({encoder: b'2', projector: b'2'})
  assert caught.value.filename == str(projector)
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {encoder.name: b'1', projector.name: b'1'}
  files.write_together({encoder: b'2', projector: b'2'})
  assert (encoder.read_bytes(), projector.read_bytes()) == (b'2', b'2')


def test_processes_that_write_the_same_file_wait_for_each_other(tmp_path):
  """Otherwise, the first one to finish publishes what the other one has written of its part so far."""
  file, contents = tmp_path / 'evaluation.npz', [bytes([k]) * 10**6 * (k + 1) for k in range(3)]

  def write(content):
    for _ in range(30):
      files.write_bytes(file, content)
      assert file.read_bytes() in contents

  with ThreadPoolExecutor() as pool:
    for done in [pool.submit(write, content) for content in contents]:
      done.result()
  assert list(tmp_path.iterdir()) == [file]


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


def test_tensorboard_reads_the_files_in_their_order_if_the_clock_was_set_back(tmp_path, monkeypatch):
  created = []
  for now in (1_900_000_000.0, 1_800_000_000.0, 1_800_000_000.5, 1_950_000_000.0):
    monkeypatch.setattr(metric_log.time, 'time', lambda now=now: now)
    metric_log.MetricLog(tmp_path, 3, tensorboard=True).close()
    created += {path.name for path in (tmp_path / 'tensorboard').iterdir()} - {*created}
  assert created == sorted(created) and len(created) == 4


def test_tensorboard_reads_the_scalars_during_a_run(tmp_path, monkeypatch):
  monkeypatch.setattr(metric_log, 'FLUSH_SECONDS', -1.0)
  log = metric_log.MetricLog(tmp_path, 3, tensorboard=True)
  log.write(4, {'loss': 0.5, 'knn5': 70.0})
  (file,) = (tmp_path / 'tensorboard').iterdir()
  events, data = [], file.read_bytes()
  log.close()
  assert file.read_bytes() == data
  while data:  # a record: its length, the length's checksum, the event, and the event's checksum
    (length,) = struct.unpack('<Q', data[:8])
    events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  assert events[0].file_version == 'brain.Event:2'
  assert (events[1].step, events[1].session_log.status) == (4, event_pb2.SessionLog.START)
  scalars = [(event.step, value.tag, value.simple_value) for event in events[2:] for value in event.summary.value]
  assert scalars == [(4, 'loss', 0.5), (4, 'knn5', 70.0)]
