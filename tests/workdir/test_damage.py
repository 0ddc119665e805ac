"""Damaged files of a workdir: every command ends in the right result or in one line."""

import json
import os
import pathlib
import shutil
import signal
import textwrap

import jax
import numpy as np
import pytest
from absl import flags

import main
from ssl_jax import train
from ssl_jax.workdir import checksums, files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints
from tests.helpers import tiny

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
  with pytest.raises(ValueError, match='line 2 of .*metrics.jsonl has no metrics of a step: fix it'):
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


def results(workdir):
  """What the commands compute, from the files of a workdir."""
  report = (workdir / 'report.md').read_text() if (workdir / 'report.md').is_file() else ''
  return {
    'train': (leaves(workdir), [row.get('loss') for row in metric_log.read(workdir)]),
    'evaluate': json.loads((workdir / 'evaluation.json').read_text()),
    'export': (workdir / 'export' / 'encoder.safetensors').read_bytes(),
    'report': report.replace(str(workdir), ''),
  }
