"""The papers' tables: every row is a valid config, and the runner runs exactly what is missing, whatever happens."""

import dataclasses
import doctest
import importlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from configs import cifar10
from experiments import pictures, runner, tables
from experiments.cacr import figures as cacr_figures
from experiments.tables import Column, Row, Sweep
from ssl_jax import config, methods
from ssl_jax.evals import settings
from ssl_jax.run import optimizers
from tests.helpers import tiny

ROOT = pathlib.Path(__file__).parent.parent
SWEEPS = {
  file.parent.name: importlib.import_module(f'experiments.{file.parent.name}.sweep').SWEEP
  for file in sorted((ROOT / 'experiments').glob('*/sweep.py'))
}

# Replaces main.py. τ selects what it does: 0.9 fails, 0.8 waits to be interrupted, 0.7 waits for another run.
STUB = """
import json, os, pathlib, signal, sys, time
import numpy as np

given = dict(argument[2:].split('=', 1) for argument in sys.argv[1:])
workdir, mode = pathlib.Path(given.pop('workdir')), given.pop('mode', 'train')
if (workdir / 'resolved.json').exists():  # by `place`: importing ssl_jax takes a second
  chosen = json.loads((workdir / 'resolved.json').read_text())
else:
  from ssl_jax import config

  chosen = config.load(given.pop('config'), [f'{key[7:]}={value}' for key, value in given.items()]).to_dict()
tau = chosen['temperature'].get('tau')
(workdir / 'share').write_text(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION', 'all'))
if tau == 0.9:
  sys.exit('ssl_jax: the loss is not finite at step 3')
if tau == 0.8 and not (workdir / 'saved').exists():
  def stop(*_):
    (workdir / 'saved').touch()
    sys.exit('ssl_jax: stopped; saved')
  signal.signal(signal.SIGTERM, stop)
  (workdir / 'metrics.jsonl').write_text(json.dumps({'step': 1, 'epoch': 0.75 * chosen['epochs']}) + '\\n')
  print('three quarters', flush=True)
  time.sleep(60)
end = time.monotonic() + 30
while tau == 0.7 and len(list(workdir.parent.glob('*/share'))) < 2 and time.monotonic() < end:
  time.sleep(0.05)
rows = [json.dumps({'step': n, 'epoch': float(n), 'images_per_second': speed}) for n, speed in enumerate((1, 500, 400))]
(workdir / 'metrics.jsonl').write_text('\\n'.join(rows))
(workdir / 'config.json').write_text(json.dumps(chosen))
machine = {'device': '1 x cpu', 'jax': '0', 'peak_memory_gib': None}
steps = 10 if mode == 'train' else 0
if mode == 'train':
  (workdir / 'summary.json').write_text(json.dumps({'steps': steps, 'images': 2000, **machine}))
else:
  (workdir / 'metrics.jsonl').unlink()
measures = {'backbone': {'uniformity': -2.5}}
evaluation = {'step': steps, 'epoch': steps / 10 * chosen['epochs'], 'knn200': 80.0 + chosen['seed']}
evaluation |= {'images': {'train': 2000}, 'measures': measures, 'classes': {'knn200': [1.0]}, 'features': 'backbone'}
evaluation['linear_std'] = None
(workdir / 'evaluation.json').write_text(json.dumps(evaluation))
np.savez(workdir / 'evaluation.npz', curve=np.arange(3.0))
"""


def tau(value, **more):
  changes = {'temperature.tau': value, 'data.path': '/somewhere'}
  return Row(f'tau_{value}', f'τ = {value}', 'configs/cifar10.py', changes, published={'knn200': 80.5}, **more)


def sweep_of(*rows, **more):
  columns = (Column('knn200', 'kNN-200, %'), Column('backbone/uniformity', 'uniformity'))
  return Sweep('A title', 'A protocol.', rows, columns, images=2000, **more)


@pytest.fixture
def place(tmp_path, monkeypatch):
  """(a folder with a README, a function that runs a sweep in it with the stub), from the root of the repository."""
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  (tmp_path / 'stub.py').write_text(STUB)
  folder = tmp_path / 'paper'
  folder.mkdir()
  (folder / 'README.md').write_text(f'Before.\n\n{tables.MARKS[0]}\nold\n{tables.MARKS[1]}\n\nAfter.\n')
  command = Sweep.command

  def with_config(sweep, row, seed, runs):
    if (workdir := runs / f'{row.name}_seed{seed}').is_dir():
      (workdir / 'resolved.json').write_text(json.dumps(sweep.resolve(row, seed)))
    return command(sweep, row, seed, runs)

  monkeypatch.setattr(Sweep, 'command', with_config)
  settings = dict(runs=tmp_path / 'runs', commit='abc', program=str(tmp_path / 'stub.py'))
  return folder, lambda sweep, **more: runner.run(sweep, folder, **{**settings, **more})


