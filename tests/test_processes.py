"""Several processes: one of them is killed, the others end and name it, and the same command resumes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import portpicker
import pytest

from ssl_jax import train
from ssl_jax.workdir import metric_log
from tests.helpers import asked_to_stop_at, bits, config_file, tiny
from tests.test_main import ROOT

SECONDS = 60  # in which the others must end
STEPS = 6
CHOICES = {'steps': STEPS, 'checkpoint.every_steps': 2, 'eval.every_epochs': 1, 'parallel.devices': 0}

# main.py in a process that kills itself at a moment of the run: argv is the moment and the arguments.
DIES = """
import os, signal, sys
import main
from ssl_jax import train
from ssl_jax.evals.image_evaluator import ImageEvaluator
from ssl_jax.workdir import checksums

moment, *sys.argv[1:] = sys.argv[1:]

def die(owner, name, when):
  function = getattr(owner, name)
  def dying(*given, **more):
    if when(*given):
      os.kill(os.getpid(), signal.SIGKILL)
    return function(*given, **more)
  setattr(owner, name, dying)

if moment == 'step':
  die(train.Monitor, 'add', lambda self, step, *_: step == 5)
elif moment == 'save':  # all is written, and it has no final name yet
  die(checksums, 'write', lambda folder: folder.name.startswith('4'))
elif moment == 'evaluation':
  calls = iter(range(1, 100))  # after steps 2, 4 and 6
  die(ImageEvaluator, 'scores', lambda *_: next(calls) == 3)
main.app.run(main.main, flags_parser=lambda argv: main.flags.FLAGS(argv, known_only=True))
"""


@contextlib.contextmanager
def processes(folder, count, workdir, dies=None, other=()):
  """`count` processes that train a tiny run together. `dies`: (process, moment). `other`: flags of the last process."""
  file = config_file(folder, CHOICES | ({'parallel.processes': count} if count > 1 else {'parallel.devices': 1}))
  arguments = [f'--config={file}', f'--workdir={workdir}']
  environment = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  environment['JAX_COORDINATOR_ADDRESS'] = f'localhost:{portpicker.pick_unused_port()}'
  with contextlib.ExitStack() as stack:
    started = []
    for process in range(count):
      program = ['main.py', *arguments, *(other if process == count - 1 else ())]
      if dies and dies[0] == process:
        program = ['-c', DIES, dies[1], *arguments]
      pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
      child = subprocess.Popen(
        [sys.executable, *program], cwd=ROOT, env=environment | {'JAX_PROCESS_ID': str(process)}, **pipes
      )
      started.append(stack.enter_context(child))
      stack.callback(child.kill)
    yield started


def finish(folder, count, workdir):
  """Trains to the end. -> the output of the first process"""
  with processes(folder, count, workdir) as started:
    said = [child.communicate(timeout=400) for child in started]
  assert [child.returncode for child in started] == [0] * count, said
  assert not any(error for _, error in said), said
  return said[0][0]


def assert_same_numbers(workdir, other):
  """Equal up to the order of summation, which is another one on other devices."""
  rows, others = metric_log.read(workdir), metric_log.read(other)
  assert [row.keys() for row in rows] == [row.keys() for row in others]
  for row, expected in zip(rows, others, strict=True):
    for name in {'step', 'loss', 'knn5'} & row.keys():
      np.testing.assert_allclose(row[name], expected[name], rtol=1e-5)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  folder = tmp_path_factory.mktemp('undisturbed')
  finish(folder, 2, folder / 'run')
  return folder


def kill_one(folder, count, process, moment, workdir):
  """Starts a run whose `process` is killed at the moment, and checks what the others say."""
  with processes(folder, count, workdir, (process, moment)) as started:
    assert started[process].wait(timeout=400) == -signal.SIGKILL, started[process].communicate()
    killed = time.monotonic()
    said = {other: child.communicate(timeout=SECONDS) for other, child in enumerate(started) if other != process}
    assert time.monotonic() - killed < SECONDS
  for other, (_, error) in said.items():
    assert started[other].returncode == 1
    line = f'ssl_jax: process {process} of {count} is lost, so process {other} stops ('
    assert error.startswith(line) and error.count('\n') == 1, error


@pytest.mark.slow
@pytest.mark.parametrize(('process', 'moment'), [(1, 'step'), (0, 'save'), (1, 'evaluation')])
def test_a_killed_process_is_named_and_the_same_command_resumes(undisturbed, tmp_path, process, moment):
  kill_one(undisturbed, 2, process, moment, tmp_path / 'run')
  assert ' resumes at step ' in finish(undisturbed, 2, tmp_path / 'run')
  # A process that is killed may leave one more of the old checkpoints than it would keep.
  assert bits(tmp_path / 'run', newest=2) == bits(undisturbed / 'run', newest=2)


@pytest.mark.slow
def test_the_first_of_four_processes_is_killed(undisturbed, tmp_path):
  """The first one is jax's coordinator. One process alone resumes the run of four, with the same numbers."""
  kill_one(undisturbed, 4, 0, 'step', tmp_path / 'run')
  assert ' resumes at step ' in finish(undisturbed, 1, tmp_path / 'run')
  assert_same_numbers(tmp_path / 'run', undisturbed / 'run')


