"""The command line: what a stranger types, right and wrong."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from absl import flags

import main

ROOT = pathlib.Path(__file__).parent.parent

QUICK = (
  '--config=configs/quickstart.py',
  '--config.model.width=4',
  '--config.model.stage_sizes=(1,)',
  '--config.augment.jitter=0.0',  # colours take long to compile
  '--config.augment.grey=0.0',
  '--config.batch_size=64',
  '--config.steps=30',
  '--config.optimizer.warmup_epochs=0',
  '--config.log.every_steps=1',
  '--config.log.tensorboard=False',
  '--config.eval.k=()',
)


def call(*arguments):
  """main.py with these arguments, in this process; returns what it exits with."""
  flags.FLAGS.unparse_flags()
  rest = flags.FLAGS(['main.py', *arguments], known_only=True)
  with pytest.raises(SystemExit) as stopped:
    main.main(rest)
  return str(stopped.value)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--workdir=w'], '--config is missing: give a file'),
    (['--config=configs/quickstart.py', '--workdir='], '--workdir is missing'),
    (['--config=configs/quikstart.py', '--workdir=w'], "did you mean 'configs/quickstart.py'?"),
    (
      ['--config=configs/quickstart.py', '--workdir=w', '--mode=trian'],
      "--mode='trian' does not exist: did you mean 'train'?",
    ),
    (['--config=configs/quickstart.py', '--workdir=w', '--wrokdir=x'], "'--wrokdir=x' is no flag"),
    (['--config=configs/quickstart.py', '--workdir=w', '--config.bach_size=3'], "did you mean 'batch_size'?"),
    (['--config=configs/quickstart.py', '--workdir=w', '--config.loss.name=nce'], "loss.name = 'nce'"),
    (['--mode=evaluate', '--workdir=nowhere'], "--workdir='nowhere' holds no run"),
    (
      ['--mode=report', '--workdir=w', '--config.seed=1'],
      '--mode=report shows what was measured, and takes no --config',
    ),
  ],
)
def test_a_mistake_is_one_line(arguments, message, monkeypatch, tmp_path):
  (tmp_path / 'configs').symlink_to(ROOT / 'configs')
  monkeypatch.chdir(tmp_path)
  told = call('--config=', '--mode=train', *arguments)
  assert told.startswith('ssl_jax: ')
  assert message in told
  assert '\n' not in told
  assert not (tmp_path / 'w').exists()


def start(workdir):
  command = [sys.executable, 'main.py', *QUICK, f'--workdir={workdir}']
  environment = os.environ | {'PYTHONUNBUFFERED': '1', 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  return subprocess.Popen(
    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path):
  with start(tmp_path) as run:
    for line in run.stdout:
      if line.startswith('step 3/30'):
        run.send_signal(signal.SIGTERM)
        break
    said = run.stdout.read()
  assert run.returncode == 1
  assert 'saved: the same command goes on from here' in said
  with start(tmp_path) as again:
    said = again.stdout.read()
  assert again.returncode == 0, said
  assert 'goes on at step' in said
  assert json.loads((tmp_path / 'summary.json').read_text())['steps'] == 30
  steps = [json.loads(line)['step'] for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert steps == list(range(1, 31))
