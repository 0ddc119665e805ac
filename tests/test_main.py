"""The command line: defaults, mistakes and signals."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from absl import flags

import main
from ssl_jax.workdir import files
from tests.helpers import call

ROOT = pathlib.Path(__file__).parent.parent

QUICK = (
  '--config=configs/quickstart.py',
  '--config.model.width=4',
  '--config.model.stage_sizes=(1,)',
  '--config.augment.jitter=0.0',  # color jitter compiles slowly
  '--config.augment.grey=0.0',
  '--config.batch_size=64',
  '--config.steps=30',
  '--config.optimizer.warmup_epochs=0',
  '--config.log.every_steps=1',
  '--config.log.tensorboard=False',
  '--config.eval.k=()',
)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--workdir=w'], '--config is missing: give a file'),
    (['--mode=evaluate'], '--workdir is missing: give the directory of the run'),
    (['--mode=compare', 'a', 'b'], '--workdir is missing: give a directory for the comparison'),
    (['--config=configs/quikstart.py', '--workdir=w'], "did you mean 'configs/quickstart.py'?"),
    (
      ['--config=configs/quickstart.py', '--workdir=w', '--mode=trian'],
      "--mode='trian' is not a valid mode: did you mean 'train'?",
    ),
    (['--config=configs/quickstart.py', '--workdir=w', '--wrokdir=x'], "'--wrokdir=x' is not a flag"),
    (['--config=configs/quickstart.py', '--workdir=w', '--config.bach_size=3'], "did you mean 'batch_size'?"),
    (['--config=configs/quickstart.py', '--workdir=w', '--config.loss.name=nce'], "loss.name = 'nce'"),
    (['--mode=prepare'], '--config is missing: give a file'),
    (['--mode=prepare', '--config=configs/cifar10.py', 'cifar.tar.gz'], "'cifar.tar.gz' is not a file: give a copy of"),
    (['--mode=prepare', '--config=configs/cifar10.py', '--md5'], "'--md5' is not a flag"),
    (['--mode=evaluate', '--workdir=no\0where'], "'no\\x00where' has a NUL character"),
    (['--mode=evaluate', '--workdir=nowhere'], "--workdir='nowhere' does not hold a run"),
    (
      ['--mode=report', '--workdir=w', '--config.seed=1'],
      '--mode=report shows the results in --workdir and takes no --config',
    ),
  ],
)
def test_a_mistake_is_one_line(arguments, message, monkeypatch, tmp_path):
  (tmp_path / 'configs').symlink_to(ROOT / 'configs')
  monkeypatch.chdir(tmp_path)
  said = call('--config=', '--workdir=', '--mode=train', *arguments)
  assert said.startswith('ssl_jax: ')
  assert message in said
  assert '\n' not in said
  assert not (tmp_path / 'w').exists()


@pytest.mark.parametrize(
  ('mode', 'then'),
  [
    ('train', 'resumes from the last checkpoint, if there is one'),
    ('transfer', 'resumes after the last finished part'),
    ('evaluate', 'starts again'),
    ('prepare', 'starts again'),
  ],
)
def test_an_interruption_says_what_the_same_command_does(mode, then, monkeypatch):
  def interrupted(command):
    raise KeyboardInterrupt

  monkeypatch.setattr(main, 'run', interrupted)
  said = call(f'--mode={mode}', '--config=configs/quickstart.py', '--workdir=w')
  assert said == f'ssl_jax: interrupted; the same command {then}'


def test_a_wrong_flag_is_refused_without_importing_jax():
  code = """
import sys, main
main.flags.FLAGS(['main.py'])
try:
  main.main(['main.py'])
finally:
  print('jax' in sys.modules)
