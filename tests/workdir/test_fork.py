"""Forks: the same run where nothing changes, another one where something does, and one line where nothing may."""

import dataclasses
import json
import shutil
import types

import chex
import pytest

from ssl_jax import config, train
from ssl_jax.reporting import compare, report
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints, _Kept
from tests.helpers import STEPS, asked_to_stop_at, call, final, tiny

AT = 10  # the step of the forks
SETTINGS = {'checkpoint.keep_every': 5, 'log.every_steps': 4}  # step 10 is within a row


def rows(workdir):
  """The rows of metrics.jsonl without what depends on the machine."""
  ignored = ('images_per_second', 'forked_at')
  found = [{k: v for k, v in row.items() if k not in ignored} for row in metric_log.read(workdir)]
  return [row for row in found if row.keys() != {'step'}]


@pytest.fixture(scope='module')
def parent(tmp_path_factory):
  folder = tmp_path_factory.mktemp('parent')
  chosen = tiny(folder, **SETTINGS)
  train.train(chosen, folder / 'run')
  return folder, *final(folder / 'run', chosen)


def forked(parent, **changes):
  folder = parent[0]
  return tiny(folder, **SETTINGS, fork=f'{folder / "run"}@{AT}', **changes)


@pytest.mark.slow
def test_a_fork_with_the_same_config_is_the_run_that_went_on(parent, tmp_path, monkeypatch):
  folder, _, state = parent
  assert sorted(files.steps(folder / 'run')) == [5, 10, 15, 20]
  chosen, seconds = forked(parent), Checkpoints.seconds
  # The time of the parent counts. Only its checkpoints are opened to be read.
  monkeypatch.setattr(Checkpoints, 'seconds', lambda self: seconds(self) + 1000 * self.read_only)
  assert 1000 < train.train(chosen, tmp_path / 'run')['seconds'] < 2000
  chex.assert_trees_all_equal(final(tmp_path / 'run', chosen)[1], state)
  assert rows(tmp_path / 'run') == rows(folder / 'run')
  train.train(tiny(folder, **SETTINGS, fork=f'{tmp_path / "run"}@15'), tmp_path / 'second')
  first, second = (json.loads((tmp_path / name / 'parent.json').read_text()) for name in ('run', 'second'))
  assert second['parent'] == first and second['config']['fork'] == chosen.fork


@pytest.mark.slow
def test_a_fork_with_another_temperature_differs_from_its_step_on_and_names_its_origin(parent, tmp_path):
  folder, losses, state = parent
  chosen = forked(parent, **{'temperature.tau': 0.2})
  summary = train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert other_losses[:2] == losses[:2] and other_losses[2] != losses[2]  # the rows of steps 4, 8 and 12
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(other.params, state.params, rtol=1e-3)
  assert {'step': AT, 'forked_at': AT} in metric_log.read(tmp_path / 'run')
  temperatures = {row['step']: row['temperature'] for row in metric_log.read(tmp_path / 'run') if 'loss' in row}
  assert temperatures[12] == pytest.approx(0.2)  # of its own two steps, not of all four since the last row
  saved = json.loads((tmp_path / 'run' / 'parent.json').read_text())
  assert saved['config']['temperature']['tau'] != 0.2 and saved['parent'] == {}
  assert summary['fork'] == json.loads((tmp_path / 'run' / 'config.json').read_text())['fork'] == chosen.fork
  report.report(tmp_path / 'run')
  text = (tmp_path / 'run' / 'report.md').read_text()
  assert f'forked from {folder / "run"} at step 10' in text and 'Up to step 10 the curves are those of' in text
  compare.compare([folder / 'run', tmp_path / 'run'], tmp_path / 'compared')
  text = (tmp_path / 'compared' / 'compare.md').read_text()
  assert 'Paired differences' in text and '| 0 | seed and start |' in text