@pytest.mark.slow
def test_a_run_of_four_devices_resumes_on_one_and_on_two_processes(undisturbed, tmp_path):
  chosen = lambda devices: tiny(undisturbed, **CHOICES | {'parallel.devices': devices})
  with asked_to_stop_at(3), pytest.raises(train.Interrupted):
    train.train(chosen(4), tmp_path / 'run')
  shutil.copytree(tmp_path / 'run', tmp_path / 'other')
  train.train(chosen(1), tmp_path / 'run')
  assert_same_numbers(tmp_path / 'run', undisturbed / 'run')
  assert 'resumes at step 3 ' in finish(undisturbed, 2, tmp_path / 'other')
  assert_same_numbers(tmp_path / 'other', undisturbed / 'run')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('other', 'message'),
  [
    ('--config.temperature.tau=0.05', r'temperature\.tau = 0\.5 in process 0, but 0\.05 in process 1: start all'),
    ('--mode=evaluate', "--mode = 'train' in process 0, but 'evaluate' in process 1: start all"),
  ],
)
def test_processes_with_different_commands_end_in_one_line(tmp_path, other, message):
  with processes(tmp_path, 2, tmp_path / 'run', other=[other]) as started:
    said = [child.communicate(timeout=SECONDS) for child in started]
  assert [child.returncode for child in started] == [1, 1], said
  assert all(re.fullmatch(f'ssl_jax: {message}.*', error.strip()) for _, error in said), said
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_workdir_that_is_not_shared_ends_in_one_line(undisturbed, tmp_path):
  with processes(undisturbed, 2, tmp_path / 'run', other=[f'--workdir={tmp_path / "other"}']) as started:
    said = [child.communicate(timeout=SECONDS) for child in started]
  assert [child.returncode for child in started] == [1, 1], said
  message = 'a new file of process 0 in --workdir, which all processes must share, is visible = True in process 0, but '
  assert all(re.match(f'ssl_jax: {message}', error) and error.count('\n') == 1 for _, error in said), said
  assert not [*tmp_path.rglob('.shared-*')]


@pytest.mark.slow
def test_processes_that_see_different_checkpoints_end_in_one_line(undisturbed, tmp_path):
  """As on hosts without a shared file system: the second process has lost the newest checkpoint."""
  for name in ('run', 'other'):
    shutil.copytree(undisturbed / 'run', tmp_path / name)
  shutil.rmtree(tmp_path / 'other' / 'checkpoints' / str(STEPS))
  with processes(undisturbed, 2, tmp_path / 'run', other=[f'--workdir={tmp_path / "other"}']) as started:
    said = [child.communicate(timeout=SECONDS) for child in started]
  assert [child.returncode for child in started] == [1, 1], said
  message = f'the step of the newest checkpoint in --workdir, .* = {STEPS} in process 0, but 4 in process 1: '
  assert all(re.match(f'ssl_jax: {message}', error) and error.count('\n') == 1 for _, error in said), said