def result(sweep, row, seed, **more):
  """A line of results.jsonl."""
  facts = dict(device='1 x cpu', side_by_side=1, wall_seconds=600.0, epochs=200.0)
  chosen = json.loads(json.dumps(sweep.resolve(row, seed)))
  return {'name': row.name, 'seed': seed, 'config': chosen, 'metrics': {'knn200': 80.0 + seed}, **facts, **more}


# The sweeps


@pytest.mark.parametrize('name', SWEEPS)
def test_every_row_is_a_valid_config(name):
  sweep = SWEEPS[name]
  names = [row.name for row in sweep.rows]
  assert len(set(names)) == len(names)
  resolved = []
  for row in sweep.rows:
    assert re.fullmatch(r'[\w.-]+', row.name)
    assert set(row.published) <= {column.metric for column in sweep.columns}
    chosen = sweep.resolve(row, 0)
    clock = dict(steps_per_epoch=390, total_steps=390 * chosen['epochs'])
    methods.create(chosen, **clock)
    optimizers.learning_rate(chosen['optimizer'], batch_size=chosen['batch_size'], **clock)
    settings.check(chosen['eval'])
    assert chosen['data']['name'] == data_of(name, row)
    resolved.append(json.dumps(chosen))
    if row.mode == 'train':
      assert chosen['eval']['at_end'] == sweep.at_end
      assert chosen['log']['every_steps'] == (row.images or sweep.images) // chosen['batch_size']
  assert len(set(resolved)) == len(resolved), 'two rows are the same run'


def data_of(name, row):
  """The dataset that the names of a sweep and of a row say."""
  same = ('cifar100', 'stl10', 'imagenet100', 'imagenet', 'webvision', 'imagenet22k')
  names = {'svhn': 'svhn_cropped'} | {name: name for name in same}
  usual = {'sentences': 'sentences', 'dystress_imagenet': 'imagenet100', 'balanced_imagenet': 'imagenet'}
  usual |= {'cacr_imagenet': 'imagenet'}
  if name == 'fine_tuning':
    return {'flowers': 'oxford_flowers102'}.get(row.name.split('_')[0], row.name.split('_')[0])
  return names.get(row.name.split('_')[0], usual.get(name, 'cifar10'))


@pytest.mark.parametrize('name', SWEEPS)
def test_the_table_in_the_readme_matches_the_results(name):
  folder = ROOT / 'experiments' / name
  text = (folder / 'README.md').read_text()
  shown = text.split(tables.MARKS[0] + '\n')[1].split(tables.MARKS[1])[0]
  finished = tables.done(SWEEPS[name], folder)
  assert shown == tables.markdown(SWEEPS[name], finished, name), 'run the sweep with --table'
  if found := tables.comparable(SWEEPS[name], finished):
    drawn = (folder / 'results.svg').read_text()
    assert all(f'>{row.title}</text>' in drawn for row, _ in found[1]), 'run the sweep with --table'
  for figure in SWEEPS[name].figures:
    assert (folder / f'{figure}.svg').exists() and f']({figure}.svg)' in text


def test_the_papers_main_rows_come_first():
  needed = {
    'dystress': 'simclr_0.1 simclr_0.2 simclr_0.5 dcl macl moco cosine linear exponential monotonic',
    'behaviour': 'contrastive_0.07 contrastive_0.3 contrastive_1.0 hard_0.07 hard_0.3 hard_1.0 simple hard_simple',
    'cacr': 'cl au_cl hn_cl cacr_k1 cmc cacr_k4 uaur',
    'balanced': 'balanced_2_4 balanced_4_2 balanced_1_1 generalized_nt_xent_2_2',
  }
  for name, rows in needed.items():
    assert {row.name for row in SWEEPS[name].rows if not row.further} == set(rows.split())
  seeds = {row.name: row.seeds for row in SWEEPS['dystress'].rows}
  assert seeds['simclr_0.2'] == seeds['cosine'] == (0, 1, 2)


def test_baselines_has_every_method():
  options_of_any_method = {'batch512', 'multi_crop', 'ema', 'muon'}
  options_of_any_method |= {'long_tail', 'linear_imbalance', 'exponential_imbalance'}
  methods_ = {row.config.partition(':')[2] or 'simclr' for row in SWEEPS['baselines'].rows}
  assert methods_ == cifar10.VARIANTS.keys() - options_of_any_method | {'simclr'}
  assert all(SWEEPS['baselines'].resolve(row, 0)['epochs'] == 30 for row in SWEEPS['baselines'].rows)