@pytest.mark.slow
def test_a_fork_within_a_row_may_have_other_metrics_and_lost_rows_are_named(parent, tmp_path, capsys):
  copy = shutil.copytree(parent[0] / 'run', tmp_path / 'parent')
  lines = (copy / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (copy / 'metrics.jsonl').write_text(lines[0])
  changes = {'loss.name': 'simple', 'temperature': {'name': 'none'}}
  chosen = tiny(parent[0], **SETTINGS, fork=f'{copy}@{AT}', **changes)
  train.train(chosen, tmp_path / 'run')
  assert 'ends at step 4, but the run had logged step 8: rows are lost' in capsys.readouterr().err
  assert [row['step'] for row in metric_log.read(tmp_path / 'run') if 'loss' in row] == [4, 12, 16, 20]


def test_a_fork_at_the_end_of_a_row_has_this_row(tmp_path, capsys):
  for name in ('parent', 'run'):
    (tmp_path / name).mkdir()
  (tmp_path / 'parent' / 'metrics.jsonl').write_text(
    ''.join(f'{{"step": {step}, "loss": 3.0}}\n' for step in (4, 8, 12))
  )
  metric_log.copy(tmp_path / 'parent', tmp_path / 'run', 8, logged=8)
  assert [row['step'] for row in metric_log.read(tmp_path / 'run') if 'loss' in row] == [4, 8]
  assert not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize('stop_at', [0, 3])
def test_a_fork_that_has_begun_does_not_need_its_parent(parent, stop_at, tmp_path, monkeypatch):
  """Killed after it has taken over the checkpoint, or interrupted after a few steps."""
  copy = shutil.copytree(parent[0] / 'run', tmp_path / 'parent')
  chosen = tiny(parent[0], **SETTINGS, fork=f'{copy}@{AT}', **{'temperature.tau': 0.2})
  train.train(chosen, tmp_path / 'whole')

  class Killed(BaseException):
    pass

  def killed(loop, state):
    raise Killed

  with monkeypatch.context() as patched, pytest.raises((Killed, train.Interrupted)):
    if not stop_at:
      patched.setattr(train.Loop, 'run_from', killed)
    with asked_to_stop_at(stop_at):
      train.train(chosen, tmp_path / 'parts')
  shutil.rmtree(copy)
  train.train(chosen, tmp_path / 'parts')
  chex.assert_trees_all_equal(*(final(tmp_path / name, chosen)[1] for name in ('parts', 'whole')))
  assert rows(tmp_path / 'parts') == rows(tmp_path / 'whole')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fork': 'nowhere@5'}, "fork = 'nowhere@5': 'nowhere' has no checkpoint: give the workdir of a trained run"),
    ({'fork': '{run}@7'}, r'has no checkpoint of step 7, only of 20, 15, 10, 5: .* checkpoint.keep_every'),
    ({'seed': 1}, 'seed = 1 here, 0 there, and a fork must have the seed, batch_size, data, imbalance of its parent'),
    ({'batch_size': 16}, 'batch_size = 16 here, 32 there'),
    ({'data.image_size': 10}, 'data.image_size = 10 here, 12 there'),
    ({'imbalance': dict(name='exponential_tail', ratio=0.5)}, "imbalance.name = 'exponential_tail' here, 'none' there"),
    ({'projector.features': (8, 4)}, r'projector/.*: \[.*4\] here, \[.*8\] there\): keep the model'),
    ({'method': dict(name='moco', queue=32)}, r'the state differs \(extra/.* here, missing there\)'),
    ({'optimizer.name': 'adamw'}, 'the state differs'),
    ({'temperature': dict(name='learnable')}, r'the state differs \(.*temperature.* here, missing there\)'),
    ({'steps': AT}, 'the run has 10 steps in all: fork an earlier step, or raise epochs or steps'),
  ],
)
def test_what_a_fork_must_share_is_refused_in_one_line(parent, tmp_path, changes, message):
  folder = parent[0]
  changes = {'fork': f'{folder / "run"}@{AT}'} | changes
  changes['fork'] = changes['fork'].replace('{run}', str(folder / 'run'))
  with pytest.raises(ValueError, match=message) as error:
    train.train(tiny(folder, **SETTINGS, **changes), tmp_path / 'run')
  assert '\n' not in str(error.value)
  assert not (tmp_path / 'run').exists(), 'a refused config leaves nothing behind'


@pytest.mark.slow
def test_another_number_of_images_and_a_damaged_checkpoint_are_refused(parent, tmp_path):
  folder = parent[0]
  copy = shutil.copytree(folder / 'run', tmp_path / 'parent')
  identity = copy / 'checkpoints' / str(AT) / 'config' / 'metadata'
  saved = json.loads(identity.read_text())
  saved['data']['images'] = 65
  (copy / 'checkpoints' / str(AT) / 'checksums.json').unlink()
  identity.write_text(json.dumps(saved))
  with pytest.raises(ValueError, match=r'data.images = 64 here, 65 there, and a fork must'):
    train.train(tiny(folder, fork=f'{copy}@{AT}'), tmp_path / 'run')
  (copy / 'checkpoints' / '15' / 'config' / 'metadata').write_text('{}')
  with pytest.raises(ValueError, match=r'checkpoint 15 \(config/metadata .*\) in .* is damaged: give another step'):
    train.train(tiny(folder, fork=f'{copy}@15'), tmp_path / 'run')


