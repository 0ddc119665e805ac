"""Every loss tuned equally: the budget, the held-out images, and how the final rows are chosen."""

import collections
import math

import numpy as np
import pytest

from experiments import tables
from experiments.fair import figures, sweep
from experiments.fair.sweep import FOLDER, HELD_OUT, LOSSES, RATES, accuracies, best, edges, grid, make, name_of
from ssl_jax import config, train
from ssl_jax.data import sources
from ssl_jax.run import builder
from tests.data.test_sources import config as data_config
from tests.data.test_sources import prepare
from tests.page import small
from tests.test_experiments import result
from tests.test_reproduce import folder, light, parts  # noqa: F401

DIVERGED = sweep.DIVERGED
MIDDLE = {loss: (RATES[1], LOSSES[loss].values[1]) for loss in LOSSES}


@pytest.fixture(scope='module', autouse=True)
def none_diverged():
  """Whatever the runs found, the tests are about all 72 settings."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sweep, 'DIVERGED', ())
    yield


def finished(loss, scores=None, **more):
  """Results of all settings of a loss: 80 % unless `scores` says otherwise."""
  scores = scores or {}
  return {
    (name_of(loss, setting), 0): {'metrics': {'knn200': scores.get(setting, 80.0)}, **more} for setting in grid(loss)
  }


@pytest.fixture(scope='module')
def resolved():
  """The configs of all settings."""
  return [make({}).resolve(row, 0) for row in make({}).rows]


def finals(results):
  return [row for row in make(results).rows if row.name.startswith('final_')]


def test_every_loss_has_nine_settings_and_nothing_else_differs(resolved):
  rows, resolved = make({}).rows, list(map(config.flatten, resolved))
  assert len({str(sorted(chosen.items())) for chosen in resolved}) == len({row.name for row in rows}) == 72
  kinds = lambda chosen: (chosen['loss.name'], chosen['temperature.name'])
  assert set(collections.Counter(map(kinds, resolved)).values()) == {9}
  tuned = ('loss.', 'temperature.', 'optimizer.learning_rate')
  others = {str({key: x for key, x in chosen.items() if not key.startswith(tuned)}) for chosen in resolved}
  assert len(others) == 1
  for loss in LOSSES:
    assert len(set(grid(loss))) == 9 and len({rate for rate, _ in grid(loss)}) == 3
    low, middle, high = LOSSES[loss].values
    assert low < middle < high


def test_the_middle_of_every_loss_is_run_first_and_the_corners_last():
  names = [row.name for row in make({}).rows]
  assert set(names[:8]) == {name_of(loss, setting) for loss, setting in MIDDLE.items()}
  assert [row.further for row in make({}).rows] == [False] * 8 + [True] * 64
  corners = {name_of(loss, setting) for loss in LOSSES for setting in grid(loss) if len(edges(loss, setting)) == 2}
  assert set(names[-32:]) == corners


def test_no_selection_trains_on_the_held_out_images(tmp_path, resolved):
  prepare(tmp_path)  # ten images
  for chosen in resolved:
    splits = {f'data.{key}': chosen['data'][key] for key in ('train_split', 'test_split')}
    assert splits == HELD_OUT and not chosen['data']['held_out'] and not any(chosen['eval']['data'].values())
  data = data_config('tfds', tmp_path, **{key.removeprefix('data.'): value for key, value in HELD_OUT.items()})
  train_images, test_images = (sources.load(data, split) for split in ('train', 'test'))
  assert (len(train_images), len(test_images)) == (9, 1) and sources.same_images(train_images, test_images) == []


def test_a_final_row_needs_all_nine_settings_of_its_loss():
  results = finished('dcl', {(0.12, 0.28): 85.0})
  for missing in list(results):
    assert not finals({key: value for key, value in results.items() if key != missing})
  (row,) = finals(results)
  assert row.name == 'final_dcl' and row.seeds == (0, 1, 2)
  chosen = make(results).resolve(row, 1)
  assert chosen['optimizer']['learning_rate'] == 0.12 and chosen['temperature']['tau'] == 0.28
  assert (chosen['epochs'], chosen['data']['train_split'], chosen['data']['test_split']) == (200, 'train', 'test')
  assert chosen['log']['every_steps'] == 50_000 // 512 and chosen['loss']['name'] == 'decoupled'
  both = finished('hcl') | results
  assert [row.name for row in make(both).rows][-2:] == ['final_dcl', 'final_hcl'], 'after all settings'


def test_only_the_held_out_accuracy_of_the_first_seed_chooses():
  results = finished('macl', {(0.36, 0.05): 81.0}, wall_seconds=1.0)
  for setting in grid('macl'):
    results[name_of('macl', setting), 0]['metrics']['linear'] = 99.0 if setting == (1.08, 0.2) else 50.0
    results[name_of('macl', setting), 1] = {'metrics': {'knn200': 99.0 if setting == (1.08, 0.2) else 0.0}}
  results |= {('final_macl', seed): {'metrics': {'knn200': 10.0, 'linear': 10.0}} for seed in range(3)}
  assert best('macl', results) == (0.36, 0.05)
  assert best('macl', finished('macl')) == MIDDLE['macl'], 'ties: the middle'
  tied = finished('macl', {(0.12, 0.1): 81.0, (1.08, 0.1): 81.0, (0.12, 0.05): 81.0})
  assert best('macl', tied) == (0.12, 0.1), 'then what is beside it, then the lower learning rate'


def test_a_best_setting_at_the_edge_is_flagged():
  assert edges('cacr', (0.36, 2.0)) == [] and edges('cacr', (1.08, 4.0)) == ['learning rate', 't⁻']
  (row,) = finals(finished('cacr', {(0.36, 4.0): 81.0}))
  assert row.note == 'at the edge of the grid: t⁻'
  (row,) = finals(finished('cacr'))
  assert row.note == ''
  line = figures.comparison(finished('cacr', {(1.08, 4.0): 82.0, (0.36, 2.0): 81.0})).splitlines()[7]
  assert '| CACR, K = 1 | 9 of 9 | t⁻ = 4, learning rate 1.08 | learning rate and t⁻ | 82.00 | 2 of 9 | 81.00 |' in line
  assert '| no |' in figures.comparison(finished('cacr')).splitlines()[7]


def test_a_setting_that_diverges_is_the_worst_and_is_not_run(monkeypatch):
  results = finished('nt_xent', {(0.36, 0.1): 81.0})
  del results['nt_xent_1.08_0.1', 0]
  assert best('nt_xent', results) is None
  monkeypatch.setattr(sweep, 'DIVERGED', ('nt_xent_1.08_0.1',))
  assert best('nt_xent', results) == (0.36, 0.1) and accuracies('nt_xent', results)[1.08, 0.1] == -math.inf
  assert 'nt_xent_1.08_0.1' not in [row.name for row in make(results).rows]
  assert np.isneginf(figures.surface('nt_xent', results)).sum() == 1
  drawn = [text.get_text() for text in figures.surfaces(results).axes[0].texts]
  assert sorted(drawn) == [*['80.0'] * 7, '81.0', '×']
  assert '| NT-Xent | 9 of 9, 1 diverged | τ = 0.1' in figures.comparison(results)


def test_a_loss_that_always_diverges_has_no_final_row(monkeypatch):
  monkeypatch.setattr(sweep, 'DIVERGED', tuple(name_of('dcl', setting) for setting in grid('dcl')))
  assert best('dcl', {}) is None and not finals({})
  assert '| DCL | 9 of 9, 9 diverged | — | — | — | — | — |' in figures.comparison({})
  figures.surfaces({})
  with pytest.raises(ValueError, match=r"^DIVERGED has 'dcl_0\.12_0\.07', which has a result: remove one of them"):
    make(finished('dcl'))


def test_the_surfaces_have_an_empty_cell_for_each_missing_run():
  results = finished('balanced', {(1.08, 1.0): 84.0}) | {('dcl_0.36_0.14', 0): {'metrics': {'knn200': 70.0}}}
  assert figures.surface('balanced', results)[2, 0] == 84  # rows are learning rates, columns strengths
  drawn = figures.surfaces(results)
  empty = [np.ma.getmaskarray(axis.images[0].get_array()).sum() for axis in drawn.axes[:8]]
  assert empty == [9, 9, 8, 9, 0, 9, 9, 9]
  assert [len(axis.patches) for axis in drawn.axes[:8]] == [0, 0, 0, 0, 1, 0, 0, 0], 'a frame needs all nine'
  assert len(figures.surfaces({}).axes) == 8


def test_the_page_follows_the_results(tmp_path):
  """One call writes the tables with a final row that the results decide, its accuracies and the figure."""
  (tmp_path / 'README.md').write_text('\n'.join((*figures.MARKS, *tables.MARKS)))
  for setting in grid('hcl'):
    row = next(row for row in make({}).rows if row.name == name_of('hcl', setting))
    tables.append(tmp_path / 'results.jsonl', result(make({}), row, 0, metrics={'knn200': 80.0 - setting[1]}))
  figures.main(tmp_path)
  text = (tmp_path / 'README.md').read_text()
  assert '| HCL | 9 of 9 | τ = 0.25, learning rate 0.12 |' not in text, 'a tie is decided nearer to the middle'
  assert '| HCL | 9 of 9 | τ = 0.25, learning rate 0.36 | τ | 79.75 |' in text and '| — | — | 0 |' in text
  chosen = make(sweep.read(tmp_path))
  for seed, accuracy in enumerate((85.0, 86.0, 87.0)):
    metrics = {'knn200': accuracy, 'linear': accuracy + 2}
    tables.append(tmp_path / 'results.jsonl', result(chosen, chosen.rows[-1], seed, metrics=metrics))
  figures.main(tmp_path)
  text = (tmp_path / 'README.md').read_text()
  assert '| 86.00 ± 1.00 | 88.00 ± 1.00 | 3 |' in text and '(at the edge of the grid: τ) | 86.00 ± 1.00' in text
  assert '>alignment and uniformity</text>' in (tmp_path / 'surfaces.svg').read_text()


def test_the_comparison_in_the_readme_matches_the_results(monkeypatch):
  monkeypatch.setattr(sweep, 'DIVERGED', DIVERGED)
  shown = (FOLDER / 'README.md').read_text().split(figures.MARKS[0] + '\n')[1].split(figures.MARKS[1])[0]
  assert shown == figures.comparison(tables.done(sweep.SWEEP, FOLDER)), 'run experiments.fair.figures'


@pytest.mark.slow
@pytest.mark.parametrize(
  'loss', ['cacr', 'align_uniform', 'hcl']
)  # test_reproduce.py trains the others with these pairs
def test_a_setting_takes_two_steps(loss, folder):  # noqa: F811
  row = next(row for row in make({}).rows if row.name == name_of(loss, (RATES[2], LOSSES[loss].values[0])))
  chosen = small(row, 'fair', folder)
  run = builder.build(light(chosen, parts(chosen)))
  state, losses = run.devices.replicate(run.initial_state()), []
  for call, _ in train._calls(run, 0):
    state, metrics = call(state)
    losses.append(float(np.ravel(metrics['loss'])[0]))
  assert len(losses) == 2 and np.isfinite(losses).all()