"""
  run = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
  assert run.stderr.startswith('ssl_jax: --config is missing') and run.stdout == 'False\n'


def test_a_missing_package_is_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ml_collections', None)
  for name in ('configs', 'configs.base'):
    monkeypatch.delitem(sys.modules, name, raising=False)
  said = call('--mode=train', '--workdir=', '--config=configs/quickstart.py')
  assert said == "ssl_jax: ml_collections is not installed: pip install -e '.[train]'"


def test_a_missing_module_of_the_project_keeps_its_traceback(monkeypatch):
  monkeypatch.setitem(sys.modules, 'configs', None)
  flags.FLAGS.unparse_flags()
  with pytest.raises(ModuleNotFoundError, match='configs'):
    main.main(flags.FLAGS(['main.py', '--mode=train', '--config=configs/quickstart.py'], known_only=True))


@pytest.mark.parametrize(
  ('file', 'ours'),
  [
    ('main.py', True),
    ('ssl_jax/config/rules.py', True),
    ('configs/base.py', True),
    ('env/lib/python3.11/site-packages/optax/base.py', False),
    ('/usr/lib/python3.11/json/decoder.py', False),
  ],
)
def test_only_the_errors_of_the_project_are_one_line(file, ours, monkeypatch):
  wrong = lambda _: exec(compile('raise ValueError("wrong")', ROOT / file, 'exec'))
  monkeypatch.setattr(main, 'run', wrong)
  flags.FLAGS.unparse_flags()
  with pytest.raises(SystemExit if ours else ValueError, match='^ssl_jax: wrong$' if ours else '^wrong$'):
    main.main(flags.FLAGS(['main.py', '--mode=train', '--config=configs/quickstart.py'], known_only=True))


@pytest.mark.parametrize(
  ('error', 'message'),
  [
    (RuntimeError('Could not determine home directory.'), 'path that begins with ~ is unknown: set HOME, or'),
    (RuntimeError('write() failed: No space left on device'), 'the disk cannot be written (no space left): make room'),
  ],
)
def test_errors_of_libraries_that_need_no_traceback(error, message, monkeypatch):
  def fail(_):
    raise error

  monkeypatch.setattr(main, 'run', fail)
  assert message in call('--mode=train', '--workdir=', '--config=configs/quickstart.py')
  message = message.replace('the disk', 'data.path')
  assert message in call('--mode=prepare', '--workdir=', '--config=configs/cifar10.py')


@pytest.mark.parametrize(
  ('command', 'name'),
  [
    (['configs/imagenet100.py'], 'imagenet100'),
    (['configs/cifar10.py:dystress,seed=1'], 'cifar10_dystress_seed=1'),
    (['configs/cifar10.py:dystress', 'seed=1'], 'cifar10_dystress_seed=1'),
    (['configs/cifar10.py', 'seed=1', 'ema=0.9'], 'cifar10_ema=0.9_seed=1'),
    (['configs/cifar10.py', 'data.path=/a/b', 'log.every_steps=1', 'eval.k=()', 'seed=1'], 'cifar10_seed=1'),
    (['configs/cifar10.py:eval.k=(1,2),eval.linear=ridge'], 'cifar10'),
    (['/else where/my config.py', "augment={'name': 'none'}"], 'my-config_augment=-name-none-'),
  ],
)
def test_the_default_workdir_is_named_after_the_command(command, name):
  assert files.default(command[0], command[1:]) == pathlib.Path('runs', name)


def test_long_default_names_are_short_and_differ():
  names = {files.default('configs/cifar10.py', [f'model.{"x" * 100}={i}']).name for i in range(3)}
  assert len(names) == 3 and all(len(name) <= files.LONGEST_NAME for name in names)


@pytest.mark.parametrize(
  ('mode', 'function'),
  [
    ('train', 'ssl_jax.train.train'),
    ('evaluate', 'ssl_jax.evals.evaluate.evaluate'),
    ('export', 'ssl_jax.reporting.export.export'),
    ('views', 'ssl_jax.reporting.views.draw_views'),
    ('report', 'ssl_jax.reporting.report.report'),
  ],
)
def test_every_mode_of_a_config_has_the_same_default_workdir(mode, function, monkeypatch):
  called = []
  monkeypatch.setattr(function, lambda *given: called.append(given[-1]))
  monkeypatch.setattr('ssl_jax.run.devices.start', lambda *_: None)
  monkeypatch.setattr('ssl_jax.run.devices.compile_faster', lambda *_: None)
  flags.FLAGS.unparse_flags()
  command = [f'--mode={mode}', '--workdir=', '--config=configs/quickstart.py:seed=1', '--config.eval.every_epochs=2']
  main.main(flags.FLAGS(['main.py', *command], known_only=True))
  assert called == ['runs/quickstart_seed=1']


def test_flags_of_xla_are_set_before_the_processes_connect(monkeypatch):
  called = []
  for function in ('ssl_jax.run.devices.start', 'ssl_jax.run.devices.compile_faster', 'ssl_jax.train.train'):
    monkeypatch.setattr(function, lambda *_, name=function: called.append(name.rpartition('.')[2]))
  main.run(main.Command('train', 'configs/quickstart.py', [], 'w', []))
  assert called == ['compile_faster', 'start', 'train']


def start(workdir):
  command = [sys.executable, 'main.py', *QUICK, f'--workdir={workdir}']
  environment = os.environ | {'PYTHONUNBUFFERED': '1', 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  return subprocess.Popen(
    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_resumes(tmp_path):
  with start(tmp_path) as run:
    for line in run.stdout:
      if line.startswith('step 3/30'):
        run.send_signal(signal.SIGTERM)
        break
    said = run.stdout.read()
  assert run.returncode == 1
  assert 'and saved; the same command resumes here' in said
  with start(tmp_path) as again:
    said = again.stdout.read()
  assert again.returncode == 0, said
  assert 'resumes at step' in said
  assert json.loads((tmp_path / 'summary.json').read_text())['steps'] == 30
  steps = [json.loads(line)['step'] for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert steps == list(range(1, 31))