@pytest.mark.slow
def test_a_fork_is_not_trained_in_the_workdir_of_its_parent(parent):
  with pytest.raises(ValueError, match='holds a run of another config'):
    train.train(forked(parent), parent[0] / 'run')


@pytest.mark.slow
def test_the_checkpoints_that_are_kept_do_not_split_calls(tmp_path):
  every = {'batch_size': 8, 'parallel.steps_per_call': 4, 'checkpoint.keep': 1, 'checkpoint.keep_every': 7}
  train.train(tiny(tmp_path, **every, **{'eval.k': ()}), tmp_path / 'run')
  assert sorted(files.steps(tmp_path / 'run')) == [8, 16, STEPS]


def test_the_first_checkpoint_after_each_multiple_stays():
  kept, seen = [], []
  for step in (4, 9, 10, 12, 17, 23, 26, 29, 41):
    seen = [types.SimpleNamespace(step=s) for s in [*kept, step]]
    stays = _Kept(newest=2, every=10).should_preserve(seen, context=None)
    kept = [info.step for info, stay in zip(seen, stays, strict=True) if stay]
  assert kept == [10, 23, 29, 41]
  assert _Kept(newest=1, every=0).should_preserve(seen, context=None) == [False] * (len(seen) - 1) + [True]


@pytest.mark.parametrize('value', ['runs/a', '@5', 'runs/a@', 'runs/a@-1', 'runs/a@2.5'])
def test_a_fork_without_a_step_is_refused(value):
  message = call('--config=configs/quickstart.py', f'--config.fork={value}')
  assert f'fork = {value!r} must be RUNDIR@STEP, such as runs/cifar10@3900' in message


def test_older_runs_are_no_forks():
  assert config.upgrade({'seed': 0})['fork'] == ''


def evaluated(seed, knn, losses=(), forked_at=0, **more):
  """A finished run with a loss at steps 5, 10, ..."""
  rows = [{'step': 5 * (k + 1), 'loss': loss} for k, loss in enumerate(losses)]
  rows += [{'step': forked_at, 'forked_at': forked_at}] if forked_at else []
  return types.SimpleNamespace(accuracies={'knn5': knn, **more}, config={'seed': seed}, rows=rows)


def test_runs_of_the_same_seeds_have_paired_differences():
  """The spread over seeds cancels: ± is the standard error of the mean of the differences 1, 2 and 3."""
  runs = {
    'a': [evaluated(0, 50.0), evaluated(1, 60.0), evaluated(2, 70.0), evaluated(7, 0.0)],
    'b': [evaluated(2, 72.0), evaluated(0, 51.0), evaluated(1, 63.0)],
    'c': [evaluated(1, 59.0)],
    'd': [evaluated(8, 99.0)],
  }
  (section,) = compare._paired(runs)
  b, c = section.parts[0].rows  # d shares no seed
  assert b[:3] == ['b', '2, 0, 1', 'seed'] and c[:3] == ['c', '1', 'seed']
  assert (b[3].value, b[3].spread) == (pytest.approx(2), pytest.approx(3**-0.5))
  assert (str(b[3]), str(c[3])) == ('+2.00 ± 0.58', '-1.00')
  assert 'minus those of a' in section.text
  assert not compare._paired({'a': runs['a'], 'd': runs['d']})
  assert not compare._paired(runs, differing=['data.test_split']), 'accuracies on other images'