def test_a_sweep_leaves_the_device_to_its_runs():
  code = """
import pathlib, sys
from jax._src import xla_bridge
from experiments.long_tail import sweep
sweep.runner.main(sweep.SWEEP, pathlib.Path(sweep.__file__).parent, ['--list'])
sys.exit(xla_bridge.backends_are_initialized())
"""
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_a_list_may_be_cut_short():
  """`--list | head -1`"""
  command = f'{shlex.quote(sys.executable)} -m experiments.long_tail.sweep --list | head -1'
  done = subprocess.run(['bash', '-o', 'pipefail', '-c', command], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0 and done.stderr == '' and done.stdout.startswith('simclr_0.2: seeds done')


# What is missing, and how long it takes


def test_first_seeds_come_first_and_further_rows_last():
  one, two, late = tau(0.1, seeds=(0, 1)), tau(0.2, seeds=(0, 1)), tau(0.3, further=True)
  order = lambda *arguments: [(row.name, seed) for row, seed in runner.missing(sweep_of(late, one, two), *arguments)]
  assert order({}) == [('tau_0.1', 0), ('tau_0.2', 0), ('tau_0.1', 1), ('tau_0.2', 1), ('tau_0.3', 0)]
  assert order({('tau_0.1', 0): {}, ('tau_0.3', 0): {}})[0] == ('tau_0.2', 0)
  assert order({}, ['tau_0.3'], 3) == [('tau_0.3', 0), ('tau_0.3', 1), ('tau_0.3', 2)]
  chosen = [('tau_0.3', 0), ('tau_0.1', 0), ('tau_0.1', 1)]
  assert order({}, ['tau_0.3', 'tau_0.1', 'tau_0.3']) == chosen, 'in the order of their names, each once'
  with pytest.raises(ValueError, match=r"--only='tau_0.11' is not a row of the sweep: did you mean 'tau_0.1'"):
    order({}, ['tau_0.11'])


def test_a_run_is_estimated_by_runs_like_it(tmp_path):
  row, longer = tau(0.1, minutes=7), Row('longer', 'longer', 'configs/cifar10.py', {'epochs': 400}, minutes=3)
  other = Row('other', 'other', 'configs/cifar10.py:dystress', minutes=5)
  sweep = sweep_of(row, longer, other)
  minutes = lambda row, finished: runner.estimate(sweep, row, 1, finished, '1 x cpu', tmp_path)
  assert minutes(row, {}) == 7
  finished = {('tau_0.1', 0): result(sweep, row, 0)}
  assert minutes(row, finished) == pytest.approx(10)
  assert minutes(longer, finished) == pytest.approx(20)
  assert minutes(other, finished) == 5
  assert minutes(row, {('tau_0.1', 0): result(sweep, row, 0, device='1 x GPU')}) == 7
  finished['tau_0.1', 2] = result(sweep, row, 2, side_by_side=2)  # as if 600 / 1.6 seconds alone
  assert minutes(row, finished) == pytest.approx((10 + 10 / 1.6) / 2)
  (tmp_path / 'tau_0.1_seed1').mkdir()
  (tmp_path / 'tau_0.1_seed1' / 'metrics.jsonl').write_text(
    '{"step": 1, "epoch": 50.0}\n{"step": 2, "epoch": 100.0}\n{"step": 3, "epo'
  )
  assert minutes(row, {}) == pytest.approx(3.5)


# Running


@pytest.mark.slow
def test_runs_are_packed_into_the_budget_and_none_is_run_twice(place, capsys):
  folder, run = place
  long = Row('long', 'long', 'configs/cifar10.py:dystress', minutes=20)
  sweep = sweep_of(tau(0.1, minutes=6), long, Row('short', 'short', 'configs/cifar10.py:dcl', minutes=3))
  assert run(sweep, budget=10) == []
  assert [row['name'] for row in tables.read(folder / 'results.jsonl')] == ['tau_0.1', 'short']
  assert '1 runs are still missing; next is long, seed 0' in capsys.readouterr().out
  assert run(sweep, budget=30) == []
  assert [row['name'] for row in tables.read(folder / 'results.jsonl')] == ['tau_0.1', 'short', 'long']
  assert capsys.readouterr().out.count('starts') == 1


def test_a_result_says_how_it_was_made(place):
  folder, run = place
  sweep = sweep_of(tau(0.1), curves=('curve',))
  assert run(sweep) == []
  (kept,) = tables.read(folder / 'results.jsonl')
  typed = shlex.split(kept['command'])
  assert typed[:4] == ['python', 'main.py', '--config=configs/cifar10.py', '--workdir=runs/paper/tau_0.1_seed0']
  assert '--config.temperature.tau=0.1' in typed and '--config.eval.at_end=True' in typed
  assert '--config.log.every_steps=15' in typed
  typed_config = config.load('configs/cifar10.py', [text.removeprefix('--config.') for text in typed[4:]])
  assert json.loads(json.dumps(typed_config.to_dict())) == json.loads(json.dumps(sweep.resolve(sweep.rows[0], 0)))
  assert kept['config']['temperature']['tau'] == 0.1 and kept['config']['data']['path'] == ''
  assert kept['metrics'] == {'knn200': 80.0, 'backbone/uniformity': -2.5}
  assert kept['seconds_per_epoch'] == pytest.approx(2000 / 400)  # the median
  assert (kept['commit'], kept['device'], kept['epochs'], kept['protocol']) == ('abc', '1 x cpu', 200, 'A protocol.')
  assert kept['curves'] == {'curve': [0, 1, 2]} and 0 < kept['wall_seconds'] < 60


def test_a_sweep_may_leave_out_the_final_evaluation(place, tmp_path):
  """Then the result is the last kNN of the training, and the clock of a run that was alone is kept."""
  folder, run = place
  (tmp_path / 'stub.py').write_text(
    STUB.replace("'images': 2000,", "'images': 2000, 'knn10': 88.5, 'compile_seconds': 0.1,").replace(
      "'step': n", "'step': 5 * n"
    )
    + "for name in ('json', 'npz'):\n  (workdir / f'evaluation.{name}').unlink()\n"
  )
  sweep = sweep_of(tau(0.1), at_end=False)
  assert run(sweep) == []
  (kept,) = tables.read(folder / 'results.jsonl')
  assert '--config.eval.at_end=True' not in shlex.split(kept['command'])
  assert kept['metrics'] == {'knn10': 88.5} and (kept['epochs'], kept['images']) == (2, {'train': 2000})
  assert kept['alone_seconds'] == kept['wall_seconds']
  assert kept['compiled_seconds'] == pytest.approx(kept['wall_seconds'] - 0.1)
  assert runner.clock({'compile_seconds': 0.1}, 300.0, side_by_side=2) == {}, 'a run beside others has no clock'
  assert runner.clock({}, 300.0, side_by_side=1) == {}, 'nor has a run that did not measure its compilation'


def test_a_row_may_evaluate_without_training(place):
  folder, run = place
  row = dataclasses.replace(tau(0.1, mode='evaluate'), changes={'init': 'random', 'temperature.tau': 0.1})
  sweep = sweep_of(row)
  for _ in range(2):  # the second time there is nothing to do
    assert run(sweep) == []
  (kept,) = tables.read(folder / 'results.jsonl')
  typed = shlex.split(kept['command'])
  assert typed[2] == '--mode=evaluate' and '--config.init=random' in typed and '--config.eval.at_end=True' not in typed
  assert (kept['epochs'], kept['seconds_per_epoch'], kept['peak_memory_gib']) == (0, None, None)
  assert kept['device'] == runner.device_here() and kept['metrics']['knn200'] == 80
  assert runner.estimate(sweep, row, 1, tables.done(sweep, folder), kept['device'], folder) > 0
  assert '`configs/cifar10.py --mode=evaluate --config.init=random' in tables.markdown(sweep, {}, 'paper')


def test_a_result_keeps_the_history_that_its_row_names(place):
  folder, run = place
  assert run(sweep_of(tau(0.1, history=('images_per_second',)))) == []
  (kept,) = tables.read(folder / 'results.jsonl')
  assert kept['history'] == {'images_per_second': [[0, 1], [1, 500], [2, 400]]}


def test_the_rows_of_one_table_are_run(place, tmp_path, capsys):
  folder, _ = place
  sweep = sweep_of(tau(0.1), tau(0.2, shows=('Table 3', 'Figure 1'), further=True), tau(0.3, shows=('Figure 1',)))
  arguments = [f'--runs={tmp_path / "runs"}', '--commit=abc']
  runner.main(sweep, folder, [*arguments, '--of=Table 3'], str(tmp_path / 'stub.py'))
  assert [row['name'] for row in tables.read(folder / 'results.jsonl')] == ['tau_0.2']
  runner.main(sweep, folder, [*arguments, '--of=Figure 1', '--list'])
  assert re.findall(r'^(\S+): seeds', capsys.readouterr().out, re.MULTILINE) == ['tau_0.2', 'tau_0.3']
  with pytest.raises(SystemExit, match="--of='Table 4' is not a table or figure of this sweep: did you mean 'Table 3'"):
    runner.main(sweep, folder, [*arguments, '--of=Table 4'])


@pytest.mark.parametrize('module', [tables, cacr_figures])
def test_examples(module):
  failed, attempted = doctest.testmod(module)
  assert attempted and not failed


def test_differences_of_two_rows(tmp_path, capsys):
  rows = tau(0.1), tau(0.2, seeds=(0, 1)), tau(0.3), tau(0.5)
  sweep, folder = sweep_of(*rows), tmp_path / 'paper'
  folder.mkdir()
  scores = {'tau_0.1': (80, 81, 82), 'tau_0.2': (82, 83, 84), 'tau_0.3': (90,), 'tau_0.5': ()}
  for row in rows:
    for seed, score in enumerate(scores[row.name]):
      metrics = {'knn200': score, 'linear': 85.0, 'linear_top5': 99.0, 'backbone/rankme': 7.0}
      metrics |= {'finetune': 87.0} if seed < 2 or row.name == 'tau_0.1' else {}
      tables.append(folder / 'results.jsonl', result(sweep, row, seed, metrics=metrics))

  def shown(names):
    runner.main(sweep, folder, [f'--difference={names}'])
    return capsys.readouterr().out.splitlines()

  # Equal spreads: Student's t with four degrees of freedom, 2.776 times sqrt(1/3 + 1/3).
  text = ['tau_0.1 (seeds 0, 1, 2) minus tau_0.2 (seeds 0, 1, 2)', '  knn200: -2.00 ± 0.82 [-4.27, +0.27]']
  assert shown('tau_0.1,tau_0.2')[:-1] == [*text, '  linear: +0.00', '  finetune: +0.00 (3 and 2 seeds)']
  assert shown('tau_0.3,tau_0.1')[1] == '  knn200: +9.00 (one seed: no standard error)'
  for names, message in (
    ('tau_0.1', "--difference='tau_0.1' must name two rows, separated by a comma"),
    ('tau_0.1,tau_0.22', "--difference: 'tau_0.22' is not a row of the sweep: did you mean 'tau_0.2'?"),
    ('tau_0.5,tau_0.1', "--difference: 'tau_0.5' has not been run: run it with --only=tau_0.5"),
  ):
    with pytest.raises(SystemExit, match=f'^paper: {re.escape(message)}'):
      shown(names)


def test_a_failed_run_is_reported_and_the_others_continue(place, tmp_path, capsys):
  folder, _ = place
  arguments = [f'--runs={tmp_path / "runs"}', '--commit=abc']
  with pytest.raises(SystemExit, match=r'^paper: failed: tau_0.9_seed0$'):
    runner.main(sweep_of(tau(0.9), tau(0.1)), folder, arguments, str(tmp_path / 'stub.py'))
  assert 'tau_0.9_seed0 failed: ssl_jax: the loss is not finite at step 3' in capsys.readouterr().out
  assert [row['name'] for row in tables.read(folder / 'results.jsonl')] == ['tau_0.1']
  assert '| 80.00 (80.50) |' in (folder / 'README.md').read_text()


def test_runs_that_all_fail_with_the_same_error_are_not_all_tried(place, tmp_path, capsys):
  _, run = place
  rows = [tau(0.1 * k) for k in range(1, 7)]
  (tmp_path / 'same.py').write_text('import sys\nsys.exit("ssl_jax: the data is not prepared")')
  assert len(run(sweep_of(*rows), program=str(tmp_path / 'same.py'))) == runner.FAILURES == 3
  assert 'gives up after 3 runs with the same error' in capsys.readouterr().out
  (tmp_path / 'own.py').write_text('import sys\nsys.exit(f"ssl_jax: {sys.argv}")')  # another error each
  assert len(run(sweep_of(*rows), program=str(tmp_path / 'own.py'))) == 6


def test_a_run_that_is_killed_names_its_log(place, tmp_path, capsys):
  _, run = place
  (tmp_path / 'killed.py').write_text(
    'import os, signal\nprint("no reason", flush=True)\nos.kill(os.getpid(), signal.SIGKILL)'
  )
  assert run(sweep_of(tau(0.1)), program=str(tmp_path / 'killed.py')) == ['tau_0.1_seed0']
  log = tmp_path / 'runs' / 'tau_0.1_seed0' / 'log.txt'
  assert f'tau_0.1_seed0 failed: ended by SIGKILL; its log is {log}' in capsys.readouterr().out


@pytest.mark.slow
def test_a_signal_stops_the_runs_and_the_same_command_resumes(place, tmp_path, capsys):
  folder, run = place
  sweep = sweep_of(tau(0.8))
  code = f"""
from pathlib import Path
from experiments import runner
from experiments.cacr import figures as cacr_figures
from experiments.tables import Column, Row, Sweep
paths = Path({str(folder)!r}), Path({str(tmp_path)!r})
runner.run({sweep!r}, paths[0], runs=paths[1] / 'runs', commit='abc', program=str(paths[1] / 'stub.py'))
"""
  with subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
    log = tmp_path / 'runs' / 'tau_0.8_seed0' / 'log.txt'
    while not (log.exists() and 'three quarters' in log.read_text()) and first.poll() is None:
      time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    said = first.stdout.read()
  assert first.returncode == 0
  assert 'stops tau_0.8_seed0' in said and 'the same command resumes it: ssl_jax: stopped; saved' in said
  assert tables.read(folder / 'results.jsonl') == []
  part = float((log.parent / 'wall_seconds').read_text())
  assert run(sweep) == []
  assert 'about 2.0 min' in capsys.readouterr().out, 'a quarter of 8 minutes is left'
  assert tables.read(folder / 'results.jsonl')[0]['wall_seconds'] > round(part, 1)


def test_a_run_ends_after_those_before_it():
  assert runner.needed_minutes([5.0], [], 1) == [5.0]
  assert runner.needed_minutes([5.0, 2.0], [3.0], 1) == [8.0, 5.0]  # it waits
  assert runner.needed_minutes([5.0], [5.0], 2) == [8.0]  # both train, each 1.6 times slower
  assert runner.needed_minutes([5.0], [5.0, 5.0], 2) == [pytest.approx(12.0)]  # 15 minutes of work at 1.25 a minute


def test_a_run_is_planned_with_those_under_way(place, monkeypatch):
  (_, run), asked = place, []
  plan = lambda alone, running, side_by_side, others: asked.append(len(running)) or [0.0] * len(alone)
  monkeypatch.setattr(runner, 'needed_minutes', plan)
  run(sweep_of(tau(0.1), tau(0.2)), side_by_side=2)
  assert asked[:2] == [0, 1]


def test_a_published_range_is_drawn_from_end_to_end():
  row = Row('a', 'a', 'configs/cifar10.py', published={'knn200': (80.0, 82.0)})
  sweep = sweep_of(row)
  figure = pictures._published_and_here(sweep, {('a', 0): result(sweep, row, 0)})
  assert (80.0, 82.0) in [tuple(line.get_xdata()) for line in figure.axes[0].lines]


def test_each_data_set_has_its_own_axes():
  rows = [Row(name, name, f'configs/{name}.py:dcl', published={'knn200': 50.0}) for name in ('cifar10', 'cifar100')]
  sweep = sweep_of(*rows)
  figure = pictures._published_and_here(sweep, {(row.name, 0): result(sweep, row, 0) for row in rows})
  assert [[tick.get_text() for tick in axis.get_yticklabels()] for axis in figure.axes] == [['cifar10'], ['cifar100']]


def test_a_run_far_over_the_budget_is_stopped(place, capsys):
  folder, run = place
  assert run(sweep_of(tau(0.8, minutes=0)), budget=0.02, grace=0.0) == []
  assert 'tau_0.8_seed0 stopped' in capsys.readouterr().out
  assert not (folder / 'results.jsonl').exists()


def test_two_runs_side_by_side_share_the_memory(place, tmp_path, monkeypatch):
  folder, run = place
  sweep = sweep_of(tau(0.7, seeds=(0, 1)))  # each waits until the other has begun
  assert run(sweep, side_by_side=2) == []
  assert {row['seed']: row['side_by_side'] for row in tables.read(folder / 'results.jsonl')} == {0: 2, 1: 2}
  assert [file.read_text() for file in tmp_path.glob('runs/*/share')] == ['0.450', '0.450']
  monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.1')
  assert run(sweep_of(tau(0.7, seeds=(0, 1)), tau(0.2)), side_by_side=2) == []
  assert (tmp_path / 'runs' / 'tau_0.2_seed0' / 'share').read_text() == '0.1'
  with pytest.raises(ValueError, match='--side-by-side=2 would distort the times'):
    run(sweep_of(tau(0.7), timed=True), side_by_side=2)
  with pytest.raises(ValueError, match='--side-by-side=0 must be at least 1'):
    run(sweep, side_by_side=0)


def test_runs_of_other_sweeps_are_counted(place, tmp_path):
  folder, run = place
  assert run(sweep_of(tau(0.2)), others=2) == []
  (found,) = tables.read(folder / 'results.jsonl')
  assert found['side_by_side'] == 3 and 'alone_seconds' not in found
  assert (tmp_path / 'runs' / 'tau_0.2_seed0' / 'share').read_text() == '0.300'
  assert runner.needed_minutes([5.0], [], 1, others=1) == [8.0]
  with pytest.raises(ValueError, match='--others=1 would distort the times'):
    run(sweep_of(tau(0.2), timed=True), others=1)


def test_sweeps_at_the_same_time_share_the_rows(place, tmp_path, capsys):
  folder, run = place
  sweep = sweep_of(tau(0.1), tau(0.2), tau(0.3))
  other = runner.Child(sweep, sweep.rows[0], 0, tmp_path / 'runs')  # another sweep runs the first row
  assert other.claim()
  # It records the third while this one runs the second.
  line = json.dumps(result(sweep, sweep.rows[2], 0))
  code = f"file = pathlib.Path({str(folder / 'results.jsonl')!r})\nfile.write_text({line!r} + '\\n')\n"
  (tmp_path / 'stub.py').write_text(STUB + code)
  assert run(sweep) == []
  assert [row['name'] for row in tables.read(folder / 'results.jsonl')] == ['tau_0.3', 'tau_0.2']
  said = capsys.readouterr().out
  assert re.findall(r'leaves out (\S+), seed 0: another sweep has it', said) == ['tau_0.1', 'tau_0.3']
  other.lock.close()
  (tmp_path / 'stub.py').write_text(STUB)
  assert run(sweep) == []
  assert {name for name, _ in tables.done(sweep, folder)} == {'tau_0.1', 'tau_0.2', 'tau_0.3'}


def test_no_result_is_lost_if_sweeps_record_at_the_same_time(tmp_path):
  code = """
import pathlib, sys
from experiments import tables
for n in range(50):
  tables.append(pathlib.Path(sys.argv[1]), {'name': sys.argv[2], 'seed': n})
"""
  file = tmp_path / 'results.jsonl'
  sweeps = [subprocess.Popen([sys.executable, '-c', code, str(file), name], cwd=ROOT) for name in 'ab']
  assert [sweep.wait() for sweep in sweeps] == [0, 0]
  assert sorted((row['name'], row['seed']) for row in tables.read(file)) == [(x, n) for x in 'ab' for n in range(50)]


def test_the_device_is_the_one_that_a_sweep_may_use(tmp_path, monkeypatch):
  (tmp_path / 'nvidia-smi').write_text('#!/bin/sh\necho NVIDIA X\ncase "$*" in *--id=1*) ;; *) echo NVIDIA X ;; esac\n')
  (tmp_path / 'nvidia-smi').chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  assert runner.device_here() == '2 x NVIDIA X'
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '1')
  assert runner.device_here() == '1 x NVIDIA X'


