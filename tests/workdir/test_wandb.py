"""Rows in Weights & Biases: offline, without an account, and without a connection."""

import json
import socket
import struct
import sys
import time
import types

import jax
import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from ssl_jax import train
from ssl_jax.run import builder
from ssl_jax.workdir import metric_log, wandb_log
from tests.helpers import asked_to_stop_at, tiny

BLOCK = 2**15  # of a .wandb file, whose format is that of LevelDB's logs


@pytest.fixture
def offline(monkeypatch):
  """Offline mode with the address of a server, and of a proxy for any other, that nobody may connect to."""
  with socket.create_server(('127.0.0.1', 0)) as server:
    address = f'http://127.0.0.1:{server.getsockname()[1]}'
    for name in ('WANDB_BASE_URL', 'HTTP_PROXY', 'HTTPS_PROXY', 'http_proxy', 'https_proxy'):
      monkeypatch.setenv(name, address)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    for name in ('WANDB_API_KEY', 'WANDB_DIR', 'WANDB_RUN_ID'):
      monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()  # otherwise its process and threads outlive the test
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
      server.accept()


def records(file):
  """The records of a .wandb file."""
  data, place, parts = file.read_bytes(), 7, b''
  while place < len(data):
    if BLOCK - place % BLOCK < 7:  # too little for a header: padding
      place += BLOCK - place % BLOCK
      continue
    length, kind = struct.unpack('<HB', data[place + 4 : place + 7])
    parts += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):  # complete, or the last part
      yield wandb_internal_pb2.Record.FromString(parts)
      parts = b''


def complete(file, seconds=30):
  """The records of a run that has ended: the process of W&B writes the last ones when it likes."""
  end = time.monotonic() + seconds
  while not (read := list(records(file))) or not read[-1].HasField('exit'):
    assert time.monotonic() < end, f'{file} has no end'
    time.sleep(0.05)
  return read


def found_in(folder):
  """[(id, project, config, exit code, rows)] of the runs in a workdir, in their order; a step has one row."""
  found = []
  for file in folder.glob('wandb/offline-run-*/*.wandb'):
    read = complete(file)
    run = next(record.run for record in read if record.HasField('run'))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    rows = {}
    for record in read:
      items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
      if items:
        step = items.pop('_step')
        rows.setdefault(step, {}).update({k: v for k, v in items.items() if not k.startswith('_')})
    found.append((run.start_time.ToNanoseconds(), run.run_id, run.project, config, read[-1].exit.exit_code, rows))
  return [run for _, *run in sorted(found, key=lambda run: run[0])]


def merged(rows):
  """The rows of metrics.jsonl by step: W&B has one row per step."""
  by_step = {}
  for row in rows:
    by_step.setdefault(row['step'], {}).update({k: v for k, v in row.items() if k != 'step'})
  return by_step


@pytest.mark.slow
def test_a_resumed_run_is_one_run_with_all_rows(tmp_path, offline):
  chosen = tiny(tmp_path, steps=8, **{'log.wandb': 'shapes', 'eval.every_epochs': 2})
  with asked_to_stop_at(5), pytest.raises(train.Interrupted):
    train.train(chosen, str(tmp_path / 'run'))
  train.train(chosen, str(tmp_path / 'run'))
  first, second = found_in(tmp_path / 'run')
  assert first[0] == second[0] == (tmp_path / 'run' / 'wandb' / 'run_id').read_text().strip()
  assert first[1] == 'shapes' and (first[3], second[3]) == (1, 0)
  assert {key: first[2][key] for key in chosen.to_dict()} == json.loads(json.dumps(chosen.to_dict()))
  assert (list(first[4]), list(second[4])) == ([1, 2, 3, 4, 5], [6, 7, 8])
  rows = merged(metric_log.read(tmp_path / 'run'))
  assert first[4] | second[4] == rows and 'knn5' in rows[8]


@pytest.mark.slow
def test_a_run_that_begins_again_is_another_run(tmp_path, offline):
  (tmp_path / 'config.json').write_text('{"seed": 1}')
  for step in (0, 0, 3):
    log = metric_log.MetricLog(tmp_path, step, tensorboard=False, wandb='shapes')
    log.write(step + 1, {'loss': 0.5})
    log.close()
  one, two, three = found_in(tmp_path)
  assert one[0] != two[0] == three[0] and three[4] == {4: {'loss': 0.5}}


@pytest.mark.parametrize('module', [None, types.ModuleType('wandb')], ids=['nothing', 'a folder that W&B made'])
def test_a_missing_package_is_one_line_before_anything_is_loaded(tmp_path, monkeypatch, module):
  monkeypatch.setitem(sys.modules, 'wandb', module)
  monkeypatch.delitem(sys.modules, 'wandb.errors', raising=False)
  monkeypatch.delattr(builder, 'build')
  with pytest.raises(ValueError, match=r"^log\.wandb = 'shapes' needs wandb: pip install -e '\.\[wandb\]'$"):
    train.train(tiny(tmp_path, **{'log.wandb': 'shapes'}), str(tmp_path / 'run'))


@pytest.mark.parametrize('content', [b'', b'../elsewhere', b'\xff\x00'])
def test_a_damaged_id_is_one_line(tmp_path, content):
  (tmp_path / 'wandb').mkdir()
  (tmp_path / 'wandb' / 'run_id').write_bytes(content)
  with pytest.raises(ValueError, match=r'run_id has no valid W&B run id: remove it to start a new W&B run$'):
    wandb_log.WandbRun(tmp_path, 3, 'shapes')


def test_without_an_account_the_fix_is_named(tmp_path, monkeypatch):
  def init(**_):
    raise wandb.errors.UsageError('No API key configured.\nMore lines.')

  monkeypatch.setattr(wandb, 'init', init)
  (tmp_path / 'config.json').write_text('{}')
  message = r"^log\.wandb = 'shapes' cannot be used \(No API key configured\.\): "
  message += r'run `wandb login`, or set WANDB_MODE=offline$'
  with pytest.raises(ValueError, match=message):
    wandb_log.WandbRun(tmp_path, 0, 'shapes')


def test_only_the_first_process_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.delattr(wandb_log, 'WandbRun')
  log = metric_log.MetricLog(tmp_path, 0, tensorboard=True, wandb='shapes')
  log.write(1, {'loss': 0.5})
  log.close()
  assert not list(tmp_path.iterdir())