def test_pairs_that_share_their_start_are_marked():
  pair = lambda a, b: compare._paired({'a': [a], 'b': [b]})[0].parts[0].rows[0][2]
  fork = evaluated(0, 50.0, [3.0, 2.0, 1.1], forked_at=10)
  assert pair(evaluated(0, 50.0, [3.0, 2.0, 1.0]), fork) == 'seed and start'  # its parent
  assert pair(evaluated(0, 50.0, [3.0, 2.0, 1.3], forked_at=10), fork) == 'seed and start'
  assert pair(evaluated(0, 50.0, [3.0, 2.5, 1.3], forked_at=5), fork) == 'seed and start'  # an earlier fork
  assert pair(evaluated(0, 50.0, [3.1, 2.0, 1.1], forked_at=10), fork) == 'seed'
  assert pair(evaluated(0, 50.0, [3.0, 2.0]), evaluated(0, 50.0, [3.0, 2.0])) == 'seed'  # no fork
  assert pair(evaluated(0, 50.0), evaluated(0, 50.0, forked_at=3)) == 'seed'  # nothing was logged before


def test_a_difference_needs_the_metric_in_all_pairs():
  runs = {
    'a': [evaluated(0, 50.0, linear=60.0), evaluated(1, 51.0, linear=60.0)],
    'b': [evaluated(0, 52.0, linear=61.0)],
  }
  runs['b'].append(evaluated(1, 52.0))
  (row,) = compare._paired(runs)[0].parts[0].rows
  assert str(row[3]) == '+1.50 ± 0.50' and row[4] == '–'


def test_accuracies_of_other_protocols_are_not_compared():
  runs = {'a': [evaluated(0, 50.0, linear=60.0)], 'b': [evaluated(0, 51.0, linear=61.0)]}
  keys = lambda differing: compare._paired(runs, differing)[0].parts[0].head[3:]
  assert keys(['temperature.tau']) == ['knn5, %', 'linear, %'] and keys(['eval.linear']) == ['knn5, %']
  assert not compare._paired(runs, ['eval.features']) and not compare._paired(runs, ['eval.patches'])


@pytest.fixture
def finished(tmp_path):
  def write(name, seed, tau, fork, parent=None):
    config_of = lambda tau, fork='': tiny(tmp_path, seed=seed, fork=fork, **{'temperature.tau': tau}).to_dict()
    contents = {'config': config_of(tau, fork), 'summary': {'knn5': 50.0 + seed}}
    if parent is not None:
      contents['parent'] = {'config': config_of(parent), 'parent': {}}
    (tmp_path / name).mkdir()
    for file, content in contents.items():
      (tmp_path / name / f'{file}.json').write_text(json.dumps(content))
    return report.FinishedRun.read(tmp_path / name)

  return write


def test_forks_of_parents_with_other_configs_are_other_configs(finished):
  runs = [finished(f'{tau}_{seed}', seed, 0.3, f'runs/{tau}_{seed}@9', tau) for tau in (0.1, 0.2) for seed in (0, 1)]
  groups = compare._groups(runs)
  assert [[run.config['seed'] for run in group] for group in groups.values()] == [[0, 1], [0, 1]]
  assert all('parent.temperature.tau = 0.' in label for label in groups)
  assert len(compare._groups([runs[0], runs[3]])) == 2  # not two seeds of one config
  assert len(compare._groups(runs[:2])) == 1


def test_the_settings_of_a_fork_have_the_keys_in_which_its_parents_differ(finished):
  run = finished('a', 0, 0.3, 'runs/p@9', 0.1)
  own = {key: x for key, x in run.settings.items() if key != 'temperature.tau'}  # as of a temperature without it
  assert run._lineage(own) == {'fork_step': 9, 'parent.temperature.tau': 0.1}
  parent = {**run.parent['config'], 'fork': 'runs/q@4'}
  twice = dataclasses.replace(run, parent={'config': parent, 'parent': run.parent})
  steps = {'fork_step': 9, 'parent.fork_step': 4}
  assert twice._lineage(run.settings) == {**steps, 'parent.temperature.tau': 0.1, 'parent.parent.temperature.tau': 0.1}
  assert dataclasses.replace(run, parent={})._lineage(own) == {'fork_step': 9}


def test_forks_of_several_seeds_are_one_config(finished):
  runs = [finished(f'{tau}_{seed}', seed, tau, f'runs/{seed}@9') for tau in (0.1, 0.2) for seed in (0, 1)]
  assert [[run.config['seed'] for run in group] for group in compare._groups(runs).values()] == [[0, 1], [0, 1]]
  other = finished('elsewhere', 0, 0.1, 'runs/5@9')  # the same seed and step, of another parent
  assert len(compare._groups([*runs, other])) == 5
  later = finished('later', 1, 0.1, 'runs/1@12')
  assert any('fork_step = 12' in label for label in compare._groups([*runs, later]))