def test_the_commit_is_dirty_if_code_differs_but_not_if_results_do(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
  with pytest.raises(ValueError, match='give --commit=HASH'):
    runner.commit_here()
  (tmp_path / 'experiments' / 'paper').mkdir(parents=True)
  for name in ('code.py', 'experiments/paper/results.jsonl'):
    (tmp_path / name).write_text('1\n')
  author = ['-c', 'user.name=A', '-c', 'user.email=a@b.c']
  for arguments in (['init', '-q'], ['add', '.'], [*author, 'commit', '-qm', 'first']):
    subprocess.run(['git', *arguments], check=True)
  (tmp_path / 'experiments' / 'paper' / 'results.jsonl').write_text('2\n')
  clean = runner.commit_here()
  assert re.fullmatch('[0-9a-f]{40}', clean)
  (tmp_path / 'code.py').write_text('2\n')
  assert runner.commit_here() == clean + '-dirty'


# Results and tables


def test_a_last_line_cut_short_is_dropped_and_any_other_is_an_error(tmp_path):
  file = tmp_path / 'results.jsonl'
  file.write_text('{"name": "a"}\n{"name": "b", "se')
  assert tables.read(file) == [{'name': 'a'}]
  tables.append(file, {'name': 'c'})
  assert file.read_text() == '{"name": "a"}\n{"name": "c"}\n'
  file.write_text('{"name": "a"\n{"name": "b"}\n')
  with pytest.raises(ValueError, match=r'results.jsonl: line 1 is not valid JSON'):
    tables.read(file)


def test_results_of_another_config_under_a_name_are_refused(tmp_path):
  row = tau(0.1)
  sweep = sweep_of(row)
  kept = result(sweep, row, 0)
  kept['config']['parallel']['map'], kept['config']['log']['every_steps'] = (
    'shard_map',
    3,
  )  # settings of another machine
  del kept['config']['ema']  # as if the key had been added later
  tables.append(tmp_path / 'results.jsonl', kept)
  assert tables.done(sweep, tmp_path).keys() == {('tau_0.1', 0)}
  changed = Row('tau_0.1', 'τ', row.config, {'temperature.tau': 0.2})
  with pytest.raises(ValueError, match=r'tau = 0.2 in the sweep, 0.1 in the result\): rename the row'):
    tables.done(sweep_of(changed), tmp_path)
  evaluated = Row('tau_0.1', 'τ', row.config, {**row.changes, 'eval.linear': 'ridge'})
  with pytest.raises(ValueError, match=r"eval.linear = 'ridge' in the sweep"):
    tables.done(sweep_of(evaluated), tmp_path)
  with pytest.raises(ValueError, match=r"'tau_0.1', seed 0, is not a row of the sweep"):
    tables.done(sweep_of(tau(0.2)), tmp_path)


def test_the_table_has_means_spreads_and_published_numbers_and_can_be_written_twice(place):
  folder, _ = place
  rows = [tau(0.1), tau(0.2), tau(0.3, further=True), Row('range', 'a range', 'configs/cifar10.py:dcl')]
  rows[3].published['knn200'] = (80.4, 80.6)
  sweep = sweep_of(*rows, common={'epochs': 30})
  for row, seed in ((rows[0], 0), (rows[0], 1), (rows[3], 0)):
    tables.append(folder / 'results.jsonl', result(sweep, row, seed))
  tables.write(sweep, folder)
  text = (folder / 'README.md').read_text()
  lines = text.splitlines()
  assert '| row | kNN-200, % (published) | uniformity | seeds | config |' in lines
  flags = '--config.temperature.tau=0.1 --config.data.path=/somewhere'
  assert f'| τ = 0.1 | 80.50 ± 0.71 (80.50) | — | 2 | `configs/cifar10.py {flags}` |' in lines
  assert any(line.startswith('| τ = 0.2 | — (80.50) | — | 0 |') for line in lines)
  assert '| a range | 80.00 (80.40 to 80.60) | — | 1 | `configs/cifar10.py:dcl` |' in lines
  assert 'Further rows not run yet: 1. `python -m experiments.paper.sweep --list` lists them.' in lines
  assert 'All rows also use `--config.epochs=30`.' in lines
  assert text.startswith('Before.\n') and text.endswith('\nAfter.\n') and 'old' not in text
  tables.write(sweep, folder)
  assert (folder / 'README.md').read_text() == text
  assert '![Published and measured here](results.svg)' in lines
  pictures.draw(sweep, folder)
  titles = re.findall('>(τ = [0-9.]+|a range|paper|here)</text>', (folder / 'results.svg').read_text())
  assert titles == ['τ = 0.1', 'a range', 'paper', 'here']
  (folder / 'README.md').write_text('no marks')
  with pytest.raises(ValueError, match='has no <!-- table -->'):
    tables.write(sweep, folder)


def test_the_picture_shows_the_rows_that_the_sweep_names(tmp_path):
  rows = tau(0.1), tau(0.2), tau(0.3)
  sweep = sweep_of(*rows, pictured=('tau_0.3', 'tau_0.1'))
  for row in rows:
    tables.append(tmp_path / 'results.jsonl', result(sweep, row, 0))
  pictures.draw(sweep, tmp_path)
  titles = re.findall('>(τ = [0-9.]+)</text>', (tmp_path / 'results.svg').read_text())
  assert titles == ['τ = 0.3', 'τ = 0.1']


def test_without_results_or_published_numbers_there_is_no_picture(tmp_path):
  alone = Row('alone', 'alone', 'configs/cifar10.py')
  pictures.draw(sweep_of(tau(0.1)), tmp_path)
  tables.append(tmp_path / 'results.jsonl', result(sweep_of(alone), alone, 0))
  pictures.draw(sweep_of(alone), tmp_path)
  assert not (tmp_path / 'results.svg').exists()


@pytest.mark.slow
def test_a_real_run_from_the_command_to_the_table(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', 'true')  # compiling is what takes its time
  small = tiny(tmp_path)  # writes the data
  changes = {f'data.{key}': small.data[key] for key in ('source', 'path', 'image_size')}
  changes |= {'model.name': 'resnet_tiny', 'model.width': 4, 'model.stage_sizes': (1,), 'projector.features': (8, 8)}
  changes |= {'augment.name': 'none', 'augment.flip': 0.5, 'dtype': 'float32', 'parallel.devices': 1}
  changes |= {'steps': 4, 'batch_size': 32, 'eval.k': (5,), 'eval.linear': 'ridge', 'log.tensorboard': False}
  row = Row('tiny', 'tiny', 'configs/cifar10.py', changes, published={'knn5': 50.0})
  sweep = Sweep('A title', 'kNN-5.', [row], [Column('knn5', 'kNN-5')], curves=('separation_mean',), images=64)
  folder = tmp_path / 'paper'
  folder.mkdir()
  (folder / 'README.md').write_text('\n'.join(tables.MARKS))
  arguments = [f'--runs={tmp_path / "runs"}', '--commit=abc', '--budget-minutes=20']
  runner.main(sweep, folder, arguments)
  (kept,) = tables.read(folder / 'results.jsonl')
  assert 0 < kept['metrics']['knn5'] <= 100 and {'linear', 'backbone/uniformity'} <= kept['metrics'].keys()
  assert (kept['device'], kept['peak_memory_gib'], kept['epochs']) == ('1 x cpu', None, 2)
  assert kept['seconds_per_epoch'] > 0 and len(kept['curves']['separation_mean']) == 11
  assert f'| tiny | {kept["metrics"]["knn5"]:.2f} (50.00) |' in (folder / 'README.md').read_text()
  assert (tmp_path / 'runs' / 'tiny_seed0' / 'checkpoints').exists()
  assert not (tmp_path / 'runs' / 'tiny_seed0' / 'features').exists()
  capsys.readouterr()
  runner.main(sweep, folder, [*arguments, '--list'])
  assert capsys.readouterr().out.startswith('tiny: seeds done [0], missing [], ')
  runner.main(sweep, folder, arguments)
  assert len(tables.read(folder / 'results.jsonl')) == 1
  assert f'--workdir={pathlib.Path("runs", "paper", "tiny_seed0")}' in kept['command']
